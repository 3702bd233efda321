"""The table of memory and counted time of published configs on machines that are not here: docs/plan_tables.csv.

    python benchmarks/plan_tables.py [--config=enwik8_large --topology=v5e:2x4] [--markdown]

Compiles each config in bfloat16 for its machines, once, and renews its rows in the CSV file: one for each setting of
the spans, with what `--mode=plan` counts. Without arguments all of them, about 20 minutes on two cores. Requires
requirements-tpu.txt, and for GPUs `pip install --no-deps -r requirements-cuda-plan.txt`. `--markdown` compiles nothing
and prints the table of docs/performance.md from the file.
"""

import argparse
import csv
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.config import Config
from adaptive_span_jax.planning import cycles, dump, fit, gpu_kernels, hlo, spans
from adaptive_span_jax.planning.topology import GIB, Machine
from adaptive_span_jax.runtime import terminal
from benchmarks.tpu_cycles import read_config

TABLE = Path(__file__).parents[1] / "docs" / "plan_tables.csv"

TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "a100:8", "h100:8")
ROWS = (
    *((config, topology) for config in ("enwik8", "enwik8_large") for topology in TOPOLOGIES),
    *(
        (config, topology)
        for config in ("enwik8_small", "text8_fixed:2048", "text8_adaptive:1024", "text8_dynamic:1024")
        for topology in ("v5e:2x4", "h100:8")
    ),
)

# What a TPU's step consists of in cycles, and a GPU's in kernels; memory is of one chip.
COLUMNS = (
    *("config", "topology", "spans", "ms", "hours", "limited_by", "limited_share"),
    *("cycles", "dense_cycles", "forward_kernel_cycles", "backward_kernel_cycles", "mxu_share"),
    *("turns", "kernels", "conditions"),
    *("total_gib", "parameters_gib", "optimizer_gib", "memory_gib", "temporaries_gib", "compile_processor_seconds"),
)


def count(name: str, topology: str) -> list[dict[str, str]]:
    """The rows of a config on a machine."""
    config, machine = read_config(name), Machine.parse(topology)
    settings = spans.settings(config)
    if machine.chip.platform == "tpu":
        found, schedules = dump.compile_step(config, machine)
        if schedules is None:
            raise SystemExit(f"{name} does not fit {topology}")
        chips = int(np.prod(machine.shape))
        counted = {
            setting: tpu_cells(cycles.count_step(config, schedules, z_LH, chips), machine)
            for setting, z_LH in settings.items()
        }
    else:
        found = fit.compile_for(config, machine, machine.devices())
        program = hlo.parse(found.program)
        counted = {
            setting: gpu_cells(gpu_kernels.count_step(config, program, z_LH), machine)
            for setting, z_LH in settings.items()
        }
    first = {"config": name, "topology": topology}
    return [
        {**first, "spans": setting, **cells, "hours": hours(config, cells), **memory_cells(found)}
        for setting, cells in counted.items()
    ]


def tpu_cells(step: cycles.StepCount, machine: Machine) -> dict[str, str]:
    """What one setting takes on a TPU."""
    kernels = {
        f"{name}_kernel_cycles": sum(
            each.cost.cycles for each in step.operations if each.name.startswith(f"span_{name}")
        )
        for name in ("forward", "backward")
    }
    counted = {"cycles": step.total.cycles, "dense_cycles": step.parts()[cycles.DENSE].cycles, **kernels}
    return {
        **time_cells(step, machine),
        **{name: str(round(value)) for name, value in counted.items()},
        "mxu_share": f"{step.total.mxu_share:.3f}",
    }


def gpu_cells(step: gpu_kernels.Step, machine: Machine) -> dict[str, str]:
    """What one setting takes on a GPU."""
    counted = {"turns": step.turns, "kernels": step.launches, "conditions": step.conditions}
    return time_cells(step, machine) | {name: str(round(value)) for name, value in counted.items()}


def time_cells(step: cycles.StepCount | gpu_kernels.Step, machine: Machine) -> dict[str, str]:
    """Milliseconds a step, and what limits most of them."""
    limits = step.limits(machine.chip)
    name, most = next(iter(limits.items()))
    return {
        "ms": f"{step.seconds(machine.chip) * 1e3:.2f}",
        "limited_by": name,
        "limited_share": f"{most / sum(limits.values()):.2f}",
    }


def memory_cells(found: fit.Fit) -> dict[str, str]:
    """GiB of one chip, and what compiling took."""
    sizes = (found.total, found.parameters, found.optimizer, found.memory, found.temporaries)
    names = ("total", "parameters", "optimizer", "memory", "temporaries")
    cells = {f"{name}_gib": f"{size / GIB:.2f}" for name, size in zip(names, sizes, strict=True)}
    return cells | {"compile_processor_seconds": f"{found.processor_seconds:.0f}"}


def hours(config: Config, cells: dict[str, str]) -> str:
    """Hours to the last step."""
    return f"{float(cells['ms']) / 1e3 * config.train.steps / 3600:.1f}"


def read() -> list[dict[str, str]]:
    """All rows of the file."""
    return list(csv.DictReader(TABLE.read_text().splitlines())) if TABLE.exists() else []


def renew(config: str, topology: str, rows: list[dict[str, str]]) -> None:
    """Replaces the rows of a config on a machine."""
    others = [row for row in read() if (row["config"], row["topology"]) != (config, topology)]
    order = {pair: number for number, pair in enumerate(ROWS)}
    ordered = sorted(others + rows, key=lambda row: order.get((row["config"], row["topology"]), len(order)))
    with TABLE.open("w") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(ordered)


def markdown() -> str:
    """The table of docs/performance.md: one line for a config on a machine."""
    lines = [
        "| config | machine | GiB a chip | ms: start / trained / 2048 / limit | limited by, trained | h, trained |",
        "|---|---|---|---|---|---|",
    ]
    rows = read()
    for pair in dict.fromkeys((row["config"], row["topology"]) for row in rows):
        by_spans = {row["spans"]: row for row in rows if (row["config"], row["topology"]) == pair}
        typical = by_spans.get(spans.TRAINED, by_spans[spans.LIMIT])
        times = " / ".join(_rounded(by_spans[name]["ms"]) if name in by_spans else "–" for name in spans.NAMES)
        limit = f"{typical['limited_by']}, {float(typical['limited_share']):.0%}"
        lines.append(f"| {' | '.join((*pair, typical['total_gib'], times, limit, typical['hours']))} |")
    return "\n".join(lines)


def _rounded(milliseconds: str) -> str:
    return f"{float(milliseconds):.0f}" if float(milliseconds) >= 100 else f"{float(milliseconds):.1f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="only this config, e.g. enwik8 or text8_fixed:2048")
    parser.add_argument("--topology", help="only this machine")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown())
        return
    jax.config.update("jax_platforms", "cpu")
    rows = [pair for pair in ROWS if arguments.config in (None, pair[0]) and arguments.topology in (None, pair[1])] or [
        (arguments.config, arguments.topology)
    ]
    for config, topology in rows:
        terminal.say(f"{config} on {topology}")
        renew(config, topology, count(config, topology))


if __name__ == "__main__":
    main()
