"""The TPU compiler's final schedule of one operation, as a tree of loops and branches with their cycles.

A bundle is what a TPU core issues in one cycle. The compiler writes down the bundles of an operation one per line:

    0x2b   : > { %254 = sbr.rel (%p28_p1) target = $region24 ;; %s5 = … } /* Start region 23 */
    0x30 LB: > { … }
    0x63 PF: > { … } /* Start/End empty region 24 */

`sbr.rel` jumps to the bundle that starts a region: backward to repeat a loop, forward to skip a branch. The bundles
right after a jump are issued before it happens, whether it is taken or not. An empty bundle `{}` is a cycle, too, and
a `delay n` adds n. Waiting for copies from and to HBM is not part of a schedule.

What is taken for granted: a loop's counter starts at 0; every branch is taken, of two opposite ones the longer; a loop
of the compiler's own whose turns depend on values (edges of copied windows, collectives) takes one turn.
"""

import dataclasses
import re
from collections.abc import Iterator

# Bundles that are issued between a jump and its target. The same for v5e, v6e and v5p.
JUMP_SLOTS = 4

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2}(?:,\s*[A-Z]{2})*)?\s*:\s*(?:>\s*)*\{")
_CONTINUES = re.compile(r"^\s*\w+\s+(?:[A-Z]{2},\s*)*PF")
_REGION_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_JUMP = re.compile(r"\bsbr\.rel \((!?)%(\w+)\) target = \$region(\d+)")
_DELAY = re.compile(r"\bv?delay (\d+)")
_CALL = re.compile(r"\binlined_call\b[^/;]*/\* (?:%([\w.\-]+) = |<)")
_PRODUCT = re.compile(r"\bvmatmul\.(?:\w+\.)*?(bf16|f32)\b")
_COMPARISON = re.compile(r"%(\w+) = scmp\.(\w+)\.\w+(?:\.totalorder)? (%\w+|\d+), (%\w+|\d+)")
_SPILL = re.compile(r"sst \[smem:\[(#allocation\d+_spill)\]\] (%\w+)")
_RELOAD = re.compile(r"(%\w+) = sld \[smem:\[(#allocation\d+_spill)\]\]")

# Rows of the left operand that one instruction multiplies: as many as a register has of the type.
_ROWS = {"bf16": 16, "f32": 8}

_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


class ScheduleError(Exception):
    """A schedule that is not understood: better no number than a wrong one."""


@dataclasses.dataclass(frozen=True)
class Count:
    """What bundles take."""

    cycles: float = 0
    rows: float = 0  # of left operands, multiplied by the MXUs
    unknown: int = 0  # loops that are counted as one turn because their turns depend on values

    def __add__(self, other: "Count") -> "Count":
        return Count(self.cycles + other.cycles, self.rows + other.rows, self.unknown + other.unknown)

    def __mul__(self, times: float) -> "Count":
        return Count(times * self.cycles, times * self.rows, self.unknown)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`left operator right`, of scalar registers or constants."""

    operator: str
    left: str
    right: str

    def opposite(self) -> "Comparison":
        """The comparison that holds exactly where this one does not."""
        return Comparison(_OPPOSITE[self.operator], self.left, self.right)


@dataclasses.dataclass(frozen=True)
class Block:
    """Straight-line bundles with the loops and branches between them, in order."""

    own: Count  # its own bundles
    parts: "tuple[Loop | Branch, ...]"
    calls: tuple[str, ...]  # operations that its own bundles call; only the program around the operations has any

    def loops(self) -> "Iterator[Loop]":
        """All loops within, at any depth."""
        for part in self.parts:
            if isinstance(part, Loop):
                yield part
            yield from part.body.loops()


@dataclasses.dataclass(frozen=True)
class Loop:
    """Bundles that repeat."""

    address: int
    body: Block
    turns: int | None  # None: depends on values


@dataclasses.dataclass(frozen=True)
class Branch:
    """Bundles that are skipped if `skipped_if` holds; None: a condition that is no plain comparison."""

    address: int
    body: Block
    skipped_if: Comparison | None

    def excludes(self, other: "Branch") -> bool:
        """Whether one of both is always skipped and never both."""
        return self.skipped_if is not None and other.skipped_if == self.skipped_if.opposite()


@dataclasses.dataclass(frozen=True)
class _Bundle:
    count: Count
    call: str | None


@dataclasses.dataclass(frozen=True)
class _Jump:
    at: int
    negated: bool
    predicate: str
    target: int


def parse(text: str) -> Block:
    """The tree of a `final_bundles` dump."""
    bundles, jumps = _read_bundles(text)
    comparisons = _comparisons(text)
    spans: list[tuple[int, int, _Jump]] = []
    for jump in jumps:
        if jump.target <= jump.at:
            spans.append((jump.target, jump.at + 1 + JUMP_SLOTS, jump))
        elif jump.target > jump.at + 1 + JUMP_SLOTS:
            spans.append((jump.at + 1 + JUMP_SLOTS, jump.target, jump))
    # Outer spans first. A branch that skips a loop starts and ends with it and is the outer one.
    spans.sort(key=lambda span: (span[0], -span[1], span[2].target <= span[2].at))
    tree, rest = _nest(0, len(bundles), spans, 0, bundles, comparisons)
    if rest != len(spans):
        raise ScheduleError(f"jump at bundle {spans[rest][2].at:#x} leaves the schedule")
    return tree


def count(block: Block) -> Count:
    """What a block takes, with everything in it."""
    total = block.own
    for part in taken(block):
        if isinstance(part, Loop) and part.turns is None:
            total += count(part.body) + Count(unknown=1)
        else:
            total += count(part.body) * (part.turns or 0 if isinstance(part, Loop) else 1)
    return total


def taken(block: Block) -> "Iterator[Loop | Branch]":
    """The parts of a block without the shorter of two opposite branches."""
    before: Branch | None = None  # a branch whose opposite may follow
    for part in block.parts:
        if isinstance(part, Loop):
            yield part
        elif before is not None and before.excludes(part):
            yield max(before, part, key=lambda branch: count(branch.body).cycles)
            before = None
        else:
            if before is not None:
                yield before
            before = part
    if before is not None:
        yield before


def _read_bundles(text: str) -> tuple[list[_Bundle], list[_Jump]]:
    """All bundles and all jumps."""
    bundles: list[_Bundle] = []
    starts: dict[str, int] = {}
    found: list[tuple[int, re.Match[str]]] = []
    line = ""
    for line in _bundle_texts(text):
        at = len(bundles)
        for region in _REGION_START.findall(line):
            starts.setdefault(region, at)
        jumps = list(_JUMP.finditer(line))
        if len(jumps) != len(re.findall(r"\bsbr\b", line)):
            raise ScheduleError(f"a jump of unknown form at bundle {at:#x}: {line.strip()[:200]}")
        found += ((at, jump) for jump in jumps)
        delay, call = _DELAY.search(line), _CALL.search(line)
        cycles = 1 + (int(delay[1]) if delay else 0)
        bundles.append(_Bundle(Count(cycles, sum(map(_ROWS.get, _PRODUCT.findall(line)))), call[1] if call else None))
    if not bundles:
        raise ScheduleError("no bundles in the schedule")
    # The last bundle may be where skipped branches continue; its comment then names the operation and no region.
    last = len(bundles) - 1 if _CONTINUES.match(line) else None
    targets = []
    for at, jump in found:
        target = starts.get(jump[3], last)
        if target is None:
            raise ScheduleError(f"the jump at bundle {at:#x} leads to region {jump[3]}, which starts nowhere")
        targets.append(_Jump(at, bool(jump[1]), jump[2], target))
    return bundles, targets


def _bundle_texts(text: str) -> Iterator[str]:
    """The text of each bundle; a comment in it may go over several lines."""
    lines: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            if lines:
                yield "\n".join(lines)
            lines = [line]
        elif lines:
            lines.append(line)
    if lines:
        yield "\n".join(lines)


def _comparisons(text: str) -> dict[str, Comparison]:
    """Predicates that are one comparison of scalars; a value that was spilled keeps its name."""
    stored: dict[str, set[str]] = {}
    for slot, value in _SPILL.findall(text):
        stored.setdefault(slot, set()).add(value)
    origin = {
        value: next(iter(stored[slot])) for value, slot in _RELOAD.findall(text) if len(stored.get(slot, ())) == 1
    }

    def root(value: str) -> str:
        seen = set()
        while value in origin and value not in seen:
            seen.add(value)
            value = origin[value]
        return value

    return {
        name: Comparison(operator, root(left), root(right))
        for name, operator, left, right in _COMPARISON.findall(text)
        if operator in _OPPOSITE
    }


def _nest(
    first: int,
    end: int,
    spans: list[tuple[int, int, _Jump]],
    index: int,
    bundles: list[_Bundle],
    comparisons: dict[str, Comparison],
) -> tuple[Block, int]:
    """(the block of the bundles first … end, the first span that is not in it)."""
    parts: list[Loop | Branch] = []
    own: list[int] = []
    at = first
    while index < len(spans) and spans[index][0] < end:
        start, stop, jump = spans[index]
        if stop > end or start < at:
            raise ScheduleError(f"the jump at bundle {jump.at:#x} crosses another one")
        own += range(at, start)
        body, index = _nest(start, stop, spans, index + 1, bundles, comparisons)
        condition = comparisons.get(jump.predicate)
        if jump.target <= jump.at:
            parts.append(Loop(start, body, _turns(condition, jump)))
        else:
            parts.append(Branch(start, body, condition.opposite() if condition and jump.negated else condition))
        at = stop
    own += range(at, end)
    calls = (bundles[number].call for number in own)
    total = sum((bundles[number].count for number in own), Count())
    return Block(total, tuple(parts), tuple(call for call in calls if call is not None)), index


def _turns(condition: Comparison | None, jump: _Jump) -> int | None:
    """How often a loop runs that repeats until its counter, which starts at 0, reaches a constant."""
    counts_up = condition is not None and condition.operator == "ge" and jump.negated
    return int(condition.right) if condition and counts_up and condition.right.isdigit() else None
