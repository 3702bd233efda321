"""ConfigDict → frozen, validated dataclasses. An unknown, missing or impossible field is an error that names it."""

import dataclasses
import math
import numbers
import typing
from collections.abc import Mapping
from typing import Any

from adaptive_span_jax import strict_json
from adaptive_span_jax.errors import UserError, UserTypeError

SPAN_KINDS = ("fixed", "adaptive", "dynamic")
SOURCES = ("enwik8", "text8", "files", "stdlib")
ATTENTION_PATHS = ("per_head", "plain")
ON_FAILURE = ("continue", "stop")
COMPUTE_DTYPES = ("float32", "bfloat16", "float64")
MEMORY_DTYPES = ("", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes token ids."""

    source: str
    path: str
    archive: str
    directory: str
    newlines: str
    splits: tuple[float, float, float]
    max_bytes: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The Transformer's sizes and arithmetic."""

    layers: int
    width: int
    heads: int
    feedforward: int
    dropout: float
    attention: str
    compute_dtype: str
    memory_dtype: str
    remat: bool
    mask_empty_memory: bool


@dataclasses.dataclass(frozen=True)
class SpanConfig:
    """How far heads may look back, and what looking back costs."""

    kind: str
    limit: int
    ramp: int
    penalty: float


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Batches, steps and the optimizer."""

    batch_size: int
    batch_split: int
    segment: int
    steps: int
    learning_rate: float
    warmup_steps: int
    cooldown_start: int
    clip: float
    max_bad_steps: int


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How parameters are shared out over the devices."""

    fsdp: int


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """When, on how many streams and on how much of dev the model is evaluated."""

    streams: int
    every_steps: int
    max_tokens: int = 0  # configs in older checkpoints do not have it


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """How text is generated."""

    length: int
    samples: int
    temperature: float
    top_k: int
    top_p: float
    seed: int

    @classmethod
    def from_arguments(cls, **arguments: Any) -> "GenerateConfig":
        """The arguments of a Python call, held to the rules of the config; errors name the argument."""
        _check(_generate_rules(how := _build(cls, arguments, "")), "")
        return how


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """How often the state is saved and how many saves are kept."""

    every_steps: int
    every_minutes: float
    keep: int
    on_failure: str


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """How often metrics are written."""

    every_steps: int


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. Fields are documented in `configs/base.py`."""

    seed: int
    init_from: str
    data: DataConfig
    model: ModelConfig
    span: SpanConfig
    train: TrainConfig
    mesh: MeshConfig
    evaluate: EvaluateConfig
    generate: GenerateConfig
    checkpoint: CheckpointConfig
    log: LogConfig

    def __post_init__(self) -> None:
        _check(_rules(self), "config.")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Config":
        """Builds and checks a Config from nested mappings, e.g. an `ml_collections.ConfigDict`."""
        return _build(cls, fields, "config.")

    def to_json(self) -> str:
        """The config as indented JSON, as written to `config.json`."""
        return strict_json.dumps(dataclasses.asdict(self), indent=2)

    def changed(self, values: Mapping[str, Any]) -> "Config":
        """The config with other values for some fields, by name (`train.steps`); checked once all are in place."""
        fields = dataclasses.asdict(self)
        for name, value in values.items():
            section, _, field = name.rpartition(".")
            (fields[section] if section else fields)[field] = value
        return Config.from_dict(fields)

    @property
    def head_width(self) -> int:
        """K, the width of one head."""
        return self.model.width // self.model.heads


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "config") -> list[str]:
    """The fields in which two nested mappings differ, one line each, old value first."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, "(absent)"), new.get(name, "(absent)")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}.{name}")
        elif before != after:
            lines.append(f"{prefix}.{name}: {before!r} → {after!r}")
    return lines


