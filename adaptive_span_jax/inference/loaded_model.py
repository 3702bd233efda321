"""`adaptive_span_jax.load(workdir)`: the model of a checkpoint, which scores and generates text and has spans."""

import functools
import hashlib
import json
import numbers
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax.checkpoint.manager import CheckpointMetadata, Checkpoints
from adaptive_span_jax.config import CheckpointConfig, Config, GenerateConfig
from adaptive_span_jax.data import corpus
from adaptive_span_jax.errors import UserError, UserTypeError
from adaptive_span_jax.inference import cache_plan, capacity
from adaptive_span_jax.inference.cache import KVCache
from adaptive_span_jax.inference.cache_plan import CHUNK
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.inference.sampling import Sampling, sample
from adaptive_span_jax.model import span, transformer
from adaptive_span_jax.model.transformer import Params
from adaptive_span_jax.runtime import sharding, storage
from adaptive_span_jax.training import objective

# For runs whose checkpoints are only read.
READ_ONLY = CheckpointConfig(every_steps=1, every_minutes=0.0, keep=1, on_failure="stop")


class DecodeState(NamedTuple):
    """The state of streams between two tokens: their KV cache and the logits of the next token."""

    cache: KVCache
    logits_BV: jax.Array


def load(workdir: str | Path, step: str | int = "latest") -> "LoadedModel":
    """The model of a run's checkpoint: the latest, the best on dev, or a step number.

    A float64 model requires JAX's 64-bit mode, which the caller must enable.
    """
    if not isinstance(workdir, str | os.PathLike):
        raise UserTypeError(f"workdir is {workdir!r}, a {type(workdir).__name__}; it must be a str or a Path")
    if isinstance(step, bool) or not isinstance(step, str | numbers.Integral):
        raise UserTypeError(f"step is {step!r}, a {type(step).__name__}; it must be latest, best or a step number")
    mesh = sharding.make_mesh(jax.devices()[:1])
    config, saved, params = load_params(storage.place(workdir), str(step), mesh)
    return LoadedModel(config, saved, params, mesh)


def load_params(workdir: Path, step: str, mesh: Mesh) -> tuple[Config, CheckpointMetadata, Params]:
    """(a run's config, the metadata of its checkpoint, its parameters replicated on a mesh)."""
    if not (workdir / "checkpoints").is_dir():
        problem = "has no checkpoints" if workdir.is_dir() else "does not exist"
        raise UserError(f"workdir {workdir} {problem}; pass the workdir of a run that has saved a checkpoint")
    checkpoints = Checkpoints(workdir / "checkpoints", READ_ONLY)
    saved = checkpoints.describe(checkpoints.choose(step))
    config = Config.from_dict(saved.config)
    _check_x64(config, workdir, jax.dtypes.canonicalize_dtype(np.float64))
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding.replicated(mesh)),
        jax.eval_shape(lambda: transformer.init(config, len(saved.vocabulary), jax.random.key(0))),
    )
    params = checkpoints.restore(saved.step, {"params": abstract})["params"]
    # Arrays are restored by other threads, for which `with jax.enable_x64(True)` has no effect.
    _check_x64(config, workdir, params["embedding_VD"].dtype)
    return config, saved, params


def _check_x64(config: Config, workdir: Path, dtype: np.dtype) -> None:
    """Raises if a float64 model would be loaded with another dtype."""
    if config.model.compute_dtype == "float64" and dtype != np.float64:
        raise UserError(
            f"the model in {workdir} computes in float64, but JAX is in 32-bit mode; call "
            'jax.config.update("jax_enable_x64", True) first, or set JAX_ENABLE_X64=1'
        )


