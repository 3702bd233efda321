"""Several machines as one: how their processes find each other, agree, and part.

Every process runs the same program on the same config, holds the whole text, and works on the streams of its own
devices. What is written and printed comes from process 0 alone. Whatever decides which computation comes next must be
the same for all, or they wait for each other for ever: signals are therefore agreed on (`ProcessMax`), and what a file
system says is asked of process 0 (`broadcast_from_process_zero`).
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

# A host that has not been heard of for this long is taken for dead, and all others stop. Heartbeats come from a thread
# of their own: neither compiling nor a slow disk delays them.
DEAD_AFTER_SECONDS = 60

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes, if there are any; call it before anything else touches a device.

    Without arguments, whether there are any is read from the environment that Cloud TPU VMs, Slurm and Open MPI set. On
    a single machine nothing is asked of any network.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        if not is_multihost_environment(os.environ):
            return
    elif None in given:
        raise UserError("--coordinator=HOST:PORT, --num_processes=N and --process_id=I must be given together")
    elif num_processes == 1:
        return
    # Signals are ours: JAX would catch SIGTERM otherwise.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *given,
            cluster_detection_method=None if coordinator is None else "deactivate",
            heartbeat_timeout_seconds=DEAD_AFTER_SECONDS,
            shutdown_timeout_seconds=DEAD_AFTER_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes did not find each other ({error}); see docs/distributed.md") from error
    if _alone_on_machine(os.environ):
        # Under Slurm and Open MPI JAX takes it that each process is to have one GPU.
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")


def is_multihost_environment(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several, as far as the environment tells; `import jax` must have come before."""
    if all(name in environment for name in _SLURM):
        return int(environment["SLURM_NTASKS"]) > 1
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        if "OMPI_MCA_orte_hnp_uri" not in environment:
            raise UserError(
                "this version of Open MPI does not say where process 0 is; add --coordinator=HOST:PORT, "
                "--num_processes=$OMPI_COMM_WORLD_SIZE and --process_id=$OMPI_COMM_WORLD_RANK"
            )
        return True
    # Importing JAX sets the first where there are TPU chips, and the second, which forbids asking Google's metadata
    # server, where there are none.
    on_tpu = "TPU_ML_PLATFORM" in environment and environment.get("JAX_PLATFORMS") != "cpu"
    named = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if on_tpu and named:
        return "," in named or int(environment.get("MEGASCALE_NUM_SLICES", 1)) > 1
    return on_tpu and "TPU_SKIP_MDS_QUERY" not in environment


def is_process_zero() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def all_gather(tree: Any) -> Any:
    """The tree's arrays whole, in this process's own memory; all processes must call it."""
    return jax.device_get(tree) if jax.process_count() == 1 else multihost_utils.process_allgather(tree, tiled=True)


def on_process_zero(place: str, function: Callable[[], None]) -> None:
    """Calls a function on process 0 only; the others wait for it."""
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
        self._asked: jax.Array | None = None
        if jax.process_count() > 1:
            # Connections between CPU devices are made when first used, within 30 s, so all processes should be here.
            multihost_utils.sync_global_devices("agreement")
            self._asked = jax.block_until_ready(self._ask(0))

    def __call__(self, number: int) -> int:
        """What was agreed on, given what this process says now."""
        if self._asked is None:
            return number
        before, self._asked = self._asked, self._ask(number)
        return int(jax.device_get(before))

    def _ask(self, number: int) -> jax.Array:
        devices = list(self._each.addressable_devices_indices_map((self._each.mesh.size,)))
        mine = jax.device_put([np.full(1, number, np.int32)] * len(devices), devices)
        return self._largest(jax.make_array_from_single_device_arrays((self._each.mesh.size,), self._each, mine))


@contextlib.contextmanager
def multihost_errors() -> Iterator[None]:
    """Within it only process 0 prints, and an error in one process ends all of them."""
    if jax.process_count() == 1:
        yield
        return
    terminal.console.quiet = not is_process_zero()
    try:
        yield
    except UserError as error:
        _leave(str(error))
    except KeyboardInterrupt:
        _leave("stopped by Ctrl-C while not training; nothing to save")
    except OSError as error:
        _leave(f"{error}; what was reported as saved is safe")
    except Exception as error:
        if _in_computation(error):
            _leave(
                "a computation that all processes share has failed, most likely because another process has ended; its "
                "own output says why. Start the same command on all hosts again: it resumes from the newest "
                f"checkpoint.\n({str(error).splitlines()[0]})"
            )
        traceback.print_exc()
        _leave("unexpected error (traceback above); what was reported as saved is safe")


def _leave(reason: str) -> NoReturn:
    """Ends this process at once: an orderly end would wait for the other processes, which wait for this one.

    They stop too: process 0's end is seen at once, that of another within DEAD_AFTER_SECONDS.
    """
    print(f"error in process {jax.process_index()} on {socket.gethostname()}: {reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _in_computation(error: Exception) -> bool:
    """Whether a device reported it; where it computes at once, JAX raises a ValueError with the same kind of text."""
    return isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]{2,}: ", str(error)) is not None


def _alone_on_machine(environment: Mapping[str, str]) -> bool:
    """Whether Slurm or Open MPI has started one process on each machine."""
    if "SLURM_STEP_NUM_TASKS" in environment:
        return environment["SLURM_STEP_NUM_TASKS"] == environment.get("SLURM_STEP_NUM_NODES")
    return environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
