"""The doctor detects and names each problem."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from adaptive_span_jax.commands import doctor
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import sharding
from tests.conftest import tiny_config


def test_a_sound_machine_passes(tmp_path, capsys):
    config = tiny_config(train={"batch_size": 8}, model={"attention": "plain", "layers": 1})  # which compile quickly
    assert doctor.doctor(config, tmp_path / "run", expected=8) == 0
    lines = capsys.readouterr().out.splitlines()
    passed = [line.split()[1].rstrip(":") for line in lines if line.startswith("ok")]
    assert passed == ["versions", "devices", "computation", "workdir", "data", "training"]
    assert "jax 0." in lines[0]
    assert "8 × cpu (cpu) in 1 process" in lines[1]


def test_every_failure_is_reported_not_only_the_first(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    config = tiny_config(train={"batch_size": 3}, data={"source": "files", "path": "/no/such/text", "max_bytes": 0})
    assert doctor.doctor(config, tmp_path / "file" / "run", expected=4) == 2
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    for line, named in zip(
        failed, ("--expect_devices=4", "--workdir=", "/no/such/text", "config.train.batch_size is 3"), strict=True
    ):
        assert named in line


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(tmp_path, monkeypatch, fails):
    for variable, name in (("HOME", "home"), ("XDG_CACHE_HOME", "cache"), ("TMPDIR", "tmp")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = tree(tmp_path)
    found = subprocess.run(
        [
            *(sys.executable, "main.py", "--mode=doctor", f"--workdir={tmp_path / 'runs' / 'my' / 'run'}"),
            *("--config.model.layers=1", "--config.model.width=32", "--config.train.batch_size=4"),
            *("--config.model.attention=plain", "--config.span.limit=64", "--config.train.segment=32"),
            # A million checkpoints do not fit, and enwik8 is not here.
            *(("--config.checkpoint.keep=1000000000", "--config.data.source=enwik8") if fails else ()),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == (2 if fails else 0), found.stdout + found.stderr
    assert ("FAILED  workdir" in found.stdout) == fails
    assert ("enwik8 is not prepared yet" in found.stdout) == fails
    assert tree(tmp_path) == before


def test_a_workdir_that_exists_stays(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    before = tree(tmp_path)
    doctor.check_workdir(tiny_config(), tmp_path / "run")
    assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    doctor.check_workdir(tiny_config(), tmp_path / "empty")
    assert (tmp_path / "empty").is_dir()


def test_a_workdir_on_a_full_disk_keeps_no_probe(tmp_path, monkeypatch):
    def full(path, content):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left"):
        doctor.check_workdir(tiny_config(), tmp_path / "a" / "run")
    assert tree(tmp_path) == []


def test_a_wrong_archive_is_found_without_preparing(tmp_path):
    (tmp_path / "enwik8").write_bytes(b"another text")
    fields = {"source": "enwik8", "archive": str(tmp_path / "enwik8"), "directory": str(tmp_path / "d"), "max_bytes": 0}
    with pytest.raises(UserError, match="got 12 bytes with SHA-256"):
        doctor.check_data(tiny_config(data=fields))
    assert tree(tmp_path) == ["enwik8"]


@pytest.fixture
def a_machine(tmp_path, monkeypatch):
    """A machine whose device files are ours to make, and on which JAX may choose what it runs on."""
    monkeypatch.setattr(doctor, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(doctor, "_DEVICE_FILES", tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (tmp_path / "pci" / "00:04.0").mkdir(parents=True)
    return tmp_path


def make_pci(machine, number: str) -> None:
    for name, value in (("vendor", "0x1ae0"), ("device", number)):
        (machine / "pci" / "00:04.0" / name).write_text(f"{value}\n")


def test_an_accelerator_that_jax_does_not_see_is_named(a_machine, monkeypatch):
    doctor.check_devices(0)
    (a_machine / "nvidia0").touch()
    with pytest.raises(UserError, match=r"has a NVIDIA GPU, but JAX found only 8 × cpu.*pip install \"\.\[gpu\]\""):
        doctor.check_devices(0)
    (a_machine / "nvidia0").unlink()
    make_pci(a_machine, "0x0063")
    with pytest.raises(UserError, match=r"has a TPU.*pip install \"\.\[tpu\]\""):
        doctor.check_devices(0)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    doctor.check_devices(0)


def test_a_network_card_of_the_same_maker_is_no_tpu(a_machine):
    make_pci(a_machine, "0x0042")
    doctor.check_devices(0)


def test_devices_that_do_not_add_up_are_refused():
    mesh = sharding.make_mesh()
    assert "compiled" in doctor.check_sum(mesh)

    def broken_last_device(shares):
        return jax.numpy.where(jax.numpy.arange(shares.size) == mesh.size - 1, 0, shares).sum()

    with pytest.raises(UserError, match=r"8 devices summed a 1 each and got 7\.0; restart the machine"):
        doctor.check_sum(mesh, broken_last_device)


def test_hosts_that_differ_are_named(monkeypatch):
    doctor.same_on_all_hosts("text", "abc")
    monkeypatch.setattr(jax, "process_count", lambda: 3)

    def gather(mine):
        return np.stack([mine, mine, mine + difference])

    monkeypatch.setattr(doctor.multihost_utils, "process_allgather", gather)
    difference = 0
    doctor.same_on_all_hosts("text", "abc")
    difference = 1
    with pytest.raises(UserError, match="text of processes 2 and of process 0 differ"):
        doctor.same_on_all_hosts("text", "abc")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "_PACKAGES", ("jax", "no-such-package"))
    with pytest.raises(UserError, match="no-such-package not installed"):
        doctor.check_versions()


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [("model", "layers", 4_000_000_000), ("model", "width", 40_000_000), ("model", "feedforward", 10**19)],
)
def test_sizes_that_must_be_typos_are_named(tmp_path, capsys, section, field, value):
    config = tiny_config(**{section: {field: value}}, train={"batch_size": 8})
    assert doctor.doctor(config, tmp_path / "run", expected=8) == 2
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert [line.split(":")[0] for line in failed] == ["FAILED  workdir", "FAILED  training step"]
    for line in failed:
        assert "would take at least" in line
        assert f"config.{section}.{field} is {value:,}" in line
        assert "GiB" not in line
