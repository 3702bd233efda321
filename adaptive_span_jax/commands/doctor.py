"""`--mode=doctor`: checks a machine before training starts.

Training runs the quick checks, `quick` and `same_on_all_hosts`. `--mode=doctor` runs all checks and continues after a
failure, so that one run reports every problem. It leaves no files: no folder, no prepared data, no compiled program.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.config import Config
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.segments import Streams
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.planning import fit
from adaptive_span_jax.runtime import hosts, sharding, storage, terminal
from adaptive_span_jax.runtime.command_line import install_command

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_PLUGINS = ("libtpu", "jax-cuda12-plugin")

# How Linux lists accelerators, whether or not JAX can use them. TPUs are PCI devices of Google with these ids.
_TPU_NUMBERS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
_PCI = Path("/sys/bus/pci/devices")
_DEVICE_FILES = Path("/dev")


def quick(expected: int) -> None:
    """The checks at every start: the expected devices are present and can compute a sum together."""
    check_devices(expected)
    same_on_all_hosts("Python packages", check_versions())
    check_sum(sharding.make_mesh())


def doctor(config: Config, directory: Path, expected: int) -> int:
    """Runs all checks and prints a line for each; returns exit code 0 if all passed, else 2."""
    # A check should not fill the user's cache, and reading from it would falsify the compile time.
    jax.config.update("jax_enable_compilation_cache", False)
    checks: dict[str, Callable[[], str]] = {
        "versions": check_versions,
        "devices": lambda: check_devices(expected),
        "computation": lambda: check_sum(sharding.make_mesh()),
        "workdir": lambda: check_workdir(config, directory),
        "data": lambda: check_data(config),
        "training step": lambda: check_step(config, sharding.make_mesh(fsdp=config.mesh.fsdp)),
    }
    failures = 0
    for name, check in checks.items():
        try:
            terminal.say(f"ok      {name}: {check()}")
        except UserError as error:
            failures += 1
            terminal.say(f"FAILED  {name}: {error}")
    if failures:
        terminal.say(f"{failures} of {len(checks)} checks failed.")
    return 2 if failures else 0


def check_devices(expected: int) -> str:
    """Raises if JAX uses the CPU although there is an accelerator, or if the device count is unexpected (0: any)."""
    devices = jax.devices()
    kind = f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform})"
    described = f"{kind} in {terminal.counted(jax.process_count(), 'process')}"
    unused = _accelerator()
    if unused and jax.default_backend() == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
        extra = {"TPU": "tpu", "NVIDIA GPU": "gpu"}[unused]
        raise UserError(
            f"this machine has a {unused}, but JAX found only {described}: run {install_command(extra)}, and check "
            "that no other program uses the device; set JAX_PLATFORMS=cpu to use the CPU"
        )
    if expected and len(devices) != expected:
        raise UserError(
            f"--expect_devices={expected}, but JAX found {described}; check that no host is missing and that no other "
            "program uses a device"
        )
    return described


def check_versions() -> str:
    """The versions of Python and of the main packages, as one line."""
    versions = {name: _version(name) for name in (*_PACKAGES, *_PLUGINS)}
    missing = [name for name in _PACKAGES if not versions[name]]
    if missing:
        raise UserError(f"{', '.join(missing)} not installed: run {install_command()}")
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"Python {platform.python_version()}, {listed}"


def check_sum(mesh: Mesh, add: Callable[[jax.Array], jax.Array] = jnp.sum) -> str:
    """Sums a 1 from every device, so that a broken device or network fails here and not an hour later.

    `add` is the computation; tests pass a wrong one.
    """
    started = time.perf_counter()
    shape = (mesh.size,)
    ones = jax.make_array_from_callback(
        shape, sharding.by_stream(mesh, mesh.size), lambda index: np.ones(shape, np.float32)[index]
    )
    total = float(jax.jit(add, out_shardings=sharding.replicated(mesh))(ones))
    if total != mesh.size:
        raise UserError(f"{terminal.counted(mesh.size, 'device')} summed a 1 each and got {total}; restart the machine")
    return f"a sum over all devices compiled and ran in {time.perf_counter() - started:.1f} s"


def check_workdir(config: Config, directory: Path) -> str:
    """Checks that the workdir is writable and has enough space; removes the folders that it creates for this."""
    missing = []
    if hosts.is_process_zero() and not storage.in_bucket(directory):
        missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        workdir.make_workdir(directory)
        needed = sharding.total_bytes(fit.abstract(config, sharding.make_mesh(fsdp=config.mesh.fsdp))[0])
        workdir.check_space(directory, needed, config.checkpoint.keep)
        room = "in a bucket" if storage.in_bucket(directory) else f"{terminal.size(storage.free_bytes(directory))} free"
    finally:
        hosts.on_process_zero("workdir checked", lambda: None)  # the folders are no longer needed
        for folder in missing:
            with contextlib.suppress(OSError):  # another program may have put something there, or removed it
                folder.rmdir()
    return f"{directory} is writable, {room}; a checkpoint takes {terminal.size(needed)}"


def check_data(config: Config) -> str:
    """Checks that the text is long enough and the same on every host; downloads and writes nothing."""
    corpus = corpora.load(config.data) if corpora.is_prepared(config.data) else None
    same_on_all_hosts("text", corpus.fingerprint if corpus else "nothing prepared")
    if corpus is None:
        corpora.check_archive(config.data)
        return f"{config.data.source} is not prepared yet; --mode=prepare or training will do it"
    Streams(corpus.train, config.train.batch_size, config.train.segment, config.seed)
    return (
        f"{corpus.name}: {terminal.counted(corpus.train.size, 'token')} to train on, fingerprint {corpus.fingerprint}"
    )


def check_step(config: Config, mesh: Mesh) -> str:
    """Compiles the train step; returns the time it took."""
    sharding.check_streams(mesh, config.train.batch_size, config.train.grad_accum_steps)
    started = time.perf_counter()
    with terminal.waiting("compiling the training step"):
        fit.lower(config, mesh).compile()
    return f"compiled in {terminal.duration(time.perf_counter() - started)}"


def same_on_all_hosts(what: str, value: str) -> None:
    """Raises if a value is not the same on all hosts."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(hashlib.sha256(value.encode()).digest()[:4], np.uint32)
    everyones = np.asarray(multihost_utils.process_allgather(mine)).ravel()
    others = [number for number, theirs in enumerate(everyones) if theirs != everyones[0]]
    if others:
        raise UserError(
            f"{what} of processes {', '.join(map(str, others))} and of process 0 differ; this is process "
            f"{jax.process_index()}, with {value}"
        )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _accelerator() -> str:
    """The kind of accelerator that Linux lists, or an empty string."""
    if any(_DEVICE_FILES.glob("nvidia[0-9]*")):
        return "NVIDIA GPU"
    for device in _PCI.glob("*"):
        try:
            maker, number = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if maker == "0x1ae0" and number in _TPU_NUMBERS:
            return "TPU"
    return ""
