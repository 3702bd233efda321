"""`--mode=plan`: whether a run fits a machine that is not here, how long a step takes there, and what limits it."""

import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.planning import cycles, dump, gpu_kernels, hlo, spans
from adaptive_span_jax.planning.bundles import ScheduleError
from adaptive_span_jax.planning.cycles import StepCount
from adaptive_span_jax.planning.dump import Dump
from adaptive_span_jax.planning.fit import CORPORA, Fit, compile_for, suggest
from adaptive_span_jax.planning.gpu_kernels import FAR_LOOPS, LAYERS, OUTSIDE
from adaptive_span_jax.planning.topology import Chip, Machine
from adaptive_span_jax.runtime import sharding, terminal, trace

_MOST_EXPENSIVE = 10


def plan(config: Config, topology: str, name: str) -> int:
    """Compiles the train step for a machine and prints what it takes; exit code 0 if it fits, else 1."""
    machine = Machine.parse(topology)
    if config.model.attention == "plain" or config.model.compute_dtype == "float64":
        raise UserError("--mode=plan is not for config.model.attention=plain, nor for float64")
    devices = machine.devices()
    sharding.check_streams(
        sharding.make_mesh(devices, config.mesh.fsdp), config.train.batch_size, config.train.grad_accum_steps
    )
    schedules = None
    if machine.chip.platform == "tpu":
        fit, schedules = dump.compile_step(config, machine)
    else:
        fit = compile_for(config, machine, devices)
    terminal.show_block(f"{name} on {topology}: {len(devices)} × {machine.chip.name}", _describe(config, fit))
    if not fit.fits:
        terminal.say(suggest(config, machine, devices))
    try:
        if schedules is not None:
            _show_cycles(config, machine.chip, len(devices), schedules)
        elif fit.program:
            _show_kernels(config, machine.chip, hlo.parse(fit.program))
    except ScheduleError as error:
        terminal.say(f"The time of a step cannot be counted for this config: {error}")
    return 0 if fit.fits else 1


def _describe(config: Config, fit: Fit) -> dict[str, str]:
    share = f"{terminal.size(fit.total)} of the {terminal.size(fit.usable)} that a program can use of one chip"
    return {
        "fits": f"{'yes' if fit.fits else 'NO'}: {share}",
        "parameters": terminal.size(fit.parameters),
        "optimizer": terminal.size(fit.optimizer),
        "memory": f"{terminal.size(fit.memory)} of segment memory",
        "temporaries": f"{terminal.size(fit.temporaries)} for activations, gradients and working space",
        "compiled": f"in {terminal.duration(fit.compile_seconds)} for {config.model.compute_dtype}, with "
        f"{terminal.duration(fit.processor_seconds)} of processor time",
    }


def _show_cycles(config: Config, chip: Chip, chips: int, schedules: Dump) -> None:
    """What a step takes by the TPU compiler's own schedule."""
    _say_run("Cycles of one chip", config)
    clock, settings = cycles.clock(chip), spans.settings(config)
    steps = {name: cycles.count_step(config, schedules, z_LH, chips) for name, z_LH in settings.items()}
    rows = []
    for setting, step in steps.items():
        counted = [f"{step.total.cycles / 1e6:.2f} M", f"{step.total.cycles / clock * 1e3:,.1f} ms"]
        rows.append([setting, *counted, *_pace(config, step.seconds(chip)), _main_limits(step.limits(chip))])
    headings = ["spans", "cycles", "schedule", "with HBM", "tokens/s", "to the end", "time limited by"]
    terminal.show_table(headings, rows)
    setting = _typical(settings)
    _show_tpu_operations(setting, steps[setting], chip)
    terminal.say(
        "Counted: every cycle of the compiler's schedule, with the turns that follow from the spans, the units that "
        "each cycle uses, and the bytes that operations move."
    )
    terminal.say(
        f"Assumed: {clock / 1e9:.2f} GHz, and that an operation takes as long as its schedule or its traffic, "
        "whichever is longer."
    )
    _say_left_out("chips")


