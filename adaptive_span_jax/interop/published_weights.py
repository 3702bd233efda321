"""The published code's names and layouts of weights ↔ our parameter tree. Pure numpy renaming and reshaping.

Published linear weights are [out, in]; ours are [in, …out]. Published positions are [1, K, S] with distance 1 in the
last column; ours are [S, K] with distance 1 first. Persistent vectors have the same layouts in both.
"""

from collections.abc import Mapping

import numpy as np

from adaptive_span_jax.model.transformer import LAYERS, Params

_SPAN = "attn.attn.adaptive_span._mask.current_val"
_PERSISTENT = (("key_HKU", "attn.attn.persistent_memory.key"), ("value_HUK", "attn.attn.persistent_memory.val"))


def from_published(weights: Mapping[str, np.ndarray], heads: int) -> Params:
    """Our parameters, or arrays of the same shapes (gradients, Adagrad sums), from arrays under published names."""
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    width = weights["in_emb.weight"].shape[1]

    def stack(name: str) -> np.ndarray:
        return np.stack([np.asarray(weights[f"layers.{i}.{name}"]) for i in range(layers)])

    def projection(name: str) -> np.ndarray:
        return stack(f"attn.proj_{name}.weight").transpose(0, 2, 1).reshape(layers, width, heads, width // heads)

    attention: Params = {f"{ours}_DHK": projection(theirs) for ours, theirs in _PROJECTIONS}
    attention["output_HKD"] = (
        stack("attn.proj_out.weight").transpose(0, 2, 1).reshape(layers, heads, width // heads, width)
    )
    if f"layers.0.{_SPAN}" in weights:
        attention["span"] = {"span_fraction_H": stack(_SPAN).reshape(layers, heads)}
    stacked: Params = {
        "attention": attention,
        "attention_norm": {"scale": stack("norm1.weight"), "bias": stack("norm1.bias")},
    }
    if is_persistent(weights):
        attention["persistent"] = {ours: stack(theirs) for ours, theirs in _PERSISTENT}
    else:
        stacked["feedforward"] = {
            "expand_DF": stack("ff.fc1.weight").transpose(0, 2, 1),
            "expand_bias_F": stack("ff.fc1.bias"),
            "contract_FD": stack("ff.fc2.weight").transpose(0, 2, 1),
            "contract_bias_D": stack("ff.fc2.bias"),
        }
        stacked["feedforward_norm"] = {"scale": stack("norm2.weight"), "bias": stack("norm2.bias")}
    return {
        "embedding_VD": np.asarray(weights["in_emb.weight"]),
        "positions_SK": np.asarray(weights["key_pe"])[0, :, ::-1].T,
        "output_DV": np.asarray(weights["out_emb.weight"]).T,
        "output_bias_V": np.asarray(weights["out_emb.bias"]),
        LAYERS: stacked,
    }


def is_persistent(weights: Mapping[str, np.ndarray]) -> bool:
    """Whether arrays under published names are of an all-attention model, which has no feed-forward."""
    return f"layers.0.{_PERSISTENT[0][1]}" in weights


_PROJECTIONS = (("query", "query"), ("key", "key"), ("value", "val"))


def to_published(params: Params) -> dict[str, np.ndarray]:
    """The inverse of `from_published`."""
    weights = {
        "in_emb.weight": np.asarray(params["embedding_VD"]),
        "key_pe": np.asarray(params["positions_SK"]).T[None, :, ::-1],
        "out_emb.weight": np.asarray(params["output_DV"]).T,
        "out_emb.bias": np.asarray(params["output_bias_V"]),
    }
    stacked = params[LAYERS]
    attention = stacked["attention"]
    layers, width = attention["query_DHK"].shape[:2]
    for i in range(layers):
        layer = {
            "attn.proj_out.weight": attention["output_HKD"][i].reshape(width, width).T,
            "norm1.weight": stacked["attention_norm"]["scale"][i],
            "norm1.bias": stacked["attention_norm"]["bias"][i],
        }
        if "persistent" in attention:
            layer |= {theirs: attention["persistent"][ours][i] for ours, theirs in _PERSISTENT}
        else:
            feedforward, norm = stacked["feedforward"], stacked["feedforward_norm"]
            layer |= {
                "ff.fc1.weight": feedforward["expand_DF"][i].T,
                "ff.fc1.bias": feedforward["expand_bias_F"][i],
                "ff.fc2.weight": feedforward["contract_FD"][i].T,
                "ff.fc2.bias": feedforward["contract_bias_D"][i],
                "norm2.weight": norm["scale"][i],
                "norm2.bias": norm["bias"][i],
            }
        for ours, theirs in _PROJECTIONS:
            layer[f"attn.proj_{theirs}.weight"] = attention[f"{ours}_DHK"][i].reshape(width, width).T
        if "span" in attention:
            layer[_SPAN] = attention["span"]["span_fraction_H"][i].reshape(-1, 1, 1)
        weights |= {f"layers.{i}.{name}": np.asarray(value) for name, value in layer.items()}
    return weights
