"""The metadata of a checkpoint: position in the text, config, vocabulary, versions."""

import dataclasses
import platform
from importlib.metadata import version
from typing import Any

import adaptive_span_jax
from adaptive_span_jax.config import current_names
from adaptive_span_jax.data.segments import Position


def versions() -> dict[str, str]:
    """The versions of Python, this package and the main libraries."""
    libraries = {name: version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint", "numpy")}
    return {"adaptive_span_jax": adaptive_span_jax.__version__, "python": platform.python_version(), **libraries}


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """The metadata that is stored with a checkpoint's arrays."""

    step: int
    position: Position
    seconds: float  # of training so far
    fingerprint: str  # of the text
    vocabulary: str  # one latin-1 character per symbol, see data/corpus.py
    config: dict[str, Any]
    learning_rate: float = 0.0  # of the next step, for information: the schedule follows from config and step
    nonfinite_steps: int = 0  # skipped steps so far
    dev_bits: float | None = None
    wall_seconds: float = 0.0  # of the run's processes so far, see training/goodput.py; 0 from earlier versions
    productive_seconds: float = 0.0  # of these, in steps that counted
    versions: dict[str, str] = dataclasses.field(default_factory=versions)

    @classmethod
    def from_saved(cls, step: int, fields: dict[str, Any]) -> "CheckpointMetadata":
        """The metadata from its stored fields, including those of earlier versions, in which some had other names."""
        fields = {{"bad_steps": "nonfinite_steps"}.get(name, name): value for name, value in fields.items()}
        changed: Any = {"position": Position(**fields["position"]), "config": current_names(fields["config"])}
        return cls(step=step, **fields | changed)
