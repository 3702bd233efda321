"""Which file may import what: data flows one way, and each outside library is known in one place."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "adaptive_span_jax"

ALLOWED = {
    "flax": {"span.py", "layer.py", "model.py"},
    "orbax": {"checkpoint.py"},
    "absl": set(),
    "tensorboardX": {"metrics.py"},
    "matplotlib": {
        f"figures/{name}.py" for name in ("drawing", "spans", "training", "attention", "passage", "cost", "sweep")
    },
    "rich": {"display.py", "datasets/source.py", "datasets/builder.py"},
    "tensorflow_datasets": {"datasets/builder.py", "datasets/enwik8.py", "datasets/text8.py", "datasets/prepared.py"},
    "jax.experimental": {"hosts.py", "doctor.py", "machine.py"},
    "jax.distributed": {"hosts.py"},
    "etils": {"storage.py"},
    "fsspec": {"storage.py"},
    "gcsfs": set(),
    "tensorflow": set(),
    "torch": {"published_checkpoint.py"},
    "constriction": {"compress.py"},
}

# Knows no jax at all: what a text is has nothing to do with devices.
NUMPY_ONLY = {
    "corpus.py",
    "segments.py",
    "text_files.py",
    "entropy.py",
    "config.py",
    "errors.py",
    "command_line.py",
    "flag_errors.py",
    "modes.py",
    "lock.py",
    "save_times.py",
    "retention.py",
    "saved.py",
    "sealed.py",
    "storage.py",
    "strict_json.py",
    "verify.py",
}

# Each of these imports only from those before it.
FLOW = [
    *(
        "errors",
        "strict_json",
        "storage",
        "config",
        "corpus",
        "segments",
        "dropout",
        "memory",
        "sharding",
        "cpu",
        "span",
    ),
    *("attention", "linear", "layer", "model"),
    *("loss", "optimizer", "train_state", "step", "head_reach", "key_value_cache", "finished_model"),
    *("capacity", "score", "sealed"),
    *("saved", "retention", "save_times", "hosts"),
    *("checkpoint", "workdir", "pretrained", "machine", "roofline", "plan", "doctor", "sampling", "trained_model"),
    *("health", "observation", "report_sample", "report", "train", "evaluate", "generate", "compress", "prepare"),
]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("library", ALLOWED)
def test_library_is_known_in_its_place_only(library):
    users = {
        str(path.relative_to(PACKAGE))
        for path in files()
        if any(name == library or name.startswith(f"{library}.") for name in imports(path))
    }
    assert users <= ALLOWED[library]


def test_text_knows_no_jax():
    for path in files():
        if path.name in NUMPY_ONLY or path.parent.name == "datasets":
            assert not {name for name in imports(path) if name.split(".")[0] == "jax"}, path


def test_data_flows_one_way():
    for position, name in enumerate(FLOW):
        later = {f"adaptive_span_jax.{other}" for other in FLOW[position + 1 :]}
        assert not imports(PACKAGE / f"{name}.py") & later, name
