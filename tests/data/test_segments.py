"""Streams, epochs and the two evaluation protocols: how often each target is predicted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from adaptive_span_jax.data.segments import Position, Streams, every_target, whole_segments
from adaptive_span_jax.errors import UserError

sizes = st.tuples(st.integers(2, 700), st.integers(1, 7), st.integers(1, 19))


def epoch(streams: Streams, position: Position) -> tuple[list[np.ndarray], list[np.ndarray], Position]:
    """All tokens and targets up to the next epoch, and where that starts."""
    number, tokens, targets = position.epoch, [], []
    while position.epoch == number:
        segment, position = streams.take(position)
        tokens.append(segment.tokens_BT)
        targets.append(segment.targets_BT)
    return tokens, targets, position


@given(sizes)
def test_every_target_of_an_epoch_exactly_once(drawn):
    length, rows, segment = drawn
    if length // rows < 2 * segment:
        with pytest.raises(UserError, match=r"config\.train\.segment"):
            Streams(np.arange(length), rows, segment, seed=1)
        return
    streams = Streams(np.arange(length), rows, segment, seed=1)
    position = Position()
    for number in range(3):
        offset = position.cursor
        assert position.fresh
        assert offset == 0 if number == 0 else 0 <= offset < segment
        tokens, targets, position = epoch(streams, position)
        per_stream = length // rows
        whole = (per_stream - 1 - offset) // segment * segment
        first = np.arange(rows)[:, None] * per_stream + offset
        assert_array_equal(np.concatenate(tokens, axis=1), first + np.arange(whole))
        assert_array_equal(np.concatenate(targets, axis=1), first + 1 + np.arange(whole))


def test_only_the_first_segment_of_an_epoch_is_fresh():
    streams, position, fresh = Streams(np.arange(100), 2, 10, seed=1), Position(), []
    for _ in range(12):
        fresh.append((position.epoch, position.fresh))
        _, position = streams.take(position)
    assert [epoch for epoch, is_fresh in fresh if is_fresh] == sorted({epoch for epoch, _ in fresh})


def test_offsets_follow_the_seed_and_differ_between_epochs():
    def offsets(seed):
        streams, position, found = Streams(np.arange(3000), 1, 500, seed), Position(), []
        for _ in range(6):
            *_, position = epoch(streams, position)
            found.append(position.cursor)
        return found

    assert offsets(1) == offsets(1) != offsets(2)
    assert len(set(offsets(1))) > 3


def test_position_is_a_value():
    streams = Streams(np.arange(100) % 7, 2, 10, seed=1)
    _, second = streams.take(Position())
    again = streams.take(Position(*second))
    assert_array_equal(again[0].tokens_BT, streams.take(second)[0].tokens_BT)


@given(sizes)
def test_exact_evaluation_scores_every_target_once(drawn):
    length, rows, segment = drawn
    seen = np.zeros(length, int)
    for part in every_target(np.arange(length), rows, segment):
        assert part.tokens_BT.shape == (rows, segment)
        assert_array_equal(part.targets_BT[part.scored_BT], part.tokens_BT[part.scored_BT] + 1)
        np.add.at(seen, part.targets_BT[part.scored_BT], 1)
    assert seen[0] == 0
    assert_array_equal(seen[1:], 1)


@given(sizes)
def test_exact_evaluation_keeps_streams_contiguous(drawn):
    parts = list(every_target(np.arange(drawn[0]), *drawn[1:]))
    tokens, scored = (
        np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("tokens_BT", "scored_BT")
    )
    for row, mask in zip(tokens, scored, strict=True):
        assert_array_equal(np.diff(row[mask]), 1)
        assert_array_equal(mask, np.sort(mask)[::-1])


@given(sizes)
def test_published_evaluation_takes_whole_segments_of_equal_streams(drawn):
    length, rows, segment = drawn
    parts = list(whole_segments(np.arange(length), rows, segment))
    per_stream = length // rows
    assert len(parts) == max(per_stream - 1, 0) // segment
    for number, part in enumerate(parts):
        first = np.arange(rows)[:, None] * per_stream + number * segment
        assert_array_equal(part.tokens_BT, first + np.arange(segment))
        assert_array_equal(part.targets_BT, part.tokens_BT + 1)
        assert part.scored_BT.all()


def test_published_evaluation_of_enwik8_leaves_out_what_is_known():
    segments = sum(1 for _ in whole_segments(np.zeros(5_000_000, np.uint8), 8, 512))
    assert segments == 1220
