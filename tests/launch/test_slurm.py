"""launch/slurm.sbatch: submits itself, runs on all hosts, requeues until the run is complete."""

import shutil
from pathlib import Path

from tests.support.launch_stand_ins import LAUNCH, ODD, ROOT, commands

SLURM = ["--nodes=2", "--gpus=4", "--", "--config=configs/enwik8.py"]


def test_slurm_submits_itself(stand_ins):
    options = ["--time=1:00:00", "--partition=a b", "--dry-run", *SLURM, ODD]
    assert commands(stand_ins.run("slurm.sbatch", *options, SLURM_JOB_ID="").stdout) == [
        [
            *["sbatch", "--nodes=2", "--gpus-per-node=4", "--time=1:00:00", "--partition=a b"],
            *["launch/slurm.sbatch", *SLURM, ODD],
        ]
    ]
    assert not stand_ins.calls()


def test_slurm_runs_on_all_hosts_and_queues_again_until_complete(stand_ins):
    workdir = stand_ins.directory / "run"
    workdir.mkdir()
    # Slurm runs a copy, from elsewhere.
    script = Path(shutil.copy(LAUNCH / "slurm.sbatch", stand_ins.directory / "slurm_script"))
    inside = {"SLURM_JOB_ID": "11", "SLURM_SUBMIT_DIR": str(ROOT)}
    assert stand_ins.run(script, *SLURM, f"--workdir={workdir}", **inside).returncode == 0
    step = ["srun", ".venv/bin/python", "main.py", "--expect_devices=8", "--config=configs/enwik8.py"]
    assert stand_ins.calls() == [[*step, f"--workdir={workdir}"], ["scontrol", "requeue", "11"]]
    (workdir / "result.json").write_text("{}")
    assert stand_ins.run(script, *SLURM, f"--workdir={workdir}", **inside).returncode == 0
    assert [call[0] for call in stand_ins.calls()] == ["srun", "scontrol", "srun"]


def test_slurm_does_not_queue_again_after_an_error(stand_ins):
    stand_ins.answer("srun", 2)
    inside = {"SLURM_JOB_ID": "11", "SLURM_SUBMIT_DIR": str(ROOT)}
    assert stand_ins.run("slurm.sbatch", *SLURM, f"--workdir={stand_ins.directory}", **inside).returncode == 2
    assert [call[0] for call in stand_ins.calls()] == ["srun"]
