"""Several processes on one or more hosts: connecting, agreeing on decisions, and exiting after an error.

Every process runs the same program with the same config, holds the whole text, and works on the streams of its own
devices. Only process 0 writes logs and prints. All processes must run the same computations in the same order, or they
wait for each other forever. So signals are agreed on (`ProcessMax`), and the state of the file system is read by
process 0 and broadcast (`broadcast_from_process_zero`).
"""

import contextlib
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import terminal

# After this long without a heartbeat, a host is considered dead and all others stop. Heartbeats are sent from a
# separate thread: neither compiling nor a slow disk delays them.
DEAD_AFTER_SECONDS = 60

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Connects to the other processes, if there are any; call this before any device is used.

    Without arguments, other processes are detected from the environment that Cloud TPU VMs, Slurm and Open MPI set. On
    a single machine no network is used.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        if not is_multihost_environment(os.environ):
            return
    elif None in given:
        raise UserError("--coordinator=HOST:PORT, --num_processes=N and --process_id=I must be given together")
    elif num_processes == 1:
        return
    # We handle signals ourselves; JAX would catch SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *given,
            cluster_detection_method=None if coordinator is None else "deactivate",
            heartbeat_timeout_seconds=DEAD_AFTER_SECONDS,
            shutdown_timeout_seconds=DEAD_AFTER_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"could not connect to the other processes ({error}); see docs/distributed.md") from error
    if _alone_on_machine(os.environ):
        # Under Slurm and Open MPI, JAX assumes one GPU per process.
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")


def is_multihost_environment(environment: Mapping[str, str]) -> bool:
    """Whether the environment says that this process is one of several. JAX must have been imported before."""
    if all(name in environment for name in _SLURM):
        return int(environment["SLURM_NTASKS"]) > 1
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        if "OMPI_MCA_orte_hnp_uri" not in environment:
            raise UserError(
                "this version of Open MPI does not provide the address of process 0; add --coordinator=HOST:PORT, "
                "--num_processes=$OMPI_COMM_WORLD_SIZE and --process_id=$OMPI_COMM_WORLD_RANK"
            )
        return True
    # Importing JAX sets TPU_ML_PLATFORM where there are TPU chips, and TPU_SKIP_MDS_QUERY (do not query Google's
    # metadata server) where there are none.
    on_tpu = "TPU_ML_PLATFORM" in environment and environment.get("JAX_PLATFORMS") != "cpu"
    named = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if on_tpu and named:
        return "," in named or int(environment.get("MEGASCALE_NUM_SLICES", 1)) > 1
    return on_tpu and "TPU_SKIP_MDS_QUERY" not in environment


def is_process_zero() -> bool:
    """Whether this is process 0, which writes and prints."""
    return jax.process_index() == 0


def all_gather(tree: Any) -> Any:
    """The tree with complete arrays in host memory; all processes must call this."""
    return jax.device_get(tree) if jax.process_count() == 1 else multihost_utils.process_allgather(tree, tiled=True)


def on_process_zero(place: str, function: Callable[[], None]) -> None:
    """Calls a function on process 0 only; the other processes wait for it."""
    if is_process_zero():
        function()
    multihost_utils.sync_global_devices(place)


def broadcast_from_process_zero(number: int) -> int:
    """Process 0's number, on every process."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))


class ProcessMax:
    """The maximum of one number per process, computed asynchronously, once a step.

    A call returns the maximum of the previous call, which has had a step's time to complete: all processes get the
    same number at the same call. A single process gets its own number at once.
    """

    def __init__(self, mesh: Mesh):
        self._each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(lambda numbers: numbers.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: jax.Array | None = None
        if jax.process_count() > 1:
            # CPU devices connect at first use, with a timeout of 30 s, so wait for all processes here.
            multihost_utils.sync_global_devices("agreement")
            self._pending = jax.block_until_ready(self._start(0))

    def __call__(self, number: int) -> int:
        """The maximum over processes of their previous `number`s."""
        if self._pending is None:
            return number
        previous, self._pending = self._pending, self._start(number)
        return int(jax.device_get(previous))

    def _start(self, number: int) -> jax.Array:
        devices = list(self._each.addressable_devices_indices_map((self._each.mesh.size,)))
        mine = jax.device_put([np.full(1, number, np.int32)] * len(devices), devices)
        return self._largest(jax.make_array_from_single_device_arrays((self._each.mesh.size,), self._each, mine))


@contextlib.contextmanager
def multihost_errors() -> Iterator[None]:
    """A context in which only process 0 prints, and an error in one process ends all of them."""
    if jax.process_count() == 1:
        yield
        return
    terminal.console.quiet = not is_process_zero()
    try:
        yield
    except UserError as error:
        _leave(str(error))
    except KeyboardInterrupt:
        _leave("stopped by Ctrl-C outside training; nothing to save")
    except OSError as error:
        _leave(f"{error}; saved checkpoints are safe")
    except Exception as error:
        if _in_computation(error):
            _leave(
                "a collective computation failed, most likely because another process ended; see the output of that "
                "process. Run the same command on all hosts again to resume from the newest checkpoint.\n"
                f"({str(error).splitlines()[0]})"
            )
        traceback.print_exc()
        _leave("unexpected error (traceback above); saved checkpoints are safe")


def _leave(reason: str) -> NoReturn:
    """Exits at once: a clean exit would wait for the other processes, which wait for this one.

    They stop, too: at once if this is process 0, otherwise within DEAD_AFTER_SECONDS.
    """
    print(f"error in process {jax.process_index()} on {socket.gethostname()}: {reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _in_computation(error: Exception) -> bool:
    """Whether an error comes from a device. Eager computations raise a ValueError with the same kind of message."""
    return isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]{2,}: ", str(error)) is not None


def _alone_on_machine(environment: Mapping[str, str]) -> bool:
    """Whether Slurm or Open MPI started one process per machine."""
    if "SLURM_STEP_NUM_TASKS" in environment:
        return environment["SLURM_STEP_NUM_TASKS"] == environment.get("SLURM_STEP_NUM_NODES")
    return environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
