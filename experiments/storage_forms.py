"""How far attention is from itself when keys and values are stored in few bits, form beside form.

    python -m experiments.storage_forms

Streams are those of `experiments.common.streams`. What `kvjax.Quantized` stores is set beside what its parts are worth
(without the rotation, the mean apart, the search for a scale, the stretch of keys), beside Lloyd and Max's grid for
Gaussian numbers behind the same rotation (TurboQuant's quantiser for the square error, arXiv 2504.19874), that with one
bit less and the residual's random signs (TurboQuant's for inner products, which takes QJL's, arXiv 2406.03482), and
KIVI's groups (arXiv 2402.02750): keys by channel over 32 tokens, values by token over 32 channels, each group with a
scale and a zero of 16 bits.

A form leaves the first tokens and the last ones as they are, in 16 bits (`Quantized(whole_window=True)`).

Bits are all that is stored, scales included, per number. Errors are of attention's output, as a share of its size.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.common import cases, plots, results, streams
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from kvjax import storage

NAME = "storage_forms"
GROUP = 32  # KIVI's
SCALE_BITS = 16
WHOLE, WHOLE_BITS = (4, 64), 16  # first and last tokens that one form leaves as they are, and their bits

Kept = Callable[[Float[Array, "R n H D"]], Float[Array, "R n H D"]]


class Form(NamedTuple):
    """What keys and values are once they have been stored, and bits per number of each beside the codes."""

    keys: Kept
    values: Kept
    key_extra: float
    value_extra: float


@dataclasses.dataclass(frozen=True)
class Options(cases.Streams):
    """Options of this experiment."""

    stream: tuple[str, ...] = each(cases.RECORDED, choices=cases.STREAMS)  # streams; repeatable
    bits: tuple[int, ...] = each(4, 3, 2)  # widths; repeatable
    seed: int = 10
    seeds: int = 20  # documents

    QUICK: ClassVar[dict[str, Any]] = {**cases.Streams.QUICK, "recorded_tokens": 512, "seeds": 2}


def run(options: Options) -> list[Row]:
    """A row for every form, width and layer: the error of attention, and the squared errors of keys and values."""
    rows: list[Row] = []
    for case in cases.cases(options):
        drawn, dim = case.drawn, case.drawn.keys.shape[-1]
        exact = streams.exact_attention(drawn)
        size = np.linalg.norm(exact, axis=-1)
        for bits in options.bits:
            for name, form in forms(bits, dim, drawn.keys.shape[1]).items():
                keys, values = (
                    np.asarray(kept(jnp.asarray(x)))
                    for kept, x in ((form.keys, drawn.keys), (form.values, drawn.values))
                )
                attended = streams.exact_attention(dataclasses.replace(drawn, keys=keys, values=values))
                error = np.mean(np.linalg.norm(attended - exact, axis=-1) / size, axis=(1, 2))
                found = {
                    "relative_error": error,
                    "key_error": _squared(keys, drawn.keys),
                    "value_error": _squared(values, drawn.values),
                }
                stored = bits + (form.key_extra + form.value_extra) / 2
                of_form: dict[str, Any] = {case.where: case.number, "form": name, "bits": bits, "stored_bits": stored}
                rows += [
                    results.row(
                        NAME,
                        options.model_of(case.stream),
                        metric,
                        results.mean_interval(samples),
                        policy="exact",
                        n=len(samples),
                        seed=options.seed,
                        stream=case.stream,
                        **of_form,
                    )
                    for metric, samples in found.items()
                ]
        title = f"{case}: error of attention"
        shown = [row for row in rows if row.extra.get(case.where) == case.number and row.metric == "relative_error"]
        results.print_rows(title, shown, lambda row: row.extra["form"], lambda row: f"{row.extra['bits']} bits")
    return rows


def forms(bits: int, dim: int, tokens: int) -> dict[str, Form]:
    """Every form of so many bits, for vectors of so many dimensions and tokens."""
    scale = SCALE_BITS / dim
    own = functools.partial(ours, bits)
    plain = Form(own(centred=True, unbiased=True), own(), scale, scale)
    lloyd = functools.partial(gaussian_grid, levels=lloyd_max(bits))
    with_signs = functools.partial(with_residual_signs, levels=lloyd_max(bits - 1)) if bits > 1 else lloyd
    window = lambda kept: functools.partial(_but_for_window, kept)  # noqa: E731
    more = sum(WHOLE) / tokens * (WHOLE_BITS - bits - scale) + scale
    return {
        "kvjax": plain,
        "sinks and recent tokens whole": Form(window(plain.keys), window(plain.values), more, more),
        "keys as they are, not stretched": plain._replace(keys=own(centred=True)),
        "keys' mean not apart": plain._replace(keys=own(unbiased=True)),
        "not rotated": plain._replace(keys=own(centred=True, unbiased=True, rotated=False), values=own(rotated=False)),
        "scale of the largest": plain._replace(
            keys=own(centred=True, unbiased=True, searched=False), values=own(searched=False)
        ),
        "Lloyd-Max grid": plain._replace(keys=lambda x: _about_mean(lloyd, x), values=lloyd),
        "TurboQuant (square error)": plain._replace(keys=lloyd, values=lloyd),
        "TurboQuant (inner products)": plain._replace(keys=with_signs, values=lloyd, key_extra=2 * scale),
        "KIVI": Form(
            functools.partial(grouped, bits, axis=1),
            functools.partial(grouped, bits, axis=3),
            2 * SCALE_BITS / GROUP,
            2 * SCALE_BITS / GROUP,
        ),
    }


def ours(
    bits: int, *, centred: bool = False, unbiased: bool = False, rotated: bool = True, searched: bool = True
) -> Kept:
    """`storage.store`, or with a part of it left out."""
    name = f"int{bits}"
    form = storage.FORMATS[name] if searched else dataclasses.replace(storage.FORMATS[name], clips=(1.0,))

    def kept(x: Float[Array, "R n H D"]) -> Float[Array, "R n H D"]:
        x = x if rotated else storage.turned_back(x)  # which storing turns again
        stored = storage.store(x, form, unbiased=unbiased)
        back = storage.load(stored.numbers, stored.scale, bits)
        return back if rotated else storage.turned(back)

    kept = jax.jit(kept)
    return functools.partial(_about_mean, kept) if centred else kept


def _about_mean(kept: Kept, x: Float[Array, "R n H D"]) -> Float[Array, "R n H D"]:
    mean = jnp.mean(x, axis=1, keepdims=True)
    return mean + kept(x - mean)


def _but_for_window(kept: Kept, x: Float[Array, "R n H D"]) -> Float[Array, "R n H D"]:
    first, last = WHOLE
    return jnp.concatenate([x[:, :first], kept(x)[:, first:-last], x[:, -last:]], axis=1)


def gaussian_grid(x: Float[Array, "R n H D"], levels: Float[np.ndarray, "L"]) -> Float[Array, "R n H D"]:
    """Vectors turned, at their norm, to the nearest levels for Gaussian coordinates of variance one."""
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    size = norm / np.sqrt(x.shape[-1])
    turned = storage.turned(x) / jnp.where(size == 0, 1, size)
    number = jnp.searchsorted(jnp.asarray((levels[1:] + levels[:-1]) / 2), turned)
    return storage.turned_back(jnp.asarray(levels)[number] * size)


def with_residual_signs(
    x: Float[Array, "R n H D"], levels: Float[np.ndarray, "L"], seed: int = 0
) -> Float[Array, "R n H D"]:
    """The same with a bit per coordinate for what is left: its signs under a Gaussian matrix S, and its norm. As a
    vector that stands for it in inner products: sqrt(pi / 2) / D |r| S^T sign(S r), right on average over S."""
    dim = x.shape[-1]
    first = gaussian_grid(x, levels)
    rest = x - first
    matrix = jnp.asarray(np.random.default_rng(seed).normal(size=(dim, dim)), jnp.float32)
    signs = jnp.sign(jnp.einsum("rnhd,ed->rnhe", rest, matrix))
    norm = jnp.linalg.norm(rest, axis=-1, keepdims=True)
    return first + np.sqrt(np.pi / 2) / dim * norm * jnp.einsum("rnhe,ed->rnhd", signs, matrix)


def grouped(bits: int, x: Float[Array, "R n H D"], axis: int) -> Float[Array, "R n H D"]:
    """Groups of 32 along an axis, each on a grid between its smallest and its largest number."""
    x = jnp.moveaxis(jnp.asarray(x), axis, -1)
    count = x.shape[-1]
    padded = jnp.pad(x, [(0, 0)] * 3 + [(0, -count % GROUP)], mode="edge").reshape(*x.shape[:-1], -1, GROUP)
    low, high = (f(padded, axis=-1, keepdims=True) for f in (jnp.min, jnp.max))
    step = (high - low) / (2**bits - 1)
    back = low + jnp.round((padded - low) / jnp.where(step == 0, 1, step)) * step
    return jnp.moveaxis(back.reshape(*x.shape[:-1], -1)[..., :count], -1, axis)


@functools.cache
def lloyd_max(bits: int) -> Float[np.ndarray, "L"]:
    """The levels of least squared error for a Gaussian number of variance one, by Lloyd's iteration."""
    grid = np.linspace(-8, 8, 100_001)
    density = np.exp(-(grid**2) / 2)
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(500):
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
        levels = np.bincount(cell, density * grid) / np.bincount(cell, density)
    return levels.astype(np.float32)


def _squared(kept: Float[np.ndarray, "R n H D"], x: Float[np.ndarray, "R n H D"]) -> Float[np.ndarray, "R"]:
    """Of every row, the squared error as a share of the squares."""
    return np.sum((kept - x) ** 2, axis=(1, 2, 3)) / np.sum(np.square(x), axis=(1, 2, 3))


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Error against stored bits, a panel per case, a line per form."""
    plots.by_rows(
        path,
        [row for row in rows if row.metric == "relative_error"],
        panel=lambda row: (
            f"{row.stream}, {'layer' if 'layer' in row.extra else 'norm'} "
            f"{row.extra.get('layer', row.extra.get('norm')):g}"
        ),
        x=lambda row: row.extra["stored_bits"],
        label=lambda row: row.extra["form"],
        xlabel="bits per number, scales included",
        ylabel="relative error of attention",
        yscale="log",
    )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
