"""Cycles of a training step on TPUs that are not here, read from the compiler's own schedule.

    python benchmarks/tpu_cycles.py [--config=enwik8] [--topology=v5e:2x4] [--spans=start|trained|2048] [--json]

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
from adaptive_span_jax.planning import cycles, dump, roofline
from adaptive_span_jax.planning.topology import Chip, Machine
from adaptive_span_jax.runtime import terminal

SPANS = ("start", "trained", "2048")
MOST_EXPENSIVE = 10


def read_config(name: str) -> Config:
    """A config of configs/, in bfloat16."""
    fields = importlib.import_module(f"configs.{name}").get_config()
    fields.model.compute_dtype = "bfloat16"
    return Config.from_dict(fields.to_dict())


def spans(config: Config, setting: str) -> np.ndarray:
    """z_LH of a setting."""
    if setting == "trained":
        return roofline.trained_profile(config)
    z = 0.0 if setting == "start" else float(setting)
    return np.full((config.model.layers, config.model.heads), min(z, config.span.limit))


def show(setting: str, step: cycles.StepCount, chip: Chip) -> None:
    """Prints one setting's parts and most expensive operations."""
    clock, total = cycles.clock(chip), step.total
    terminal.say(
        f"\nspans: {setting}: {total.cycles / 1e6:.2f} M cycles, {total.cycles / clock * 1e3:.2f} ms at "
        f"{clock / 1e9:.2f} GHz, MXUs busy {cycles.mxu_share(total):.0%}"
    )
    rows = [
        [part, f"{each.cycles:,.0f}", f"{each.cycles / total.cycles:.1%}", f"{cycles.mxu_share(each):.0%}"]
        for part, each in step.parts().items()
    ]
    terminal.show_table(["part", "cycles", "of the step", "MXUs busy"], rows)
    rows = [
        [each.name, each.part, f"{each.runs:,.0f}", f"{each.count.cycles:,.0f}", f"{cycles.mxu_share(each.count):.0%}"]
        for each in step.most_expensive(MOST_EXPENSIVE)
    ]
    terminal.show_table(["most expensive operation", "part", "runs", "cycles", "MXUs busy"], rows)


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
    compiled = dump.compile_step(config, machine)
    chips = int(np.prod(machine.shape))
    totals = {}
    for setting in [arguments.spans] if arguments.spans else SPANS:
        step = cycles.count_step(config, compiled, spans(config, setting), chips)
        show(setting, step, machine.chip)
        totals[setting] = round(step.total.cycles)
    if arguments.json:
        print(json.dumps(totals))


if __name__ == "__main__":
    main()
