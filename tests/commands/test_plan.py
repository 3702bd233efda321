"""`--mode=plan`: what it prints of a compiled program."""

import re
from typing import Any

import jax
import pytest

from adaptive_span_jax.commands import plan as plan_command
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.planning import cycles, gpu_kernels, hlo, spans
from adaptive_span_jax.planning.fit import Fit
from adaptive_span_jax.planning.topology import CHIPS, GIB, Machine
from tests.conftest import tiny_config
from tests.support.programs import FAR_CONFIG, GPU_PROGRAM, far_dump


@pytest.fixture
def planned(monkeypatch, capsys) -> Any:
    """The exit code and output of a plan, with what a compiler would have found."""

    def run(config: Config, topology: str, found: Fit, schedules: Any = None) -> tuple[int, str]:
        monkeypatch.setattr(Machine, "devices", lambda self: jax.devices())
        monkeypatch.setattr(plan_command, "compile_for", lambda *_: found)
        monkeypatch.setattr(plan_command.dump, "compile_step", lambda *_: (found, schedules))
        monkeypatch.setattr(plan_command, "suggest", lambda *_: "buy more")
        code = plan_command.plan(config, topology, "tiny")
        return code, capsys.readouterr().out

    return run


def fit(program: str = "", total: int = GIB) -> Fit:
    return Fit(1, 2, 3, total, usable=2 * GIB, compile_seconds=1, processor_seconds=2, program=program)


GPU_CONFIG = tiny_config(
    model={"layers": 3, "heads": 2},
    span={"limit": 4000, "ramp": 32},
    train={"segment": 512, "batch_size": 8, "steps": 1000},
)


def cells(text: str, first: str) -> list[str]:
    """The cells of the line that starts with a word."""
    [line] = [line for line in text.splitlines() if line.startswith(f"  {first} ")]
    return re.split(r"  +", line.strip())


def test_gpu_plans_count_kernels_and_name_what_limits_them(planned):
    code, text = planned(GPU_CONFIG, "a100:8", fit(GPU_PROGRAM))
    assert code == 0
    chip, program = CHIPS["a100"], hlo.parse(GPU_PROGRAM)
    for setting, z_LH in spans.settings(GPU_CONFIG).items():
        step = gpu_kernels.count_step(GPU_CONFIG, program, z_LH)
        _, turns, kernels, conditions, milliseconds, tokens, hours, limits = cells(text, setting)
        found = [int(cell.replace(",", "")) for cell in (turns, kernels, conditions)]
        assert found == [round(step.turns), round(step.launches), round(step.conditions)]
        assert float(milliseconds.split()[0]) == pytest.approx(step.seconds(chip) * 1e3, abs=0.06)
        assert float(tokens.replace(",", "")) == pytest.approx(8 * 512 / step.seconds(chip), rel=1e-3)
        assert float(hours.split()[0]) == pytest.approx(1000 * step.seconds(chip) / 3600, abs=0.06)
        assert limits.startswith("conditions ")  # nearly nothing is computed here
    # A copy, a product a layer, and a copy a turn.
    assert "Kernels: 1 outside of the layers, 1 a layer forward and backward, 1.0 a turn of a far loop" in text
    assert cells(text, "copy.1")[1:2] == [f"{step_runs('copy.1', spans.TRAINED):,.0f}"]
    assert "launches" in cells(text, "fusion")
    assert re.search(r"^Counted: kernels.*\.$", text, re.MULTILINE)
    assert re.search(r"^Assumed: 40% of .* 70% of .* 1\.5 µs a launch and 15 µs a condition\.$", text, re.MULTILINE)


def step_runs(kernel: str, setting: str) -> float:
    step = gpu_kernels.count_step(GPU_CONFIG, hlo.parse(GPU_PROGRAM), spans.spans(GPU_CONFIG, setting))
    return next(each.runs for each in step.kernels if each.name == kernel)


def test_tpu_plans_count_cycles_and_name_the_limiting_unit(planned):
    config = FAR_CONFIG.changed({"train.batch_size": 8})
    code, text = planned(config, "v5e:2x4", fit("compiled"), far_dump())
    assert code == 0
    chip = CHIPS["v5e"]
    for setting, z_LH in spans.settings(config).items():
        step = cycles.count_step(config, far_dump(), z_LH, chips=8)
        _, counted, schedule, milliseconds, *_, limits = cells(text, setting)
        assert counted == f"{step.total.cycles / 1e6:.2f} M"
        assert schedule == f"{step.total.cycles / cycles.clock(chip) * 1e3:,.1f} ms"
        assert milliseconds == f"{step.seconds(chip) * 1e3:,.1f} ms"
        (first, part), *_ = step.limits(chip).items()
        assert limits.startswith(f"{first} {part / step.with_hbm(chip):.0%}, ")
    name, runs, _, _, limit, source = cells(text, "product")
    assert (name, runs, limit, source) == ("product", "3", "MXU 100% busy", "jvp(turns_0_3)/while/body/dot")
    # Five operations and the code between them: no head of so small a profile is far.
    assert len(re.findall(r" busy ", text)) == 6
    assert re.search(r"^Counted: every cycle.*\.$", text, re.MULTILINE)
    assert re.search(r"^Assumed: 1\.50 GHz.*\.$", text, re.MULTILINE)


def test_what_does_not_fit_exits_with_1_and_a_remedy(planned):
    code, text = planned(FAR_CONFIG.changed({"train.batch_size": 8}), "v5e:2x4", fit(total=3 * GIB))
    assert code == 1
    assert "fits         NO: 3.0 GiB of the 2.0 GiB" in text
    assert "buy more" in text
    assert "Cycles" not in text


def test_a_program_that_is_not_understood_still_has_its_memory(planned):
    code, text = planned(GPU_CONFIG, "a100:8", fit(GPU_PROGRAM.replace("copy(%f)", "call(%f)")))
    assert code == 0
    assert "fits         yes" in text
    assert "The time of a step cannot be counted for this config: copy.3: kernels in a call" in text


def test_the_plain_path_is_not_planned(planned):
    with pytest.raises(UserError, match="plain"):
        planned(GPU_CONFIG.changed({"model.attention": "plain"}), "a100:8", fit())
