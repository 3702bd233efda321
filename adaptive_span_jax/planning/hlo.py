"""The optimized HLO text of a compiled program: its computations, and how often each of its loops turns."""

import dataclasses
import re
from collections.abc import Iterator

from adaptive_span_jax.planning.bundles import ScheduleError

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r"^ ([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

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
    def scope(self) -> str:
        """Where in the traced program it comes from, e.g. `jit(train_step)/jvp()/while/body`."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Program:
    """All computations by name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

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
    if opcode[1] == "constant":
        return Instruction(name, opcode[1], result, (), f"({inside})" + rest[close:])
    return Instruction(name, opcode[1], result, tuple(_NAME.findall(_COMMENT.sub("", inside))), rest[close:])


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    raise ScheduleError(f"no closing parenthesis in {text[:80]}")
