"""Cycles of a training step on TPUs that are not here, read from the compiler's own schedule.

    python benchmarks/tpu_cycles.py [--config=enwik8] [--topology=v5e:2x4] [--spans=start] [--json]

Compiles the real train step in bfloat16 (a minute or two on two cores; needs requirements-tpu.txt) and counts what a
chip issues at the start, with the made-up trained profile, and with every head at 2048. docs/performance.md says what
is counted and what is not. `--json` ends with one line, {"start": cycles, "trained": cycles, "2048": cycles}.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.planning import cycles, dump
from adaptive_span_jax.planning.spans import LONG, START, TRAINED, spans
from adaptive_span_jax.planning.topology import Chip, Machine
from adaptive_span_jax.runtime import terminal

SPANS = (START, TRAINED, LONG)
MOST_EXPENSIVE = 10


def read_config(name: str) -> Config:
    """A config of configs/ in bfloat16, e.g. `enwik8`, or `text8_fixed:2048` with an argument."""
    module, _, argument = name.partition(":")
    fields = importlib.import_module(f"configs.{module}").get_config(*([argument] if argument else []))
    fields.model.compute_dtype = "bfloat16"
    return Config.from_dict(fields.to_dict())


def show(setting: str, step: cycles.StepCount, chip: Chip) -> None:
    """Prints one setting's parts and most expensive operations."""
    clock, total = cycles.clock(chip), step.total
    with_hbm = step.with_hbm(chip)
    terminal.show_block(
        f"\nspans: {setting}",
        {
            "schedule": f"{total.cycles / 1e6:.2f} M cycles, {_milliseconds(total.cycles, clock)} "
            f"at {clock / 1e9:.2f} GHz",
            "MXUs": f"{total.mxu_share:.0%} of their limit: {total.mxu_cycles / 1e6:.2f} M cycles of products",
            "HBM": f"{total.hbm_bytes / 1e9:.2f} GB, {_milliseconds(total.hbm_cycles(chip), clock)} at "
            f"{chip.bandwidth / 1e9:,.0f} GB/s",
            "both": f"{with_hbm / 1e6:.2f} M cycles, {_milliseconds(with_hbm, clock)} "
            "if each operation takes as long as its schedule or its traffic",
            "limits": ", ".join(f"{unit} {part / with_hbm:.0%}" for unit, part in step.limits(chip).items())
            + " of the time",
            "assumed": f"{step.assumed().cycles / 1e6:.2f} M of the cycles are of operations with loops counted once",
        },
    )
    rows = [[part, "", *_cells(each, total, chip)] for part, each in step.parts().items()]
    rows += [
        [f"{each.name} ({each.part})", f"{each.runs:,.0f}", *_cells(each.cost, total, chip)]
        for each in step.most_expensive(chip, MOST_EXPENSIVE)
    ]
    headings = ["runs", "cycles", "of the step", "MXU limit", "HBM cycles", "busiest"]
    terminal.show_table(["part, or operation", *headings], rows)


def show_kernels(compiled: dump.Dump) -> None:
    """Prints what the pieces of the attention kernels take."""
    found = cycles.kernels(compiled)
    if not found:
        terminal.say("attention: XLA path, no kernel")
        return
    pieces = ("call", "program", "short", "fixed", "full", "masked")
    rows = [[name, *(f"{getattr(cost, piece).cycles:,.0f}" for piece in pieces)] for name, cost in found.items()]
    headings = ["a call", "a program", "short head", "long head", "full step", "masked step"]
    terminal.show_table(["cycles of the kernel", *headings], rows)


def _milliseconds(count: float, clock: float) -> str:
    return f"{count / clock * 1e3:.2f} ms"


def _cells(cost: cycles.Cost, total: cycles.Cost, chip: Chip) -> list[str]:
    share = f"{cost.cycles / total.cycles:.1%}"
    unit, busy = cost.limit(chip) if cost.cycles else ("", 0.0)
    counted = [f"{cost.cycles:,.0f}", share, f"{cost.mxu_share:.0%}", f"{cost.hbm_cycles(chip):,.0f}"]
    return [*counted, f"{unit} {busy:.0%}"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="enwik8", help="a file of configs/")
    parser.add_argument("--topology", default="v5e:2x4", help="v5e:2x4, v6e:2x4 or v5p:2x2x2, for example")
    parser.add_argument("--spans", choices=SPANS, help="only this setting")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # with libtpu installed JAX would look for TPUs first
    config, machine = read_config(arguments.config), Machine.parse(arguments.topology)
    fit, compiled = dump.compile_step(config, machine)
    if compiled is None:
        raise UserError(f"the step takes {terminal.size(fit.total)} of one chip, which is too much to compile it")
    chips = int(np.prod(machine.shape))
    show_kernels(compiled)
    totals = {}
    for setting in [arguments.spans] if arguments.spans else SPANS:
        step = cycles.count_step(config, compiled, spans(config, setting), chips)
        show(setting, step, machine.chip)
        totals[setting] = round(step.total.cycles)
    if arguments.json:
        print(json.dumps(totals))


if __name__ == "__main__":
    main()
