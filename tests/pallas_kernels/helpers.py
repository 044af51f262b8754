"""Helpers that the tests of several ops share."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.partials import MASK_VALUE

# The slow interpreter simulates memory spaces: it raises on races and on reads out of bounds, and memory that was not
# written is NaN.
CHECKED = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise")
ON_GPU = jax.default_backend() == "gpu"
RUNS_GPU_KERNELS = ON_GPU or hasattr(plgpu, "InterpretGPUParams")
# `pytest -m gpu_kernel` runs the tests of kernels for GPUs: compiled on a GPU, interpreted elsewhere (JAX 0.11).
gpu_kernel = pytest.mark.gpu_kernel
GPU: dict[str, Any] = {"implementation": "mosaic_gpu"}
if RUNS_GPU_KERNELS and not ON_GPU:
    GPU["interpret"] = plgpu.InterpretGPUParams(detect_races=True)


def make_forms(config: Any, xla_config: Any = None) -> dict[str, dict[str, Any]]:
    """Returns options of an op per form: XLA, TPU kernel in both interpreters, on accelerators the default.

    The oracle, in float64, is what all forms are compared with.
    """
    tpu = {"implementation": "mosaic_tpu", "config": config}
    forms = {
        "xla": {"implementation": "xla", "config": xla_config},
        "mosaic_tpu": {**tpu, "interpret": True},
        "mosaic_tpu_checked": {**tpu, "interpret": CHECKED},
    }
    return forms if jax.default_backend() == "cpu" else {**forms, "device": {}}


def form_marks(forms: dict[str, Any]) -> tuple[pytest.MarkDecorator, pytest.MarkDecorator]:
    """Returns parametrizations over all forms, and over all but the slow interpreter."""
    quick = [form for form in forms if form != "mosaic_tpu_checked"]
    return pytest.mark.parametrize("form", list(forms)), pytest.mark.parametrize("form", quick)


def float64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def in_float64(oracle: Any, *arguments: Any, **options: Any) -> Any:
    """Returns the results of an oracle with all floating-point numbers in float64."""

    def widen(x: Any) -> np.ndarray:
        return float64(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(functools.partial(oracle, **options))(*jax.tree.map(widen, arguments)))


def pick(tree: Any, *index: int) -> Any:
    """Returns the arrays of a tree at an index."""
    return jax.tree.map(lambda x: x[index], tree)


def stack(*trees: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations of a program except those inside kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in ("pallas_call", "mpmd_map"):
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
                if (inner := getattr(inner, "jaxpr", inner)) is not None and hasattr(inner, "eqns"):
                    yield from equations(inner)


def run_without_loop(function: Any, *arguments: Any, grids: Sequence[tuple[str, str]] = ()) -> Any:
    """Runs a function whose program has one TPU kernel, or GPU kernels with these grids (as text), outside loops."""
    traced = jax.jit(function).trace(*arguments)
    names = [equation.primitive.name for equation in equations(traced.jaxpr.jaxpr)]
    assert not {"while", "scan"} & set(names)
    assert names.count("pallas_call") == (0 if grids else 1)
    assert re.findall(r"Mesh\(grid=(\([\d, ]*\)), grid_names=\((.*?)\)", str(traced.jaxpr)) == list(grids)
    return traced.lower().compile()(*arguments)


def compare_partials(actual: Any, expected: Any, tolerance: float) -> np.ndarray:
    """Compares partials with those of an oracle.

    Returns:
        Which queries have entries.
    """
    maximum, numerator, denominator, _ = expected
    some = maximum > MASK_VALUE / 2
    assert actual.max.shape == maximum.shape and actual.numerator.shape == numerator.shape
    np.testing.assert_array_equal(np.asarray(actual.max) > MASK_VALUE / 2, some)
    # Both are relative to their maximum.
    shift = np.exp(np.where(some, float64(actual.max) - np.where(some, maximum, 0), 0))
    largest = max(np.abs(numerator).max(), np.abs(denominator).max(), 1e-30)
    sums = (float64(actual.numerator) * shift[..., None], numerator), (float64(actual.denominator) * shift, denominator)
    for result, reference in sums:
        error = np.abs(result - reference)[some].max(initial=0) / largest
        assert error <= tolerance, f"error {error:.2e} exceeds {tolerance:.0e}"
    return some
