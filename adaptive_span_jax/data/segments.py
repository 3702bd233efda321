"""Token ids → parallel streams → segments. The position in the text is a value, not the state of an iterator."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime.terminal import counted


class Segment(NamedTuple):
    """The next tokens of every stream, and the token that follows each of them."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray


class ScoredSegment(NamedTuple):
    """A segment of an evaluation; `scored_BT` is false for padding."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    scored_BT: np.ndarray


class Position(NamedTuple):
    """The position in every stream, in tokens (`cursor`). `fresh`: an epoch starts here, with empty memory."""

    epoch: int = 0
    cursor: int = 0
    fresh: bool = True


@dataclasses.dataclass(frozen=True)
class Streams:
    """A text cut into equal contiguous streams that are read in parallel, one segment at a time, for many epochs."""

    ids: np.ndarray
    streams: int
    segment: int
    seed: int

    def __post_init__(self) -> None:
        # An epoch starts at an offset of up to segment − 1 and needs a segment and its last target after that.
        if self.length < 2 * self.segment:
            most = self.ids.size // (2 * self.segment)
            fewer = f"at most {most:,} streams" if most else "fewer streams"
            raise UserError(
                f"config.train.batch_size is {self.streams}, so each stream has {self.length:,} of the "
                f"{counted(self.ids.size, 'token')} to train on, but it needs two segments of {self.segment} "
                f"(config.train.segment); use more text, {fewer} or shorter segments"
            )

    @property
    def length(self) -> int:
        """Tokens per stream; the remainder at the end of the text is not read."""
        return self.ids.size // self.streams

    def take(self, position: Position) -> tuple[Segment, Position]:
        """The segment at a position, and the position after it."""
        window = np.arange(position.cursor, position.cursor + self.segment + 1)
        start_B = np.arange(self.streams) * self.length
        tokens = self.ids[start_B[:, None] + window[None, :]].astype(np.int32)
        return Segment(tokens[:, :-1], tokens[:, 1:]), self._after(position)

    def _after(self, position: Position) -> Position:
        cursor = position.cursor + self.segment
        if cursor + self.segment + 1 <= self.length:
            return Position(position.epoch, cursor, fresh=False)
        # As published, later epochs start at a random offset, so that segment boundaries differ between epochs.
        epoch = position.epoch + 1
        offset = int(np.random.default_rng([self.seed, epoch]).integers(self.segment))
        return Position(epoch, offset, fresh=True)


def whole_segments(ids: np.ndarray, streams: int, segment: int) -> Iterator[ScoredSegment]:
    """The published evaluation: equal streams, whole segments only; the rest of each stream is not scored."""
    length = ids.size // streams
    rows = ids[: streams * length].reshape(streams, length).astype(np.int32)
    for start in range(0, length - segment, segment):
        tokens, targets = rows[:, start : start + segment], rows[:, start + 1 : start + segment + 1]
        yield ScoredSegment(tokens, targets, np.ones(tokens.shape, bool))


def every_target(ids: np.ndarray, streams: int, segment: int) -> Iterator[ScoredSegment]:
    """The exact evaluation: every token but the first is a target exactly once; padding is not scored."""
    targets = ids.size - 1
    length = -(-targets // streams)
    padded_length = -(-length // segment) * segment
    index = np.arange(streams)[:, None] * length + np.arange(padded_length)[None, :]
    scored = (np.arange(padded_length)[None, :] < length) & (index < targets)
    index = np.minimum(index, max(targets - 1, 0))
    for start in range(0, padded_length, segment):
        part = np.s_[:, start : start + segment]
        yield ScoredSegment(ids[index[part]].astype(np.int32), ids[index[part] + 1].astype(np.int32), scored[part])
