"""The optimized HLO text of a compiled program: its computations, how often its loops turn, and its HBM traffic."""

import dataclasses
import math
import re
from collections.abc import Iterator

from adaptive_span_jax.planning.bundles import ScheduleError

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r"^ ([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")


_ELEMENT_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
# What the attributes of a Pallas kernel have.
KERNEL = 'custom_call_target="tpu_custom_call"'
# Copies that run beside other instructions.
PREFETCH = ("copy-start", "slice-start")
# Instructions that only name an operand otherwise.
_SAME = ("bitcast", "reshape")
_READ_A_PART = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as the compiler lays it out."""

    size: int  # in bytes, padded to whole tiles
    in_hbm: bool  # else in on-chip memory
    element: int  # bytes of one element

    @property
    def hbm(self) -> int:
        """Its bytes in HBM."""
        return self.size if self.in_hbm else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; the attributes of constants and parameters start with their value or number."""

    name: str
    opcode: str
    result: str  # its type
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, key: str) -> str | None:
        """The computation that an attribute such as `body` or `calls` names."""
        found = re.search(rf"\b{key}=%([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def arrays(self) -> list[Array]:
        """What it returns, a tuple's elements one after the other."""
        return [_array(*found) for found in _ARRAY.findall(_COMMENT.sub("", self.result))]

    @property
    def scope(self) -> str:
        """Where in the traced program it comes from, e.g. `jit(train_step)/jvp()/while/body`."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Program:
    """All computations by name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def traffic(self, instruction: Instruction, computation: str) -> int:
        """Bytes that one run moves from and to HBM, if every operand is read once and every result written once.

        Of an array that is only sliced, the slices count, and of one that is updated in place, the update.
        """
        inside = self.computations[computation]
        if instruction.opcode in PREFETCH:
            first, second = instruction.arrays[:2]
            moved = min(first.size, second.size)
            return moved * (first.in_hbm + second.in_hbm)
        if instruction.opcode == "custom-call" and KERNEL not in instruction.attributes:
            return 0  # reserves space or names arrays otherwise
        operands = [inside[name] for name in instruction.operands]
        called = instruction.attribute("calls")
        if called is None or instruction.opcode != "fusion":
            if instruction.opcode == "dynamic-update-slice" and instruction.arrays[0].in_hbm:
                return operands[1].arrays[0].hbm + operands[1].arrays[0].size
            if instruction.opcode in _READ_A_PART:
                read = instruction.arrays[0].size if operands[0].arrays[0].in_hbm else 0
            else:
                read = sum(array.hbm for operand in operands for array in operand.arrays)
            return read + sum(array.hbm for array in instruction.arrays)
        read = sum(
            min(self._read(called, number), operand.arrays[0].size)
            for number, operand in enumerate(operands)
            if operand.arrays and operand.arrays[0].in_hbm
        )
        written = self._written(called)
        if len(written) != len(instruction.arrays):
            written = [array.size for array in instruction.arrays]
        pairs = zip(instruction.arrays, written, strict=True)
        return read + sum(min(array.size, size) for array, size in pairs if array.in_hbm)

    def _read(self, computation: str, number: int) -> int:
        """Bytes that a fused computation reads of one of its parameters."""
        instructions = self.computations[computation]
        [parameter] = [
            each
            for each in instructions.values()
            if each.opcode == "parameter" and each.attributes.startswith(f"({number})")
        ]
        return self._read_value(instructions, parameter)

    def _read_value(self, instructions: dict[str, Instruction], value: Instruction) -> int:
        total = 0
        for user in instructions.values():
            for place in (place for place, name in enumerate(user.operands) if name == value.name):
                called = user.attribute("calls")
                if user.opcode in _SAME:
                    total += self._read_value(instructions, user)
                elif user.opcode in _READ_A_PART and place == 0:
                    total += user.arrays[0].size
                elif user.opcode == "dynamic-update-slice" and place == 0:
                    continue
                elif user.opcode == "fusion" and called:
                    total += self._read(called, place)
                else:
                    total += value.arrays[0].size
        return total

    def _written(self, computation: str) -> list[int]:
        """Bytes that a fused computation writes of each of its results."""
        instructions = self.computations[computation]
        root = list(instructions.values())[-1]
        names = root.operands if root.opcode == "tuple" else (root.name,)
        return [self._write_size(instructions, instructions[name]) for name in names]

    def _write_size(self, instructions: dict[str, Instruction], value: Instruction) -> int:
        called = value.attribute("calls")
        if value.opcode in _SAME:
            return self._write_size(instructions, instructions[value.operands[0]])
        if value.opcode == "dynamic-update-slice":
            return instructions[value.operands[1]].arrays[0].size
        if value.opcode == "fusion" and called:
            return sum(self._written(called))
        return sum(array.size for array in value.arrays)

    def loops(self, computation: str) -> Iterator[Instruction]:
        """The `while` instructions directly in a computation."""
        return (each for each in self.computations[computation].values() if each.opcode == "while")

    def body(self, loop: Instruction) -> str:
        """The computation that a `while` repeats."""
        body = loop.attribute("body")
        if body is None:
            raise ScheduleError(f"{loop.name} has no body")
        return body

    def turns(self, loop: Instruction) -> int | None:
        """How often a `while` repeats its body; None if that depends on values."""
        condition = loop.attribute("condition")
        instructions = self.computations[condition or ""]
        last = list(instructions.values())[-1]
        if last.opcode != "compare" or "direction=LT" not in last.attributes:
            raise ScheduleError(f"{loop.name} does not count up to a limit: {last.attributes[:80]}")
        limit = instructions[last.operands[1]]
        found = re.fullmatch(r"\((\d+)\).*", limit.attributes) if limit.opcode == "constant" else None
        return int(found[1]) if found else None


def parse(text: str) -> Program:
    """Reads what `compiled.as_text()` returns."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, here = "", None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            here = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif here is not None and (found := _INSTRUCTION.match(line)):
            here[found[1]] = _instruction(found[1], line[found.end() :])
    if not entry:
        raise ScheduleError("the program has no entry computation")
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:]
    opcode = _OPCODE.match(rest)
    if opcode is None:
        raise ScheduleError(f"unreadable instruction {name}: {text[:120]}")
    close = _closing(rest, opcode.end() - 1)
    inside = rest[opcode.end() : close - 1]
    if opcode[1] in ("constant", "parameter"):
        return Instruction(name, opcode[1], result, (), f"({inside})" + rest[close:])
    return Instruction(name, opcode[1], result, tuple(_NAME.findall(_COMMENT.sub("", inside))), rest[close:])


def _array(element: str, sizes: str, layout: str) -> Array:
    """An array from its type, e.g. `bf16`, `8,512`, `1,0:T(8,128)(2,1)S(1)`."""
    dimensions = [int(size) for size in sizes.split(",") if size]
    order, _, rest = layout.partition(":")
    minor_first = [dimensions[int(axis)] for axis in order.split(",") if axis] or dimensions[::-1]
    tile = re.match(r"T\(([\d,]+)\)", rest)
    tiles = [int(size) for size in tile[1].split(",")][::-1] if tile else []
    padded = [-(-size // unit) * unit for size, unit in zip(minor_first, tiles, strict=False)]
    elements = math.prod(padded + minor_first[len(padded) :])
    space = re.search(r"S\((\d+)\)", rest)
    size = _ELEMENT_BYTES.get(element, 4)
    return Array(elements * size, space is None or space[1] == "0", size)


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    raise ScheduleError(f"no closing parenthesis in {text[:80]}")
