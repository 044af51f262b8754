"""Compiled programs of a process that lives long: sizes that share them, and an end to how many are kept."""

import pathlib
from collections.abc import Iterable
from typing import Any

import jax
from absl import logging

# Of the memory maps that Linux lets a process have: XLA:CPU takes hundreds per program, and dies where there are no
# more.
_SHARE = 0.6
_MAPS, _MOST = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")


def length_bucket(tokens: int) -> range:
    """The prompt lengths that share the programs of a prompt of so many tokens: sixteen of them, or a quarter of an
    octave. Caches are made for the last."""
    step = max(16, 1 << max((tokens - 1).bit_length() - 3, 0))
    last = max(-(-tokens // step), 1) * step
    return range(last - step + 1, last + 1)


def free_compiled_programs(functions: Iterable[Any]) -> None:
    """Drops what these functions have compiled where the process nears the memory maps that it may have: what is needed
    again is compiled again."""
    most = max_memory_maps()
    if most is None or num_memory_maps() < _SHARE * most:
        return
    logging.info("compiled programs are dropped: the process holds %d memory maps of %d", num_memory_maps(), most)
    for function in functions:
        function.clear_cache()
    if num_memory_maps() >= _SHARE * most:  # others' programs, too
        jax.clear_caches()


def num_memory_maps() -> int:
    """Memory maps that the process holds; 0 where nothing says so."""
    try:
        return _MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


def max_memory_maps() -> int | None:
    """Memory maps that a process may hold; None where there is no such limit."""
    try:
        return int(_MOST.read_text())
    except (OSError, ValueError):
        return None
