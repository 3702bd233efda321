"""Time of one layer's attention, forward and backward, against spans and limits: does the cost follow the spans?

    python benchmarks/cost_follows_spans.py [--output docs/cost_follows_spans.png]

Left: time against the sum of the heads' spans, a straight line. How the sum is distributed over heads hardly matters;
the only difference is that a head beyond the near window rounds its span up to a block and also reads the segment.
Right: time against the limit S at constant spans, which is flat. Changing spans does not recompile. One stream, width
512, 8 heads.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.model.attention import per_head
from adaptive_span_jax.model.memory import LayerMemory

LENGTH, WIDTH, HEADS, RAMP = 512, 512, 8, 32
LIMITS = (1024, 2048, 4096, 8192, 16384)
REPEATS = 7


def make_step(limit: int) -> Callable[[np.ndarray], float]:
    """A function from z_H to the seconds of one forward and backward pass."""
    rng = np.random.default_rng(0)
    head_width = WIDTH // HEADS

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    query, segment, memory = normal(1, LENGTH, HEADS, head_width), normal(1, LENGTH, WIDTH), normal(1, limit, WIDTH)
    key, value = (normal(WIDTH, HEADS, head_width) * WIDTH**-0.5 for _ in range(2))
    positions, d_output = normal(limit, head_width), normal(1, LENGTH, HEADS, head_width)

    @jax.jit
    def step(memory: jax.Array, z_H: jax.Array) -> tuple:
        def attend(*inputs: jax.Array) -> jax.Array:
            query, segment, key, value, positions, z_H = inputs
            plain = LayerMemory.of(memory)
            return per_head.attend(query, segment, plain, key, value, positions, z_H[None, None, :], ramp=RAMP)[0]

        _, pull = jax.vjp(attend, query, segment, key, value, positions, z_H)
        return pull(d_output)

    def timed(z_H: np.ndarray) -> float:
        z = jnp.asarray(z_H, jnp.float32)
        seconds = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            jax.block_until_ready(step(memory, z))
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds[1:]))

    return timed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs" / "cost_follows_spans.png")
    arguments = parser.parse_args()

    rng = np.random.default_rng(1)
    step = make_step(8192)
    kinds = {
        "all heads alike": [np.full(HEADS, z) for z in (0, 500, 1000, 2000, 4000)],
        "one long head": [np.eye(HEADS)[2] * z for z in (2000, 4000, 8000)],
        "mixed": [rng.dirichlet(np.full(HEADS, 0.3)) * total for total in (4000, 8000, 16000, 24000)],
    }
    points = {
        kind: np.array([(np.minimum(z_H, 8192).sum(), step(z_H)) for z_H in spans]) for kind, spans in kinds.items()
    }
    sums, seconds = np.concatenate(list(points.values())).T
    slope, base = np.polyfit(sums, seconds, 1)
    correlation = np.corrcoef(sums, seconds)[0, 1]
    print(f"time = {base * 1e3:.0f} ms + {slope * 1e6:.1f} ms per 1000 positions, correlation {correlation:.4f}")

    z_H = np.array([0, 0, 0, 0, 0, 100, 300, 900])
    by_limit = [make_step(limit)(z_H) for limit in LIMITS]
    for limit, found in zip(LIMITS, by_limit, strict=True):
        print(f"S = {limit:6d}: {found * 1e3:.0f} ms")

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    left.plot([0, sums.max()], [base * 1e3, (base + slope * sums.max()) * 1e3], "-", color="0.7")
    for (kind, found), marker in zip(points.items(), "os^", strict=True):
        left.plot(found[:, 0], found[:, 1] * 1e3, marker, label=kind)
    left.set(xlabel="sum of the heads' spans (positions)", ylabel="forward and backward (ms)", ylim=(0, None))
    left.legend(frameon=False)
    right.plot(LIMITS, np.array(by_limit) * 1e3, "o-")
    right.set(xlabel="limit S (positions), spans fixed", ylim=(0, 1.5 * max(by_limit) * 1e3), xscale="log")
    right.set_xticks(LIMITS, [f"{limit:,}" for limit in LIMITS])
    right.minorticks_off()
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=120)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
