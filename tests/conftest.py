import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled_programs():
    """Every program that XLA:CPU compiled holds memory maps, and a process may have some 65,000 of them: a whole run
    would pass that, and end in a segmentation fault."""
    yield
    jax.clear_caches()
