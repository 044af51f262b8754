import pathlib

import jax
import pytest

MOST_MAPS = 30_000


@pytest.fixture(autouse=True, scope="module")
def _drop_programs_of_a_file():
    """Every program that XLA:CPU compiled holds memory maps, and a process may have some 65,000 of them: a whole run
    would pass that, and end in a segmentation fault."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _drop_programs_of_a_long_file():
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
