"""The TPU compiler's schedules of kernels: instruction bundles per loop, and critical paths.

A core issues one bundle per cycle. Schedules do not show stalls, so a loop takes at least as many cycles as it has
bundles.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

# Flags of libtpu, which reads them when it is loaded.
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
_BUNDLE = re.compile(r" *(?:0x)?[0-9a-f]+ +(LB)?[A-Z]*: +(>*)")
_LENGTH = re.compile(r"Length to end: (\d+)")


class Schedule(NamedTuple):
    """The schedule of a kernel.

    Attributes:
        name: name of the kernel.
        bundles: number of bundles.
        loops: bundles of every loop, after one ">" per level of nesting; an inner loop counts once.
        critical_path: cycles of the longest dependency chain in one basic block.
    """

    name: str
    bundles: int
    loops: str
    critical_path: int


def collect(directory: pathlib.Path, kernels: Sequence[str]) -> list[Schedule]:
    """Reads the schedules since the last call and deletes all files.

    Args:
        directory: directory that libtpu writes to.
        kernels: prefixes of kernel names; loops of XLA's fusions have other names.

    Returns:
        The schedules.
    """
    result = []
    for path in sorted(directory.glob("*-final_bundles.txt")):
        match = re.match(r"(\d+-(.+))-\d+-final_bundles", path.name)
        if match is None or not match[2].startswith(tuple(kernels)):
            continue
        chains = "".join(chain.read_text() for chain in directory.glob(f"{match[1]}-*-critical-path.txt"))
        longest = max((int(cycles) for cycles in _LENGTH.findall(chains)), default=0)
        result.append(Schedule(match[2], *parse_loops(path.read_text()), longest))
    for path in directory.iterdir():
        path.unlink()
    return result


def parse_loops(text: str) -> tuple[int, str]:
    """Returns the number of bundles in a kernel's text, and the bundles of its loops."""
    lines = [match.groups() for line in text.splitlines() if (match := _BUNDLE.match(line))]
    begins = [bool(begin) for begin, _ in lines]
    depths = [len(depth) for _, depth in lines]
    loops = []
    for first, depth in enumerate(depths):
        if begins[first]:
            # Blocks that are jumped over may be anywhere, without a depth: a loop ends at the next loop of its level.
            later = (at for at in range(first + 1, len(lines)) if begins[at] and depths[at] <= depth)
            end = next(later, len(lines))
            last = max(at for at in range(first, end) if depths[at] >= depth)
            loops.append(f"{'>' * depth}{last + 1 - first}")
    return len(lines), " ".join(loops)
