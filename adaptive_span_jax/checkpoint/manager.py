"""Orbax checkpoints: named trees of arrays (parameters, optimizer state, segment memory) and their metadata.

    checkpoints/1000/params/, optimizer/, memory/    three trees of arrays, in orbax's format: OCDBT of zarr
    checkpoints/1000/_CHECKPOINT_METADATA            JSON; its `custom_metadata` holds the `CheckpointMetadata`
    checkpoints/1000/SHA256SUMS                      the hash of every other file
    checkpoints/1200.unfinished, damaged/…           see sealing.py

model/transformer.py names the arrays of `params`; `optimizer` is what optax makes of them; for `memory` see
model/memory.py.
Any orbax, and for the arrays any TensorStore, reads all of it without this package: `ocp.load_checkpointables(folder)`;
`tests/checkpoint/test_manager.py` does so.

A save is copied off the devices at once, then written, hashed and given its name while training continues; then it is
reported as saved. policy.py says when. On several hosts every process writes its own arrays and the first one does
the rest; the folder must be one that all of them see.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from adaptive_span_jax.checkpoint import retention, sealing
from adaptive_span_jax.checkpoint.metadata import CheckpointMetadata, versions
from adaptive_span_jax.checkpoint.policy import SavePolicy
from adaptive_span_jax.config import CheckpointConfig
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import hosts, sharding, storage, strict_json, terminal


class Checkpoints:
    """The checkpoints of one run: the newest few and the one with the best dev bits are kept."""

    def __init__(
        self, directory: Path, config: CheckpointConfig, agree: Callable[[int], int] = lambda late: late
    ) -> None:
        """`agree`: clocks differ, so several processes must agree on whether it is time to save; see hosts.py."""
        self._policy = SavePolicy(config, agree)
        self._directory = directory if storage.in_bucket(directory) else directory.absolute()
        self._config = config
        self._damage: dict[int, str | None] = {}  # what was found in those that were checked
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._failure: UserError | None = None
        self._warning: str | None = None  # of that failure, if training continues
        self._step: int | None = None  # of the newest save, whether it has been finished or not
        self._safe: int | None = None  # of the newest save that is known to be whole

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        # However the run ends, what is being written is brought to an end before another run may come.
        self._worker.shutdown()
        self._remove_remains()

    def newest(self) -> int | None:
        """The newest checkpoint whose content is what was written, if there is any; says what it passes over."""
        found = self._find_newest() if hosts.is_process_zero() else None
        found = hosts.broadcast_from_process_zero(-1 if found is None else found)
        self._step = self._safe = None if found < 0 else found
        if found >= 0 and not (self._directory / str(found)).is_dir():
            raise UserError(
                f"{self._directory / str(found)}, which process 0 sees, is not here; use a --workdir on a file system "
                "that all hosts share"
            )
        return self._step

    @property
    def kept(self) -> str:
        """Which checkpoint a run that ends now can be resumed from."""
        return f"the newest checkpoint is that of step {self._safe:,}" if self._safe else "there is no checkpoint yet"

    def choose(self, which: str) -> int:
        """The step of the checkpoint that a user names: latest, best (on dev) or a number."""
        steps, best = sealing.sealed_steps(self._directory), retention.best(self._described())
        named = {"latest": self.newest, "best": lambda: best}
        step = named[which]() if which in named else int(which) if which.isdecimal() else None
        if step is None or step not in steps:
            there = ", ".join(f"{each}{' (best)' if each == best else ''}" for each in steps) or "none"
            raise UserError(
                f"{self._directory}: no checkpoint {which!r}; name a step, latest or best. There are: {there}"
            )
        return step

    def set_damaged_aside(self) -> None:
        """Moves damaged checkpoints aside and deletes unfinished ones, which were never reported as saved; only for the
        one process that may write here."""
        if not hosts.is_process_zero() or not self._directory.is_dir():
            return
        sealing.finish_deleting(self._directory)
        whole = self._find_newest()
        damaged = [step for step, damage in self._damage.items() if damage]
        if damaged and whole is None:
            # To start a long run over is for the user to decide.
            raise UserError(
                f"{self._directory} has only damaged checkpoints (see above); restore one from a copy, or "
                "start a new run with another --workdir"
            )
        for step in damaged:
            terminal.say(f"it is set aside: {sealing.set_aside(self._directory / str(step))}")
        for folder in sealing.leftovers(self._directory):
            sealing.discard(folder)
            terminal.say(f"{folder.name} was never reported as saved: a process was killed while writing it; deleted")

    def thin_out(self) -> None:
        """Deletes what is no longer kept; the newest must be known to be whole."""
        if hosts.is_process_zero():
            steps = sealing.sealed_steps(self._directory)
            for step in retention.superseded(steps, self._described(), self._config.keep):
                sealing.delete(self._directory, step)

    def describe(self, step: int) -> CheckpointMetadata:
        """What was written beside the arrays of a checkpoint."""
        found: Any = ocp.checkpointables_metadata(str(self._directory / str(step))).custom_metadata
        try:
            return CheckpointMetadata.from_saved(step, found)
        except (TypeError, KeyError) as error:
            raise UserError(
                f"{self._directory / str(step)} was written by another version of this package ({error}); "
                "start a new run with another --workdir"
            ) from error

    def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """The named trees of a checkpoint, or some of them, placed like `abstract`."""
        return self._load(step, abstract)

    def shapes(self, step: int, name: str) -> Any:
        """The shapes and types of a tree as they are stored."""
        found: Any = ocp.checkpointables_metadata(str(self._directory / str(step))).metadata
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found[name])

    def due(self, step: int) -> bool:
        """Whether a step is one to save after."""
        return self._policy.due(step, newest=self._step or 0)

    def save(
        self,
        trees: dict[str, Any],
        about: CheckpointMetadata,
        logs: storage.Staged | None = None,
        check_older: bool = True,
    ) -> None:
        """Starts saving named trees, which may be donated at once. Does nothing if this step was the last to be saved.

        `logs` are stored before: a run is resumed with the lines up to its checkpoint. `check_older`: then see
        that the checkpoint before is still whole, which takes as long as reading it.
        """
        self._wait()
        step = about.step
        if step == self._step:
            return
        self._remove_remains()
        self._step = step
        self._policy.begin()
        fields: Any = dataclasses.asdict(about) | {"position": about.position._asdict()}
        del fields["step"]
        try:
            self._begin(step, trees)
            response = ocp.save_checkpointables_async(
                str(sealing.unfinished(self._directory, step)), trees, custom_metadata=strict_json.finite(fields)
            )
        except Exception as error:
            self._fail(step, error)
        else:
            self._pending = self._worker.submit(self._finish, response, step, logs, check_older)

    def wait_if_overdue(self, step: int) -> None:
        """Before a step: waits for what is being saved if a kill could otherwise cost more than the config's interval.
        Raises if a save has failed and the config says to stop then."""
        if self._pending is not None and (self._pending.done() or self._policy.must_wait(step, self._safe or 0)):
            self._wait()
        if self._failure is not None and self._config.on_failure == "stop":
            raise self._failure
        if self._warning is not None:  # only now is it known that training continues; at the end there is an error
            terminal.say(self._warning)
            self._warning = None

    def finish(self) -> None:
        """Waits for what is being saved; raises if the last save failed."""
        self._wait()
        if self._failure is not None:
            raise self._failure

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _finish(self, response: Any, step: int, logs: storage.Staged | None, check_older: bool) -> None:
        """In the background: waits until all is written, seals it, deletes what is no longer kept."""
        try:
            response.result()
            if logs is not None:
                logs.store()
            if hosts.is_process_zero():
                sealing.seal(self._directory, step)
        # Whatever the libraries call a full disk or a lost connection, it is a save that failed and is said to be one.
        except Exception as error:
            self._fail(step, error)
            return
        self._failure = self._warning = None
        self._safe = step
        self._policy.end()
        if hosts.is_process_zero():
            terminal.say(f"step {step:,} is saved")
            try:
                if check_older and self._config.keep > 1:
                    retention.check_fallback(self._directory, step)
                self.thin_out()
            except Exception as error:
                terminal.say(f"warning: older checkpoints could not be checked or deleted ({_reason(error)})")

    def _fail(self, step: int, error: Exception) -> None:
        safe = "there is none yet" if self._safe is None else f"that of step {self._safe:,} is safe"
        what = f"the checkpoint of step {step:,} could not be written to {self._directory} ({_reason(error)}); {safe}"
        mend = "See that the bucket can be reached" if storage.in_bucket(self._directory) else "Make room"
        self._failure = UserError(f"{what}. {mend} and start the same command again")
        self._failure.__cause__ = error
        self._remove_remains()
        if self._config.on_failure == "continue":
            self._warning = (
                f"warning: {what}. Training continues; {mend[0].lower()}{mend[1:]} before the next one is due"
            )

    def _begin(self, step: int, arrays: Any) -> None:
        """A save that does not fit is not begun. What process 0 finds holds for all of them."""
        refused = None
        if hosts.is_process_zero():
            try:
                storage.make_folder(self._directory)
                if sharding.total_bytes(arrays) > storage.free_bytes(self._directory):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                sealing.begin(self._directory, step)
            except Exception as error:
                refused = error
        if not hosts.broadcast_from_process_zero(refused is None):
            raise refused or OSError("process 0 could not begin to write it")

    def _remove_remains(self) -> None:
        """What a failed save has written takes the room that the next one needs. Threads of it may still be writing, so
        this is tried again later."""
        if self._failure is not None and hosts.is_process_zero():
            with contextlib.suppress(Exception):
                for folder in sealing.leftovers(self._directory):
                    sealing.discard(folder, as_far_as_possible=True)

    def _described(self) -> dict[int, CheckpointMetadata]:
        """Every checkpoint that can be read; others, perhaps damaged, are not for us to judge."""
        found = {}
        for step in sealing.sealed_steps(self._directory):
            with contextlib.suppress(Exception):
                found[step] = self.describe(step)
        return found

    def _find_newest(self) -> int | None:
        for step in reversed(sealing.sealed_steps(self._directory)):
            if step not in self._damage:
                with terminal.share_done(f"checking the checkpoint of step {step:,}") as show:
                    self._damage[step] = sealing.find_damage(self._directory / str(step), show)
                if self._damage[step]:
                    terminal.say(f"the checkpoint of step {step:,} is damaged: {self._damage[step]}")
            if self._damage[step] is None:
                return step
        return None

    def _load(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        folder = self._directory / str(step)
        if hosts.is_process_zero() and step not in self._damage:
            self._damage[step] = sealing.find_damage(folder)
        if damage := self._damage.get(step):
            raise UserError(f"{folder} is damaged: {damage}")
        try:
            return ocp.load_checkpointables(str(folder), abstract)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"{folder} is what was written, but cannot be read into this model ({reason}). It was written with "
                f"{self.describe(step).versions}, now it is {versions()}"
            ) from error


def _reason(error: Exception) -> str:
    """What the system said; the libraries wrap it in paths and codes."""
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) else (str(error).strip() or repr(error)).splitlines()[-1]
