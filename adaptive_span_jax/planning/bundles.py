"""The TPU compiler's final schedule of one operation, as a tree of loops and branches with their cycles.

A bundle is what a TPU core issues in one cycle. The compiler writes down the bundles of an operation one per line:

    0x2b   : > { %254 = sbr.rel (%p28_p1) target = $region24 ;; %s5 = … } /* Start region 23 */
    0x30 LB: > { … }
    0x63 PF: > { … } /* Start/End empty region 24 */

`sbr.rel` jumps to the bundle that starts a region: backward to repeat a loop, forward to skip a branch. The bundles
right after a jump are issued before it happens, whether it is taken or not. An empty bundle `{}` is a cycle, too, and
a `delay n` adds n. Waiting for copies from and to HBM is not part of a schedule.

What is taken for granted: a loop's counter starts at 0; a branch that compares the counter of the loop around it (the
first and last turns of a pipelined loop only start or end copies) is taken as often as that says, any other always, of
two opposite ones the longer; a loop whose turns depend on values (edges of copied windows, collectives) turns once.

Beside each schedule the compiler writes down how many slots of each unit every bundle uses, and how many there are.
"""

import dataclasses
import operator
import re
from collections.abc import Iterator

import numpy as np

# Bundles that are issued between a jump and its target. The same for v5e, v6e and v5p.
JUMP_SLOTS = 4

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2}(?:,\s*[A-Z]{2})*)?\s*:\s*(?:>\s*)*\{")
_CONTINUES = re.compile(r"^\s*\w+\s+(?:[A-Z]{2},\s*)*PF")
_REGION_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_JUMP = re.compile(r"\bsbr\.rel \((!?)(%\w+)\) target = \$region(\d+)")
_DELAY = re.compile(r"\bv?delay (\d+)")
_CALL = re.compile(r"\binlined_call\b[^/;]*/\* (?:%([\w.\-]+) = |<)")
_PRODUCT = re.compile(r"\bvmatmul\.((?:\w+\.)*?(?:bf16|f32))\b")
_DEFINITION = re.compile(r"(%[sp]\w+) = (scmp\.\w+|sadd|smov|pnand|por|pneg|pmov)[\w.]* (?:\(!?%\w+\), )?([^;}/]+)")
_SPILL = re.compile(r"sst \[smem:\[(#allocation\d+_spill)\]\] (%\w+)")
_RELOAD = re.compile(r"(%\w+) = sld \[smem:\[(#allocation\d+_spill)\]\]")

# Units besides the MXUs: permutes and reductions across lanes, arithmetic, transcendental functions, loads and stores
# of vectors, and scalars.
UNITS = ("XLU", "VALU", "EUP", "VLOAD", "VSTORE", "SALU")

# Rows of the left operand that one instruction multiplies: as many as a register has of the type, or half of them
# (`lmr`). Found from products of known size, whose rows add up.
_ROWS, _FEW_ROWS = 16, 8

_COMPARE = {
    "lt": operator.lt,
    "ge": operator.ge,
    "le": operator.le,
    "gt": operator.gt,
    "eq": operator.eq,
    "ne": operator.ne,
}
_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


class ScheduleError(Exception):
    """A schedule that is not understood: better no number than a wrong one."""


@dataclasses.dataclass(frozen=True)
class Count:
    """What bundles take."""

    cycles: float = 0
    rows: float = 0  # of left operands, multiplied by the MXUs
    unknown: int = 0  # loops that are counted as one turn because their turns depend on values
    units: tuple[float, ...] = (0.0,) * len(UNITS)  # cycles in which each unit would have to work with all its slots

    def __add__(self, other: "Count") -> "Count":
        units = tuple(map(operator.add, self.units, other.units))
        return Count(self.cycles + other.cycles, self.rows + other.rows, self.unknown + other.unknown, units)

    def __mul__(self, times: float) -> "Count":
        return Count(times * self.cycles, times * self.rows, self.unknown, tuple(times * unit for unit in self.units))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`left kind right`, of scalar registers or constants; kind is one of lt, le, …"""

    kind: str
    left: str
    right: str

    def opposite(self) -> "Comparison":
        """The comparison that holds exactly where this one does not."""
        return Comparison(_OPPOSITE[self.kind], self.left, self.right)


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
    share: float = 1.0  # of the runs of the block around it in which it is taken, as far as that is known

    def excludes(self, other: "Branch") -> bool:
        """Whether one of both is always skipped and never both, and nothing more is known."""
        if self.skipped_if is None or self.share < 1 or other.share < 1:
            return False
        return other.skipped_if == self.skipped_if.opposite()


@dataclasses.dataclass(frozen=True)
class _Bundle:
    cycles: int
    rows: int
    call: str | None


@dataclasses.dataclass(frozen=True)
class _Jump:
    at: int
    negated: bool  # taken where the predicate does not hold
    predicate: str
    target: int

    @property
    def repeats(self) -> bool:
        """Whether it goes back."""
        return self.target <= self.at


@dataclasses.dataclass(frozen=True)
class _Span:
    """The bundles that a jump repeats or skips."""

    first: int
    end: int
    jump: _Jump


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Turns of a loop, by the value of its counter."""

    counter: str
    numbers: tuple[int, ...]


def parse(text: str, utilization: str = "") -> Block:
    """The tree of a `final_bundles` dump; `utilization` is the dump of the units that each bundle uses."""
    bundles, jumps = _read_bundles(text)
    units = _read_units(utilization, len(bundles)) if utilization else np.zeros((len(bundles), len(UNITS)))
    spans = []
    for jump in jumps:
        if jump.target <= jump.at:
            spans.append(_Span(jump.target, jump.at + 1 + JUMP_SLOTS, jump))
        elif jump.target > jump.at + 1 + JUMP_SLOTS:
            spans.append(_Span(jump.at + 1 + JUMP_SLOTS, jump.target, jump))
    # Outer spans first. A branch that skips a loop starts and ends with it and is the outer one.
    spans.sort(key=lambda span: (span.first, -span.end, span.jump.repeats))
    return _Builder(bundles, units, spans, _Scalars(text)).block(0, len(bundles), None)


def count(block: Block) -> Count:
    """What a block takes, with everything in it."""
    total = block.own
    for part in taken(block):
        if isinstance(part, Branch):
            total += count(part.body) * part.share
        elif part.turns is None:
            total += count(part.body) + Count(unknown=1)
        else:
            total += count(part.body) * part.turns
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
        bundles.append(_Bundle(cycles, sum(map(_rows, _PRODUCT.findall(line))), call[1] if call else None))
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


def _read_units(text: str, bundles: int) -> np.ndarray:
    """For each bundle, the share of every unit's slots that it uses."""
    header, found, lines = text.partition("== UTILIZATION:\n")
    names, slots = (line.replace(",", " ").split() for line in [*header.splitlines(), "", ""][1:3])
    used = [line.split() for line in lines.splitlines()]
    if not found or len(used) != bundles or not set(UNITS) <= set(names):
        raise ScheduleError(f"the units of {len(used)} bundles are written down in another form, for {bundles} bundles")
    columns = [names.index(unit) for unit in UNITS]
    return np.array(used, float)[:, columns] / np.array(slots, float)[columns]


def _rows(kind: str) -> int:
    """The rows that one product of a kind such as `bf16`, `msk.bf16` or `lmr.bf16` takes on."""
    return _ROWS if kind.endswith("bf16") and "lmr" not in kind else _FEW_ROWS


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


class _Scalars:
    """How a schedule computes the predicates of its jumps."""

    def __init__(self, text: str):
        self._definitions = {
            name: (opcode, [each.strip() for each in operands.split(",")])
            for name, opcode, operands in _DEFINITION.findall(text)
        }
        stored: dict[str, set[str]] = {}
        for slot, value in _SPILL.findall(text):
            stored.setdefault(slot, set()).add(value)
        self._reloaded = {
            value: next(iter(stored[slot])) for value, slot in _RELOAD.findall(text) if len(stored.get(slot, ())) == 1
        }

    def comparison(self, predicate: str, negated: bool) -> Comparison | None:
        """The predicate as one comparison of scalars; a value that was spilled keeps its name."""
        opcode, operands = self._definitions.get(predicate, ("", []))
        kind = opcode.removeprefix("scmp.")
        if kind not in _OPPOSITE or len(operands) != 2:
            return None
        found = Comparison(kind, *(self._origin(operand) for operand in operands))
        return found.opposite() if negated else found

    def counter(self, jump: _Jump) -> tuple[str, int] | None:
        """(the counter of a loop that repeats until it reaches a constant, that constant)."""
        end = self.comparison(jump.predicate, False)
        if end is None or end.kind != "ge" or not jump.negated or not end.right.isdigit():
            return None
        opcode, operands = self._definitions.get(end.left, ("", []))
        counted = [self._origin(operand) for operand in operands if operand != "1"]
        return (counted[0], int(end.right)) if opcode == "sadd" and len(counted) == 1 else None

    def holds(self, predicate: str, counter: str, turn: int, depth: int = 8) -> bool | None:
        """Whether a predicate holds in a turn of a loop; None if that depends on more than the loop's counter."""
        opcode, operands = self._definitions.get(predicate, ("", []))
        if opcode.startswith("scmp.") and len(operands) == 2:
            left, right = (self._value(operand, counter, turn) for operand in operands)
            compare = _COMPARE.get(opcode.removeprefix("scmp."))
            return None if left is None or right is None or compare is None else compare(left, right)
        if depth == 0 or not operands:
            return None
        inner = [self.holds(operand, counter, turn, depth - 1) for operand in operands]
        if opcode == "pneg" and inner[0] is not None:
            return not inner[0]
        if opcode == "pmov":
            return inner[0]
        if opcode == "por":
            return True if True in inner else None if None in inner else False
        if opcode == "pnand":
            return True if False in inner else None if None in inner else False
        return None

    def _value(self, operand: str, counter: str, turn: int, depth: int = 8) -> int | None:
        operand = self._origin(operand)
        if operand == counter:
            return turn
        if operand.isdigit():
            return int(operand) - (int(operand) >> 31 << 32)  # signed
        opcode, operands = self._definitions.get(operand, ("", []))
        if depth and opcode in ("sadd", "smov"):
            found = [self._value(each, counter, turn, depth - 1) for each in operands]
            return None if None in found else sum(each for each in found if each is not None)
        return None

    def _origin(self, value: str) -> str:
        """The value that was spilled, if this one was loaded back."""
        for _ in range(8):
            value = self._reloaded.get(value, value)
        return value


class _Builder:
    """Nests spans of bundles into a tree."""

    def __init__(self, bundles: list[_Bundle], units: np.ndarray, spans: list[_Span], scalars: _Scalars):
        self._bundles, self._units, self._spans, self._scalars = bundles, units, spans, scalars
        self._next = 0

    def block(self, first: int, end: int, turns: _Turns | None) -> Block:
        """The block of some bundles, at which the loop around them is in one of some turns."""
        parts: list[Loop | Branch] = []
        own: list[int] = []
        at = first
        while self._next < len(self._spans) and self._spans[self._next].first < end:
            inner = self._spans[self._next]
            if inner.end > end or inner.first < at or inner.jump.at < first:
                raise ScheduleError(f"the jump at bundle {inner.jump.at:#x} crosses another one")
            self._next += 1
            own += range(at, inner.first)
            parts.append(self._part(inner, turns))
            at = inner.end
        own += range(at, end)
        bundles = [self._bundles[number] for number in own]
        total = Count(
            sum(bundle.cycles for bundle in bundles),
            sum(bundle.rows for bundle in bundles),
            units=tuple(self._units[own].sum(axis=0).tolist()),
        )
        return Block(total, tuple(parts), tuple(bundle.call for bundle in bundles if bundle.call is not None))

    def _part(self, span: _Span, turns: _Turns | None) -> "Loop | Branch":
        jump = span.jump
        if jump.repeats:
            counted = self._scalars.counter(jump)
            inside = _Turns(counted[0], tuple(range(counted[1]))) if counted else None
            return Loop(span.first, self.block(span.first, span.end, inside), counted[1] if counted else None)
        share = 1.0
        if turns is not None and turns.numbers:
            skips = [self._scalars.holds(jump.predicate, turns.counter, turn) for turn in turns.numbers]
            left = tuple(
                turn for turn, skip in zip(turns.numbers, skips, strict=True) if skip is None or skip == jump.negated
            )
            share, turns = len(left) / len(turns.numbers), _Turns(turns.counter, left)
        skipped_if = self._scalars.comparison(jump.predicate, jump.negated)
        return Branch(span.first, self.block(span.first, span.end, turns), skipped_if, share)
