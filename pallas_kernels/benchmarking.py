"""Times and errors of all forms of the ops, on this machine's device.

    python -m pallas_kernels.OP.benchmark [--quick] [--output FILE]
    python -m pallas_kernels.benchmark_all [--op OP ...] [--quick] [--output FILE]

The first command measures all shapes of an op, the second one a few shapes of every op. All forms of an op run on the
same random inputs in the same process. Each is called many times in one compiled program, so that the overhead of calls
is not measured. The limit is the time of a plain copy or reduction of the bytes that must move, or of the op's flops at
the rate of a plain matrix product, if that is longer; both rates are measured in the same process. Errors are relative
to the oracle with float32 inputs. On GPUs, XLA itself multiplies float32 matrices in TF32 by default.

Every row is on disk as soon as it is measured; a run that is started again with the same `--output` skips the forms
that have a row.
"""

import abc
import argparse
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp

from pallas_kernels.partials import Partials
from pallas_kernels.quantized_array import array_bytes as array_bytes

# The duration of a measurement at the limit, the number of measurements, and the seconds after which no further
# measurement begins.
MIN_SECONDS, MEASUREMENTS, MAX_SECONDS = 0.02, 5, 1.0
BANDWIDTH_BYTES = 4 * 2**30
PRODUCT_WIDTH = 8192


class RandomArrays:
    """Creates random arrays from a seed."""

    def __init__(self, seed: int):
        """Starts a sequence of arrays that is determined by `seed`."""
        self._seeds = itertools.count(100 * seed)

    def array(self, size: tuple[int, ...], dtype: Any) -> Any:
        """Creates the next array.

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
        quick: Small shapes for `--quick`, which only tests that all forms run.
    """
    arguments = make_parser(title).parse_args()
    run([(title, shape) for shape in (quick if arguments.quick else shapes)], arguments.output)


def run(cases: Sequence[tuple[str, Shape]], output: pathlib.Path | None = None) -> None:
    """Measures ops at some shapes, prints a table and writes rows.

    Args:
        cases: The names of ops, and shapes of them.
        output: A file of JSON lines for the rows, which are appended; forms that have a row in it are skipped.
    """
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}\n")
    print("| op | case | form | ms | GB/s | share of limit | relative error |\n|---|---|---|---|---|---|---|")
    measured = set()
    if output is not None and output.exists():
        rows = map(json.loads, output.read_text().splitlines())
        measured = {(row["op"], row["case"], row["form"]) for row in rows if "form" in row}
    for op, shape in cases:
        skipped = [form for other, case, form in measured if (other, case) == (op, str(shape))]
        for row in measure(shape, skipped):
            print(_table_line(row := {"op": op, **row}), flush=True)
            if output is not None:
                with output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    os.fsync(file.fileno())


