"""A table of memory and estimated time for every published config on several machines.

    python benchmarks/plan_tables.py [--config=enwik8_large] [--topology=v5e:2x4] >> table.md

Without arguments, all of them: about half an hour on two cores. Requires requirements-tpu.txt, and for GPUs
`pip install --no-deps -r requirements-cuda-plan.txt`. Rows are Markdown; times are estimates (see roofline.py).
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.config import Config
from adaptive_span_jax.planning import fit as plan
from adaptive_span_jax.planning import roofline
from adaptive_span_jax.planning.topology import GIB, Machine
from adaptive_span_jax.runtime import terminal

TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "a100:8", "h100:8")
# Some with an argument, and with another type than the published float32.
CONFIGS = (
    *("enwik8_large", "enwik8_large bfloat16", "enwik8", "enwik8_small"),
    *("text8_large", "text8", "text8_fixed:2048", "text8_adaptive:1024", "text8_dynamic:1024"),
)


def read_config(name: str) -> Config:
    """The config of a name such as `text8_fixed:2048` or `enwik8 bfloat16`."""
    file, _, dtype = name.partition(" ")
    module, _, argument = file.partition(":")
    fields = importlib.import_module(f"configs.{module}").get_config(*([argument] if argument else []))
    fields.model.compute_dtype = dtype or fields.model.compute_dtype
    fields.model.attention = "per_head"  # what the estimates count; benchmarks/tpu_cycles.py counts the fused kernels
    return Config.from_dict(fields.to_dict())


def row(name: str, topology: str) -> str:
    """One line of the table."""
    config, machine = read_config(name), Machine.parse(topology)
    devices = machine.devices()
    fit = plan.compile_for(config, machine, devices)
    sizes = (fit.parameters, fit.optimizer, fit.memory, fit.temporaries, fit.total)
    found = [
        roofline.estimate(config, z_LH, machine.chip, len(devices), fit.parameters, fit.temporaries)
        for z_LH in roofline.span_settings(config).values()
    ]
    trained = found[min(1, len(found) - 1)]
    cells = [
        name,
        topology,
        "yes" if fit.fits else "**no**",
        *(f"{size / GIB:.2f}" for size in sizes),
        f"{fit.processor_seconds:.0f}",
        " / ".join(f"{estimate.seconds * 1e3:.0f}" for estimate in found),
        f"{trained.seconds * config.train.steps / 3600:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", help="only this config; may be given several times")
    parser.add_argument("--topology", action="append", help="only this machine; may be given several times")
    arguments = parser.parse_args()
    terminal.console.stderr = True  # rows alone go to stdout
    for name in arguments.config or CONFIGS:
        for topology in arguments.topology or TOPOLOGIES:
            print(row(name, topology), flush=True)


if __name__ == "__main__":
    main()
