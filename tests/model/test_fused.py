"""The fused kernels, interpreted: equal to plain attention in values and all gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_span_jax.model.attention import fused, per_head
from adaptive_span_jax.model.attention.fused import tiles
from adaptive_span_jax.model.attention.fused.sizes import BLOCK, SHORT, walk
from adaptive_span_jax.model.span import on_ramp, reach, soft_mask
from tests.support.attention import assert_causal, draw, draw_ring, errors, run, spans, with_end
from tests.support.fused import RAMP, Case, check, exact, inputs, simulate

# z from which one more position is read, one more block, or one more block without a mask; 31.5 reads as far as 31.
BOUNDARIES = (0, 31, 31.5, 32, 95, 96, 127, 128, 223, 224, 255, 256)

slow = pytest.mark.slow


# ------------------------------------------------------------------------------------------------------ how heads walk


def extremes(limit: int) -> st.SearchStrategy[float]:
    """A z, in steps of 1/64: then z + R + 1 is exact in float32, and no rounding decides where the ramp begins."""
    known = [z for z in (*BOUNDARIES, limit - RAMP - 1, limit - RAMP, limit) if 0 <= z <= limit]
    return st.one_of(st.sampled_from(known), st.integers(0, 64 * limit).map(lambda number: number / 64))


@settings(deadline=None)
@given(st.data())
def test_the_walk_of_a_head(data):
    limit, ramp = data.draw(st.integers(1, 600)), data.draw(st.integers(1, 100))
    low, high = sorted([data.draw(extremes(limit)), data.draw(extremes(limit))])
    valid_length = data.draw(st.none() | st.integers(0, limit))
    z_min, z_max = np.array([low], np.float32), np.array([high], np.float32)
    [steps], [full] = walk(z_min, z_max, ramp, limit, valid_length)
    [read] = reach(z_max, ramp, limit)
    assert steps == -(-read // BLOCK)
    assert (full == -1) == (read <= SHORT)
    if full < 0:
        return
    inside = min(np.ceil(low), limit, limit if valid_length is None else valid_length)
    assert full == min(inside // BLOCK, steps - 1)
    # What that means for masks: none where a step needs one, nothing left to read behind the last step.
    distance = jnp.arange(1, 601, dtype=jnp.float32)
    unmasked, behind = distance <= full * BLOCK, (distance > steps * BLOCK) & (distance <= limit)
    for z in (jnp.asarray(z_min), jnp.asarray(z_max)):
        mask, has_derivative = soft_mask(distance, z, ramp), on_ramp(distance, z, ramp)
        assert np.all(mask[unmasked] == 1)
        assert np.all(mask[behind] == 0)
        assert not np.any(has_derivative[unmasked | behind])


@pytest.mark.parametrize(
    ("z", "steps", "full"),
    [
        (0, 1, -1),
        (31, 1, -1),  # reads 64
        (31.5, 1, -1),
        (32, 1, 0),  # reads 65
        (95, 1, 0),  # reads 128
        (96, 2, 0),
        (127, 2, 0),  # distance 128 is the closed end of the ramp
        (127.5, 2, 1),
        (128, 2, 1),
        (223, 2, 1),
        (224, 3, 1),
        (256, 3, 2),
        (900, 8, 7),  # all of S, but the last step always has a mask
    ],
)
def test_the_walk_at_boundaries(z, steps, full):
    z_H = np.array([z], np.float32)
    assert walk(z_H, z_H, RAMP, 900) == (steps, full)
    assert tuple(int(each[0]) for each in walk(jnp.asarray(z_H), jnp.asarray(z_H), RAMP, 900)) == (steps, full)


def test_the_walk_over_empty_memory_and_several_tokens():
    low, high = np.array([0.0, 300.0], np.float32), np.array([300.0, 700.0], np.float32)
    assert [each.tolist() for each in walk(low, high, RAMP, 900)] == [[3, 6], [0, 2]]
    assert [each.tolist() for each in walk(low, high, RAMP, 900, 255)] == [[3, 6], [0, 1]]
    assert [each.tolist() for each in walk(low, high, RAMP, 900, 0)] == [[3, 6], [0, 0]]


# The interpreter has its own way to roll rows: that of the hardware is compared with it, and both with NumPy.
@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=slow)])
def test_rows_are_rolled_by_their_number(interpret):
    tile = np.random.default_rng(0).standard_normal(tiles.TILE).astype(np.float32)
    right = np.stack([np.roll(row, number) for number, row in enumerate(tile)])
    left = np.stack([np.roll(row, -number) for number, row in enumerate(tile)])
    skew, unskew_flipped = (
        jax.jit(functools.partial(each, interpret=interpret)) for each in (tiles.skew, tiles.unskew_flipped)
    )
    np.testing.assert_array_equal(skew(tile), right)
    np.testing.assert_array_equal(tiles.flip(unskew_flipped(tile)), left)
    np.testing.assert_array_equal(
        tiles.flip(jnp.asarray(tile)), tile.reshape(-1, 8, BLOCK)[:, ::-1].reshape(tiles.TILE)
    )


# ------------------------------------------------------------------------------------------- the same as the reference


@pytest.mark.xdist_group("fused")  # compiled once
@pytest.mark.parametrize(
    ("z", "end"),
    [
        ((300, 0), 0),  # the very first program copies from memory
        ((0, 300), 128),
        ((300, 300), 256),
        ((31.5, 32), 0),
        ((95, 96), 128),
        ((127, 128), 256),
        ((267, 268), 128),  # just all of S
    ],
)
def test_same_as_plain(z, end):
    check(Case(length=128, limit=300, heads=2, head_width=64), z, end)


@pytest.mark.xdist_group("fused with log-sum")
@pytest.mark.parametrize(("z", "valid_length"), [((300, 0), 128), ((31.5, 96), 0)])
def test_log_sum_same_as_plain(z, valid_length):
    check(Case(128, 300, 2, 64, masks_empty=True, log_sum=True), z, 128, valid_length=valid_length)


CASES = {
    "one query block": Case(128, 640, 2, 64),
    "two query blocks": Case(256, 1024, 4, 64),
    "no dropout": Case(256, 1024, 2, 64, rate=0.0),
    "three query blocks": Case(384, 1152, 2, 64, streams=1),
    "four query blocks": Case(512, 1024, 2, 64, streams=1),
    "more memory blocks than are held": Case(128, 2304, 2, 64, streams=1),
    "S not in blocks": Case(256, 900, 2, 64),
    "S not in segments": Case(256, 300, 2, 64),
    "S below a block": Case(128, 100, 2, 64),
    "S below the short path": Case(256, 50, 2, 64),
    "heads of 32": Case(256, 512, 4, 32),
    "heads of 96": Case(256, 512, 4, 96),
    "heads of 96, two blocks of lanes": Case(128, 512, 4, 96, streams=3),
    "heads of 128": Case(256, 512, 2, 128),
    "heads of 48": Case(128, 300, 8, 48, streams=1),
    "memory in bfloat16": Case(128, 640, 2, 64, memory_dtype=jnp.bfloat16),
    "empty memory": Case(256, 900, 2, 64, masks_empty=True),
    "empty memory, no dropout": Case(128, 640, 2, 64, rate=0.0, masks_empty=True),
    "log-sum": Case(256, 900, 2, 64, log_sum=True),
    "log-sum, no dropout": Case(128, 640, 4, 96, rate=0.0, log_sum=True),
    "log-sum, z by token, empty memory": Case(256, 640, 4, 32, per_token=True, masks_empty=True, log_sum=True),
    "z by token": Case(256, 900, 2, 64, per_token=True),
    "z by token, empty memory": Case(128, 640, 4, 32, per_token=True, masks_empty=True),
}


def draw_z(data: st.DataObject, case: Case) -> np.ndarray:
    if not case.per_token:
        return np.array([data.draw(extremes(case.limit)) for _ in range(case.heads)])
    # Between two extremes, which occur; a head is as long as its longest token.
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = (case.streams, case.length)
    z = []
    for _ in range(case.heads):
        low, high = sorted([data.draw(extremes(case.limit)), data.draw(extremes(case.limit))])
        drawn = np.round(rng.uniform(low, high, shape) * 64) / 64
        z.append(np.where(rng.uniform(size=shape) < 0.2, rng.choice([low, high], shape), drawn))
    return np.stack(z, axis=-1)


# One compilation for each case: spans, the ring's position, dropout bits and the valid length are arguments.
@slow
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_same_as_plain_for_any_span(name, data):
    case = CASES[name]
    z = draw_z(data, case)
    end = data.draw(st.sampled_from(case.ends))
    seed = data.draw(st.integers(0, 2**31 - 1)) if case.rate else 1
    valid_length = None
    if case.masks_empty:
        valid_length = data.draw(
            st.one_of(st.sampled_from([0, 1, case.length, case.limit]), st.integers(0, case.limit))
        )
    check(case, z, end, seed, valid_length)


@slow
@pytest.mark.parametrize("name", ["one query block", "S not in blocks", "heads of 96", "empty memory"])
def test_same_as_plain_with_fixed_spans(name):
    case = CASES[name]
    for end in case.ends:
        check(case, [case.limit] * case.heads, end, valid_length=case.limit // 2 if case.masks_empty else None)


@slow
@pytest.mark.parametrize("length", [512, 1024])
def test_same_as_plain_with_long_segments(length):
    case = Case(length, 2304, 2, 64, streams=1)
    for number, z in enumerate(((2304, 2000), (1500, 0), (31, 2200), (128, 1024), (700, 300))):
        check(case, z, case.ends[number % len(case.ends)])


# A program starts the copy of the next one's first block, also for the next stream.
@slow
@pytest.mark.parametrize("head_width", [64, 128])
def test_heads_in_any_order(head_width):
    case = Case(length=128, limit=640, heads=4, head_width=head_width)
    for z in itertools.product((0, 120), (500, 20, 80), (0, 300), (10, 640)):
        check(case, z, end=256)


# The simulation of a TPU is slower than the interpreter, but knows when a copy may arrive: as soon as it is started, or
# not before it is waited for. It reports reads out of bounds, and of what is not yet written or may be just then.
@slow
@pytest.mark.parametrize("arrival", ["eager", "on_wait"])
@pytest.mark.parametrize(
    ("case", "z"),
    [
        (Case(128, 2304, 2, 64, streams=1), (2304, 2304)),
        (Case(256, 640, 4, 64), (300, 600, 0, 200)),
        (Case(128, 640, 4, 96), (0, 640, 20, 100)),
    ],
)
def test_copies_arrive_in_time(case, z, arrival, monkeypatch, capsys):
    z_BTH, arrays = np.array(z, np.float32)[None, None], with_end(inputs(case), 256)
    expected = jax.device_get(run(fused, arrays, z_BTH, None, 1, ramp=RAMP, rate=case.rate))
    found = simulate(monkeypatch, arrays, z_BTH, case.rate, dma_execution_mode=arrival)
    assert max(errors(found, expected).values()) < 1e-6
    assert "RACE" not in capsys.readouterr().out


@slow
def test_every_stream_may_have_its_own_z():
    check(Case(length=128, limit=640, heads=2, head_width=64, per_token=True), [[[0, 500]], [[300, 20]]])


# --------------------------------------------------------------------------------------------------- lower precision


def bfloat16_inputs(case: Case, z_BTH: np.ndarray, seed: int) -> dict:
    """Inputs as the model passes them: all in bfloat16 but the position table."""
    arrays = draw(case.streams, case.length, case.limit, case.heads, case.width, np.float32, seed, case.log_sum)
    arrays = {name: array if name == "positions" else array.astype(jnp.bfloat16) for name, array in arrays.items()}
    arrays["memory"] = draw_ring(case.streams, case.limit, case.length, case.width, case.memory_dtype, seed)
    output = exact(arrays, z_BTH, None, seed, case.rate)["output"]  # why: see `check`
    return arrays | {"d_output": (arrays["d_output"] - 2 * output).astype(jnp.bfloat16)}


# Both paths round about as often, so that which one is nearer to the truth is chance for a single number. The mean over
# all numbers of sixteen draws tells them apart to about one percent.
@slow
@pytest.mark.parametrize(
    "case",
    [
        Case(256, 512, 2, 64, memory_dtype=jnp.bfloat16),
        Case(256, 512, 4, 96, memory_dtype=jnp.bfloat16),
        Case(128, 512, 4, 32, memory_dtype=np.float32),
        Case(256, 512, 2, 64, memory_dtype=jnp.bfloat16, log_sum=True),
    ],
    ids=lambda case: f"heads of {case.head_width}{', log-sum' * case.log_sum}",
)
def test_bfloat16_is_as_exact_as_the_per_head_path(case):
    squares: dict = {fused: [], per_head: []}
    for seed, z in itertools.product(range(8), ((0, 300, 40, 450), (400, 20, 100, 0))):
        z_BTH = np.array(z[: case.heads], np.float32)[None, None]
        arrays = bfloat16_inputs(case, z_BTH, seed)
        expected = exact(arrays, z_BTH, None, seed, case.rate)
        for path in squares:
            found = jax.device_get(run(path, arrays, z_BTH, None, seed, ramp=RAMP, rate=case.rate))
            squares[path].append(
                {name: np.mean((found[name] - right) ** 2) / np.mean(right**2) for name, right in expected.items()}
            )
    for name in squares[fused][0]:
        kernels, xla = (np.sqrt(np.mean([each[name] for each in squares[path]])) for path in (fused, per_head))
        assert kernels < 1.02 * xla, (name, kernels, xla)
        assert kernels < 5e-3, name


# ----------------------------------------------------------------------------------------------------------- causality


@slow
@pytest.mark.parametrize("head_width", [64, 96])
def test_nothing_comes_from_later_tokens_nor_from_the_token_itself(head_width):
    case = Case(length=256, limit=300, heads=4, head_width=head_width, streams=1)
    z = spans("full", (1, 1, case.heads), case.limit).astype(np.float32)
    assert_causal(fused, inputs(case), z, RAMP, queries=(0, 1, 63, 64, 127, 128, 129, 255))


@slow
def test_a_short_head_sees_no_later_tokens():
    case = Case(length=128, limit=64, heads=2, head_width=64, streams=1)
    z = np.full((1, 1, 2), 64, np.float32)
    arrays = inputs(case)
    output = jax.device_get(run(fused, arrays, z, None, 1, ramp=RAMP, rate=0.0)["output"])
    for query in (0, 63, 64, 127):
        segment = arrays["segment"].copy()
        segment[:, query:] += 1
        other = jax.device_get(run(fused, arrays | {"segment": segment}, z, None, 1, ramp=RAMP, rate=0.0)["output"])
        np.testing.assert_array_equal(other[:, : query + 1], output[:, : query + 1])
