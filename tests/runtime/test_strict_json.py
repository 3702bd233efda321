"""All JSON is readable by any parser: non-finite numbers are null."""

import ast
import dataclasses
import json
import math
from pathlib import Path

import pytest

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.report import result
from adaptive_span_jax.runtime import strict_json
from adaptive_span_jax.training import objective
from adaptive_span_jax.training.metrics import MetricsLog, read_lines
from tests.conftest import tiny_config, tiny_fields

PACKAGE = Path(__file__).parents[2] / "adaptive_span_jax"


def strictly(text: str):
    """Parses JSON; bare NaN and Infinity are errors."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_non_finite_numbers_are_null_at_any_depth():
    value = {"a": math.nan, "b": [math.inf, 1.5, (-math.inf, 2)], "c": {"d": math.nan, "e": None, "f": "NaN"}}
    expected = {"a": None, "b": [None, 1.5, [None, 2]], "c": {"d": None, "e": None, "f": "NaN"}}
    assert strictly(strict_json.dumps(value)) == expected
    assert strict_json.loads(json.dumps(value)) == expected, "as older versions wrote it"


def test_all_json_is_written_in_one_place():
    # loaded_model.py hashes a few fields of a config, which are never written; a config has finite numbers only.
    allowed = {"strict_json.py", "loaded_model.py", "config.py"}
    for path in PACKAGE.rglob("*.py"):
        called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
                  and isinstance(node.value, ast.Name) and node.value.id == "json"}  # fmt: skip
        assert path.name in allowed or not called & {"dump", "dumps"}, path


def test_a_log_line_with_a_non_finite_number_is_json_and_read_without_it(tmp_path):
    log = MetricsLog(tmp_path, resumed_at=0)
    log.write(3, {"dev_bits": math.nan, "train_bits": 2.5})
    log.close()
    assert strictly((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "dev_bits": None, "train_bits": 2.5}
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 3, "train_bits": 2.5}]
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "dev_bits": NaN, "train_bits": 2.5}\n')
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 3, "train_bits": 2.5}], "as older versions wrote it"


def test_a_result_with_a_non_finite_number_is_not_that_of_a_finished_run(tmp_path):
    found = {"dev_bits": 2.0, "test_bits": 2.5, "steps": 4}
    result.write_result(tmp_path, found)
    assert result.read_result(tmp_path, 4) == found
    result.write_result(tmp_path, found | {"test_bits": math.nan})
    assert strictly((tmp_path / "result.json").read_text())["test_bits"] is None
    assert result.read_result(tmp_path, 4) is None
    (tmp_path / "result.json").write_text('{"dev_bits": NaN, "test_bits": 2.5, "steps": 4}')
    assert result.read_result(tmp_path, 4) is None, "as older versions wrote it"


def test_the_perplexity_of_a_loss_that_is_too_large_is_infinite():
    assert objective.perplexity(2 * math.log(2)) == 4
    assert objective.perplexity(1e30) == math.inf
    assert math.isnan(objective.perplexity(math.nan))


@pytest.mark.parametrize("field", ["train.clip", "checkpoint.every_minutes"])
def test_a_config_has_only_numbers_that_json_has(field):
    section, name = field.split(".")
    fields = tiny_fields(**{section: {name: math.inf}}).to_dict()
    with pytest.raises(UserError, match=f"config.{field} is inf"):
        Config.from_dict(fields)
    config = tiny_config()
    assert strictly(config.to_json()) == json.loads(json.dumps(dataclasses.asdict(config)))
