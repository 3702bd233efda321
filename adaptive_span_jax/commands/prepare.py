"""`--mode=prepare`: the text of a config, fetched, checked and written before any training, and what came of it."""

from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.tfds import prepared
from adaptive_span_jax.runtime import hosts, terminal


def prepare(data: DataConfig) -> int:
    """Prepares the text if needed and shows what is there; exit code 0. Process 0 does it for all hosts."""
    hosts.on_process_zero("data", lambda: _prepare(data))
    return 0


def _prepare(data: DataConfig) -> None:
    before = corpora.is_prepared(data)
    corpus = corpora.load(data)
    parts = zip(prepared.SPLITS, (corpus.train, corpus.dev, corpus.test), strict=True)
    terminal.show_block(
        f"{corpus.name}, {'already there' if before else 'prepared now'}",
        {
            "tokens": ", ".join(f"{name} {ids.size:,}" for name, ids in parts),
            "vocabulary": terminal.counted(len(corpus.vocabulary), "symbol"),
            "fingerprint": corpus.fingerprint,
            "found in": str(corpora.place(data)),
        },
    )
