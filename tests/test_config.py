"""Every config builds, is valid, and has the published number of parameters."""

import importlib
from pathlib import Path

import jax
import pytest

from adaptive_span_jax.config import Config, differences
from adaptive_span_jax.data.corpus import PUBLISHED_VOCABULARY_SIZES
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import transformer
from tests.conftest import tiny_fields

NAMES = sorted(path.stem for path in (Path(__file__).parents[1] / "configs").glob("*.py"))

PARAMETERS = {
    "enwik8": 38_538_541,
    "enwik8_large": 208_910_221,
    "enwik8_persistent": 114_017_773,
    "enwik8_persistent_small": 38_501_725,
    "enwik8_sandwich": 208_910_221,
    "enwik8_small": 6_480_621,
    "text8": 38_357_116,
    "text8_large": 208_638_172,
}


def load(name: str, *arguments: str) -> Config:
    return Config.from_dict(importlib.import_module(f"configs.{name}").get_config(*arguments).to_dict())


def parameters(config: Config) -> int:
    vocabulary = PUBLISHED_VOCABULARY_SIZES[config.data.source]
    return transformer.parameter_count(jax.eval_shape(lambda: transformer.init(config, vocabulary, jax.random.key(0))))


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_valid(name):
    # All of dev, but for the models that a CPU trains on enwik8.
    assert load(name).evaluate.max_tokens == (200_000 if name in ("enwik8_cpu", "same_curve") else 0)


def test_a_config_from_before_a_field_was_added_is_read():
    """Checkpoints hold the config of their time."""
    fields = tiny_fields().to_dict()
    del fields["evaluate"]["max_tokens"], fields["model"]["persistent"], fields["model"]["sandwich"]
    del fields["span"]["initial"]
    config = Config.from_dict(fields)
    assert (config.evaluate.max_tokens, config.model.persistent, config.model.sandwich) == (0, 0, 0)
    assert config.span.initial == 0


@pytest.mark.parametrize("tokens", [-1, 1])
def test_an_evaluation_has_at_least_one_token_to_score(tokens):
    with pytest.raises(UserError, match=f"config.evaluate.max_tokens is {tokens}; it must be 0"):
        Config.from_dict(tiny_fields(evaluate={"max_tokens": tokens}).to_dict())


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_parameter_counts(name):
    assert parameters(load(name)) == PARAMETERS[name]


def test_kinds_of_span_differ_by_what_they_learn():
    fixed, adaptive, dynamic = (parameters(load(f"text8_{kind}", "2048")) for kind in ("fixed", "adaptive", "dynamic"))
    assert adaptive - fixed == 12 * 8
    assert dynamic - fixed == 12 * 8 * (512 + 1)


def test_span_is_the_configs_argument():
    for name in ("text8_fixed", "text8_adaptive", "text8_dynamic"):
        assert load(name, "256").span.limit == 256
        assert load(name, "256").span.kind == name.removeprefix("text8_")


# The settings of the published runs, a row each. From the cooldown on, the learning rate is a tenth.
PUBLISHED = """
config          source layers width heads feedforward persistent dropout limit penalty segment warmup  steps cooldown
enwik8          enwik8     12   512     8        2048          0     0.3  8192    5e-7     512  32000 600000        0
text8           text8      12   512     8        2048          0     0.3  8192    5e-7     512  32000 900000        0
enwik8_large    enwik8     24   768     8        4096          0     0.4  8192    5e-7     512  32000 170000   150000
enwik8_sandwich enwik8     24   768     8        4096          0     0.4  8192    5e-7     512  32000 170000   150000
text8_large     text8      24   768     8        4096          0     0.4  8192    5e-7     512  32000 270000   250000
enwik8_small    enwik8      8   256     4        1024          0     0.0  1024    2e-6     256   8000 150000        0
text8_fixed     text8      12   512     8        2048          0     0.3  1024     0.0     512  32000 600000        0
text8_adaptive  text8      12   512     8        2048          0     0.3  1024    2e-6     512  32000 600000        0
text8_dynamic   text8      12   512     8        2048          0     0.3  1024    2e-6     512  32000 600000        0
enwik8_persistent_small enwik8 18 512   8        2048       1024     0.3  8192    1e-7     512  32000 480000   450000
enwik8_persistent enwik8   36   512     8        2048       2048     0.4  8192    1e-7     512  32000 210000   200000
"""


