"""Cycles of a training step on TPUs that are not here, read from the compiler's own schedule.

    python benchmarks/tpu_cycles.py [--config=enwik8] [--topology=v5e:2x4] [--spans=start] [--json] [--table]

Compiles the real train step in bfloat16 (a minute or two on two cores; needs requirements-tpu.txt) and counts what a
chip issues at the start, with the made-up trained profile, and with every head at 2048. docs/performance.md says what
is counted and what is not. `--json` ends with one line, {"start": cycles, "trained": cycles, "2048": cycles}; `--table`
renews the rows of this config and topology in docs/tpu_cycles.csv.
"""

import argparse
import csv
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
TABLE = Path(__file__).parents[1] / "docs" / "tpu_cycles.csv"
_COLUMNS = (
    "config",
    "topology",
    "spans",
    "cycles",
    "with_hbm",
    "dense",
    "forward_kernel",
    "backward_kernel",
    "mxu_share",
)
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
            "assumed": f"{step.assumed().cycles / 1e6:.2f} M of the cycles are of operations with loops counted once",
        },
    )
    rows = [[part, "", *_cells(each, total, chip)] for part, each in step.parts().items()]
    rows += [
        [f"{each.name} ({each.part})", f"{each.runs:,.0f}", *_cells(each.cost, total, chip)]
        for each in step.most_expensive(MOST_EXPENSIVE)
    ]
    terminal.show_table(["part, or operation", "runs", "cycles", "of the step", "MXU limit", "HBM cycles"], rows)


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


def table_row(config: str, topology: str, setting: str, step: cycles.StepCount, chip: Chip) -> dict[str, str]:
    """One setting's row of docs/tpu_cycles.csv."""
    kernels = {
        kind: sum(
            each.cost.cycles for each in step.operations if each.name.startswith((f"span_{kind}", f"persistent_{kind}"))
        )
        for kind in ("forward", "backward")
    }
    dense = step.parts()[cycles.DENSE].cycles
    values = (step.total.cycles, step.with_hbm(chip), dense, *kernels.values())
    numbers = [str(round(value)) for value in values]
    return dict(zip(_COLUMNS, (config, topology, setting, *numbers, f"{step.total.mxu_share:.3f}"), strict=True))


def renew_table(rows: list[dict[str, str]]) -> None:
    """Replaces the rows of the same config, topology and spans."""
    old = list(csv.DictReader(TABLE.read_text().splitlines())) if TABLE.exists() else []
    kept = {tuple(row[name] for name in _COLUMNS[:3]): row for row in (*old, *rows)}
    with TABLE.open("w") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[key] for key in sorted(kept, key=lambda key: (*key[:2], SPANS.index(key[2]))))


def _milliseconds(count: float, clock: float) -> str:
    return f"{count / clock * 1e3:.2f} ms"


def _cells(cost: cycles.Cost, total: cycles.Cost, chip: Chip) -> list[str]:
    share = f"{cost.cycles / total.cycles:.1%}"
    return [f"{cost.cycles:,.0f}", share, f"{cost.mxu_share:.0%}", f"{cost.hbm_cycles(chip):,.0f}"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="enwik8", help="a file of configs/")
    parser.add_argument("--topology", default="v5e:2x4", help="v5e:2x4, v6e:2x4 or v5p:2x2x2, for example")
    parser.add_argument("--spans", choices=SPANS, help="only this setting")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--table", action="store_true", help=f"renew the rows in {TABLE.parent.name}/{TABLE.name}")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # with libtpu installed JAX would look for TPUs first
    config, machine = read_config(arguments.config), Machine.parse(arguments.topology)
    compiled = dump.compile_step(config, machine)
    chips = int(np.prod(machine.shape))
    show_kernels(compiled)
    totals, rows = {}, []
    for setting in [arguments.spans] if arguments.spans else SPANS:
        step = cycles.count_step(config, compiled, spans(config, setting), chips)
        show(setting, step, machine.chip)
        totals[setting] = round(step.total.cycles)
        rows.append(table_row(arguments.config, arguments.topology, setting, step, machine.chip))
    if arguments.table:
        renew_table(rows)
    if arguments.json:
        print(json.dumps(totals))


if __name__ == "__main__":
    main()
