"""Compiled programs: their cache on disk, and limits of how many a long-lived process creates and holds."""

import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
from absl import logging

from kvjax_models.user_cache import user_cache_directory

DISABLE_VARIABLE = "KVJAX_COMPILATION_CACHE"  # environment variable; "off" disables the cache on disk
_MAX_BYTES = 2**29  # of stored programs

# XLA:CPU takes hundreds of memory maps per program and aborts the process at Linux's limit.
_MAX_SHARE_OF_LIMIT = 0.6
_MAPS, _LIMIT = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")


def enable_persistent_cache() -> None:
    """Makes JAX store compiled programs in the user's cache directory, so that later processes start faster.

    Does nothing if a directory is configured (`jax_compilation_cache_dir`), if `KVJAX_COMPILATION_CACHE` is "off", or
    if the directory cannot be created. Options of JAX that the environment sets are kept.
    """
    if os.environ.get(DISABLE_VARIABLE) == "off" or _configured_directory() is not None:
        return
    try:
        directory = user_cache_directory() / "programs"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # JAX trusts the programs in it
        _limit_size(directory)
    except OSError as error:
        logging.info("compiled programs are not stored: %s", error)
        return
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # reading takes less than compiling
    jax.config.update("jax_compilation_cache_dir", str(directory))


def _configured_directory() -> str | None:
    """Returns the directory that the user or an earlier call configured."""
    return jax.config.values["jax_compilation_cache_dir"]


def _limit_size(directory: pathlib.Path) -> None:
    """Removes the programs that were used longest ago, beyond the maximum size.

    JAX's own limit reads the times of all programs before each one that it writes, .1 to .3 s for 4,000 of them.
    """
    files = [(path, path.stat()) for path in directory.glob("*-cache")]
    total = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda item: max(item[1].st_atime, item[1].st_mtime)):
        if total <= _MAX_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size


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
