"""Checks of a run's directory: writable, not in use, of the same run, with enough space."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.checkpoint.manager import CheckpointMetadata
from adaptive_span_jax.config import Config, differences, is_mutable
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import hosts, locking, storage, strict_json, terminal
from adaptive_span_jax.runtime.terminal import counted, size

_SHARE = "use a directory on a file system that all hosts share"


def make_workdir(workdir: Path) -> None:
    """Creates the directory and checks that it is writable and visible to all hosts."""
    hosts.on_process_zero("workdir", lambda: _check_writable(workdir))
    if not storage.in_bucket(workdir) and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} was created by process 0 but does not exist here: {_SHARE}")


@contextlib.contextmanager
def only_user(workdir: Path) -> Iterator[None]:
    """A context that keeps other runs out of the workdir; on several hosts, process 0 holds the lock for all."""
    if not hosts.is_process_zero():
        yield
        return
    if storage.in_bucket(workdir):
        with locking.tag(workdir / ".lock") as before:
            if before:
                terminal.say(
                    f"warning: {before} used {workdir} and may still be running; make sure that it is not, because a "
                    "bucket has no locks"
                )
            yield
        return
    try:
        with locking.hold(workdir / ".lock", wait=False) as alone:
            if not alone:
                terminal.say(
                    f"warning: {workdir} is on a file system without locks; make sure that no other run uses it"
                )
            yield
    except locking.Held as holder:
        raise UserError(
            f"--workdir={workdir} is in use by {holder}; wait for it, stop it, or use another --workdir"
        ) from None


def check_space(workdir: Path, checkpoint_bytes: int, keep: int) -> None:
    """Raises if there is not enough space for the checkpoints."""
    folder = workdir / "checkpoints"
    there = len(sealing.sealed_steps(folder))
    # The newest few, the best, and the one being written.
    more, free = max(keep + 2 - there, 1), storage.free_bytes(workdir)
    if more * checkpoint_bytes > free:
        aside = sealing.bytes_in(folder / sealing.DAMAGED)
        raise UserError(
            f"--workdir={workdir} has {size(free)} free, but "
            f"{counted(more, 'more checkpoint' if there else 'checkpoint')} of {size(checkpoint_bytes)} would take "
            f"{size(more * checkpoint_bytes)}; free some space, "
            + (f"delete the {size(aside)} in {folder / sealing.DAMAGED}, " if aside else "")
            + f"use another --workdir, or keep fewer checkpoints (config.checkpoint.keep is {keep})"
        )


def write_config(workdir: Path, config: Config) -> None:
    """Writes `config.json` atomically."""
    storage.write_text(workdir / "config.json", config.to_json() + "\n")


def check_same_run(workdir: Path, saved: CheckpointMetadata, config: Config, fingerprint: str) -> list[str]:
    """Raises if a checkpoint is of another model or text; returns the allowed changes, one line each."""
    # A field that was added since the checkpoint was written has its default there.
    before, now = (strict_json.loads(each.to_json()) for each in (Config.from_dict(saved.config), config))
    changed = differences(before, now)
    rejected = [line for line in changed if not is_mutable(line.partition(":")[0].removeprefix("config."))]
    if rejected:
        raise UserError(
            f"--workdir={workdir} has a checkpoint (step {saved.step:,}) of a different run:\n  "
            + "\n  ".join(rejected)
            + "\nRestore the old values, or start a new run with another --workdir"
        )
    if saved.fingerprint != fingerprint:
        raise UserError(
            f"--workdir={workdir} has a checkpoint (step {saved.step:,}) trained on other text: its fingerprint is "
            f"{saved.fingerprint}, that of the current text {fingerprint}. Restore the text, or start a new run with "
            "another --workdir"
        )
    return changed


def _check_writable(workdir: Path) -> None:
    try:
        storage.make_folder(workdir)
        probe = workdir / f".writable.{os.getpid()}"
        try:
            probe.write_bytes(b"x")
        finally:
            probe.unlink(missing_ok=True)  # on a full disk an empty file remains
    except Exception as error:
        if not isinstance(error, OSError) and not storage.is_failure(error):
            raise
        reason = getattr(error, "strerror", None) or str(error).strip() or repr(error)
        raise UserError(f"--workdir={workdir} is not writable ({reason}); use another --workdir") from error
