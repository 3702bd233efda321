"""Orbax checkpoints: named trees of arrays (parameters, optimizer state, segment memory) and their metadata.

    checkpoints/1000/params/, optimizer/, memory/    three trees of arrays in Orbax's format (OCDBT of zarr)
    checkpoints/1000/_CHECKPOINT_METADATA            JSON; its `custom_metadata` holds the `CheckpointMetadata`
    checkpoints/1000/SHA256SUMS                      the hash of every other file
    checkpoints/1200.unfinished, damaged/…           see sealing.py

model/transformer.py names the arrays of `params`; `optimizer` is the optax state; model/memory.py describes `memory`.
Orbax reads all of it without this package (`ocp.load_checkpointables(folder)`), as `tests/checkpoint/test_manager.py`
shows; TensorStore reads the arrays.

A save first copies the arrays from the devices. Then they are written and hashed and the folder gets its name, while
training continues; only then is the step reported as saved. policy.py decides when to save. On several hosts, every
process writes its own arrays and process 0 does the rest; all of them must see the folder.
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
        self._damage: dict[int, str | None] = {}  # step → damage, of the checkpoints verified so far
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._failure: UserError | None = None
        self._warning: str | None = None  # not printed yet; set if training continues after the failure
        self._step: int | None = None  # of the newest save, finished or not
        self._safe: int | None = None  # of the newest save that is known to be intact

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        # However the run ends, finish the current save before the lock is released.
        self._worker.shutdown()
        self._remove_remains()

    def newest(self) -> int | None:
        """The step of the newest intact checkpoint, or None; reports the damaged ones that it skips."""
        found = self._find_newest() if hosts.is_process_zero() else None
        found = hosts.broadcast_from_process_zero(-1 if found is None else found)
        self._step = self._safe = None if found < 0 else found
        if found >= 0 and not (self._directory / str(found)).is_dir():
            raise UserError(
                f"{self._directory / str(found)} exists on process 0 but not here; use a --workdir on a file system "
                "that all hosts share"
            )
        return self._step

    @property
    def kept(self) -> str:
        """The checkpoint from which the run can be resumed, in words."""
        return f"the newest checkpoint is step {self._safe:,}" if self._safe else "there is no checkpoint yet"

    def choose(self, which: str) -> int:
        """The step of a checkpoint given as latest, best (on dev) or a step number."""
        steps, best = sealing.sealed_steps(self._directory), retention.best(self._described())
        named = {"latest": self.newest, "best": lambda: best}
        step = named[which]() if which in named else int(which) if which.isdecimal() else None
        if step is None or step not in steps:
            there = ", ".join(f"{each}{' (best)' if each == best else ''}" for each in steps) or "none"
            raise UserError(
                f"{self._directory}: no checkpoint {which!r}; use a step, latest or best. Available: {there}"
            )
        return step

    def set_damaged_aside(self) -> None:
        """Moves damaged checkpoints to `damaged/` and deletes unfinished ones, which were never reported as saved.

        Only for the process that holds the lock.
        """
        if not hosts.is_process_zero() or not self._directory.is_dir():
            return
        sealing.finish_deleting(self._directory)
        whole = self._find_newest()
        damaged = [step for step, damage in self._damage.items() if damage]
        if damaged and whole is None:
            # Only the user may decide to start a long run over.
            raise UserError(
                f"{self._directory} has only damaged checkpoints (see above); restore one from a backup, or "
                "start a new run with another --workdir"
            )
        for step in damaged:
            terminal.say(f"moved it to {sealing.set_aside(self._directory / str(step))}")
        for folder in sealing.leftovers(self._directory):
            sealing.discard(folder)
            terminal.say(f"deleted {folder.name}: a process was killed while writing it")

    def thin_out(self) -> None:
        """Deletes checkpoints that need not be kept; the newest must be known to be intact."""
        if hosts.is_process_zero():
            steps = sealing.sealed_steps(self._directory)
            for step in retention.superseded(steps, self._described(), self._config.keep):
                sealing.delete(self._directory, step)

    def describe(self, step: int) -> CheckpointMetadata:
        """The metadata of a checkpoint."""
        found: Any = ocp.checkpointables_metadata(str(self._directory / str(step))).custom_metadata
        try:
            return CheckpointMetadata.from_saved(step, found)
        except (TypeError, KeyError) as error:
            raise UserError(
                f"{self._directory / str(step)} was written by another version of this package ({error}); "
                "start a new run with another --workdir"
            ) from error

    def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """The named trees of a checkpoint, or some of them, with the shardings of `abstract`."""
        return self._load(step, abstract)

    def names(self, step: int) -> set[str]:
        """The names of a checkpoint's trees."""
        found: Any = ocp.checkpointables_metadata(str(self._directory / str(step))).metadata
        return set(found)

    def shapes(self, step: int, name: str) -> Any:
        """The stored shapes and dtypes of a tree."""
        found: Any = ocp.checkpointables_metadata(str(self._directory / str(step))).metadata
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found[name])

    def due(self, step: int) -> bool:
        """Whether to save after a step."""
        return self._policy.due(step, newest=self._step or 0)

    def save(
        self,
        trees: dict[str, Any],
        about: CheckpointMetadata,
        logs: storage.Staged | None = None,
        check_older: bool = True,
    ) -> None:
        """Starts saving named trees, which may be donated right after. Does nothing if this step was saved last.

        `logs` are uploaded before the checkpoint is sealed, so that they contain all lines up to it. `check_older`:
        afterward, verify the previous checkpoint again, which takes as long as reading it.
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
        """Before a step: waits for the current save if a kill could otherwise lose more than the config's interval.

        Raises if a save failed and checkpoint.on_failure is stop.
        """
        if self._pending is not None and (self._pending.done() or self._policy.must_wait(step, self._safe or 0)):
            self._wait()
        if self._failure is not None and self._config.on_failure == "stop":
            raise self._failure
        if self._warning is not None:  # training continues; at its end this would be an error instead
            terminal.say(self._warning)
            self._warning = None

    def finish(self) -> None:
        """Waits for the current save; raises if the last save failed."""
        self._wait()
        if self._failure is not None:
            raise self._failure

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _finish(self, response: Any, step: int, logs: storage.Staged | None, check_older: bool) -> None:
        """In the background: waits until everything is written, seals it, deletes checkpoints that need not be kept."""
        try:
            response.result()
            if logs is not None:
                logs.store()
            if hosts.is_process_zero():
                sealing.seal(self._directory, step)
        # The libraries raise many types for a full disk or a lost connection; all of them are failed saves.
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
                terminal.say(f"warning: could not verify or delete older checkpoints ({_reason(error)})")

    def _fail(self, step: int, error: Exception) -> None:
        what = (
            f"the checkpoint of step {step:,} could not be written to {self._directory} ({_reason(error)}); {self.kept}"
        )
        fix = "Check access to the bucket" if storage.in_bucket(self._directory) else "Free some disk space"
        self._failure = UserError(f"{what}. {fix} and run the same command again")
        self._failure.__cause__ = error
        self._remove_remains()
        if self._config.on_failure == "continue":
            self._warning = f"warning: {what}. Training continues; {fix[0].lower()}{fix[1:]} before the next save"

    def _begin(self, step: int, arrays: Any) -> None:
        """Prepares a save, or raises if it does not fit. Process 0 decides for all processes."""
        failure = None
        if hosts.is_process_zero():
            try:
                storage.make_folder(self._directory)
                if sharding.total_bytes(arrays) > storage.free_bytes(self._directory):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                sealing.begin(self._directory, step)
            except Exception as error:
                failure = error
        if not hosts.broadcast_from_process_zero(failure is None):
            raise failure or OSError("process 0 could not start the save")

    def _remove_remains(self) -> None:
        """Deletes the files of a failed save, whose space the next one needs.

        Its threads may still be writing, so this is repeated later.
        """
        if self._failure is not None and hosts.is_process_zero():
            with contextlib.suppress(Exception):
                for folder in sealing.leftovers(self._directory):
                    sealing.discard(folder, as_far_as_possible=True)

    def _described(self) -> dict[int, CheckpointMetadata]:
        """The metadata of every readable checkpoint; unreadable ones, perhaps damaged, are skipped."""
        found = {}
        for step in sealing.sealed_steps(self._directory):
            with contextlib.suppress(Exception):
                found[step] = self.describe(step)
        return found

    def _find_newest(self) -> int | None:
        for step in reversed(sealing.sealed_steps(self._directory)):
            if step not in self._damage:
                with terminal.share_done(f"verifying the checkpoint of step {step:,}") as show:
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
                f"{folder} is intact but cannot be loaded into this model ({reason}). It was written with "
                f"{self.describe(step).versions}; installed are {versions()}"
            ) from error


def _reason(error: Exception) -> str:
    """The system's error message, without the paths and codes that the libraries add."""
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) else (str(error).strip() or repr(error)).splitlines()[-1]
