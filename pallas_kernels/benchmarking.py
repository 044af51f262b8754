"""Timing, limits and tables of `python -m pallas_kernels.OP.benchmark [--quick] [--output FILE]`.

All forms of an op run on the same inputs in the same process. Each is called many times in one compiled program, so
that the overhead of calls is not measured. The limit is measured in the same process: the time of a plain
reduction over the bytes that must move, or of the op's flops at the rate of a plain matrix product, if that is longer.
"""

import abc
import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_array import array_bytes as array_bytes

# The minimum duration of a measurement in seconds, and the number of measurements.
MIN_SECONDS, MEASUREMENTS = 0.1, 5
PRODUCT_WIDTH = 4096


class RandomArrays:
    """Creates random arrays from a seed."""

    def __init__(self, seed: int):
        """Starts a sequence of arrays that is determined by `seed`."""
        self._seeds = itertools.count(100 * seed)

    def array(self, size: tuple[int, ...], dtype: Any) -> Any:
        """Creates the next array.

        Args:
            size: Its shape.
            dtype: Its dtype.

        Returns:
            True for bool, random bytes for uint8, otherwise normal numbers of standard deviation 1/2.
        """
        key = jax.random.key(next(self._seeds))
        if dtype == jnp.bool:
            return jnp.ones(size, dtype)
        if dtype == jnp.uint8:
            return jax.random.bits(key, size, jnp.uint8)
        return (jax.random.normal(key, size, jnp.bfloat16) / 2).astype(dtype)


class Form(NamedTuple):
    """One way to compute an op.

    Attributes:
        function: Computes the op.
        arguments: Pytrees of arrays.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Shape(abc.ABC):
    """The shapes and options of an op; a base for frozen dataclasses."""

    product_dtype: ClassVar[Any] = jnp.bfloat16  # of the flops

    def __str__(self) -> str:
        """Returns the fields that have no default or another value, such as "batch=8, slots=4096"."""
        named = {
            field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(cast(Any, self))
        }
        shown = {name: value for name, (value, default) in named.items() if value != default}
        return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in shown.items())

    @abc.abstractmethod
    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns the op's arguments, created by `array(shape, dtype)`."""

    @abc.abstractmethod
    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op as a function of these arguments."""

    def random_arguments(self) -> tuple[Any, ...]:
        """Returns arguments for measurements."""
        return self.arguments(RandomArrays(0).array)

    @property
    def bytes(self) -> int:
        """The bytes that must move: all arguments and results."""
        abstract = self.arguments(jax.ShapeDtypeStruct)
        return array_bytes(abstract, jax.eval_shape(self.function(), *abstract))

    @property
    def flops(self) -> int:
        """The flops of the products that must be computed; 0 if bytes limit the time."""
        return 0

    def forms(self) -> Mapping[str, Form]:
        """Returns the forms to compare: the default one, named "kvjax", first."""
        arguments = self.random_arguments()
        return {"kvjax": Form(self.function(), arguments), "xla": Form(self.function(implementation="xla"), arguments)}


def main(title: str, quick: Sequence[Shape], shapes: Sequence[Shape]) -> None:
    """Measures an op, prints a table and writes rows.

    Args:
        title: The name of the op.
        quick: Small shapes for `--quick`, which only tests that all forms run.
        shapes: The shapes to measure.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="small shapes, to test that all forms run")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    print(f"# {title}\n\n{jax.devices()[0].device_kind}, JAX {jax.__version__}\n")
    print("| case | form | ms | GB/s | share of limit | speed relative to the best other |\n|---|---|---|---|---|---|")
    rows = []
    for shape in quick if arguments.quick else shapes:
        for row in measure(shape):
            rows.append(row)
            print(_table_line(row), flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(rows, indent=1))


