"""What `python -m pallas_kernels.OP.benchmark` has in common: timing, limits, and a table in Markdown.

Every form of an op runs on the same inputs in the same process. A form is called many times within one compiled
program, so that what is timed is the device and not the calls. Its limit is measured there, too: the longer of a plain
reduction over the bytes that must move, and of the op's products at the rate of a plain matrix product.
"""

import argparse
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# How long one measurement lasts at least, in seconds, and how many are made.
LONG_ENOUGH, MEASUREMENTS = 0.1, 5
PRODUCT_WIDTH = 4096


class Draws:
    """Random arrays, each drawn apart."""

    def __init__(self, seed: int):
        self._seeds = itertools.count(100 * seed)

    def array(self, size: tuple[int, ...], dtype: Any) -> Any:
        """Normal numbers of deviation 1/2; bytes of any content."""
        key = jax.random.key(next(self._seeds))
        if dtype == jnp.uint8:
            return jax.random.bits(key, size, jnp.uint8)
        return (jax.random.normal(key, size, jnp.bfloat16) / 2).astype(dtype)


class Form(NamedTuple):
    """One way to compute an op."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # pytrees of arrays


class Case(NamedTuple):
    """An op at one shape."""

    name: str
    forms: Callable[[], Mapping[str, Form]]  # kvjax's own first; made when the case's turn comes
    bytes: int  # that must move, metadata included
    flops: int = 0
    product_type: Any = jnp.bfloat16  # in which the flops are taken


class Measured(NamedTuple):
    case: str
    form: str
    seconds: float | None  # None where this form cannot run here
    problem: str | None  # the reason
    bytes: int
    limit: float  # seconds
    best_other: float | None  # seconds of the fastest other form

    @property
    def row(self) -> dict[str, Any]:
        rates = {}
        if self.seconds is not None:
            rates["share_of_limit"] = self.limit / self.seconds
            if self.best_other is not None:
                rates["times_best_other"] = self.best_other / self.seconds
        return {**self._asdict(), **rates, "device": jax.devices()[0].device_kind, "jax": jax.__version__}


def main(title: str, cases: Callable[[bool], Iterable[Case]]) -> None:
    """Measures the cases, prints a table and writes rows.

    Args:
        cases: by whether to be quick: small shapes that any machine can do, to see that all forms run.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that everything runs")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    print(f"# {title}\n\n{device.device_kind}, JAX {jax.__version__}\n")
    print("| case | form | ms | GB/s | share of limit | against the best other |\n|---|---|---|---|---|---|")
    rows = []
    for case in cases(arguments.quick):
        for one in measure(case):
            rows.append(one.row)
            print(_line(one), flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(rows, indent=1))


def measure(case: Case) -> list[Measured]:
    """Times every form of a case."""
    limit = limit_seconds(case)
    seconds: dict[str, float | None] = {}
    problems: dict[str, str] = {}
    for name, form in case.forms().items():
        try:
            seconds[name] = seconds_per_call(form)
        except Exception as error:  # whatever stops one form is told, and the others go on
            seconds[name] = None
            problems[name] = next(iter(str(error).splitlines()), type(error).__name__)
    others = {
        name: min((s for other, s in seconds.items() if other != name and s is not None), default=None)
        for name in seconds
    }
    return [
        Measured(case.name, name, one, problems.get(name), case.bytes, limit, others[name])
        for name, one in seconds.items()
    ]


def limit_seconds(case: Case) -> float:
    """The shortest time in which the device could do it."""
    store = jnp.ones(max(case.bytes // 2, 1), jnp.bfloat16)
    reading = seconds_per_call(Form(lambda x: jnp.sum(x, dtype=jnp.float32), (store,)))
    if not case.flops:
        return reading
    square = jnp.ones((PRODUCT_WIDTH, PRODUCT_WIDTH), case.product_type)
    # float32 to the last digit, as the ops compute.
    precision = jax.lax.Precision.HIGHEST if case.product_type == jnp.float32 else None
    product = Form(functools.partial(jnp.matmul, precision=precision), (square, square))
    rate = 2 * PRODUCT_WIDTH**3 / seconds_per_call(product)
    return max(reading, case.flops / rate)


def seconds_per_call(form: Form) -> float:
    """The median time of a call among many in one program."""
    calls = 2
    while (taken := _seconds(form, calls)[0]) < LONG_ENOUGH and calls < 4096:
        calls = min(4096, max(2 * calls, int(1.2 * calls * LONG_ENOUGH / max(taken, 1e-6))))
    return statistics.median(_seconds(form, calls, MEASUREMENTS)) / calls


def _seconds(form: Form, calls: int, measurements: int = 1) -> list[float]:
    """How long a program of so many calls takes."""

    def call(_, carry):
        # The barrier makes each call wait for the one before, and keeps the compiler from calling once for all.
        arguments, _ = carry
        return jax.lax.optimization_barrier((arguments, form.function(*arguments)))

    @jax.jit
    def program(*arguments):
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(form.function, *arguments))
        return jax.lax.fori_loop(0, calls, call, (arguments, nothing))[1]

    jax.block_until_ready(program(*form.arguments))
    taken = []
    for _ in range(measurements):
        begin = time.perf_counter()
        jax.block_until_ready(program(*form.arguments))
        taken.append(time.perf_counter() - begin)
    return taken


def array_bytes(*trees: Any) -> int:
    """Bytes of all arrays, abstract ones too."""
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(trees))


def _line(one: Measured) -> str:
    if one.seconds is None:
        cells: Sequence[str] = (f"cannot run here: {one.problem}", "", "", "")
    else:
        against = "" if one.best_other is None else f"{one.best_other / one.seconds:.2f}x"
        rate = one.bytes / one.seconds / 1e9
        cells = (f"{1e3 * one.seconds:.3f}", f"{rate:.0f}", f"{100 * one.limit / one.seconds:.0f}%", against)
    return "| " + " | ".join((one.case, one.form, *cells)) + " |"
