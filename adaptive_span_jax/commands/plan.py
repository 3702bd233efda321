"""`--mode=plan`: whether a run fits a machine that is not here, and about how long it takes."""

import jax

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model.attention import paths
from adaptive_span_jax.planning import cycles, dump, gpu_kernels, roofline
from adaptive_span_jax.planning.bundles import ScheduleError
from adaptive_span_jax.planning.fit import CORPORA, Fit, compile_for, suggest
from adaptive_span_jax.planning.topology import Machine
from adaptive_span_jax.runtime import terminal


def plan(config: Config, topology: str, name: str) -> int:
    """Compiles the train step for a machine and prints what it takes; exit code 0 if it fits, else 1."""
    machine = Machine.parse(topology)
    if config.model.attention == "plain" or config.model.compute_dtype == "float64":
        raise UserError("--mode=plan is not for config.model.attention=plain, nor for float64")
    devices = machine.devices()
    fit = compile_for(config, machine, devices)
    terminal.show_block(f"{name} on {topology}: {len(devices)} × {machine.chip.name}", _describe(config, fit))
    if not fit.fits:
        terminal.say(suggest(config, machine, devices))
    try:
        if paths.choose_for(config, machine.chip.platform).name == "fused":
            _show_cycles(config, machine, len(devices))
        elif machine.chip.platform == "cuda":
            _show_kernels(config, machine, devices)
        else:
            _show_estimates(config, machine, len(devices), fit)
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


def _show_cycles(config: Config, machine: Machine, chips: int) -> None:
    """What a step takes by the TPU compiler's own schedule."""
    compiled = dump.compile_step(config, machine)
    _say_run("Cycles of one chip", config)
    rows, clock = [], cycles.clock(machine.chip)
    for setting, z_LH in roofline.span_settings(config).items():
        step = cycles.count_step(config, compiled, z_LH, chips)
        seconds = step.with_hbm(machine.chip) / clock
        rows.append(
            [
                setting,
                f"{step.total.cycles / 1e6:.2f} M",
                f"{step.total.cycles / clock * 1e3:,.1f} ms",
                f"{seconds * 1e3:,.1f} ms",
                *_pace(config, seconds),
            ]
        )
    terminal.show_table(["spans", "cycles", "schedule", "with HBM", "tokens/s", "to the end"], rows)
    terminal.say(
        "Counted: every cycle of the compiler's schedule, with the turns that follow from the spans, and bytes that "
        f"operations move. Assumed: {clock / 1e9:.2f} GHz, and that an operation takes as long as its schedule or its "
        "traffic, whichever is longer. Left out: waiting for other chips, evaluation, checkpoints. The trained profile "
        "is made up."
    )


def _show_kernels(config: Config, machine: Machine, devices: list[jax.Device]) -> None:
    """What a step takes by the kernels of the program that is compiled for a GPU."""
    with terminal.waiting(f"compiling for {machine.topology} with its kernels"):
        program = gpu_kernels.compile_step(config, devices)
    _say_run("Kernels of one GPU", config)
    rows = []
    for setting, z_LH in roofline.span_settings(config).items():
        step = gpu_kernels.count_step(config, program, z_LH)
        seconds = step.seconds(machine.chip)
        cells = [setting, f"{step.turns:,.0f}", f"{step.launches:,.0f}", f"{seconds * 1e3:,.1f} ms"]
        rows.append([*cells, *_pace(config, seconds)])
    terminal.show_table(["spans", "loop turns", "kernels", "a step", "tokens/s", "to the end"], rows)
    terminal.say(
        "Counted: kernels, their products and bytes, and turns that follow from the spans. Assumed: "
        f"{roofline.ARITHMETIC_SHARE:.0%} of the peak arithmetic or {roofline.BANDWIDTH_SHARE:.0%} of the bandwidth, "
        f"whichever is slower, {gpu_kernels.LAUNCH_SECONDS * 1e6:.1f} µs a launch and "
        f"{gpu_kernels.CONDITION_SECONDS * 1e6:.0f} µs for a loop's condition. Left out: waiting for other GPUs, "
        "evaluation, checkpoints. The trained profile is made up."
    )


def _pace(config: Config, seconds: float) -> list[str]:
    """Tokens per second, and hours to the last step."""
    tokens = config.train.batch_size * config.train.segment / seconds
    return [f"{tokens:,.0f}", f"{seconds * config.train.steps / 3600:.1f} h"]


def _say_run(what: str, config: Config) -> None:
    per_step = config.train.batch_size * config.train.segment
    _, text = CORPORA.get(config.data.source, (None, None))
    epochs = f", {config.train.steps * per_step / text:.1f} epochs" if text else ""
    terminal.say(f"{what}, for {terminal.counted(config.train.steps, 'step')}{epochs}:")


def _show_estimates(config: Config, machine: Machine, chips: int, fit: Fit) -> None:
    _say_run("Estimates, not measurements", config)
    rows = []
    for setting, z_LH in roofline.span_settings(config).items():
        found = roofline.estimate(config, z_LH, machine.chip, chips, fit.parameters, fit.temporaries)
        rows.append(
            [
                setting,
                f"{found.multiply_adds / 1e12:.2f} T",
                f"{found.turns:,}",
                f"{found.seconds * 1e3:,.1f} ms",
                *_pace(config, found.seconds),
            ]
        )
    terminal.show_table(["spans", "multiply-adds", "loop turns", "a step", "tokens/s", "to the end"], rows)
    terminal.say(
        f"at {roofline.ARITHMETIC_SHARE:.0%} of the chip's peak arithmetic or {roofline.BANDWIDTH_SHARE:.0%} of its "
        f"bandwidth, whichever is slower, and {roofline.TURN_SECONDS[machine.chip.platform] * 1e6:.0f} µs a loop turn "
        "(assumed); without communication, evaluation and checkpoints. The trained profile is a made-up one."
    )
