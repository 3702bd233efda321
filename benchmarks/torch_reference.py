"""The published algorithm in PyTorch, written from its description; `train_speed.py` compares our speed with it.

Every head of a layer is computed with that layer's longest span, rounded up to a multiple of 64; the layer's memory has
that length, grows with the spans, and is projected completely for every head; scores are batched matrix products, and a
pad with a reshape turns scores by key into scores by distance. The optimizer works in place. Parameters have the names
and shapes of `adaptive_span_jax/model/transformer.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

TRIM = 64
MARGIN = 256  # memory that is kept beyond the longest span, because it may grow
EPSILON = 1e-10


class Reference:
    """A model, its optimizer and its memory."""

    def __init__(self, config: Mapping[str, Any], params: Mapping[str, np.ndarray]):
        """`config` as in `configs/base.py`, `params` one array per path, as in "layers/feedforward/expand_DF"."""
        self.model, self.span, self.train = config["model"], config["span"], config["train"]
        # Each layer has its own tensors, as published, because clipping is per tensor.
        self.weights: dict[str, list[Tensor]] = {}
        for name, array in params.items():
            parts = list(array) if name.startswith("layers/") else [array]
            self.weights[name] = [torch.tensor(part).requires_grad_() for part in parts]
        self.squares = {name: [torch.zeros_like(part) for part in parts] for name, parts in self.weights.items()}
        self.updates = 0
        self.reset_memory()

    def reset_memory(self) -> None:
        """Empties the memory; it has zeros before the first token."""
        empty = torch.zeros(self.train["batch_size"], 0, self.model["width"])
        self.memory_LBMD = [empty for _ in range(self.model["layers"])]

    def train_step(self, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> float:
        """Forward, backward, update; the mean nats without the penalty."""
        nats = self._nats(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT), self.model["dropout"])
        loss = nats
        if self.span["kind"] == "adaptive":
            for fraction_H in self.weights["layers/attention/span/span_fraction_H"]:
                loss = loss + self.span["penalty"] * self.span["limit"] * fraction_H.mean()
        loss.backward()
        self._update()
        return float(nats.detach())

    @torch.no_grad()
    def evaluate(self, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> float:
        """Forward only."""
        return float(self._nats(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT), 0.0))

    def gradient_norms(self) -> dict[str, float]:
        """√Σ g² of every parameter, over all updates so far."""
        return {
            name: math.sqrt(sum(float(part.double().sum()) for part in parts)) for name, parts in self.squares.items()
        }

    def _longest(self, layer: int) -> int:
        limit = self.span["limit"]
        if self.span["kind"] == "fixed":
            return limit
        fraction = float(self.weights["layers/attention/span/span_fraction_H"][layer].detach().max())
        return min(limit, math.ceil((math.ceil(fraction * limit) + self.span["ramp"]) / TRIM) * TRIM)

    def _nats(self, tokens_BT: Tensor, targets_BT: Tensor, dropout: float) -> Tensor:
        (embedding_VD,), (output_DV,), (bias_V,) = (
            self.weights[name] for name in ("embedding_VD", "output_DV", "output_bias_V")
        )
        hidden_BTD = functional.embedding(tokens_BT.long(), embedding_VD)
        for layer in range(self.model["layers"]):
            weights = {
                name.removeprefix("layers/"): parts[layer] for name, parts in self.weights.items() if "/" in name
            }
            longest = self._longest(layer)
            kept_BMD = self.memory_LBMD[layer]
            if kept_BMD.shape[1] < longest:  # only in the first steps
                kept_BMD = functional.pad(kept_BMD, (0, 0, longest - kept_BMD.shape[1], 0))
            memory_BMD = kept_BMD[:, -longest:]
            kept_BMD = torch.cat([kept_BMD, hidden_BTD.detach()], 1)
            self.memory_LBMD[layer] = kept_BMD[:, -min(longest + MARGIN, self.span["limit"]) :]
            attended_BTD = self._attention(hidden_BTD, memory_BMD, weights, dropout)
            hidden_BTD = _norm(hidden_BTD + attended_BTD, weights, "attention_norm")
            inner_BTF = functional.relu(
                functional.linear(
                    hidden_BTD, weights["feedforward/expand_DF"].t(), weights["feedforward/expand_bias_F"]
                )
            )
            inner_BTF = functional.dropout(inner_BTF, dropout, training=dropout > 0)
            fed_BTD = functional.linear(
                inner_BTF, weights["feedforward/contract_FD"].t(), weights["feedforward/contract_bias_D"]
            )
            hidden_BTD = _norm(hidden_BTD + fed_BTD, weights, "feedforward_norm")
        logits_BTV = functional.linear(hidden_BTD, output_DV.t(), bias_V)
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.long().flatten())

    def _attention(
        self, hidden_BTD: Tensor, memory_BMD: Tensor, weights: Mapping[str, Tensor], dropout: float
    ) -> Tensor:
        streams, length, width = hidden_BTD.shape
        span, heads = memory_BMD.shape[1], self.model["heads"]
        context_BJD = torch.cat([memory_BMD, hidden_BTD], 1)

        def project(rows: Tensor, name: str) -> Tensor:
            projected = rows @ weights[f"attention/{name}"].flatten(1)
            return projected.view(streams, -1, heads, width // heads).transpose(1, 2).flatten(0, 1)

        query, key, value = (
            project(hidden_BTD, "query_DHK"),
            project(context_BJD, "key_DHK"),
            project(context_BJD, "value_DHK"),
        )
        (positions_SK,) = self.weights["positions_SK"]
        content = _by_distance(torch.bmm(query, key.transpose(1, 2)), span)
        score = (content + query @ positions_SK[:span].flip(0).t()) / math.sqrt(width // heads)
        weight = torch.softmax(score, -1)
        if self.span["kind"] == "adaptive":
            distance = torch.arange(span, 0, -1)
            z = weights["attention/span/span_fraction_H"][:, None, None] * self.span["limit"]
            mask = _Clip.apply((self.span["ramp"] + z + 1 - distance) / self.span["ramp"])
            weight = (weight.view(streams, heads, length, span) * mask).flatten(0, 1)
            weight = weight / weight.sum(-1, keepdim=True)
        weight = functional.dropout(weight, dropout, training=dropout > 0)
        output = torch.bmm(_by_key(weight), value)
        output_BTD = output.view(streams, heads, length, -1).transpose(1, 2).reshape(streams, length, width)
        return output_BTD @ weights["attention/output_HKD"].flatten(0, 1)

    @torch.no_grad()
    def _update(self) -> None:
        rate = self.train["learning_rate"] * min(1.0, (self.updates + 1) / max(self.train["warmup_steps"], 1))
        self.updates += 1
        for name, parts in self.weights.items():
            for weight, total in zip(parts, self.squares[name], strict=True):
                gradient = weight.grad
                assert gradient is not None
                clip = min(1.0, self.train["clip"] / (float(gradient.norm()) + EPSILON))
                total.addcmul_(gradient, gradient)
                weight.addcdiv_(gradient, total.sqrt().add_(EPSILON), value=-rate * clip)
                weight.grad = None
                if name.endswith("span_fraction_H"):
                    weight.clamp_(0, 1)


class _Clip(torch.autograd.Function):
    """Clips to [0, 1] with a derivative of 1 on the closed interval."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *d_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return d_output[0] * ((x >= 0) & (x <= 1))


def _norm(rows: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.layer_norm(rows, rows.shape[-1:], weights[f"{name}/scale"], weights[f"{name}/bias"], 1e-5)


def _by_distance(scores: Tensor, span: int) -> Tensor:
    """[N, T, M + T] by key → [N, T, M] by distance, furthest first: row t starts t columns further right."""
    batch, length, context = scores.shape
    flat = functional.pad(scores.flatten(1), (0, length))
    return flat.view(batch, length, context + 1)[:, :, :span]


def _by_key(weights: Tensor) -> Tensor:
    """[N, T, M] by distance → [N, T, M + T] by key, 0 elsewhere."""
    batch, length, span = weights.shape
    flat = functional.pad(weights, (0, length + 1)).flatten(1)[:, :-length]
    return flat.view(batch, length, span + length)
