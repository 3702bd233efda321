"""The plain model, an all-attention network and a sandwich of about one size: a run of `benchmarks/family.py`.

    python main.py --config=configs/family.py:all-attention --config.data.path=enwik8.zip

docs/family.md has the results.
"""

from ml_collections import ConfigDict

from configs import span_sweep

MODELS = ("plain", "all-attention", "sandwich")


def get_config(model: str = "plain") -> ConfigDict:
    """4 layers of width 96, or 6 without feed-forward sublayers, as 12 became 18 in the paper; else as `span_sweep`."""
    if model not in MODELS:
        raise ValueError(f"it must be one of {', '.join(MODELS)}")
    config = span_sweep.get_config("adaptive-1024")
    config.model.layers = 6 if model == "all-attention" else 4
    config.model.persistent = 2 * config.model.width if model == "all-attention" else 0
    config.model.sandwich = 1 if model == "sandwich" else 0
    config.train.steps = config.evaluate.every_steps = 2_500
    return config
