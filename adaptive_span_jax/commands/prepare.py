"""`--mode=prepare`: downloads, checks and stores the text of a config before training."""

from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.tfds import prepared
from adaptive_span_jax.runtime import hosts, terminal


def prepare(data: DataConfig) -> int:
    """Prepares the text if needed and prints what it contains; returns exit code 0. Process 0 does it for all hosts."""
    hosts.on_process_zero("data", lambda: _prepare(data))
    return 0


def _prepare(data: DataConfig) -> None:
    before = corpora.is_prepared(data)
    corpus = corpora.load(data)
    parts = zip(prepared.SPLITS, (corpus.train, corpus.dev, corpus.test), strict=True)
    terminal.show_block(
        f"{corpus.name}, {'already prepared' if before else 'prepared'}",
        {
            "tokens": ", ".join(f"{name} {ids.size:,}" for name, ids in parts),
            "vocabulary": terminal.counted(len(corpus.vocabulary), "symbol"),
            "fingerprint": corpus.fingerprint,
            "location": str(corpora.place(data)),
        },
    )
