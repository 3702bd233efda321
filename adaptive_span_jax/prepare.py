"""`--mode=prepare`: the text of a config, fetched, checked and written before any training, and what came of it."""

from adaptive_span_jax import corpus as corpora
from adaptive_span_jax import display, hosts
from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.datasets import prepared


def prepare(data: DataConfig) -> int:
    """Prepares the text if nobody has yet, and shows what is there; exit code 0. Process 0 does it for all hosts."""
    hosts.on_first("data", lambda: _prepare(data))
    return 0


def _prepare(data: DataConfig) -> None:
    before = corpora.is_prepared(data)
    corpus = corpora.load(data)
    parts = zip(prepared.SPLITS, (corpus.train, corpus.dev, corpus.test), strict=True)
    display.show_block(
        f"{corpus.name}, {'already there' if before else 'prepared now'}",
        {
            "tokens": ", ".join(f"{name} {ids.size:,}" for name, ids in parts),
            "vocabulary": display.counted(len(corpus.vocabulary), "symbol"),
            "fingerprint": corpus.fingerprint,
            "found in": str(corpora.place(data)),
        },
    )