def _build(cls: type, fields: Any, prefix: str) -> Any:
    group = prefix.removesuffix(".")
    if not isinstance(fields, Mapping):
        raise UserError(f"{group} is {fields!r}; it must be a group of fields like the one in configs/base.py")
    types = typing.get_type_hints(cls)
    for name in fields:
        if name not in types:
            raise UserError(f"{prefix}{name} is not a known field; {group} has {', '.join(sorted(types))}")
    optional = {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
    for name in types:
        if name not in fields and name not in optional:
            raise UserError(f"{prefix}{name} is missing; start the config from configs/base.py, which sets every field")
    return cls(
        **{name: _convert(type_, fields[name], f"{prefix}{name}") for name, type_ in types.items() if name in fields}
    )


def _convert(type_: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(type_):
        return _build(typing.cast(type, type_), value, f"{path}.")
    if typing.get_origin(type_) is tuple:
        parts = typing.get_args(type_)
        if not isinstance(value, (tuple, list)) or len(value) != len(parts):
            raise UserError(f"{path} is {value!r}; it must be {len(parts)} numbers in brackets")
        return tuple(_convert(part, item, path) for part, item in zip(parts, value, strict=True))
    # Any kind of number, e.g. numpy's, except that True is not meant as 1.
    abstract = {int: numbers.Integral, float: numbers.Real}.get(type_)
    if abstract and isinstance(value, abstract) and not isinstance(value, bool):
        return type_(value)
    if abstract or not isinstance(value, type_):
        raise UserTypeError(f"{path} is {value!r}, a {type(value).__name__}; it must be a {type_.__name__}")
    return value


# Field, value found, what is allowed, whether it holds.
_Rule = tuple[str, Any, str, bool]
_POSITIVE = "it must be at least 1"


def _check(rules: list[_Rule], prefix: str) -> None:
    for field, value, allowed, holds in rules:
        if not holds:
            raise UserError(f"{prefix}{field} is {value!r}; {allowed}")


def _generate_rules(g: GenerateConfig) -> list[_Rule]:
    """What `config.generate`, and the arguments of `TrainedModel.generate`, must satisfy."""
    return [
        ("length", g.length, _POSITIVE, g.length >= 1),
        ("samples", g.samples, _POSITIVE, g.samples >= 1),
        ("temperature", g.temperature, "it must be 0 or more", 0 <= g.temperature < math.inf),
        ("top_k", g.top_k, "it must be 0 (all symbols) or more, below 2**31", 0 <= g.top_k < 2**31),
        ("top_p", g.top_p, "it must be above 0 and at most 1", 0 < g.top_p <= 1),
        ("seed", g.seed, "it must be between 0 and 2**32 - 1", 0 <= g.seed < 2**32),
    ]


def _rules(c: Config) -> list[_Rule]:
    """What every config must satisfy."""
    shares = c.data.splits
    return [
        ("seed", c.seed, "it must be between 0 and 2**32 - 1", 0 <= c.seed < 2**32),
        ("data.source", c.data.source, f"it must be one of {', '.join(SOURCES)}", c.data.source in SOURCES),
        ("data.newlines", c.data.newlines, "it must be keep or drop", c.data.newlines in ("keep", "drop")),
        (
            "data.splits",
            shares,
            "it must be three positive shares with a sum of 1, e.g. (0.9, 0.05, 0.05)",
            min(shares) > 0 and abs(sum(shares) - 1) < 1e-6,
        ),
        ("data.max_bytes", c.data.max_bytes, "it must be 0 (no limit) or more", c.data.max_bytes >= 0),
        ("model.layers", c.model.layers, _POSITIVE, c.model.layers >= 1),
        ("model.width", c.model.width, _POSITIVE, c.model.width >= 1),
        ("model.heads", c.model.heads, _POSITIVE, c.model.heads >= 1),
        (
            "model.width",
            c.model.width,
            f"it must be a multiple of config.model.heads, which is {c.model.heads}",
            c.model.heads < 1 or c.model.width % c.model.heads == 0,
        ),
        ("model.feedforward", c.model.feedforward, _POSITIVE, c.model.feedforward >= 1),
        ("model.dropout", c.model.dropout, "it must be at least 0 and below 1", 0 <= c.model.dropout < 1),
        (
            "model.attention",
            c.model.attention,
            f"it must be one of {', '.join(ATTENTION_PATHS)}",
            c.model.attention in ATTENTION_PATHS,
        ),
        (
            "model.compute_dtype",
            c.model.compute_dtype,
            f"it must be one of {', '.join(COMPUTE_DTYPES)}",
            c.model.compute_dtype in COMPUTE_DTYPES,
        ),
        (
            "model.memory_dtype",
            c.model.memory_dtype,
            "it must be empty (as config.model.compute_dtype), float32 or bfloat16",
            c.model.memory_dtype in MEMORY_DTYPES,
        ),
        ("span.kind", c.span.kind, f"it must be one of {', '.join(SPAN_KINDS)}", c.span.kind in SPAN_KINDS),
        ("span.limit", c.span.limit, "it must be between 1 and 2**20 positions", 1 <= c.span.limit <= 2**20),
        ("span.ramp", c.span.ramp, _POSITIVE, c.span.ramp >= 1),
        ("span.penalty", c.span.penalty, "it must be 0 or more", 0 <= c.span.penalty < math.inf),
        ("train.batch_size", c.train.batch_size, _POSITIVE, c.train.batch_size >= 1),
        ("train.batch_split", c.train.batch_split, _POSITIVE, c.train.batch_split >= 1),
        ("train.segment", c.train.segment, "it must be between 1 and 2**20 positions", 1 <= c.train.segment <= 2**20),
        ("train.steps", c.train.steps, _POSITIVE, c.train.steps >= 1),
        ("train.learning_rate", c.train.learning_rate, "it must be above 0", 0 < c.train.learning_rate < math.inf),
        ("train.warmup_steps", c.train.warmup_steps, "it must be 0 or more", c.train.warmup_steps >= 0),
        ("train.cooldown_start", c.train.cooldown_start, "it must be 0 (never) or more", c.train.cooldown_start >= 0),
        ("train.clip", c.train.clip, "it must be above 0 and finite", 0 < c.train.clip < math.inf),
        ("train.max_bad_steps", c.train.max_bad_steps, _POSITIVE, c.train.max_bad_steps >= 1),
        ("mesh.fsdp", c.mesh.fsdp, _POSITIVE, c.mesh.fsdp >= 1),
        ("evaluate.streams", c.evaluate.streams, _POSITIVE, c.evaluate.streams >= 1),
        ("evaluate.every_steps", c.evaluate.every_steps, _POSITIVE, c.evaluate.every_steps >= 1),
        (
            "evaluate.max_tokens",
            c.evaluate.max_tokens,
            "it must be 0 (all of dev) or at least 2, because the first token is not scored",
            c.evaluate.max_tokens == 0 or c.evaluate.max_tokens >= 2,
        ),
        *((f"generate.{name}", value, allowed, holds) for name, value, allowed, holds in _generate_rules(c.generate)),
        ("checkpoint.every_steps", c.checkpoint.every_steps, _POSITIVE, c.checkpoint.every_steps >= 1),
        (
            "checkpoint.every_minutes",
            c.checkpoint.every_minutes,
            "it must be 0 (never) or more, and finite",
            0 <= c.checkpoint.every_minutes < math.inf,
        ),
        (
            "checkpoint.on_failure",
            c.checkpoint.on_failure,
            f"it must be one of {', '.join(ON_FAILURE)}",
            c.checkpoint.on_failure in ON_FAILURE,
        ),
        ("checkpoint.keep", c.checkpoint.keep, _POSITIVE, c.checkpoint.keep >= 1),
        ("log.every_steps", c.log.every_steps, _POSITIVE, c.log.every_steps >= 1),
    ]
