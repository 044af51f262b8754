"""Limits how many compiled programs a long-lived process creates and holds."""

import pathlib
from collections.abc import Iterable
from typing import Any

import jax
from absl import logging

# XLA:CPU takes hundreds of memory maps per program and aborts the process at Linux's limit.
_MAX_SHARE_OF_LIMIT = 0.6
_MAPS, _LIMIT = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")


def length_bucket(tokens: int) -> range:
    """Returns the prompt lengths that share compiled programs with a prompt of `tokens` tokens.

    A bucket spans 16 lengths or a quarter of an octave, whichever is larger. Caches are created for the last one.
    """
    step = max(16, 1 << max((tokens - 1).bit_length() - 3, 0))
    last = max(-(-tokens // step), 1) * step
    return range(last - step + 1, last + 1)


def free_compiled_programs(functions: Iterable[Any]) -> None:
    """Clears the caches of jitted functions if the process approaches its limit of memory maps.

    Programs that are needed again are compiled again.
    """
    limit = max_memory_maps()
    if limit is None or num_memory_maps() < _MAX_SHARE_OF_LIMIT * limit:
        return
    logging.info("clearing compiled programs: the process holds %d of %d memory maps", num_memory_maps(), limit)
    for function in functions:
        function.clear_cache()
    if num_memory_maps() >= _MAX_SHARE_OF_LIMIT * limit:  # other functions hold programs, too
        jax.clear_caches()


def num_memory_maps() -> int:
    """Returns the number of memory maps that this process holds; 0 if the system does not report it."""
    try:
        return _MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


def max_memory_maps() -> int | None:
    """Returns the system's limit of memory maps per process; None if the system has no limit."""
    try:
        return int(_LIMIT.read_text())
    except (OSError, ValueError):
        return None
