"""What the TPU compiler's own schedule says of a kernel: the bundles of its loops, and the longest chain in one block.

A bundle is what a core issues in a cycle. Stalls are not in a schedule, so that a loop takes at least as many cycles as
it has bundles.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

# What libtpu writes into a directory for every kernel that it compiles. It is read when libtpu is loaded.
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
_BUNDLE = re.compile(r" *(?:0x)?[0-9a-f]+ +(LB)?[A-Z]*: +(>*)")
_LENGTH = re.compile(r"Length to end: (\d+)")


class Schedule(NamedTuple):
    """Of one kernel."""

    name: str
    bundles: int
    loops: str  # bundles of every loop, inner ones' once, behind as many > as it is deep
    critical_path: int  # cycles of the longest chain of operations in any one block


def taken(directory: pathlib.Path, kernels: Sequence[str]) -> list[Schedule]:
    """The schedules of these kernels, by how their names begin, that were compiled since the last call: all files are
    deleted."""
    found = []
    for bundles in sorted(directory.glob("*-final_bundles.txt")):
        named = re.match(r"(\d+-(.+))-\d+-final_bundles", bundles.name)
        # What XLA fuses for itself has loops, too, but not one kernel for a program.
        if named is None or not named[2].startswith(tuple(kernels)):
            continue
        chains = "".join(path.read_text() for path in directory.glob(f"{named[1]}-*-critical-path.txt"))
        longest = max((int(cycles) for cycles in _LENGTH.findall(chains)), default=0)
        found.append(Schedule(named[2], *loops_of(bundles.read_text()), longest))
    for path in directory.iterdir():
        path.unlink()
    return found


def loops_of(text: str) -> tuple[int, str]:
    """How many bundles a kernel's text has, and each of its loops."""
    lines = [match.groups() for line in text.splitlines() if (match := _BUNDLE.match(line))]
    begins = [bool(begin) for begin, _ in lines]
    depths = [len(depth) for _, depth in lines]
    loops = []
    for first, depth in enumerate(depths):
        if begins[first]:
            # Blocks that are jumped over stand anywhere, without a depth: a loop ends where the next one begins.
            later = (at for at in range(first + 1, len(lines)) if begins[at] and depths[at] <= depth)
            end = next(later, len(lines))
            last = max(at for at in range(first, end) if depths[at] >= depth)
            loops.append(f"{'>' * depth}{last + 1 - first}")
    return len(lines), " ".join(loops)