def _show_tpu_operations(setting: str, step: StepCount, chip: Chip) -> None:
    rows, whole = [], step.with_hbm(chip)
    for each in step.most_expensive(chip, _MOST_EXPENSIVE):
        taken, (unit, busy) = each.cost.with_hbm(chip), each.cost.limit(chip)
        milliseconds = f"{taken / cycles.clock(chip) * 1e3:.2f} ms"
        shares = [f"{taken / whole:.1%}", f"{unit} {busy:.0%} busy"]
        rows.append([each.name, f"{each.runs:,.0f}", milliseconds, *shares, trace.shortened(each.scope)])
    _show_operations(setting, rows)


def _show_kernels(config: Config, chip: Chip, program: hlo.Program) -> None:
    """What a step takes by the kernels of the program that is compiled for a GPU."""
    _say_run("Kernels of one GPU", config)
    settings = spans.settings(config)
    steps = {name: gpu_kernels.count_step(config, program, z_LH) for name, z_LH in settings.items()}
    rows = []
    for setting, step in steps.items():
        counts = [f"{count:,.0f}" for count in (step.turns, step.launches, step.conditions)]
        rows.append([setting, *counts, *_pace(config, step.seconds(chip)), _main_limits(step.limits(chip))])
    headings = ["spans", "loop turns", "kernels", "conditions", "a step", "tokens/s", "to the end"]
    terminal.show_table([*headings, "time limited by"], rows)
    longest = steps[spans.LIMIT]
    terminal.say(
        f"Kernels: {longest.launches_in(OUTSIDE):,.0f} outside of the layers, "
        f"{longest.launches_in(LAYERS) / config.model.layers:,.0f} a layer forward and backward, "
        f"{longest.launches_in(FAR_LOOPS) / max(longest.turns, 1):,.1f} a turn of a far loop (average at limit)."
    )
    setting = _typical(settings)
    whole, rows = steps[setting].seconds(chip), []
    for each in steps[setting].most_expensive(chip, _MOST_EXPENSIVE):
        seconds = each.seconds(chip)
        time = [f"{seconds * 1e3:.2f} ms", f"{seconds / whole:.1%}", each.limit(chip)]
        rows.append([each.name, f"{each.runs:,.0f}", *time, trace.shortened(each.scope)])
    _show_operations(setting, rows)
    terminal.say(
        "Counted: kernels, their products and bytes, turns that follow from the spans, and conditions that the host "
        "reads."
    )
    terminal.say(
        f"Assumed: {gpu_kernels.ARITHMETIC_SHARE:.0%} of the peak arithmetic or {gpu_kernels.BANDWIDTH_SHARE:.0%} of "
        f"the bandwidth, whichever is slower, {gpu_kernels.LAUNCH_SECONDS * 1e6:.1f} µs a launch and "
        f"{gpu_kernels.CONDITION_SECONDS * 1e6:.0f} µs a condition."
    )
    _say_left_out("GPUs")


def _show_operations(setting: str, rows: list[list[str]]) -> None:
    width = max(len(row[-1]) for row in rows)
    rows = [[*row[:-1], row[-1].ljust(width)] for row in rows]
    headings = ["runs", "a step", "share", "limited by", "source".ljust(width)]
    terminal.show_table([f"most expensive, {setting}", *headings], rows)


def _say_left_out(others: str) -> None:
    terminal.say(f"Left out: waiting for other {others}, evaluation, checkpoints. Spans: {spans.EXPLANATION}.")


def _typical(settings: dict[str, np.ndarray]) -> str:
    """The setting whose operations are listed."""
    return spans.TRAINED if spans.TRAINED in settings else spans.LIMIT


def _main_limits(limits: dict[str, float]) -> str:
    """The two that limit most of the time, each with its share."""
    whole = sum(limits.values())
    return ", ".join(f"{name} {part / whole:.0%}" for name, part in list(limits.items())[:2])


def _pace(config: Config, seconds: float) -> list[str]:
    """Milliseconds a step, tokens per second, and hours to the last step."""
    tokens = config.train.batch_size * config.train.segment / seconds
    return [f"{seconds * 1e3:,.1f} ms", f"{tokens:,.0f}", f"{seconds * config.train.steps / 3600:.1f} h"]


def _say_run(what: str, config: Config) -> None:
    per_step = config.train.batch_size * config.train.segment
    _, text = CORPORA.get(config.data.source, (None, None))
    epochs = f", {config.train.steps * per_step / text:.1f} epochs" if text else ""
    terminal.say(f"{what}, for {terminal.counted(config.train.steps, 'step')}{epochs}:")
