"""A short training run by the equations, in float64, in the format of the golden files: for sizes that these lack.

Written from the definition and not from the production code: every score is computed, gradients are JAX's, parameters
have published names and layouts, and the optimizer sees one tensor per name. `tests/system/test_golden.py` runs it on
the sizes of a golden file, too, and compares.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "nb_layers": 2,
    "hidden_size": 12,
    "inner_hidden_size": 1,
    "nb_heads": 2,
    "attn_span": 19,
    "block_size": 8,
    "batch_size": 2,
    "ramp": 4,
    "span_loss": 0.001,
    "steps": 3,
    "lr": 0.07,
    "grad_clip": 0.03,
    "lr_warmup": 2,
    "adapt_span": True,
    "dropout": 0.0,
    "pers_mem_size": 5,
}
SPAN = "attn.attn.adaptive_span._mask.current_val"


def write_golden(path: Path, **changes: Any) -> None:
    """Writes the golden file of a run of these sizes, from random weights, tokens and spans."""
    sizes = SIZES | changes
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes["vocab_size"], (sizes["batch_size"], sizes["steps"] * sizes["block_size"] + 1))
    eval_tokens = rng.integers(0, sizes["vocab_size"], (3, 4 * sizes["block_size"] + 3))
    golden: Any = train(sizes, initial(sizes, rng), tokens, eval_tokens)
    np.savez(path, **golden)


def initial(sizes: dict, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights under published names."""
    width, heads, count = sizes["hidden_size"], sizes["nb_heads"], sizes["pers_mem_size"]
    shapes = {
        "key_pe": (1, width // heads, sizes["attn_span"]),
        "in_emb.weight": (sizes["vocab_size"], width),
        "out_emb.weight": (sizes["vocab_size"], width),
        "out_emb.bias": (sizes["vocab_size"],),
    }
    for layer in range(sizes["nb_layers"]):
        own = {SPAN: (heads, 1, 1)} if sizes["adapt_span"] else {}
        own["attn.attn.persistent_memory.key"] = (heads, width // heads, count)
        own["attn.attn.persistent_memory.val"] = (heads, count, width // heads)
        own |= {f"attn.proj_{name}.weight": (width, width) for name in ("query", "out", "val", "key")}
        own |= {"norm1.weight": (width,), "norm1.bias": (width,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    weights = {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}
    weights |= {name: rng.uniform(size=shape) for name, shape in shapes.items() if name.endswith(SPAN)}
    return {name: array.astype(np.float32) for name, array in weights.items()}


def train(sizes: dict, weights: dict, tokens: np.ndarray, eval_tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Every array of the golden file."""
    golden: dict[str, Any] = {"config": json.dumps(sizes), "tokens": tokens, "eval_tokens": eval_tokens}
    golden |= {f"init/{name}": array for name, array in weights.items()}
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    sums, memory = dict.fromkeys(weights, 0.0), None
    nll, penalties, z_after = [], [], []

    def objective(weights: dict, tokens: jax.Array, memory: Any) -> tuple:
        logprobs, memory = forward(sizes, weights, tokens[:, :-1], memory)
        data = -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=2).mean()
        penalty = sizes["span_loss"] * sizes["attn_span"] * sum(z.mean() for z in spans(weights))
        return data + penalty, (data, penalty, logprobs, memory)

    gradient = jax.jit(jax.grad(objective, has_aux=True))
    for step in range(sizes["steps"]):
        part = tokens[:, step * sizes["block_size"] : (step + 1) * sizes["block_size"] + 1]
        grads, (data, penalty, logprobs, memory) = jax.device_get(gradient(weights, part, memory))
        if step < 2:
            golden |= {f"logprobs/{step}": logprobs} | {f"grad/{step}/{name}": grads[name] for name in grads}
        nll.append(data)
        penalties.append(penalty)
        rate = sizes["lr"] * min(1, (step + 1) / sizes["lr_warmup"])
        for name, grad in grads.items():
            sums[name] = sums[name] + grad**2
            clip = min(1, sizes["grad_clip"] / (np.sqrt((grad**2).sum()) + 1e-10))
            weights[name] = weights[name] - rate * clip * grad / (np.sqrt(sums[name]) + 1e-10)
            if name.endswith(SPAN):
                weights[name] = np.clip(weights[name], 0, 1)
        z_after.append([sizes["attn_span"] * z.ravel() for z in spans(weights)])
    if sizes["adapt_span"]:
        for name, each in (("avg_span", np.mean), ("max_span", np.max)):
            ends = np.array([np.ceil(each(z)) + sizes["ramp"] for z in z_after[-1]])
            golden[name] = np.minimum(ends, sizes["attn_span"])
        golden["z_after_step"] = z_after
    golden |= {"nll": nll, "span_loss": penalties, "full_eval_nll": evaluate(sizes, weights, eval_tokens)}
    golden |= {f"final/{name}": array for name, array in weights.items()}
    return {name: np.asarray(array) for name, array in golden.items()}


def evaluate(sizes: dict, weights: dict, tokens: np.ndarray) -> float:
    """The mean over whole segments of their mean loss, from empty memory."""
    size, memory, losses = sizes["block_size"], None, []
    for first in range(0, tokens.shape[1] - size, size):
        part = tokens[:, first : first + size + 1]
        logprobs, memory = forward(sizes, weights, part[:, :-1], memory)
        losses.append(-np.take_along_axis(np.asarray(logprobs), part[:, 1:, None], axis=2).mean())
    return float(np.mean(losses))


def spans(weights: dict) -> list:
    return [array for name, array in weights.items() if name.endswith(SPAN)]


def forward(sizes: dict, weights: dict, tokens: ArrayLike, memory: Any) -> tuple[jax.Array, list[jax.Array]]:
    """(log-probabilities, the memory for the next segment), given the last S inputs of every layer."""
    heads, limit, ramp, count = (sizes[name] for name in ("nb_heads", "attn_span", "ramp", "pers_mem_size"))
    hidden = jnp.asarray(weights["in_emb.weight"])[tokens]
    streams, length, width = hidden.shape
    head_width = width // heads
    memory = memory or [jnp.zeros((streams, limit, width))] * sizes["nb_layers"]
    # Column j of the context is x = S + t − j positions before query t. Column S − x of key_pe is for distance x.
    distance = limit + np.arange(length)[:, None] - np.arange(limit + length)[None, :]
    seen = (distance >= 1) & (distance <= limit)
    position = jnp.asarray(weights["key_pe"])[0][:, np.where(seen, limit - distance, 0)]  # [K, T, J]
    after = []
    for layer in range(sizes["nb_layers"]):
        own = {name.removeprefix(f"layers.{layer}."): array for name, array in weights.items()}
        context = jnp.concatenate([memory[layer], hidden], axis=1)
        after.append(jax.lax.stop_gradient(context[:, -limit:]))

        def project(rows: jax.Array, name: str, own: dict = own) -> jax.Array:
            return (rows @ own[f"attn.proj_{name}.weight"].T).reshape(streams, -1, heads, head_width)

        query, key, value = project(hidden, "query"), project(context, "key"), project(context, "val")
        score = jnp.einsum("bthk,bjhk->bhtj", query, key) + jnp.einsum("bthk,ktj->bhtj", query, position)
        score = score / np.sqrt(head_width)
        z = limit * own[SPAN] if SPAN in own else jnp.full((heads, 1, 1), float(limit))
        ratio = (ramp + z + 1 - distance[None]) / ramp
        mask = jnp.where(ratio < 0, 0, jnp.where(ratio > 1, 1, ratio))  # at both ends its derivative is 1
        unnormalised = jnp.where(seen[None, None], mask[None] * jnp.exp(score), 0)
        constant_key = own["attn.attn.persistent_memory.key"] * np.sqrt(head_width)
        constant_value = own["attn.attn.persistent_memory.val"] * np.sqrt(count)
        constant = jnp.exp(jnp.einsum("bthk,hkn->bhtn", query, constant_key) / np.sqrt(head_width))
        total = unnormalised.sum(axis=-1, keepdims=True) + constant.sum(axis=-1, keepdims=True)
        average = jnp.einsum("bhtj,bjhk->bthk", unnormalised / total, value)
        average += jnp.einsum("bhtn,hnk->bthk", constant / total, constant_value)
        hidden = hidden + average.reshape(streams, length, width) @ own["attn.proj_out.weight"].T
        centred = hidden - hidden.mean(axis=-1, keepdims=True)
        hidden = centred / jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        hidden = hidden * own["norm1.weight"][None, None, :] + own["norm1.bias"][None, None, :]
    logits = hidden @ weights["out_emb.weight"].T + weights["out_emb.bias"][None, None, :]
    return jax.nn.log_softmax(logits), after
