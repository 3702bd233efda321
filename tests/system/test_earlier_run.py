"""A run written by the code before the package was split into rooms still resumes, evaluates and reports.

`tests/golden/run_before_rooms` has 20 steps of it, with config fields under their former names; the numbers below are
what that code found when it resumed the run to step 40.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from adaptive_span_jax.checkpoint import sealing
from tests.support.program import ROOT

RUN = ROOT / "tests" / "golden" / "run_before_rooms"
PARAMS_SHA256 = "4660bc993ead47e9a1ee4c4729f6c8419aefe41cab5fe1b0ba85f6281894ce56"
DEV_BITS_20, DEV_BITS_40, TEST_BITS_40 = 5.392980459530243, 5.111653580882131, 5.390025565851656


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def main(run: Path, *flags: str) -> str:
    command = [sys.executable, "main.py", f"--workdir={run}", *flags]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout


def params_hash(folder: Path) -> str:
    shapes = ocp.checkpointables_metadata(str(folder)).metadata["params"]
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
    params = ocp.load_checkpointables(str(folder), {"params": abstract})["params"]
    digest = hashlib.sha256()
    for path, leaf in sorted(jax.tree_util.tree_leaves_with_path(params), key=lambda each: str(each[0])):
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def test_its_arrays_are_unchanged():
    assert sealing.find_damage(RUN / "checkpoints" / "20") is None
    assert params_hash(RUN / "checkpoints" / "20") == PARAMS_SHA256


def test_it_resumes_evaluates_and_reports(run):
    printed = main(run, "--config.train.steps=40")
    assert "from step 20" in printed
    result = json.loads((run / "result.json").read_text())
    # Not to the last bit: other processors round differently.
    assert result["dev_bits"] == pytest.approx(DEV_BITS_40, abs=1e-4)
    assert result["test_bits"] == pytest.approx(TEST_BITS_40, abs=1e-4)
    assert (run / "report" / "index.html").exists()
    before = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    after = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert after[: len(before)] == before


def test_it_is_evaluated(run):
    main(run, "--mode=evaluate")
    found = json.loads((run / "evaluation.json").read_text())
    assert found["dev_exact"]["bits"] == pytest.approx(DEV_BITS_20, abs=1e-5)
