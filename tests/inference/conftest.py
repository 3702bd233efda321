"""A briefly trained run, for all tests of this folder."""

import pytest

import adaptive_span_jax
from adaptive_span_jax.commands import compress, decompress, generate, train
from adaptive_span_jax.report import report
from tests.conftest import tiny_config, use_devices

TEXT = b"import sys\n\n\ndef main():\n    return sys.argv\n" * 7
# Plain attention is compiled sooner, and what a decoder computes does not depend on it.
MODEL = {"layers": 2, "attention": "plain"}
CONFIG = tiny_config(train={"steps": 60}, evaluate={"every_steps": 30}, span={"limit": 100}, model=MODEL)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run that has trained for a moment."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        patch.setattr(report, "write_report", lambda *_: None)
        assert train.train(CONFIG, directory, "command") == 0
    return directory


@pytest.fixture(scope="session")
def model(run):
    return adaptive_span_jax.load(run)


@pytest.fixture
def loaded(model, monkeypatch):
    """Commands find the model already in memory, with what is compiled of it."""
    for command in (generate, compress, decompress):
        monkeypatch.setattr(command, "load", lambda *_: model)
    return model
