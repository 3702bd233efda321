"""What a checkpoint says of itself: where in the text it stands, of which run it is, what it was made with."""

import dataclasses
import platform
from importlib.metadata import version
from typing import Any

import adaptive_span_jax
from adaptive_span_jax.config import current_names
from adaptive_span_jax.data.segments import Position


def versions() -> dict[str, str]:
    """What a checkpoint is made with."""
    libraries = {name: version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint", "numpy")}
    return {"adaptive_span_jax": adaptive_span_jax.__version__, "python": platform.python_version(), **libraries}


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """What is written beside a checkpoint's arrays."""

    step: int
    position: Position
    seconds: float  # of training so far
    fingerprint: str  # of the text
    vocabulary: str  # symbol number i is the character with the byte's number
    config: dict[str, Any]
    learning_rate: float = 0.0  # of the next step; the schedule's own fields are in the config, its count is `step`
    nonfinite_steps: int = 0  # steps so far whose update was left out
    dev_bits: float | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=versions)

    @classmethod
    def from_saved(cls, step: int, fields: dict[str, Any]) -> "CheckpointMetadata":
        """What a checkpoint holds, also one of an earlier version, which named some fields differently."""
        fields = {{"bad_steps": "nonfinite_steps"}.get(name, name): value for name, value in fields.items()}
        changed: Any = {"position": Position(**fields["position"]), "config": current_names(fields["config"])}
        return cls(step=step, **fields | changed)
