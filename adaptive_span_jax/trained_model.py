"""A run's checkpoint as an object: `adaptive_span_jax.load(workdir)`. It scores text, continues it, tells its spans."""

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

from adaptive_span_jax import capacity, corpus, head_reach, loss, model, sharding, span, storage
from adaptive_span_jax.checkpoint import Checkpoints, Saved
from adaptive_span_jax.config import CheckpointConfig, Config, GenerateConfig
from adaptive_span_jax.errors import UserError, UserTypeError
from adaptive_span_jax.finished_model import FinishedModel
from adaptive_span_jax.head_reach import CHUNK
from adaptive_span_jax.key_value_cache import KeyValueCache
from adaptive_span_jax.model import Params
from adaptive_span_jax.sampling import Sampling, sample

# For checkpoints of runs that are only read.
READ_ONLY = CheckpointConfig(every_steps=1, every_minutes=0.0, keep=1, on_failure="stop")


class Reading(NamedTuple):
    """Where streams stand that are being continued: their cache, and the logits of what comes next."""

    cache: KeyValueCache
    logits_BV: jax.Array


def load(workdir: str | Path, step: str | int = "latest") -> "TrainedModel":
    """The model of a run's checkpoint: the latest, the best on dev, or that of a step."""
    if not isinstance(workdir, str | os.PathLike):
        raise UserTypeError(f"workdir is {workdir!r}, a {type(workdir).__name__}; it must be a str or a Path")
    if isinstance(step, bool) or not isinstance(step, str | numbers.Integral):
        raise UserTypeError(f"step is {step!r}, a {type(step).__name__}; it must be latest, best or a number of steps")
    mesh = sharding.make_mesh(jax.devices()[:1])
    config, saved, params = load_params(storage.place(workdir), str(step), mesh)
    return TrainedModel(config, saved, params, mesh)


def load_params(workdir: Path, step: str, mesh: Mesh) -> tuple[Config, Saved, Params]:
    """What a run's checkpoint says of itself, and its parameters on every device of a mesh."""
    if not (workdir / "checkpoints").is_dir():
        found = "has no checkpoints" if workdir.is_dir() else "does not exist"
        raise UserError(f"workdir {workdir} {found}; name the workdir of a run that has trained")
    checkpoints = Checkpoints(workdir / "checkpoints", READ_ONLY)
    saved = checkpoints.describe(checkpoints.choose(step))
    config = Config.from_dict(saved.config)
    if config.model.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    everywhere = sharding.replicated(mesh)
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
        jax.eval_shape(lambda: model.init(config, len(saved.vocabulary), jax.random.key(0))),
    )
    params = checkpoints.restore_params(saved.step, abstract)
    return config, saved, params


