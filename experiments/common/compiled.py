"""What a compiled program's text says about the arrays it writes."""

import math
import re
from typing import NamedTuple

# Bytes per element.
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
# The name, the element type, sides and layout of an array (none of a tuple), and the opcode.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|(\w+)\[([\d,]*)\](\S*)) ([\w\-]+)\(")
_ENTERED = re.compile(r"(?:body|condition|to_apply)=%?([\w.\-]+)")
# These name what is there already.
_NAMES = {"parameter", "get-tuple-element", "bitcast", "while", "conditional", "call", "optimization-barrier"}
_BODY = re.compile(r"body=%?([\w.\-]+)")
_NOTHING = {"tuple", "constant", "after-all", "partition-id"}
# On TPUs memory space 1 is on chip, where the compiler puts what it reads ahead, and 6 the scalar core's.
_ON_CHIP, _SCALARS = "S(1)", "S(6)"
# Copies that run beside everything else.
_AHEAD = {"copy-start", "slice-start", "copy-done", "slice-done"}


class Written(NamedTuple):
    """An instruction that writes an array to main memory."""

    name: str
    opcode: str
    shape: tuple[int, ...]
    bytes: int


def large_outputs(text: str, least: int) -> list[Written]:
    """The arrays of at least so many bytes that a program writes whenever it runs: in its loops and calls, but not in
    branches of conditionals. Fusions count by what they write, not by what stands inside them.

    Args:
        text: of a compiled program, as `jax.stages.Compiled.as_text` gives it.
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
            elif kind in _BYTES and opcode not in _NAMES and _ON_CHIP not in layout:
                shape = tuple(int(side) for side in sides.split(",") if side)
                found.append(Written(name, opcode, shape, math.prod(shape) * _BYTES[kind]))
    return [one for one in found if one.bytes >= least]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation, and the name of the one that the program begins with."""
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
    """What one turn of a program's longest loop starts: fusions, copies, products and kernels, each a launch on a GPU.
    What stands inside a fusion, a branch or an inner loop is not counted; nor is, on a TPU, what its scalar core does
    and what is copied on chip ahead.

    Args:
        text: of a compiled program, as `jax.stages.Compiled.as_text` gives it.
    """
    bodies, _ = _computations(text)
    turns = [bodies[name] for line in text.splitlines() if " while(" in line for name in _BODY.findall(line)]
    longest: list[str] = max(turns, key=len, default=[])
    started = [match for line in longest if (match := _INSTRUCTION.match(line))]
    return sum(one[5] not in _NAMES | _NOTHING | _AHEAD and _SCALARS not in (one[4] or "") for one in started)


class Collective(NamedTuple):
    """An exchange between devices."""

    kind: str
    bytes: int  # that one device receives or holds as the result


_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(text: str) -> list[Collective]:
    """The exchanges between devices in a compiled program's text, each once, however often its loops run."""
    found = []
    for result, kind, started in _COLLECTIVE.findall(text):
        sizes = [
            math.prod(int(side) for side in sides.split(",") if side) * _BYTES[element]
            for element, sides in _ARRAY.findall(result)
            if element in _BYTES
        ]
        # Several arrays may be exchanged as one; what starts an exchange holds its operands beside its result, but for
        # sums.
        beside = started and kind != "all-reduce"
        found.append(Collective(kind, max(sizes, default=0) if beside else sum(sizes)))
    return found