def measure(shape: Shape, skipped: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Measures all forms of an op; compiles them at the same time.

    Args:
        skipped: Names of forms that are not measured.

    Yields:
        A row per form, as JSON: the case, the form, the seconds (None, with the problem, if the form cannot run on this
        device), the bytes that must move, the shortest possible time `limit` as such and relative to the seconds, the
        error of forms with the op's results, the device and the JAX version.
    """
    common = {"case": str(shape), "bytes": shape.bytes, "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    limit = limit_seconds(shape)
    forms = {name: form for name, form in shape.forms().items() if name not in skipped}
    calls = min(max(round(MIN_SECONDS / limit), 1), 4096)
    with ThreadPoolExecutor(max(len(forms), 1)) as pool:
        programs = {name: pool.submit(compile_calls, form, calls) for name, form in forms.items()}
        expected = _oracle_results(shape) if {"kvjax", "xla"} & forms.keys() else None
        for name, form in forms.items():
            row = {"form": name, **common, "limit": limit, "seconds": None, "problem": None, "error": None}
            try:
                program = programs[name].result()
                if name in ("kvjax", "xla"):
                    row["error"] = relative_error(jax.jit(form.function)(*form.arguments), expected)
                row["seconds"] = median_seconds(functools.partial(program, *form.arguments)) / calls
                row["share_of_limit"] = limit / row["seconds"]
            except Exception as error:  # the problem is reported, and the other forms are measured
                row["problem"] = describe(error)
            yield row


def describe(error: Exception) -> str:
    """Returns the type and the first line of an error, at most 300 characters."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


def _oracle_results(shape: Shape) -> Any:
    """Returns the results of the oracle with float32 inputs; None if they cannot be computed."""

    def widen(x: Any) -> Any:
        return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x

    try:
        with jax.default_matmul_precision("highest"):
            arguments = jax.tree.map(widen, shape.random_arguments())
            return jax.block_until_ready(jax.jit(shape.function(implementation="oracle"))(*arguments))
    except (NotImplementedError, TypeError, jax.errors.JaxRuntimeError):  # for example for lack of memory
        return None


def relative_error(actual: Any, expected: Any) -> float | None:
    """Compares results: the largest ||actual - expected|| / ||expected|| of their arrays.

    Args:
        actual: Results of an op; partials are compared as outputs and logarithms of denominators.
        expected: The expected results; None returns None.

    Returns:
        The error; of integers, the share of the numbers that differ.
    """
    if expected is None:
        return None

    def comparable(results: Any) -> list[Any]:
        if isinstance(results, Partials):
            has_entries = results.denominator > 0
            denominator = jnp.where(has_entries, results.denominator, 1.0)
            log_denominator = jnp.where(has_entries, results.max + jnp.log(denominator), 0.0)
            results = results.numerator / denominator[..., None], log_denominator, results.logits
        return jax.tree.leaves(results)

    @jax.jit
    def error(x: Any, y: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.mean(x != y)
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm(jnp.ravel(x - y)) / jnp.maximum(jnp.linalg.norm(jnp.ravel(y)), 1e-30)

    errors = [error(x, y) for x, y in zip(comparable(actual), comparable(expected), strict=True)]
    return float(jnp.max(jnp.stack(errors)))  # NaN if any error is


def limit_seconds(shape: Shape) -> float:
    """Returns the shortest time in which the device could compute an op at `shape`."""
    reading = shape.bytes / memory_bandwidth()
    # The ops compute float32 products with full precision.
    return max(reading, shape.flops / product_rate(jnp.dtype(shape.product_dtype))) if shape.flops else reading


@functools.cache
def memory_bandwidth() -> float:
    """Measures the bytes per second of a reduction and of a copy of 4 GiB, or of 512 MiB on a CPU, the faster of both.

    Returns:
        Bytes read by the reduction, or read and written by the copy, which is the faster one on GPUs.
    """
    calls = 1 if jax.default_backend() == "cpu" else 8
    size = BANDWIDTH_BYTES // (8 if jax.default_backend() == "cpu" else 1)
    array = jnp.ones((size // 2**16, 2**14), jnp.float32)

    def bandwidth(function: Callable[[Any], Any], moved: int) -> float:
        program = compile_calls(Form(function, (array,)), calls)
        return calls * moved / median_seconds(functools.partial(program, array))

    return max(bandwidth(jnp.sum, array.nbytes), bandwidth(lambda x: x + 1, 2 * array.nbytes))


@functools.cache
def product_rate(dtype: jnp.dtype) -> float:
    """Measures the flops per second of a large matrix product of random numbers, in float32 with full precision.

    Returns:
        Two flops per multiplication.
    """
    width = PRODUCT_WIDTH // (8 if jax.default_backend() == "cpu" else 1)
    square = jax.random.normal(jax.random.key(0), (width, width), dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    calls = 1 if jax.default_backend() == "cpu" else 8
    program = compile_calls(Form(functools.partial(jnp.matmul, precision=precision), (square, square)), calls)
    return calls * 2 * width**3 / median_seconds(functools.partial(program, square, square))


def compile_calls(form: Form, calls: int) -> jax.stages.Compiled:
    """Compiles a program that calls a form many times.

    Args:
        calls: The number of calls; a number that is known to the compiler needs no synchronization on GPUs.

    Returns:
        The program, which takes the form's arguments.
    """

    def call(_, carry):
        """Returns arguments and results, `carry`, of the next call."""
        # The barrier makes each call wait for the previous one and keeps the compiler from hoisting the call.
        arguments, _ = carry
        return jax.lax.optimization_barrier((arguments, form.function(*arguments)))

    @jax.jit
    def program(*arguments):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(form.function, *arguments))
        return jax.lax.fori_loop(0, calls, call, (arguments, zeros))[1]

    return program.lower(*form.arguments).compile()


def median_seconds(function: Callable[[], Any]) -> float:
    """Returns the median time of a function's device work, after a first call."""
    jax.block_until_ready(function())
    seconds: list[float] = []
    while len(seconds) < MEASUREMENTS and sum(seconds) < MAX_SECONDS:
        begin = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def make_parser(title: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that all benchmarks have, with a title."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="small shapes, to test that all forms run")
    parser.add_argument("--output", type=pathlib.Path, help="file of JSON lines for the rows")
    return parser


def _table_line(row: Mapping[str, Any]) -> str:
    seconds = row["seconds"]
    if seconds is None:
        cells: Sequence[str] = (f"cannot run here: {row['problem']}", "", "", "")
    else:
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        cells = (f"{1e3 * seconds:.3f}", f"{row['bytes'] / seconds / 1e9:.0f}", f"{100 * row['share_of_limit']:.0f}%")
        cells = (*cells, error)
    return "| " + " | ".join((row["op"], row["case"], row["form"], *cells)) + " |"
