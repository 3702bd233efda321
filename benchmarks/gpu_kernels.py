"""Kernels, loop turns and time of a training step on GPUs that are not here, counted from the compiled program.

    python benchmarks/gpu_kernels.py [--config=enwik8] [--topology=a100:8] [--limit=2048] [--json]

Compiles the real train step in bfloat16 (half a minute on two cores; needs requirements-cuda-plan.txt) and counts what
one GPU runs at the start, with the made-up trained profile, and with every head at 2048.
adaptive_span_jax/planning/gpu_kernels.py says what is counted and what is assumed. `--json` ends with one line:
{"start": {"turns": …, "kernels": …, "conditions": …, "ms": …}, "trained": …, "2048": …}.
"""

import argparse
import json
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.planning import fit, gpu_kernels, hlo
from adaptive_span_jax.planning.spans import spans
from adaptive_span_jax.planning.topology import Machine
from adaptive_span_jax.runtime import terminal
from benchmarks.tpu_cycles import MOST_EXPENSIVE, SPANS, read_config

_PARTS = (gpu_kernels.ARITHMETIC, gpu_kernels.BANDWIDTH, gpu_kernels.LAUNCHES, gpu_kernels.CONDITIONS)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="enwik8", help="a file of configs/")
    parser.add_argument("--topology", default="a100:8", help="a100:8 or h100:8, for example")
    parser.add_argument("--limit", type=int, help="another span.limit")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    config, machine = read_config(arguments.config), Machine.parse(arguments.topology)
    if arguments.limit:
        config = config.changed({"span.limit": arguments.limit})
    program = hlo.parse(fit.compile_for(config, machine, machine.devices()).program)
    rows, totals, chip = [], {}, machine.chip
    for setting in SPANS:
        step = gpu_kernels.count_step(config, program, spans(config, setting))
        limits, seconds = step.limits(chip), step.seconds(chip)
        totals[setting] = {
            "turns": round(step.turns),
            "kernels": round(step.launches),
            "conditions": round(step.conditions),
            "ms": round(seconds * 1e3, 1),
        }
        milliseconds = (f"{part * 1e3:.1f}" for part in (seconds, *(limits[name] for name in _PARTS)))
        rows.append([setting, f"{step.turns:,.0f}", f"{step.launches:,.0f}", *milliseconds])
    terminal.show_table(["spans", "turns", "kernels", "ms a step", *_PARTS], rows)
    rows = [
        [kernel.name, f"{kernel.runs:,.0f}", f"{kernel.seconds(chip) * 1e3:.2f}", f"{kernel.moved / 1e6:.1f}"]
        for kernel in step.most_expensive(chip, MOST_EXPENSIVE)
    ]
    terminal.show_table([f"most expensive, {setting}", "runs", "ms a step", "MB a run"], rows)
    if arguments.json:
        print(json.dumps(totals))


if __name__ == "__main__":
    main()
