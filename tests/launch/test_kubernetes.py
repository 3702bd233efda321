"""The Kubernetes manifests that launch/kubernetes.sh writes, validated by the published schemas."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.launch_stand_ins import ODD, StandIns

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: pip install -r requirements-dev.txt"
)

ROOT = Path(__file__).parents[2]
MACHINES = {
    "tpu": ["--machine=tpu", "--accelerator=tpu-v5-lite-podslice", "--topology=4x4", "--hosts=4", "--chips=4"],
    "gpu": ["--machine=gpu", "--hosts=2", "--chips=8"],
}
MAIN = ["--config=configs/enwik8_large.py", ODD]

# What JobSet v1alpha2 knows of its own, and of which type; its jobs' templates are Kubernetes' own.
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": dict, "annotations": dict},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": str,
            "rules": [
                {
                    "name": str,
                    "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
                    "onJobFailureReasons": [
                        {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"}
                        | {"PodFailurePolicy"}
                    ],
                    "onJobFailureMessagePatterns": [str],
                    "targetReplicatedJobs": [str],
                }
            ],
        },
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
        "replicatedJobs": [{"name": str, "replicas": int, "groupName": str, "template": dict}],
    },
}


def check(value: Any, allowed: Any, path: str = "") -> None:
    """Refuses every field that `allowed` does not have and every value of another type."""
    if isinstance(allowed, dict):
        assert isinstance(value, dict), path
        for name, inner in value.items():
            assert name in allowed, f"{path}.{name}"
            check(inner, allowed[name], f"{path}.{name}")
    elif isinstance(allowed, list):
        assert isinstance(value, list), path
        for inner in value:
            check(inner, allowed[0], path)
    elif isinstance(allowed, set):
        assert value in allowed, f"{path}: {value}"
    else:
        assert type(value) is allowed, f"{path}: {value!r}"


def validate(jobset: dict) -> None:
    """Strictly: the JobSet by its own table, each of its jobs by Kubernetes' published schema."""
    check(jobset, JOBSET)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    for job in jobset["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(whole, "1.33", strict=True)


def filled_in(directory: Path, machine: str) -> dict:
    """The manifest that kubectl is given."""
    stand_ins = StandIns(directory)
    arguments = ["start", "--name=span", "--image=registry/adaptive_span_jax:1", *MACHINES[machine]]
    shown = stand_ins.run("kubernetes.sh", *arguments, "--dry-run", "--", *MAIN)
    assert not stand_ins.calls()
    done = stand_ins.run("kubernetes.sh", *arguments, "--", *MAIN)
    assert done.returncode == 0, done.stderr
    ((program, *words, text),) = stand_ins.calls()
    assert (program, words) == ("kubectl", ["apply", "--filename=-"])
    assert shown.stdout.partition("\n")[2] == text
    return yaml.safe_load(text)


def pod(jobset: dict) -> dict:
    """What one host of the JobSet runs."""
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("machine", MACHINES)
def test_manifest_is_valid_and_says_what_was_asked_for(tmp_path, machine):
    jobset = filled_in(tmp_path, machine)
    validate(jobset)
    assert not re.search("@[A-Z]+@", yaml.dump(jobset))
    hosts, chips = (int(word.partition("=")[2]) for word in MACHINES[machine][-2:])
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (hosts, hosts, "Indexed")
    (container,) = pod(jobset)["containers"]
    # Kubernetes reads $$( as $(, and $( as the start of a variable.
    given = [word.replace("$$(", "$(") for word in container["args"]]
    assert given == [f"--expect_devices={hosts * chips}", *MAIN]
    resource = {"tpu": "google.com/tpu", "gpu": "nvidia.com/gpu"}[machine]
    assert container["resources"]["limits"] == {resource: chips}


def test_gpu_hosts_find_each_other(tmp_path):
    (container,) = pod(filled_in(tmp_path, "gpu"))["containers"]
    # <jobset>-<job>-<number of the job>-<number of the pod>.<jobset>
    assert "--coordinator=span-workers-0-0.span:8476" in container["command"]
    assert {"--num_processes=2", "--process_id=$(PROCESS_ID)"} <= set(container["command"])
    assert [variable["name"] for variable in container["env"]] == ["PROCESS_ID"]


def broken(jobset: dict) -> list[dict]:
    """Manifests with one mistake each."""
    copies = [copy.deepcopy(jobset) for _ in range(6)]
    copies[0]["spec"]["failurePolicy"]["maxRestart"] = 3
    copies[1]["spec"]["failurePolicy"]["maxRestarts"] = "3"
    copies[2]["spec"]["failurePolicy"]["rules"][0]["action"] = "GiveUp"
    pod(copies[3])["restartPolicies"] = "Never"
    pod(copies[4])["containers"][0]["args"] = "--config"
    pod(copies[5])["containers"][0]["limits"] = {}
    return copies


def test_the_check_finds_mistakes(tmp_path):
    for mistake in broken(filled_in(tmp_path, "gpu")):
        with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
            validate(mistake)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("logs", ["logs", "--follow", "--selector=jobset.sigs.k8s.io/jobset-name=span,"]),
        ("delete", ["delete", "jobset", "span"]),
    ],
)
def test_other_commands(tmp_path, command, expected):
    stand_ins = StandIns(tmp_path)
    assert stand_ins.run("kubernetes.sh", command, "--name=span").returncode == 0
    ((program, *words),) = stand_ins.calls()
    assert program == "kubectl"
    assert len(words) == len(expected)
    assert all(word.startswith(start) for word, start in zip(words, expected, strict=True))


def test_image_is_built_from_files_that_exist():
    lines = [line.split() for line in (ROOT / "launch/kubernetes/Dockerfile").read_text().splitlines()]
    steps = [line for line in lines if line and line[0] != "#"]
    assert [line[0] for line in steps] == ["FROM", "ARG", "WORKDIR", "COPY", "RUN", "COPY", "ENTRYPOINT"]
    for name in ("requirements-tpu.txt", "requirements-gpu.txt", "requirements-gcs.txt"):
        assert (ROOT / name).is_file()
    _, *entry = steps[-1]
    assert (ROOT / json.loads(" ".join(entry))[1]).is_file()