def measure(shape: Shape) -> list[dict[str, Any]]:
    """Measures all forms of an op.

    Args:
        shape: The shape to measure.

    Returns:
        A row per form, as JSON: the case, the form, the seconds (None, with the problem, if the form cannot run on this
        device), the bytes that must move, the shortest possible time `limit`, the time of the best other form, both
        relative to the seconds, the device and the JAX version.
    """
    limit = limit_seconds(shape)
    common = {"case": str(shape), "bytes": shape.bytes, "limit": limit, "jax": jax.__version__}
    rows: list[dict[str, Any]] = []
    for name, form in shape.forms().items():
        row: dict[str, Any] = {**common, "form": name, "seconds": None, "problem": None}
        row["device"] = jax.devices()[0].device_kind
        try:
            row["seconds"] = seconds_per_call(form)
        except Exception as error:  # the problem is reported, and the other forms are measured
            row["problem"] = next(iter(str(error).splitlines()), type(error).__name__)
        rows.append(row)
    for row in rows:
        others = [other["seconds"] for other in rows if other is not row and other["seconds"] is not None]
        row["best_other"] = min(others, default=None)
        if row["seconds"] is not None:
            row["share_of_limit"] = limit / row["seconds"]
            row["times_best_other"] = row["best_other"] and row["best_other"] / row["seconds"]
    return rows


def limit_seconds(shape: Shape) -> float:
    """Returns the shortest time in which the device could compute an op at `shape`."""
    store = jnp.ones(max(shape.bytes // 2, 1), jnp.bfloat16)
    reading = seconds_per_call(Form(lambda x: jnp.sum(x, dtype=jnp.float32), (store,)))
    if not shape.flops:
        return reading
    square = jnp.ones((PRODUCT_WIDTH, PRODUCT_WIDTH), shape.product_dtype)
    # The ops compute float32 products with full precision.
    precision = jax.lax.Precision.HIGHEST if shape.product_dtype == jnp.float32 else None
    product = Form(functools.partial(jnp.matmul, precision=precision), (square, square))
    rate = 2 * PRODUCT_WIDTH**3 / seconds_per_call(product)
    return max(reading, shape.flops / rate)


def seconds_per_call(form: Form) -> float:
    """Returns the median time of a call of `form` among many in one program."""
    calls = 2
    while (seconds := _program_seconds(form, calls)[0]) < MIN_SECONDS and calls < 4096:
        calls = min(4096, max(2 * calls, int(1.2 * calls * MIN_SECONDS / max(seconds, 1e-6))))
    return statistics.median(_program_seconds(form, calls, MEASUREMENTS)) / calls


def _program_seconds(form: Form, calls: int, measurements: int = 1) -> list[float]:
    """Returns the times of a program that makes `calls` calls."""

    def call(_, carry):
        """Returns arguments and results, `carry`, of the next call."""
        # The barrier makes each call wait for the previous one and keeps the compiler from hoisting the call.
        arguments, _ = carry
        return jax.lax.optimization_barrier((arguments, form.function(*arguments)))

    @jax.jit
    def program(*arguments):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(form.function, *arguments))
        return jax.lax.fori_loop(0, calls, call, (arguments, zeros))[1]

    jax.block_until_ready(program(*form.arguments))
    seconds = []
    for _ in range(measurements):
        begin = time.perf_counter()
        jax.block_until_ready(program(*form.arguments))
        seconds.append(time.perf_counter() - begin)
    return seconds


def _table_line(row: Mapping[str, Any]) -> str:
    seconds = row["seconds"]
    if seconds is None:
        cells: Sequence[str] = (f"cannot run here: {row['problem']}", "", "", "")
    else:
        relative = "" if row["best_other"] is None else f"{row['times_best_other']:.2f}x"
        rate = f"{row['bytes'] / seconds / 1e9:.0f}"
        cells = (f"{1e3 * seconds:.3f}", rate, f"{100 * row['share_of_limit']:.0f}%", relative)
    return "| " + " | ".join((row["case"], row["form"], *cells)) + " |"
