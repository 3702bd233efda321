"""Replays a golden run of the published code with the production code in float64, and prints the largest errors.

    python tests/golden/replay.py tests/golden/adaptive_tiny.npz

Errors are relative to the largest entry of each tensor; the exit code is 1 if one is above 1e-9.
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import Segment
from adaptive_span_jax.interop.published_weights import from_published, to_published
from adaptive_span_jax.model import span
from adaptive_span_jax.model.transformer import Params
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training import objective, step
from adaptive_span_jax.training.evaluation import Score, score
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import create_state
from configs import base

TOLERANCE = 1e-9

# The fused kernels compute in float32 at most; they are compared with the reference in tests/model/test_fused.py.
PATHS = ("per_head", "plain")


def replay(path: Path, attention: str, mesh: Mesh | None = None) -> dict[str, float]:
    """The largest relative error of every quantity in a golden file, with one of the attentions. Needs 64-bit mode.

    On several devices each has its own copy of the golden streams: all losses and gradients are means over streams.
    """
    mesh = mesh or sharding.make_mesh(jax.devices()[:1])
    golden = dict(np.load(path))
    published = json.loads(str(golden["config"]))
    for name in ("tokens", "eval_tokens"):
        golden[name] = np.tile(golden[name], (mesh.size, 1))
    config = _config(published, attention, golden["tokens"].shape[0], golden["eval_tokens"].shape[0])
    optimizer = make_optimizer(config.train)
    state = create_state(config, published["vocab_size"], optimizer, mesh)
    params = from_published(_below(golden, "init/"), config.model.heads)
    state = jax.device_put(
        type(state)(state.step, jax.tree.map(np.float64, params), state.opt_state, state.memory),
        jax.tree.map(lambda leaf: leaf.sharding, state),
    )
    train_step = step.make_train_step(config, optimizer, state, mesh)

    @jax.jit
    def gradient(*arguments):
        with sharding.on_mesh(mesh):
            return jax.grad(partial(objective.objective, config), has_aux=True)(*arguments)

    errors: dict[str, float] = {}
    nats, penalties, z_after = [], [], []
    for number in range(published["steps"]):
        first = number * config.train.segment
        tokens = golden["tokens"][:, first : first + config.train.segment + 1]
        segment = sharding.place_segment(mesh, Segment(tokens[:, :-1], tokens[:, 1:]))
        if f"logprobs/{number}" in golden:
            errors |= _compare_gradients(gradient, state, segment, golden, number)
        state, metrics = train_step(state, segment)
        nats.append(float(metrics.nats))
        penalties.append(float(metrics.penalty_nats))
        if config.span.kind == "adaptive":
            fraction_LH = state.params["layers"]["attention"]["span"]["span_fraction_H"]
            z_after.append(config.span.limit * np.asarray(fraction_LH))

    errors["nll of every step"] = _error(nats, golden["nll"])
    errors["penalty of every step"] = _error(penalties, golden["span_loss"])
    if z_after:
        errors["z after every step"] = _error(z_after, golden["z_after_step"])
    if "avg_span" in golden and z_after:
        average = span.average_span(z_after[-1], config.span.ramp, config.span.limit)
        errors["average span"] = _error(average, golden["avg_span"].mean())
        # Published logs round the longest span up, too.
        longest = min(np.ceil(z_after[-1].max()) + config.span.ramp, config.span.limit)
        errors["longest span"] = _error(longest, golden["max_span"].max())
    errors |= _compare_weights("final", state.params, golden)
    evaluation = _evaluate(config, state.params, golden["eval_tokens"], mesh)
    errors["published evaluation"] = _error(evaluation.nats, golden["full_eval_nll"])
    return errors


def main(arguments: list[str]) -> int:
    """Replays the files named on the command line; 1 if any error is above the tolerance."""
    if not arguments:
        print(__doc__)
        return 2
    paths = [Path(argument) for argument in arguments]
    for path in paths:
        if not path.is_file():
            print(f"{path}: no such file; pass a golden .npz file, e.g. tests/golden/adaptive_tiny.npz")
            return 2
    jax.config.update("jax_enable_x64", True)
    worst = 0.0
    for path in paths:
        for attention in PATHS:
            print(f"{path}, {attention} attention")
            for name, error in replay(path, attention).items():
                print(f"  {error:9.2e}  {name}{'   ABOVE TOLERANCE' if not error <= TOLERANCE else ''}")
                worst = max(worst, error if np.isfinite(error) else np.inf)
    print(f"largest relative error {worst:.2e}, allowed {TOLERANCE:.0e}")
    return 0 if worst <= TOLERANCE else 1


def _config(published: dict, attention: str, streams: int, eval_streams: int) -> Config:
    config = base.get_config()
    config.model.update(
        layers=published["nb_layers"],
        width=published["hidden_size"],
        heads=published["nb_heads"],
        feedforward=max(published["inner_hidden_size"], 1),
        persistent=published.get("pers_mem_size", 0),
        dropout=float(published["dropout"]),
        attention=attention,
        compute_dtype="float64",
    )
    config.span.update(
        kind="adaptive" if published["adapt_span"] else "fixed",
        limit=published["attn_span"],
        ramp=published["ramp"],
        penalty=float(published["span_loss"]),
    )
    config.train.update(
        batch_size=streams,
        segment=published["block_size"],
        steps=published["steps"],
        learning_rate=published["lr"],
        warmup_steps=published["lr_warmup"],
        clip=published["grad_clip"],
    )
    config.evaluate.batch_size = eval_streams
    return Config.from_dict(config.to_dict())


def _compare_gradients(gradient, state, segment: Segment, golden: dict, number: int) -> dict[str, float]:
    gradients, (prediction, _, _) = gradient(state.params, segment, state.memory, None)
    logprobs = jax.nn.log_softmax(prediction.logits_BTV)
    expected = golden[f"logprobs/{number}"]
    copies = logprobs.shape[0] // expected.shape[0]
    errors = {f"log-probabilities of step {number}": _error(logprobs, np.tile(expected, (copies, 1, 1)))}
    return errors | _compare_weights(f"grad/{number}", gradients, golden)


def _compare_weights(prefix: str, params: Params, golden: dict) -> dict[str, float]:
    ours = to_published(jax.tree.map(np.asarray, params))
    theirs = _below(golden, f"{prefix}/")
    if ours.keys() != theirs.keys():
        return {f"{prefix}: names differ: {sorted(ours.keys() ^ theirs.keys())}": np.inf}
    return {f"{prefix}/{name}": _error(ours[name], theirs[name]) for name in theirs}


def _evaluate(config: Config, params: Params, tokens_BT: np.ndarray, mesh) -> Score:
    # The published protocol cuts one text into streams: laid end to end, the golden streams come out of the cut again.
    return score(config, params, tokens_BT.reshape(-1), "published", step.make_eval_step(config, mesh), mesh)


def _below(arrays: dict, prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _error(found, expected) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        return np.inf
    largest = np.abs(expected).max(initial=0.0)
    return float(np.abs(found - expected).max(initial=0.0) / (largest if largest else 1.0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