class LoadedModel:
    """A trained model and its vocabulary, on one device. Texts are bytes, or str, which is encoded as UTF-8."""

    def __init__(self, config: Config, saved: CheckpointMetadata, params: Params, mesh: Mesh):
        self.config = config
        self.step = saved.step
        self.vocabulary = corpus.symbols(saved.vocabulary)
        self.unit = corpus.unit(config.data)
        self.decoder = CachedDecoder.of(config, params)
        self._z_LH = cache_plan.largest_z(config, jax.device_get(params))
        self._mesh = mesh
        shardings: Any = DecodeState
        self._shardings = shardings(self.decoder.cache_sharding(1, mesh), sharding.replicated(mesh))

    @functools.cached_property
    def hash(self) -> str:
        """32 hex digits of a SHA-256 over everything that probabilities depend on."""
        model, span = self.config.model, self.config.span
        fields = [model.heads, model.compute_dtype, model.mask_empty_memory, span.kind, span.limit, span.ramp]
        if model.persistent:  # not in the hashes of models without, which files compressed earlier contain
            fields.append(model.persistent)
        digest = hashlib.sha256(json.dumps(fields).encode())
        digest.update(b"".join(self.vocabulary))
        for leaf in jax.tree.leaves(self.decoder.weights):
            digest.update(np.ascontiguousarray(leaf).data)
        return digest.hexdigest()[:32]

    def encode(self, text: bytes | str, argument: str = "text") -> np.ndarray:
        """The ids of a text; `argument` is its name in errors."""
        if not isinstance(text, bytes | bytearray | str):
            raise UserTypeError(f"{argument} is of type {type(text).__name__}; it must be bytes or str")
        text = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        return corpus.encode(text, self.vocabulary, f"this model's text ({self.config.data.source})")

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of the ids."""
        return corpus.decode(ids, self.vocabulary)

    def logprobs(self, text: bytes | str, on_progress: Callable[[float], None] = lambda share: None) -> np.ndarray:
        """log p of every symbol except the first, given all symbols before it, in nats. Memory starts empty.

        `on_progress` is called with the completed fraction.
        """
        ids = self.encode(text)
        logprobs = [logprob_T for logprob_T, _ in self._scored_chunks(ids, on_progress)]
        return np.concatenate(logprobs) if logprobs else np.zeros(0, np.float32)

    def spans(self, text: bytes | str = b"") -> np.ndarray:
        """Each head's span in positions with its ramp: [layers, heads]. Dynamic spans are averaged over a text."""
        ids = self.encode(text)
        if self.config.span.kind == "dynamic":
            if ids.size < 2:
                raise UserError(
                    f"text has {ids.size} symbols; dynamic spans depend on the text, so it must have at least 2"
                )
            logprobs, z_NLH = zip(*self._scored_chunks(ids), strict=True)
            # Averaged as in an evaluation, over the tokens that have a target.
            z_LH = np.average(z_NLH, axis=0, weights=[logprob_T.size for logprob_T in logprobs])
        else:
            z_LH = self._z_LH
        return span.head_spans(z_LH, self.config.span.ramp, self.config.span.limit)

    def _scored_chunks(
        self, ids: np.ndarray, on_progress: Callable[[float], None] = lambda share: None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For every chunk: (the log-probabilities of its targets, z_LH averaged over the tokens that have a target)."""
        targets = max(ids.size - 1, 0)
        padded = np.pad(ids.astype(np.int32), (0, -targets % CHUNK))
        scores, cache = [], self.decoder.empty_cache(1, self._mesh)
        for start in range(0, targets, CHUNK):
            part_1T, scored_1T = padded[None, start : start + CHUNK + 1], (np.arange(CHUNK) < targets - start)[None]
            chunk_scores, cache = self._score(self.decoder.weights, part_1T[:, :-1], part_1T[:, 1:], scored_1T, cache)
            scores.append(chunk_scores)
            if start % (16 * CHUNK) == 0:
                jax.block_until_ready(chunk_scores)
                on_progress(start / targets)
        scores = jax.device_get(scores)
        return [(logprob_T[: targets - CHUNK * number], z_LH) for number, (logprob_T, z_LH) in enumerate(scores)]

    def generate(
        self,
        prompt: bytes | str,
        length: int = 500,
        *,
        samples: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[bytes]:
        """Continuations of a prompt, `length` symbols each, without the prompt."""
        steps = self.continuation(prompt, length, samples, Sampling(temperature, top_k, top_p), seed)
        tokens = [token_B for token_B, _ in steps]
        return [self.decode(np.array(row, np.uint8)) for row in np.array(tokens, np.uint8).reshape(-1, samples).T]

    def continuation(
        self,
        prompt: bytes | str,
        length: int,
        samples: int,
        sampling: Sampling,
        seed: int,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (token_B, logprob_B) for each position: the token of every sample and its log-probability."""
        # Validated outside the generator, so that this call raises and not the first `next`.
        checked = GenerateConfig.from_arguments(length=length, samples=samples, seed=seed, **sampling._asdict())
        self._prompt(prompt)
        return self._continuation(prompt, checked, on_progress)

    def _continuation(
        self, prompt: bytes | str, generate: GenerateConfig, on_progress: Callable[[float], None]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        sampling = Sampling(generate.temperature, generate.top_k, generate.top_p)
        state = self.read(prompt, generate.samples, on_progress)
        key, pending = jax.random.key(generate.seed), None
        for number in range(generate.length):
            drawn, state = self._advance(self.decoder.weights, state, jax.random.fold_in(key, number), sampling)
            # Fetched only now, while the device is computing the next token.
            if pending is not None:
                yield jax.device_get(pending)
            pending = drawn
        if pending is not None:
            yield jax.device_get(pending)

    def read(
        self,
        prompt: bytes | str,
        streams: int,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> DecodeState:
        """The state after a prompt of any length, the same in every stream."""
        ids = self._prompt(prompt)
        capacity.check_reading(self.decoder, streams, CHUNK, self._mesh, "generate.samples")
        # Padding comes first, so that the last chunk ends with the prompt; it does not change the result.
        padding = -ids.size % CHUNK
        # A view: a long prompt is not copied for every stream.
        tokens_BN = np.broadcast_to(np.pad(ids.astype(np.int32), (padding, 0)), (streams, padding + ids.size))
        state = DecodeState(self.decoder.empty_cache(streams, self._mesh, padding), jnp.zeros(0))
        for start in range(0, tokens_BN.shape[1], CHUNK):
            state = self.extend(tokens_BN[:, start : start + CHUNK], state)
            if start % (16 * CHUNK) == 0:
                jax.block_until_ready(state.logits_BV)
                on_progress(start / tokens_BN.shape[1])
        return state

    def _prompt(self, prompt: bytes | str) -> np.ndarray:
        ids = self.encode(prompt, "prompt")
        if not ids.size:
            raise UserError("the prompt is empty; it must have at least one symbol")
        return ids

    def start(self, streams: int) -> DecodeState:
        """The state of empty streams; it has no logits yet."""
        return DecodeState(self.decoder.empty_cache(streams, self._mesh), jnp.zeros(0))

    def extend(self, tokens_BT: np.ndarray, state: DecodeState) -> DecodeState:
        """The state after more tokens, either 1 or a whole chunk; `state` is donated."""
        return self._read(self.decoder.weights, tokens_BT, state.cache)

    @functools.cached_property
    def _read(self) -> Callable:
        def read(weights: Params, tokens_BT: jax.Array, cache: KVCache) -> DecodeState:
            logits_BTV, cache, _ = self.decoder.read(weights, tokens_BT, cache)
            return DecodeState(cache, logits_BTV[:, -1])

        return jax.jit(read, donate_argnums=2, out_shardings=self._shardings)

    @functools.cached_property
    def _advance(self) -> Callable:
        def advance(
            weights: Params, state: DecodeState, key: jax.Array, sampling: Sampling
        ) -> tuple[tuple[jax.Array, jax.Array], DecodeState]:
            token_B = sample(state.logits_BV, key, sampling)
            logprob_B = -objective.nats_BT(state.logits_BV[:, None], token_B[:, None])[:, 0]
            logits_BTV, cache, _ = self.decoder.read(weights, token_B[:, None], state.cache)
            return (token_B, logprob_B), DecodeState(cache, logits_BTV[:, 0])

        return jax.jit(advance, donate_argnums=1, out_shardings=(None, self._shardings))

    @functools.cached_property
    def _score(self) -> Callable:
        def score(
            weights: Params, tokens_1T: jax.Array, targets_1T: jax.Array, scored_1T: jax.Array, cache: KVCache
        ) -> Any:
            logits_1TV, cache, z_L1TH = self.decoder.read(weights, tokens_1T, cache)
            return (-objective.nats_BT(logits_1TV, targets_1T)[0], span.mean_z(z_L1TH, scored_1T)), cache

        return jax.jit(score, donate_argnums=4, out_shardings=(None, self._shardings.cache))
