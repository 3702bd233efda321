"""Every config field, defined once: type, published default, meaning, valid values, and whether resuming may change it.

`configs/base.py` turns the defaults into an `ml_collections.ConfigDict`, the other configs list their differences, and
the command line overrides any field (`--config.train.batch_size=8`). The result is a frozen, validated `Config`. An
unknown, missing or invalid field raises an error that names it.
"""

import dataclasses
import json
import math
import numbers
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from adaptive_span_jax.errors import UserError, UserTypeError


class Rule(NamedTuple):
    """A constraint on a field's value, in words and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


def _field(default: Any, meaning: str, rule: Rule | None = None, *, mutable: bool = False, added: bool = False) -> Any:
    """A field of a section. `mutable`: a run may be resumed with another value. `added`: a checkpoint of an earlier
    version may lack the field; it then has the default."""
    about = {"meaning": meaning, "rule": rule, "mutable": mutable, "added": added}
    return dataclasses.field(default=default, metadata=about)


def _at_least(least: float, words: str = "") -> Rule:
    return Rule(words or f"it must be at least {least:g}", lambda value: least <= value < math.inf)


def _one_of(*names: str) -> Rule:
    return Rule(f"it must be one of {', '.join(names)}", lambda value: value in names)


ATTENTION_PATHS = ("auto", "fused", "per_head", "plain")
_POSITIVE = Rule("it must be above 0 and finite", lambda value: 0 < value < math.inf)
_SEED = Rule("it must be between 0 and 2**32 - 1", lambda value: 0 <= value < 2**32)
_POSITIONS = Rule("it must be between 1 and 2**20 positions", lambda value: 1 <= value <= 2**20)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes token ids."""

    source: str = _field(
        "enwik8",
        "enwik8 | text8 | files (your own text) | stdlib (the source text of Python's library)",
        _one_of("enwik8", "text8", "files", "stdlib"),
    )
    path: str = _field("", "source=files: a file or folder, read as bytes; .gz, .bz2, .xz and .zip are decompressed")
    archive: str = _field("", "enwik8 and text8: a local archive to use instead of downloading", mutable=True)
    directory: str = _field("", "where prepared data is stored; empty: ~/.cache/adaptive_span_jax", mutable=True)
    newlines: str = _field("keep", "keep (published) | drop (as for Transformer-XL's results)", _one_of("keep", "drop"))
    splits: tuple[float, float, float] = _field(
        (0.9, 0.05, 0.05),
        "files and stdlib: fractions of the text for train, dev and test, in this order",
        Rule(
            "it must be three positive fractions that sum to 1, e.g. (0.9, 0.05, 0.05)",
            lambda shares: min(shares) > 0 and abs(sum(shares) - 1) < 1e-6,
        ),
    )
    max_bytes: int = _field(
        0,
        "files and stdlib: use only this many bytes from the start; 0: all",
        _at_least(0, "it must be 0 (no limit) or more"),
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The Transformer's sizes and arithmetic."""

    layers: int = _field(12, "number of layers", _at_least(1))
    width: int = _field(512, "d, the width of the hidden states; a multiple of heads", _at_least(1))
    heads: int = _field(8, "attention heads per layer", _at_least(1))
    feedforward: int = _field(
        2048, "inner width of the feed-forward sublayer; not used if persistent is set", _at_least(1)
    )
    persistent: int = _field(
        0,
        "N, learned key/value pairs per head that replace the feed-forward sublayer (all-attention); 0: none",
        _at_least(0, "it must be 0 (none) or more"),
        added=True,
    )
    dropout: float = _field(
        0.3,
        "dropout rate of attention weights and ReLU activations",
        Rule("it must be at least 0 and below 1", lambda value: 0 <= value < 1),
        mutable=True,
    )
    attention: str = _field(
        "auto",
        "auto (fused on TPUs where the sizes allow, else per_head) | fused (Pallas kernels for TPUs) | per_head (any "
        "platform) | plain (reference implementation: same results, slow)",
        _one_of(*ATTENTION_PATHS),
        mutable=True,
    )
    compute_dtype: str = _field(
        "float32",
        "float32 (published) | bfloat16 | float64 (exactness tests)",
        _one_of("float32", "bfloat16", "float64"),
    )
    memory_dtype: str = _field(
        "",
        "dtype of the segment memory: float32 | bfloat16; empty: as compute_dtype",
        Rule(
            "it must be empty (as config.model.compute_dtype), float32 or bfloat16",
            lambda value: value in ("", "float32", "bfloat16"),
        ),
    )
    remat: bool = _field(False, "recompute a layer's activations in the backward pass", mutable=True)
    mask_empty_memory: bool = _field(
        False, "True: do not attend to empty memory; False (published): attend to its zeros"
    )
    sandwich: int = _field(
        0,
        "k of the sublayers' order s^k (sf)^(n-k) f^k (s: attention, f: feed-forward, n: layers); 0: interleaved",
        _at_least(0, "it must be between 0 and config.model.layers"),
        added=True,
    )


@dataclasses.dataclass(frozen=True)
class SpanConfig:
    """How far heads may look back, and the penalty on it."""

    kind: str = _field(
        "adaptive",
        "fixed | adaptive (one learned span per head) | dynamic (one per head and token)",
        _one_of("fixed", "adaptive", "dynamic"),
    )
    limit: int = _field(8192, "S, the maximum span in positions", _POSITIONS)
    ramp: int = _field(32, "R, the length of the mask's ramp from 1 to 0, in positions", _at_least(1))
    penalty: float = _field(
        5e-7,
        "lambda, in nats per position of average span, summed over layers",
        _at_least(0, "it must be 0 or more"),
        mutable=True,
    )
    initial: float = _field(
        0.0,
        "adaptive: every head's z before training, in positions (published: 0)",
        _at_least(0, "it must be between 0 and config.span.limit"),
        added=True,
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Batch, steps and optimizer."""

    batch_size: int = _field(64, "parallel streams, over all devices", _at_least(1))
    grad_accum_steps: int = _field(
        1,
        "gradient accumulation: process the streams in this many groups, one after the other",
        _at_least(1),
        mutable=True,
    )
    segment: int = _field(512, "positions per stream and step", _POSITIONS)
    steps: int = _field(600_000, "total number of steps", _at_least(1), mutable=True)
    learning_rate: float = _field(
        0.07,
        "learning rate after warm-up",
        Rule("it must be above 0", lambda value: 0 < value < math.inf),
        mutable=True,
    )
    warmup_steps: int = _field(
        32_000,
        "length of the linear warm-up, which starts at learning_rate / warmup_steps",
        _at_least(0, "it must be 0 or more"),
        mutable=True,
    )
    cooldown_start: int = _field(
        0,
        "divide the learning rate by 10 from this step on; 0: never",
        _at_least(0, "it must be 0 (never) or more"),
        mutable=True,
    )
    clip: float = _field(
        0.03, "maximum L2 norm of each parameter tensor's gradient; only the update is clipped", _POSITIVE, mutable=True
    )
    max_nonfinite_steps: int = _field(
        10, "stop after this many consecutive steps with a non-finite loss or gradient", _at_least(1), mutable=True
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How parameters are sharded."""

    fsdp: int = _field(
        1,
        "shard parameters and optimizer state over this many devices; must divide the device count",
        _at_least(1),
        mutable=True,
    )


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """How often, and on how many streams, the model is evaluated."""

    batch_size: int = _field(
        8, "parallel streams of an evaluation, each starting from empty memory", _at_least(1), mutable=True
    )
    every_steps: int = _field(
        2746, "steps between dev evaluations; the default is one epoch of enwik8", _at_least(1), mutable=True
    )
    max_tokens: int = _field(
        0,
        "during training, score only this many tokens from the start of dev; 0: all. The final result covers all",
        Rule(
            "it must be 0 (all of dev) or at least 2, because the first token is not scored",
            lambda value: value == 0 or value >= 2,
        ),
        mutable=True,
        added=True,
    )


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """How text is generated."""

    length: int = _field(500, "symbols to generate", _at_least(1), mutable=True)
    samples: int = _field(1, "number of continuations of the prompt", _at_least(1), mutable=True)
    temperature: float = _field(
        1.0,
        "divides the logits: below 1 is safer, above 1 more diverse, 0 picks the most likely symbol",
        _at_least(0, "it must be 0 or more"),
        mutable=True,
    )
    top_k: int = _field(
        0,
        "sample from the k most likely symbols; 0: all",
        Rule("it must be 0 (all symbols) or more, below 2**31", lambda value: 0 <= value < 2**31),
        mutable=True,
    )
    top_p: float = _field(
        1.0,
        "sample from the most likely symbols whose probabilities sum to this",
        Rule("it must be above 0 and at most 1", lambda value: 0 < value <= 1),
        mutable=True,
    )
    seed: int = _field(0, "random seed; the same seed gives the same text", _SEED, mutable=True)

    @classmethod
    def from_arguments(cls, **arguments: Any) -> "GenerateConfig":
        """A config from the arguments of a Python call, validated by the same rules; errors name the argument."""
        return _build(cls, arguments, "")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """How often the state is saved and how many checkpoints are kept."""

    every_steps: int = _field(
        1000, "a kill loses at most this many steps: a save starts after 4/5 of them", _at_least(1), mutable=True
    )
    every_minutes: float = _field(
        0.0,
        "a kill loses at most this much time; 0: no limit",
        _at_least(0, "it must be 0 (no limit) or more"),
        mutable=True,
    )
    keep: int = _field(
        2, "how many of the newest checkpoints to keep, in addition to the best on dev", _at_least(1), mutable=True
    )
    on_failure: str = _field(
        "continue",
        "when a save fails: continue (print a warning and keep training) | stop",
        _one_of("continue", "stop"),
        mutable=True,
    )


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """How often metrics are written."""

    every_steps: int = _field(
        100, "steps between entries of metrics.jsonl, TensorBoard and the log", _at_least(1), mutable=True
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """The config of a run. The defaults are the published 12-layer model with adaptive spans up to 8192, on enwik8."""

    seed: int = _field(1, "random seed of the initial weights, dropout and epoch offsets", _SEED)
    init_from: str = _field("", "start from the newest weights of the run in this workdir; empty: random weights")
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    span: SpanConfig = dataclasses.field(default_factory=SpanConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.model.width % self.model.heads:
            raise UserError(
                f"config.model.width is {self.model.width}; it must be a multiple of config.model.heads, which is "
                f"{self.model.heads}"
            )
        if self.span.initial > self.span.limit:
            raise UserError(
                f"config.span.initial is {self.span.initial:g}; it must be between 0 and config.span.limit, which is "
                f"{self.span.limit}"
            )
        if self.span.initial and self.span.kind != "adaptive":
            raise UserError(
                f"config.span.initial is {self.span.initial:g}, but config.span.kind is {self.span.kind!r}; only "
                "adaptive spans have an initial value"
            )
        if self.model.sandwich > self.model.layers:
            raise UserError(
                f"config.model.sandwich is {self.model.sandwich}; it must be between 0 and config.model.layers, which "
                f"is {self.model.layers}"
            )
        if self.model.sandwich and self.model.persistent:
            raise UserError(
                f"config.model.sandwich is {self.model.sandwich}, but with config.model.persistent="
                f"{self.model.persistent} there are no feed-forward sublayers to reorder; set one of them to 0"
            )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Config":
        """Builds and checks a Config from nested mappings, e.g. an `ml_collections.ConfigDict`."""
        return _build(cls, fields, "config.")

    def to_json(self) -> str:
        """The config as indented JSON, as written to `config.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)

    def changed(self, values: Mapping[str, Any]) -> "Config":
        """A copy with some fields changed, given by name (`train.steps`); validated after all changes."""
        fields = dataclasses.asdict(self)
        for name, value in values.items():
            section, _, field = name.rpartition(".")
            (fields[section] if section else fields)[field] = value
        return Config.from_dict(fields)

    @property
    def head_width(self) -> int:
        """K, the width of one head."""
        return self.model.width // self.model.heads


# Old names of fields in checkpoints and config.json files of earlier versions.
RENAMED = {
    "train": {"batch_split": "grad_accum_steps", "max_bad_steps": "max_nonfinite_steps"},
    "evaluate": {"streams": "batch_size"},
}


def current_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a saved config under their current names."""
    if not isinstance(fields, Mapping):
        return fields
    return {
        section: {RENAMED.get(section, {}).get(name, name): value for name, value in values.items()}
        if isinstance(values, Mapping)
        else values
        for section, values in fields.items()
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "config") -> list[str]:
    """The fields that differ between two nested mappings, one line each: old value → new value."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, "(absent)"), new.get(name, "(absent)")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}.{name}")
        elif before != after:
            lines.append(f"{prefix}.{name}: {before!r} → {after!r}")
    return lines


def is_mutable(name: str) -> bool:
    """Whether a run may be resumed with another value of a field, given as `train.steps`."""
    section, _, field = name.rpartition(".")
    group = typing.get_type_hints(Config)[section] if section else Config
    known = {each.name: each.metadata for each in dataclasses.fields(group)}
    return known.get(field, {}).get("mutable", False)


def _build(cls: type, fields: Any, prefix: str) -> Any:
    group = prefix.removesuffix(".")
    if not isinstance(fields, Mapping):
        raise UserError(f"{group} is {fields!r}; it must be a mapping of fields")
    types = typing.get_type_hints(cls)
    for name in fields:
        if name not in types:
            raise UserError(f"{prefix}{name} is not a known field; {group} has {', '.join(sorted(types))}")
    values = {}
    for field in dataclasses.fields(cls):
        path = f"{prefix}{field.name}"
        if field.name in fields:
            values[field.name] = _convert(types[field.name], fields[field.name], path)
            rule = field.metadata.get("rule")
            if rule is not None and not rule.holds(values[field.name]):
                raise UserError(f"{path} is {values[field.name]!r}; {rule.words}")
        elif not field.metadata.get("added"):
            raise UserError(f"{path} is missing; build the config from configs/base.py, which sets every field")
    return cls(**values)


def _convert(type_: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(type_):
        return _build(typing.cast(type, type_), value, f"{path}.")
    if typing.get_origin(type_) is tuple:
        parts = typing.get_args(type_)
        if not isinstance(value, (tuple, list)) or len(value) != len(parts):
            raise UserError(f"{path} is {value!r}; it must be a tuple of {len(parts)} numbers")
        return tuple(_convert(part, item, path) for part, item in zip(parts, value, strict=True))
    # Any number type, e.g. numpy's, but not bool: True is not 1.
    abstract = {int: numbers.Integral, float: numbers.Real}.get(type_)
    if abstract and isinstance(value, abstract) and not isinstance(value, bool):
        return type_(value)
    if abstract or not isinstance(value, type_):
        raise UserTypeError(f"{path} is {value!r}, a {type(value).__name__}; it must be a {type_.__name__}")
    return value
