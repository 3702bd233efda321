"""Orbax checkpoints: parameters, optimizer state, segment memory, and where in the text they stand.

A checkpoint is a directory `checkpoints/<step>` with three trees of arrays, `params`, `optimizer` and `memory`, and a
JSON file `_CHECKPOINT_METADATA` whose `custom_metadata` holds the position in the text, the data's fingerprint and the
config. Any orbax, and for the arrays any TensorStore (OCDBT of zarr), can read it without this package.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import Params
from adaptive_span_jax.segments import Position
from adaptive_span_jax.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Saved:
    """What is written beside a checkpoint's arrays."""

    step: int
    position: Position
    seconds: float  # of training so far
    fingerprint: str  # of the text
    vocabulary: str  # symbol number i is the character with the byte's number
    config: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: the newest few and the one with the best dev bits are kept."""

    def __init__(self, directory: Path, keep: int):
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics["dev_bits"],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        self._directory = directory
        policy: Any = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        self._checkpointer = ocp.training.Checkpointer(
            str(directory.absolute()),
            preservation_policy=policy,
            cleanup_tmp_directories=True,
        )
        self._pending: Any = None

    @property
    def latest_step(self) -> int | None:
        """The newest finished checkpoint, if there is any."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def choose(self, which: str) -> int:
        """The step of the checkpoint that a user names: latest, best (on dev) or a number."""
        bits = {each.step: (each.metrics or {}).get("dev_bits") for each in self._checkpointer.checkpoints}
        scored = {step: found for step, found in bits.items() if found is not None}
        chosen = {"latest": max(bits, default=None), "best": min(scored, key=lambda step: scored[step], default=None)}
        step = chosen.get(which, int(which) if which.isdecimal() else None)
        if step not in bits:
            there = ", ".join(f"{step}{' (best)' if step == chosen['best'] else ''}" for step in sorted(bits)) or "none"
            raise UserError(
                f"{self._directory}: no checkpoint {which!r}; name a step, latest or best. There are: {there}"
            )
        return step

    def describe(self, step: int) -> Saved:
        """What was written beside the arrays of a checkpoint."""
        found: Any = self._checkpointer.checkpointables_metadata(step).custom_metadata
        return Saved(**found | {"step": step, "position": Position(**found["position"])})

    def save(self, state: TrainState, about: Saved, dev_bits: float | None = None) -> None:
        """Starts saving; the state may be given away at once. A failure shows at the next `save` or `wait`."""
        self.wait()
        step = about.step
        if self.latest_step == step:
            return
        json_fields: Any = dataclasses.asdict(about) | {"position": about.position._asdict()}
        del json_fields["step"]
        arrays = {"params": state.params, "optimizer": state.opt_state, "memory": state.memory}
        metrics: Any = None if dev_bits is None else {"dev_bits": dev_bits}
        with self._failure(step):
            self._pending = self._checkpointer.save_checkpointables_async(
                step, arrays, metrics=metrics, custom_metadata=json_fields
            )
        if self._pending is None:
            # Orbax skips a save without a word when a newer step exists.
            raise UserError(
                f"{self._directory} has a checkpoint of step {self.latest_step}, newer than step {step} that was to be "
                "saved; another run seems to use the same directory. Start this one with another --workdir"
            )
        self._pending_step = step

    def wait(self) -> None:
        """Waits until what was saved is safely on disk."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            with self._failure(self._pending_step):
                pending.result()

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a checkpoint, placed like `abstract`."""
        arrays = {"params": abstract.params, "optimizer": abstract.opt_state, "memory": abstract.memory}
        loaded = self._checkpointer.load_checkpointables(step, arrays)
        number = jax.device_put(np.asarray(step, abstract.step.dtype), abstract.step.sharding)
        return TrainState(number, loaded["params"], loaded["optimizer"], loaded["memory"])

    def restore_params(self, step: int, abstract: Params) -> Params:
        """Only the parameters of a checkpoint, placed like `abstract`."""
        return self._checkpointer.load_checkpointables(step, {"params": abstract})["params"]

    def close(self) -> None:
        """Waits for what is being saved, then lets go of the directory."""
        self.wait()
        self._checkpointer.close()

    @contextlib.contextmanager
    def _failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            safe = self.latest_step
            raise UserError(
                f"{self._directory}: the checkpoint of step {step} could not be written ({error}); "
                + ("no checkpoint exists yet" if safe is None else f"the one of step {safe} is safe")
                + ". Make room and start the same command again"
            ) from error
