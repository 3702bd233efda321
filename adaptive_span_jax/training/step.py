"""One training step and one evaluation step: pure functions, each compiled once, the old state's buffers reused."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import ScoredSegment, Segment
from adaptive_span_jax.model import flops, span, transformer
from adaptive_span_jax.model.attention import paths
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.memory import Memory, memory_sharding
from adaptive_span_jax.runtime import cpu, sharding
from adaptive_span_jax.training import objective
from adaptive_span_jax.training.optimizer import make_schedule, squared_norms
from adaptive_span_jax.training.state import TrainState


class Metrics(NamedTuple):
    """What is worth knowing of one training step."""

    nats: jax.Array  # mean negative log-likelihood per target, penalty left out
    penalty_nats: jax.Array
    learning_rate: jax.Array
    z_LH: jax.Array  # each head's z in positions, before the update
    cost: flops.Cost  # what attention computed at these spans
    good: jax.Array  # whether the step was applied: loss and gradients were numbers


TrainStep = Callable[[TrainState, Segment], tuple[TrainState, Metrics]]
EvalStep = Callable[[transformer.Params, Memory, ScoredSegment], tuple[Memory, tuple[jax.Array, jax.Array]]]


def make_train_step(
    config: Config, optimizer: optax.GradientTransformationExtraArgs, state: TrainState, mesh: Mesh
) -> TrainStep:
    """The compiled training step for states placed like `state`. It consumes the state it is given."""
    schedule = make_schedule(config.train)
    path = paths.choose_for(config, sharding.platform_of(mesh)).name

    def train_step(state: TrainState, segment: Segment) -> tuple[TrainState, Metrics]:
        rate = config.model.dropout
        dropout = Dropout.create(rate, config.seed, state.step) if rate else None
        with sharding.on_mesh(mesh):
            gradients, found = _gradients(config, state.params, segment, state.memory, dropout)
        # One non-finite number would spoil every parameter for good, so such a step is skipped; the run continues
        # with the next segment, from the memory before, and the schedule stays in step with the steps. The optimizer
        # clips by the same norms, and the compiler computes them once.
        squares = jax.tree.leaves(squared_norms(gradients))
        good = jnp.isfinite(found.nats + sum(square.sum() for square in squares))
        updates, opt_state = optimizer.update(gradients, state.opt_state, good=good)
        params: Any = span.project(optax.apply_updates(state.params, updates))
        memory = state.memory.advance(found.inputs_LBTD, config.span.limit, good)
        cost = flops.cost(config, found.furthest_z_LH, path)
        metrics = Metrics(found.nats, found.penalty_nats, schedule(state.step), found.z_LH, cost, good)
        return TrainState(state.step + 1, params, opt_state, memory), metrics

    placement = (_placement(state), sharding.replicated(mesh))
    options = cpu.compiler_options(mesh)
    return jax.jit(train_step, donate_argnums=0, out_shardings=placement, compiler_options=options)


class StepOutputs(NamedTuple):
    """What a step needs of the prediction besides the gradients."""

    nats: jax.Array
    penalty_nats: jax.Array
    z_LH: jax.Array  # the mean over tokens
    furthest_z_LH: jax.Array  # the largest over tokens, which a head's cost follows
    inputs_LBTD: jax.Array


def _gradients(
    config: Config, params: transformer.Params, segment: Segment, memory: Memory, dropout: Dropout | None
) -> tuple[transformer.Params, StepOutputs]:
    """The objective's gradients over all streams, accumulated over `train.grad_accum_steps` groups of them.

    Groups are of one size, and the objective is a mean over streams: the mean over groups is the same.
    """
    gradient = jax.grad(functools.partial(objective.objective, config), has_aux=True)
    groups, streams = config.train.grad_accum_steps, segment.tokens_BT.shape[0]

    def read(segment: Segment, memory: Memory, dropout: Dropout | None) -> tuple[transformer.Params, StepOutputs]:
        gradients, (prediction, nats, penalty_nats) = gradient(params, segment, memory, dropout)
        z_LBTH = prediction.z_LBTH
        return gradients, StepOutputs(
            nats, penalty_nats, z_LBTH.mean(axis=(1, 2)), z_LBTH.max(axis=(1, 2)), prediction.inputs_LBTD
        )

    def read_group(sum_of_gradients: transformer.Params, number: jax.Array) -> tuple[transformer.Params, StepOutputs]:
        def part(array: Any, axis: int = 0) -> Any:
            return sharding.group(array, axis, groups, number)

        gradients, found = read(
            Segment(part(segment.tokens_BT), part(segment.targets_BT)),
            memory._replace(hidden_LBMD=part(memory.hidden_LBMD, axis=1)),
            dropout and dataclasses.replace(dropout, stream_B=part(jnp.arange(streams))),
        )
        return jax.tree.map(jnp.add, sum_of_gradients, gradients), found

    if groups == 1:
        return read(segment, memory, dropout)
    total, found = jax.lax.scan(read_group, jax.tree.map(jnp.zeros_like, params), jnp.arange(groups))
    return jax.tree.map(lambda g: g / groups, total), StepOutputs(
        found.nats.mean(),
        found.penalty_nats.mean(),
        found.z_LH.mean(axis=0),
        found.furthest_z_LH.max(axis=0),
        sharding.join_groups(found.inputs_LBTD, axis=1),
    )


def make_reset_memory(state: TrainState) -> Callable[[TrainState], TrainState]:
    """The compiled reset of the memory, for when all streams start anew, for states placed like `state`.

    It is a function of its own because a step that may or may not reset it would rewrite the whole memory every time.
    """

    def reset_memory(state: TrainState) -> TrainState:
        return dataclasses.replace(state, memory=jax.tree.map(jnp.zeros_like, state.memory))

    return jax.jit(reset_memory, donate_argnums=0, out_shardings=_placement(state))


def make_eval_step(config: Config, mesh: Mesh) -> EvalStep:
    """The compiled evaluation step: (params, memory, segment) → (memory, (nats of scored targets, their mean z_LH))."""

    def eval_step(
        params: transformer.Params, memory: Memory, segment: ScoredSegment
    ) -> tuple[Memory, tuple[jax.Array, jax.Array]]:
        with sharding.on_mesh(mesh):
            prediction = transformer.apply(config, params, segment.tokens_BT, memory)
        nats_BT = objective.nats_BT(prediction.logits_BTV, segment.targets_BT)
        memory = memory.advance(prediction.inputs_LBTD, config.span.limit, jnp.isfinite(nats_BT.sum()))
        z_LH = span.mean_z(prediction.z_LBTH, segment.scored_BT)
        return memory, (jnp.where(segment.scored_BT, nats_BT, 0).sum(), z_LH)

    placement = (memory_sharding(mesh, config.evaluate.batch_size), sharding.replicated(mesh))
    options = cpu.compiler_options(mesh)
    return jax.jit(eval_step, donate_argnums=1, out_shardings=placement, compiler_options=options)


def _placement(state: TrainState) -> TrainState:
    """Where a state's arrays lie. Placing every new state exactly like the first keeps steps from compiling again."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)
