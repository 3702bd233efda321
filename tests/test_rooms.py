"""Each third-party library is used in one place; import-linter's contract in pyproject.toml orders the sub-packages."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "adaptive_span_jax"

ALLOWED = {
    "flax": {"model/span.py", "model/layers.py", "model/transformer.py"},
    "orbax": {"checkpoint/manager.py"},
    "absl": {"cli.py"},
    "ml_collections": {"cli.py"},
    "tensorboardX": {"training/metrics.py"},
    "matplotlib": {
        f"report/figures/{name}.py"
        for name in ("drawing", "spans", "training", "attention", "passage", "cost", "sweep")
    },
    "rich": {"runtime/terminal.py", "data/tfds/source.py", "data/tfds/builder.py"},
    "tensorflow_datasets": {f"data/tfds/{name}.py" for name in ("builder", "enwik8", "text8", "prepared")},
    "jax.experimental": {
        "runtime/hosts.py",
        "commands/doctor.py",
        "planning/topology.py",
        "model/linear.py",
        *(
            f"model/attention/fused/{name}.py"
            for name in ("tiles", "program", "layout", "forward", "backward", "backward_arrays", "persistent_kernels")
        ),
    },
    "jax.distributed": {"runtime/hosts.py"},
    "etils": {"runtime/storage.py"},
    "fsspec": {"runtime/storage.py"},
    "gcsfs": set(),
    "tensorflow": set(),
    "torch": {"interop/published_checkpoint.py"},
    "constriction": {"inference/codec.py"},
}

# Besides config and data, which import-linter watches: these are imported before JAX is, or must not need it.
WITHOUT_JAX = {
    "errors.py",
    "cli.py",
    "flag_errors.py",
    *(f"runtime/{name}.py" for name in ("command_line", "locking", "storage", "strict_json", "signals", "terminal")),
    *(f"checkpoint/{name}.py" for name in ("policy", "retention", "metadata", "sealing")),
    *(f"commands/{name}.py" for name in ("modes", "verify")),
}


def imports_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return set()


def imports(path: Path) -> set[str]:
    return {name for node in ast.walk(ast.parse(path.read_text())) for name in imports_of(node)}


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


def test_some_files_need_no_jax():
    for name in WITHOUT_JAX:
        tree = ast.parse((PACKAGE / name).read_text())
        top = {each for node in tree.body for each in imports_of(node)}
        assert not {each for each in top if each.split(".")[0] == "jax"}, name