class TrainedModel:
    """A finished model and its vocabulary, on one device. Texts are bytes, or str, which is read as UTF-8."""

    def __init__(self, config: Config, saved: Saved, params: Params, mesh: Mesh):
        self.config = config
        self.step = saved.step
        self.vocabulary = corpus.symbols(saved.vocabulary)
        self.unit = corpus.unit(config.data)
        self.finished = FinishedModel.of(config, params)
        self._z_LH = head_reach.largest_z(config, jax.device_get(params))
        self._mesh = mesh
        at: Any = Reading
        self._placed = at(self.finished.cache_sharding(1, mesh), sharding.replicated(mesh))

    @functools.cached_property
    def hash(self) -> str:
        """Tells models apart: 32 digits of a SHA-256 over all that decides a probability."""
        model, span = self.config.model, self.config.span
        decides = [model.heads, model.compute_dtype, model.mask_empty_memory, span.kind, span.limit, span.ramp]
        digest = hashlib.sha256(json.dumps(decides).encode())
        digest.update(b"".join(self.vocabulary))
        for leaf in jax.tree.leaves(self.finished.weights):
            digest.update(np.ascontiguousarray(leaf).data)
        return digest.hexdigest()[:32]

    def encode(self, text: bytes | str, argument: str = "text") -> np.ndarray:
        """The ids of a text; `argument` is what errors call it."""
        if not isinstance(text, bytes | bytearray | str):
            raise UserTypeError(f"{argument} is of type {type(text).__name__}; it must be bytes or str")
        text = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        return corpus.encode(text, self.vocabulary, f"this model's text ({self.config.data.source})")

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of the ids."""
        return corpus.decode(ids, self.vocabulary)

    def logprobs(self, text: bytes | str) -> np.ndarray:
        """log p of every symbol but the first, given all before it, in nats. Memory is empty where the text begins."""
        ids = self.encode(text)
        found = [logprob_T for logprob_T, _ in self._scored_chunks(ids)]
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def spans(self, text: bytes | str = b"") -> np.ndarray:
        """Each head's span in positions, ramp included, [layers, heads]; dynamic spans: the average over a text."""
        ids = self.encode(text)
        if self.config.span.kind == "dynamic":
            if ids.size < 2:
                raise UserError(
                    f"text has {ids.size} symbols; dynamic spans depend on it, so it must have at least 2 of them"
                )
            logprobs, z_NLH = zip(*self._scored_chunks(ids), strict=True)
            # As an evaluation averages: over the tokens that predict another one.
            z_LH = np.average(z_NLH, axis=0, weights=[logprob_T.size for logprob_T in logprobs])
        else:
            z_LH = self._z_LH
        return span.head_spans(z_LH, self.config.span.ramp, self.config.span.limit)

    def _scored_chunks(self, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """For every chunk the log-probabilities of its targets and z_LH, averaged over the tokens before them."""
        targets = max(ids.size - 1, 0)
        padded = np.pad(ids.astype(np.int32), (0, -targets % CHUNK))
        found, cache = [], self.finished.empty_cache(1, self._mesh)
        for start in range(0, targets, CHUNK):
            part_1T, scored_1T = padded[None, start : start + CHUNK + 1], (np.arange(CHUNK) < targets - start)[None]
            scored, cache = self._score(self.finished.weights, part_1T[:, :-1], part_1T[:, 1:], scored_1T, cache)
            found.append(scored)
        found = jax.device_get(found)
        return [(logprob_T[: targets - CHUNK * number], z_LH) for number, (logprob_T, z_LH) in enumerate(found)]

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
        how: Sampling,
        seed: int,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """One token after the other of every sample, with its log-probability under the model (token_B, logprob_B)."""
        # Not in the iterator itself: what is wrong with the arguments is said by this call, not by the first token.
        checked = GenerateConfig.from_arguments(length=length, samples=samples, seed=seed, **how._asdict())
        self._prompt(prompt)
        return self._continuation(prompt, checked, on_progress)

    def _continuation(
        self, prompt: bytes | str, asked: GenerateConfig, on_progress: Callable[[float], None]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        how = Sampling(asked.temperature, asked.top_k, asked.top_p)
        reading = self.read(prompt, asked.samples, on_progress)
        key, running = jax.random.key(asked.seed), None
        for number in range(asked.length):
            found, reading = self._advance(self.finished.weights, reading, jax.random.fold_in(key, number), how)
            # Handing out a token while the device works on the next.
            if running is not None:
                yield jax.device_get(running)
            running = found
        if running is not None:
            yield jax.device_get(running)

    def read(
        self,
        prompt: bytes | str,
        streams: int,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> Reading:
        """Reads a prompt of any length, the same in every stream."""
        ids = self._prompt(prompt)
        capacity.check_reading(self.finished, streams, CHUNK, self._mesh, "generate.samples")
        # Padding stands in front, so that chunks end where the prompt ends; it leaves no trace.
        first = -ids.size % CHUNK
        # A view: a long prompt is not copied for every stream.
        tokens_BN = np.broadcast_to(np.pad(ids.astype(np.int32), (first, 0)), (streams, first + ids.size))
        reading = Reading(self.finished.empty_cache(streams, self._mesh, first), jnp.zeros(0))
        for start in range(0, tokens_BN.shape[1], CHUNK):
            reading = self.read_on(tokens_BN[:, start : start + CHUNK], reading)
            if start % (16 * CHUNK) == 0:
                jax.block_until_ready(reading.logits_BV)
                on_progress(start / tokens_BN.shape[1])
        return reading

    def _prompt(self, prompt: bytes | str) -> np.ndarray:
        ids = self.encode(prompt, "prompt")
        if not ids.size:
            raise UserError("the prompt is empty: there is nothing to go on from; give at least one symbol")
        return ids

    def start(self, streams: int) -> Reading:
        """Streams that have seen nothing; the logits mean nothing yet."""
        return Reading(self.finished.empty_cache(streams, self._mesh), jnp.zeros(0))

    def read_on(self, tokens_BT: np.ndarray, reading: Reading) -> Reading:
        """The streams after some more tokens, 1 or a whole chunk; `reading` is used up."""
        return self._read(self.finished.weights, tokens_BT, reading.cache)

    @functools.cached_property
    def _read(self) -> Callable:
        def read(weights: Params, tokens_BT: jax.Array, cache: KeyValueCache) -> Reading:
            logits_BTV, cache, _ = self.finished.read(weights, tokens_BT, cache)
            return Reading(cache, logits_BTV[:, -1])

        return jax.jit(read, donate_argnums=2, out_shardings=self._placed)

    @functools.cached_property
    def _advance(self) -> Callable:
        def advance(
            weights: Params, reading: Reading, key: jax.Array, how: Sampling
        ) -> tuple[tuple[jax.Array, jax.Array], Reading]:
            token_B = sample(reading.logits_BV, key, how)
            logprob_B = -loss.nats_BT(reading.logits_BV[:, None], token_B[:, None])[:, 0]
            logits_BTV, cache, _ = self.finished.read(weights, token_B[:, None], reading.cache)
            return (token_B, logprob_B), Reading(cache, logits_BTV[:, 0])

        return jax.jit(advance, donate_argnums=1, out_shardings=(None, self._placed))

    @functools.cached_property
    def _score(self) -> Callable:
        def score(
            weights: Params, tokens_1T: jax.Array, targets_1T: jax.Array, scored_1T: jax.Array, cache: KeyValueCache
        ) -> Any:
            logits_1TV, cache, z_L1TH = self.finished.read(weights, tokens_1T, cache)
            return (-loss.nats_BT(logits_1TV, targets_1T)[0], span.mean_z(z_L1TH, scored_1T)), cache

        return jax.jit(score, donate_argnums=4, out_shardings=(None, self._placed.cache))
