"""The train step, compiled for machines that are not here."""

import importlib.util
from typing import Any

import jax
import pytest

from adaptive_span_jax.commands import plan as plan_command
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.planning import fit as plan
from adaptive_span_jax.planning.topology import GIB, Machine
from adaptive_span_jax.runtime import cpu, sharding
from adaptive_span_jax.training import step
from adaptive_span_jax.training.optimizer import make_optimizer
from configs import enwik8_large
from tests.conftest import tiny_config

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -r requirements-tpu.txt"
)


@pytest.mark.parametrize("topology", ["v5e", "v5e:", "v5e:2x", "v5e:0x4", "v9:2x2", "a100:2x2x2", "v5e:2x4 "])
def test_bad_topologies_are_refused_with_examples(topology):
    with pytest.raises(UserError, match=r"h100:2x8"):
        Machine.parse(topology)


def test_missing_compiler_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr("adaptive_span_jax.planning.topology._installed", lambda module: False)
    with pytest.raises(UserError, match=r"libtpu.*pip install \"\.\[tpu\]\""):
        Machine.parse("v5e:2x4").devices()
    with pytest.raises(UserError, match=r"--no-deps jax-cuda12-pjrt==\S+ jax-cuda12-plugin=="):
        Machine.parse("a100:8").devices()


def lowered_for(platform: str, config: Config) -> str:
    mesh = sharding.make_mesh(jax.devices()[:2])
    state, segment = plan.abstract(config, mesh)
    train_step: Any = step.make_train_step(config, make_optimizer(config.train), state, mesh)
    return jax.export.export(train_step, platforms=[platform])(state, segment).mlir_module()


@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm"])
def test_step_lowers_for_every_accelerator(platform):
    assert "stablehlo.while" in lowered_for(platform, tiny_config(model={"compute_dtype": "bfloat16", "dropout": 0.1}))


def test_stream_shards_are_for_the_processor_that_runs_the_program(monkeypatch):
    monkeypatch.setattr(cpu, "_cores", lambda: 64)
    with sharding.on_mesh(sharding.make_mesh(jax.devices()[:1])):
        assert cpu.stream_shards(8) == cpu.MAX_STREAM_SHARDS
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    auto = (jax.sharding.AxisType.Auto,)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("data",), auto, abstract_device=device)):
        assert cpu.stream_shards(8) == 1


def test_out_of_memory_is_an_answer_not_a_failure():
    class TooLarge:
        def compile(self):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (27.15G) "
                "exceeds available HBM (15.75G)."
            )

    lowered: Any = TooLarge()
    assert plan._total_bytes(lowered) == int(27.15 * GIB)


def fit_of(total: int) -> plan.Fit:
    return plan.Fit(0, 0, 0, total, usable=16 * GIB, compile_seconds=1, processor_seconds=1)


def test_the_first_change_that_fits_is_named(monkeypatch):
    # The first cannot be had: 4 streams do not go round 2 devices in 3 groups.
    remedies = (
        {"train.grad_accum_steps": 3},
        {"model.remat": True},
        {"model.compute_dtype": "bfloat16"},
        {"span.limit": 9},
    )
    monkeypatch.setattr(plan, "_REMEDIES", remedies)
    tried = []

    def compile_for(config, machine, devices):
        tried.append((config.model.remat, config.model.compute_dtype))
        return fit_of(20 * GIB if config.model.compute_dtype == "float32" else 10 * GIB)

    monkeypatch.setattr(plan, "compile_for", compile_for)
    machine = Machine.parse("v5e:2x4")
    devices = jax.devices()[:2]
    found = plan.suggest(tiny_config(train={"batch_size": 4}), machine, devices)
    assert found == (
        "The smallest change that fits: --config.model.compute_dtype=bfloat16, which takes 10.0 GiB of one chip."
    )
    assert tried == [(True, "float32"), (False, "bfloat16")]
    monkeypatch.setattr(plan, "compile_for", lambda *_: fit_of(30 * GIB))
    monkeypatch.setattr(plan, "_REMEDIES", remedies[:3])
    config = tiny_config(train={"batch_size": 2}, model={"compute_dtype": "bfloat16"})
    assert plan.suggest(config, machine, devices) == (
        "It would not fit with --config.model.remat=True (30.0 GiB) either: use more chips."
    )


def test_report_has_every_part(monkeypatch, capsys):
    monkeypatch.setattr(Machine, "devices", lambda self: [None] * 8)
    found = plan.Fit(1 * GIB, 2 * GIB, 3 * GIB, 20 * GIB, 16 * GIB, compile_seconds=40, processor_seconds=50)
    for module in (plan, plan_command):
        monkeypatch.setattr(module, "compile_for", lambda config, *_: found)
    assert plan_command.plan(tiny_config(data={"source": "text8", "max_bytes": 0}), "v5e:2x4", "tiny") == 1
    text = capsys.readouterr().out
    for part in (
        *(
            "tiny on v5e:2x4: 8 × TPU v5e",
            "NO: 20.0 GiB of the 16.0 GiB",
            "parameters   1.0 GiB",
            "optimizer    2.0 GiB",
        ),
        *("memory       3.0 GiB", "temporaries  14.0 GiB", "compiled     in 40 s", "It would not fit with"),
        *("Estimates, not measurements, for 6 steps, 0.0 epochs", "start ", "trained profile ", "every head at S "),
        *("multiply-adds", "tokens/s", "to the end", "40% of the chip's peak", "made-up"),
    ):
        assert part in text


@needs_libtpu
@pytest.mark.slow
def test_small_model_compiles_for_a_tpu_slice():
    config = tiny_config(train={"batch_size": 8, "segment": 128}, span={"limit": 256}, model={"dropout": 0.1})
    machine = Machine.parse("v5e:2x2")
    devices = machine.devices()
    assert [device.platform for device in devices] == ["tpu"] * 4
    fit = plan.compile_for(config, machine, devices)
    assert fit.fits
    # 3 layers × 2 streams × (256 + 128) positions × 22 wide × 4 bytes, and two counters.
    assert fit.memory == 3 * 2 * 384 * 22 * 4 + 8
    assert fit.parameters == fit.optimizer - 4 or fit.parameters == fit.optimizer
    assert fit.temporaries > 0


@needs_libtpu
@pytest.mark.slow
def test_a_tpu_rounds_blocks_of_memory_and_not_the_whole():
    config = tiny_config(train={"batch_size": 8, "segment": 128}, span={"limit": 1024}, model={"dropout": 0.1})
    mesh = sharding.make_mesh(Machine.parse("v5e:2x2").devices())
    sizes = "[3,2,1152,22]"
    program = plan.lower(config, mesh).compile().as_text() or ""
    assert f"f32{sizes}" in program  # the memory of one chip
    assert f"bf16{sizes}" not in program


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("change", [{"compute_dtype": "bfloat16"}, {"remat": True}])
def test_the_large_model_fits_eight_v5e_chips(change):
    fields = enwik8_large.get_config()
    fields.model.update(change)
    machine = Machine.parse("v5e:2x4")
    fit = plan.compile_for(Config.from_dict(fields.to_dict()), machine, machine.devices())
    assert fit.fits
    assert fit.total < 10 * GIB
    assert fit.processor_seconds < 180  # 90 s on two cores
