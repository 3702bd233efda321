"""One process at a time, and no lock outlives its process."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import locking

ROOT = Path(__file__).parents[2]


def run_holder(path: Path) -> subprocess.Popen:
    """A process that holds the lock until it is killed."""
    code = (
        "import pathlib, sys, time; from adaptive_span_jax.runtime import locking as lock\n"
        "with lock.hold(pathlib.Path(sys.argv[1]), wait=False): print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    return holder


def test_the_second_run_is_refused_and_a_dead_one_is_no_hindrance(tmp_path):
    holder = run_holder(tmp_path / ".lock")
    try:
        expected = rf"is in use by process {holder.pid} on .*another --workdir"
        with pytest.raises(UserError, match=expected), workdir.only_user(tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with workdir.only_user(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"), workdir.only_user(tmp_path):
            pass
    with workdir.only_user(tmp_path):
        pass


def test_where_there_are_no_locks_the_run_continues_with_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with workdir.only_user(tmp_path):
        pass
    assert "file system without locks" in capsys.readouterr().out
    with locking.hold(tmp_path / "other", wait=True) as alone:
        assert not alone


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, sys; from adaptive_span_jax.runtime.signals import Interrupt\n"
        "with Interrupt() as interrupt:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(interrupt.poll(), interrupt.signal.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "True SIGTERM\n"
    assert found.returncode == -signal.SIGINT
