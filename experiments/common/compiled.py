"""Analyzes the text of compiled programs: large arrays, launches and collectives."""

import math
import re
from typing import NamedTuple

# Bytes per element.
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
# Name; element type, dimensions and layout unless the result is a tuple; opcode.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|(\w+)\[([\d,]*)\](\S*)) ([\w\-]+)\(")
_ENTERED = re.compile(r"(?:body|condition|to_apply)=%?([\w.\-]+)")
# Opcodes that do not write an array.
_NAMES = {"parameter", "get-tuple-element", "bitcast", "while", "conditional", "call", "optimization-barrier"}
_BODY = re.compile(r"body=%?([\w.\-]+)")
# An instruction that updates an operand in place; XLA copies the operand before if it must.
_IN_PLACE = "output_to_operand_aliasing="
_NOTHING = {"tuple", "constant", "after-all", "partition-id"}
# TPU memory spaces: 1 is on chip and holds prefetched data, 6 belongs to the scalar core.
_ON_CHIP, _SCALARS = "S(1)", "S(6)"
# Asynchronous copies.
_AHEAD = {"copy-start", "slice-start", "copy-done", "slice-done"}


class Written(NamedTuple):
    """An instruction that writes an array to main memory."""

    name: str
    opcode: str
    shape: tuple[int, ...]
    bytes: int


def large_outputs(text: str, least: int) -> list[Written]:
    """Returns large arrays that every run of a program writes, including loops and calls but not conditionals.

    Args:
        text: text of a compiled program (`jax.stages.Compiled.as_text`).
        least: minimum number of bytes.

    Returns:
        The instructions; a fusion counts once.
    """
    bodies, entry = _computations(text)
    found: list[Written] = []
    seen, waiting = set(), [entry]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in bodies[name]:
            instruction = _INSTRUCTION.match(line)
            if instruction is None:
                continue
            name, kind, sides, layout, opcode = instruction.groups()
            if opcode in ("while", "call"):
                waiting += _ENTERED.findall(line)
            elif kind in _BYTES and opcode not in _NAMES and _ON_CHIP not in layout and _IN_PLACE not in line:
                shape = tuple(int(side) for side in sides.split(",") if side)
                found.append(Written(name, opcode, shape, math.prod(shape) * _BYTES[kind]))
    return [one for one in found if one.bytes >= least]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of every computation, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[2]
            entry = name if header[1] else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    return bodies, entry


def launches(text: str) -> int:
    """Returns the number of operations that one iteration of a program's longest loop launches.

    Each is a launch on a GPU: a fusion, copy, matrix product or kernel. Operations in fusions, branches and inner loops
    are not counted, nor are scalar operations and prefetching on TPUs.

    Args:
        text: text of a compiled program (`jax.stages.Compiled.as_text`).
    """
    bodies, _ = _computations(text)
    turns = [bodies[name] for line in text.splitlines() if " while(" in line for name in _BODY.findall(line)]
    longest: list[str] = max(turns, key=len, default=[])
    started = [match for line in longest if (match := _INSTRUCTION.match(line))]
    return sum(one[5] not in _NAMES | _NOTHING | _AHEAD and _SCALARS not in (one[4] or "") for one in started)


class Collective(NamedTuple):
    """A collective operation.

    Attributes:
        kind: opcode.
        bytes: bytes of the result on one device.
    """

    kind: str
    bytes: int


_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(text: str) -> list[Collective]:
    """Returns the collective operations in a compiled program's text; loops count once."""
    found = []
    for result, kind, started in _COLLECTIVE.findall(text):
        sizes = [
            math.prod(int(side) for side in sides.split(",") if side) * _BYTES[element]
            for element, sides in _ARRAY.findall(result)
            if element in _BYTES
        ]
        # One collective may exchange several arrays; a started one has operands and results, except all-reduce.
        has_operands = started and kind != "all-reduce"
        found.append(Collective(kind, max(sizes, default=0) if has_operands else sum(sizes)))
    return found
