"""Evaluation speed at trained spans with the KV cache, the training attention and plain attention, in alternation.

    python benchmarks/evaluate_speed.py [--full] [--rounds 5]

Plain attention projects and scores all of memory for every head, at every segment. Spans are those of
trained_spans.json. The default is a quarter of the published size: 12 layers of width 256, S = 2048, spans a quarter as
long, 4 streams; --full uses width 512 and S = 8192 (about 8 GB). Before timing, all three must agree in nats to 1e-5. A
round is one segment of 512 positions per stream.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import adaptive_span_jax
from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import ScoredSegment
from adaptive_span_jax.inference import cache_plan
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.inference.scoring import make_decoder_step
from adaptive_span_jax.model import transformer
from adaptive_span_jax.model.memory import memory_sharding
from adaptive_span_jax.runtime import cpu, sharding
from adaptive_span_jax.training import step
from configs import base

VOCABULARY, STREAMS = 205, 4


def make_config(full: bool, attention: str) -> Config:
    """The small published model, or a quarter of it."""
    config = base.get_config()
    config.model.attention = attention
    config.evaluate.batch_size = STREAMS
    if not full:
        config.model.update(width=256, feedforward=1024)
        config.span.limit = 2048
    return Config.from_dict(config.to_dict())


def segment(number: int, length: int) -> ScoredSegment:
    """Any text: cost does not depend on it."""
    ids = np.random.default_rng(number).integers(0, VOCABULARY, (STREAMS, length + 1), np.int32)
    return ScoredSegment(ids[:, :-1], ids[:, 1:], np.ones((STREAMS, length), bool))


class Evaluation:
    """One way to evaluate, with its memory."""

    def __init__(self, compiled: Any, weights: Any, memory: Any, mesh: Any):
        self.compiled, self.weights, self.memory, self.mesh = compiled, weights, memory, mesh

    def read(self, whole: ScoredSegment) -> tuple[float, float]:
        """(nats, seconds) of a segment."""
        start = time.perf_counter()
        self.memory, (nats, _) = self.compiled(self.weights, self.memory, sharding.place_segment(self.mesh, whole))
        return float(nats), time.perf_counter() - start


def main() -> int:
    """Measures; 1 if the paths do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the published size")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cpu.use_cores(STREAMS)
    mesh = sharding.make_mesh()
    config = make_config(options.full, "per_head")
    params = transformer.init(config, VOCABULARY, jax.random.key(0))
    z_LH = np.array(
        json.loads((Path(adaptive_span_jax.__file__).parent / "planning" / "trained_spans.json").read_text())["z_LH"]
    )
    params["layers"]["attention"]["span"]["span_fraction_H"] = jnp.asarray(z_LH / 8192, jnp.float32)
    params = jax.device_put(params, sharding.replicated(mesh))

    paths = {}
    for attention in ("plain", "per_head"):
        config = make_config(options.full, attention)
        memory = jax.jit(
            lambda config=config: transformer.init_memory(config, STREAMS),
            out_shardings=memory_sharding(mesh, STREAMS),
        )()
        paths[attention] = Evaluation(step.make_eval_step(config, mesh), params, memory, mesh)
    decoder = CachedDecoder.of(config, params)
    cache = decoder.empty_cache(STREAMS, mesh)
    paths["cache"] = Evaluation(make_decoder_step(decoder, mesh), decoder.weights, cache, mesh)
    kept = sum(group.rows * len(group.heads) for groups in decoder.plan for group in groups) / z_LH.size
    read = cache_plan.head_reach(config, jax.device_get(params)).mean()
    print(f"positions kept per head: {kept:.0f} on average, {read:.0f} read, limit {config.span.limit}")

    length = config.train.segment
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(options.rounds + 1):
        found = {name: path.read(segment(number, length)) for name, path in paths.items()}
        worst = max(abs(nats - found["plain"][0]) for nats, _ in found.values()) / (STREAMS * length)
        if worst > 1e-5:
            print(f"segment {number}: nats per token differ by {worst:.1e}")
            return 1
        if number:  # the first one compiles
            for name, (_, took) in found.items():
                seconds[name].append(took)
            print(
                f"round {number}: nats agree to {worst:.0e}, "
                + ", ".join(f"{n} {s[-1]:.2f} s" for n, s in seconds.items())
            )
    for name, took in seconds.items():
        speed, ratio = STREAMS * length / median(took), median(seconds["plain"]) / median(took)
        print(f"{name:9} {speed:9,.0f} tokens/s   {ratio:5.1f} × plain")
    return 0


if __name__ == "__main__":
    sys.exit(main())
