"""A run's directory: can it be written, is it free, does it belong to this config, is there room."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from adaptive_span_jax import display, hosts, lock, sealed, storage, strict_json
from adaptive_span_jax.checkpoint import Saved
from adaptive_span_jax.config import Config, differences
from adaptive_span_jax.display import counted, size
from adaptive_span_jax.errors import UserError

# Fields that may change between the parts of a run. All others decide what the checkpoint's arrays are or mean.
_FREE = (
    "config.checkpoint.",
    "config.data.archive:",
    "config.data.directory:",
    "config.evaluate.",
    "config.generate",
    "config.log.",
    "config.mesh.",
    "config.model.attention:",
    "config.model.dropout:",
    "config.model.remat:",
    "config.span.penalty:",
    "config.train.batch_split:",
    "config.train.clip:",
    "config.train.cooldown_start:",
    "config.train.learning_rate:",
    "config.train.max_bad_steps:",
    "config.train.steps:",
    "config.train.warmup_steps:",
)

_SHARE = "use a directory on a file system that all hosts share"


def make_workdir(workdir: Path) -> None:
    """Creates the directory and proves that it can be written, and that all hosts see it."""
    hosts.on_first("workdir", lambda: _prove_writable(workdir))
    if not storage.in_bucket(workdir) and not workdir.is_dir():
        raise UserError(f"--workdir={workdir}, which process 0 has made, is not here: {_SHARE}")


@contextlib.contextmanager
def only_user(workdir: Path) -> Iterator[None]:
    """Keeps other runs out for as long as this process lives; on several hosts its first process does it for all."""
    if not hosts.is_first():
        yield
        return
    if storage.in_bucket(workdir):
        with lock.tag(workdir / ".lock") as before:
            if before:
                display.say(
                    f"warning: {before} has used {workdir} and not said that it ended; see that it does not run any "
                    "more, because a bucket has no locks"
                )
            yield
        return
    try:
        with lock.hold(workdir / ".lock", wait=False) as alone:
            if not alone:
                display.say(f"warning: {workdir} is on a file system without locks; see that no other run uses it")
            yield
    except lock.Held as holder:
        raise UserError(
            f"--workdir={workdir} is in use by {holder}; wait for it, stop it, or name another directory with --workdir"
        ) from None


def check_space(workdir: Path, checkpoint_bytes: int, keep: int) -> None:
    """Refuses to start where the checkpoints to come will not fit."""
    folder = workdir / "checkpoints"
    there = len(sealed.sealed_steps(folder))
    # The newest few, the best, and the one being written.
    more, free = max(keep + 2 - there, 1), storage.free_bytes(workdir)
    if more * checkpoint_bytes > free:
        aside = sealed.bytes_in(folder / sealed.DAMAGED)
        raise UserError(
            f"--workdir={workdir} has {size(free)} free, but "
            f"{counted(more, 'more checkpoint' if there else 'checkpoint')} of {size(checkpoint_bytes)} would take "
            f"{size(more * checkpoint_bytes)}; make room, "
            + (f"delete the {size(aside)} that were set aside in {folder / sealed.DAMAGED}, " if aside else "")
            + f"name another --workdir, or keep fewer (config.checkpoint.keep is {keep})"
        )


def write_config(workdir: Path, config: Config) -> None:
    """Writes `config.json`, whole or not at all."""
    storage.write_text(workdir / "config.json", config.to_json() + "\n")


def check_same_run(workdir: Path, saved: Saved, config: Config, fingerprint: str) -> list[str]:
    """Refuses a checkpoint of another model or text; answers the harmless differences, one line each."""
    changed = differences(saved.config, strict_json.loads(config.to_json()))
    refused = [line for line in changed if not line.startswith(_FREE)]
    if refused:
        raise UserError(
            f"--workdir={workdir} has a checkpoint (step {saved.step:,}) of a different run:\n  "
            + "\n  ".join(refused)
            + "\nGo back to these values, or start a new run with another --workdir"
        )
    if saved.fingerprint != fingerprint:
        raise UserError(
            f"--workdir={workdir} has a checkpoint (step {saved.step:,}) trained on other text: its fingerprint was "
            f"{saved.fingerprint}, that of the data now is {fingerprint}. Restore the text, or start a new run with "
            "another --workdir"
        )
    return changed


def _prove_writable(workdir: Path) -> None:
    try:
        storage.make_folder(workdir)
        probe = workdir / f".writable.{os.getpid()}"
        try:
            probe.write_bytes(b"x")
        finally:
            probe.unlink(missing_ok=True)  # on a full disk an empty file is there
    except Exception as error:
        if not isinstance(error, OSError) and not storage.is_failure(error):
            raise
        reason = getattr(error, "strerror", None) or str(error).strip() or repr(error)
        raise UserError(
            f"--workdir={workdir} cannot be written ({reason}); name another directory with --workdir"
        ) from error
