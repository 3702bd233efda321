"""`config.init_from`: a new run starts from the weights of another."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.commands import train
from adaptive_span_jax.config import Config
from adaptive_span_jax.data import corpus
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.report import report
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training.init_from import load_init_params
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import abstract_state
from tests.conftest import tiny_fields, use_devices

pytestmark = [pytest.mark.usefixtures("one_device", "no_report"), pytest.mark.xdist_group("pretrained")]


def config_of(path, init_from="", **sections) -> Config:
    fields = tiny_fields(data={"source": "files", "path": str(path), "max_bytes": 0}, **sections)
    fields.model.attention = "plain"  # quicker to compile
    fields.init_from = str(init_from)
    return Config.from_dict(fields.to_dict())


def abstract_params(config, vocabulary):
    return abstract_state(config, vocabulary, make_optimizer(config.train), sharding.make_mesh()).params


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A run on a text of the symbols a, b, c, d, in this order."""
    directory = tmp_path_factory.mktemp("first")
    (directory / "text").write_bytes(b"abcd" * 1000)
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        patch.setattr(report, "write_report", lambda *_: None)
        assert train.train(config_of(directory / "text", train={"steps": 3}), directory, "command") == 0
    return directory


def test_every_symbol_keeps_what_was_learned_of_it(first_run, tmp_path):
    (tmp_path / "text").write_bytes(b"dab" * 1000)
    config = config_of(tmp_path / "text", first_run, train={"batch_size": 4, "segment": 17})
    vocabulary = corpus.load(config.data).vocabulary
    assert vocabulary == (b"d", b"a", b"b")
    found = load_init_params(config, vocabulary, abstract_params(config, 3))
    old_config = config_of(first_run / "text")
    old = Checkpoints(first_run / "checkpoints", config.checkpoint).restore(
        3, {"params": abstract_params(old_config, 4)}
    )["params"]
    order = np.array([3, 0, 1])
    assert_array_equal(found["embedding_VD"], np.asarray(old["embedding_VD"])[order])
    assert_array_equal(found["output_DV"], np.asarray(old["output_DV"])[:, order])
    assert_array_equal(found["output_bias_V"], np.asarray(old["output_bias_V"])[order])
    jax.tree.map(assert_array_equal, found["layers"], old["layers"])


def test_a_run_starts_from_another_and_then_from_itself(first_run, tmp_path, capsys):
    config = config_of(first_run / "text", first_run, train={"steps": 2})
    assert train.train(config, tmp_path / "new", "command") == 0
    printed = capsys.readouterr().out
    assert f"initialized from step 3 of {first_run}" in printed
    assert "from the beginning" in printed
    longer = config_of(first_run / "text", first_run, train={"steps": 4})
    assert train.train(longer, tmp_path / "new", "command") == 0
    printed = capsys.readouterr().out
    assert "from step 2" in printed
    assert "weights of" not in printed


def test_what_does_not_fit_is_named(first_run, tmp_path):
    (tmp_path / "text").write_bytes(b"abcxyd" * 1000)
    with pytest.raises(UserError, match=r"has 4 symbols, but 2 of the 6 .* not among them: b'x', b'y'"):
        train.train(config_of(tmp_path / "text", first_run), tmp_path / "new", "command")
    with pytest.raises(UserError, match=r"another shape; there → here:\n  config\.model\.feedforward: 29 → 31\n"):
        train.train(config_of(first_run / "text", first_run, model={"feedforward": 31}), tmp_path / "new", "command")
    with pytest.raises(UserError, match=r"config\.model\.sandwich is 2, but config\.init_from=.* was trained with 0"):
        train.train(config_of(first_run / "text", first_run, model={"sandwich": 2}), tmp_path / "new", "command")
    with pytest.raises(UserError, match=r"init_from=.*nowhere has no checkpoint to start from"):
        train.train(config_of(first_run / "text", tmp_path / "nowhere"), tmp_path / "new", "command")
    assert not (tmp_path / "new" / "checkpoints").exists()
