"""A full disk: a file system with space for one checkpoint but not for two."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.support.kills import BETWEEN_SAVES, FIELDS, ROOT

NEW_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.slow
# A checkpoint has arrays of 90 KB and takes 170 KB; the logs take 40. The second is not begun, or breaks off.
@pytest.mark.parametrize(("size", "on_failure"), [("300k", "stop"), ("350k", "continue")])
def test_a_full_disk_costs_no_checkpoint(tmp_path, size, on_failure):
    if subprocess.run([*NEW_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small file system")
    fields = FIELDS | {"train.steps": 60, "log.every_steps": 10}
    fields |= {"checkpoint.keep": 1, "checkpoint.on_failure": on_failure}
    disk = tmp_path / "disk"
    disk.mkdir()
    command = shlex.join([sys.executable, "main.py", f"--workdir={disk}/run"])
    changes = " ".join(f"--config.{name}={value}" for name, value in fields.items())
    script = f"""
        mount -t tmpfs -o size={size} tmpfs {disk}
        {command} {changes}; echo "trained: $?"
        {command} --mode=verify; echo "verified: $?"
        echo "left:" $(ls {disk}/run/checkpoints)
    """
    found = subprocess.run([*NEW_MOUNTS, "bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in found.stderr
    assert f"step {BETWEEN_SAVES} is saved\n" in found.stdout
    expected = (
        "could not be written to .*/run/checkpoints (No space left on device); the newest checkpoint is step 10. "
    )
    for part in expected.split(".*"):
        assert part in found.stderr
    assert f"trained: 2\nchecking step {BETWEEN_SAVES} …" in found.stdout
    assert "verified: 0\n" in found.stdout
    assert f"left: {BETWEEN_SAVES}\n" in found.stdout
    assert ("step 50/60" in found.stdout) == (on_failure == "continue")
    # Each failure is said once: a warning while training continues, the error where it ends.
    assert found.stdout.count("Training continues") == (4 if on_failure == "continue" else 0)
    said = re.findall(r"the checkpoint of step (\d+) could not be written", found.stdout + found.stderr)
    assert said == (["20", "30", "40", "50", "60"] if on_failure == "continue" else ["20"])