def published_settings() -> dict[str, dict[str, str]]:
    heading, *rows = (line.split() for line in PUBLISHED.strip().splitlines())
    return {row[0]: dict(zip(heading[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize(("name", "row"), published_settings().items())
def test_published_settings(name, row):
    config = load(name)
    assert config.data.source == row["source"]
    found = {
        **{
            field: getattr(config.model, field)
            for field in ("layers", "width", "heads", "feedforward", "persistent", "dropout")
        },
        **{field: getattr(config.span, field) for field in ("limit", "penalty")},
        "segment": config.train.segment,
        "warmup": config.train.warmup_steps,
        "steps": config.train.steps,
        "cooldown": config.train.cooldown_start,
    }
    assert found == {field: float(value) for field, value in row.items() if field != "source"}
    # The same in all of them.
    assert (config.train.batch_size, config.train.grad_accum_steps, config.evaluate.batch_size) == (64, 1, 8)
    assert (config.train.learning_rate, config.train.clip, config.span.ramp) == (0.07, 0.03, 32)
    assert (config.model.compute_dtype, config.model.mask_empty_memory) == ("float32", False)
    assert config.model.sandwich == (5 if name == "enwik8_sandwich" else 0)
    assert config.span.kind == (name.removeprefix("text8_") if name.endswith(("fixed", "dynamic")) else "adaptive")


def test_every_published_config_has_a_row():
    own = {"base", "bytes", "enwik8_cpu", "family", "lags", "quickstart", "same_curve", "span_sweep"}
    assert {*published_settings()} == {*NAMES} - own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.train.__setattr__("speed", 3), r"config\.train\.speed is not a known field; config\.train has"),
        (lambda c: c.train.__delattr__("steps"), r"config\.train\.steps is missing"),
        (lambda c: c.model.__setattr__("heads", 3), r"config\.model\.width is 22; it must be a multiple"),
        (
            lambda c: c.model.__setattr__("sandwich", 4),
            r"config\.model\.sandwich is 4; .* config\.model\.layers, which is 3",
        ),
        (lambda c: c.model.update(sandwich=1, persistent=5), r"config\.model\.sandwich is 1, but .*persistent=5"),
        (lambda c: c.model.__setattr__("sandwich", -1), r"config\.model\.sandwich is -1; it must be between 0 and"),
        (lambda c: c.span.__setattr__("kind", "wide"), r"config\.span\.kind is 'wide'; it must be one of fixed"),
        (
            lambda c: c.span.__setattr__("initial", 1e6),
            r"config\.span\.initial is 1e\+06; .* config\.span\.limit, which is",
        ),
        (lambda c: c.span.update(kind="dynamic", initial=5.0), r"config\.span\.initial is 5, but .* is 'dynamic'"),
        (lambda c: c.data.__setattr__("splits", (0.5, 0.1, 0.1)), r"config\.data\.splits is .* sum to 1"),
        (lambda c: c.__setattr__("seed", -1), r"config\.seed is -1"),
        (lambda c: c.model.__setattr__("persistent", -1), r"config\.model\.persistent is -1; it must be 0 \(none\) or"),
    ],
)
def test_wrong_fields_are_named(change, message):
    fields = tiny_fields()
    fields.unlock()
    change(fields)
    with pytest.raises(UserError, match=message):
        Config.from_dict(fields.to_dict())


def test_wrong_types_are_named():
    fields = tiny_fields().to_dict()
    fields["train"]["steps"] = 2.5
    with pytest.raises(UserError, match=r"config\.train\.steps is 2\.5, a float; it must be a int"):
        Config.from_dict(fields)
    fields["train"]["steps"] = True
    with pytest.raises(UserError, match=r"config\.train\.steps is True, a bool"):
        Config.from_dict(fields)


def test_differences_name_the_fields():
    old, new = tiny_fields().to_dict(), tiny_fields(train={"steps": 7}).to_dict()
    assert differences(old, new) == ["config.train.steps: 6 → 7"]
    assert differences(old, old) == []
