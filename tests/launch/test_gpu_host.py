"""launch/gpu_host.sh: one host, all its GPUs."""

from tests.support.launch_stand_ins import ODD, commands


def test_gpu_host_starts_on_all_its_gpus(stand_ins):
    stand_ins.answer("nvidia-smi", "GPU 0: A100")
    found = stand_ins.run("gpu_host.sh", "--dry-run", "--config=configs/enwik8.py", ODD)
    assert found.returncode == 0, found.stderr
    assert commands(found.stdout) == [
        ["exec", "python", "main.py", "--expect_devices=1", "--config=configs/enwik8.py", ODD]
    ]
    assert "requirements-gpu.txt" in found.stdout


def test_gpu_host_without_gpus_says_so(stand_ins):
    stand_ins.answer("nvidia-smi", 0)
    assert "lists no GPU" in stand_ins.run("gpu_host.sh", "--config=configs/enwik8.py").stderr
