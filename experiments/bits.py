"""Compares bases and formats of few bits by the error of attention outputs, in the heads that retrieve.

    python -m experiments.bits --model smollm2-135m --text books --data_dir DIR

The first `--heads` heads of the model's profile keep every token of a text. Keys, values or both are quantized, but for
4 sinks, and the queries of the next tokens attend to them. Formats of keys and of values:

- `int4`, `int3`, `int2`: those of the package (a random rotation, one scale per vector, symmetric grid).
- `zero point`: a smallest and a largest number per vector, optionally clipped at a quantile (OSCAR, arXiv 2605.17757).
- `eigenbasis`: the basis of the eigenvectors of the query moments, in place of the random rotation.
- `moments^1/4`: keys times the fourth root of the query moments before the random rotation, queries times its inverse.
- `transform coding`: the basis in which keys are uncorrelated if errors are weighed by the query moments, with bits by
  reverse water-filling and Gaussian codebooks (RDKV, arXiv 2605.08317). Moments of keys and values come from Python's
  documentation.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments import evaluate
from experiments.common import streams
from experiments.common.flags import Flags, run_command
from experiments.common.output import Figure, figure, print_figures, write_figures
from experiments.common.statistics import mean_interval
from kvjax import quantization

SINKS = 4  # tokens that are not quantized
CLIP = {"keys": 0.96, "values": 0.92}  # quantiles
MAX_BITS = 6  # of a coordinate in transform coding
_MIN_MOMENT = 1e-4  # relative to the largest eigenvalue


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the comparison."""

    model: str = "smollm2-135m"  # Name of `kvjax models`, GGUF file or Hugging Face directory.
    text: str = "books"  # Text of the prompts: docs, books, wikitext2 or essays.
    data_dir: str | None = None  # Directory of published files.
    heads: int = 16  # Number of retrieving heads.
    tokens: int = 1024  # Tokens of a text.
    queries: int = 32  # Tokens after it.
    seeds: int = 4  # Number of texts.
    output_dir: str = "build/bits"  # Directory of the figures.


class Basis(NamedTuple):
    """A linear map of vectors, its inverse, and the variances of the coordinates."""

    forward: Float[np.ndarray, "D D"]
    inverse: Float[np.ndarray, "D D"]
    variances: Float[np.ndarray, "D"] | None = None


Codec = Callable[[Float[np.ndarray, "T D"]], Float[np.ndarray, "T D"]]  # quantizes and dequantizes


def package_format(bits: int, *, is_key: bool, basis: Basis | None = None) -> Codec:
    """Returns a format of the package, after a linear map."""

    def code(x: Float[np.ndarray, "T D"]) -> Float[np.ndarray, "T D"]:
        mean = x.mean(0) if is_key else np.zeros(x.shape[1])
        y = x - mean if basis is None else (x - mean) @ basis.forward
        quantized = quantization.quantize(jnp.asarray(y, jnp.float32), f"int{bits}", unbiased=is_key)
        y = np.asarray(quantization.dequantize(quantized), np.float64)
        return mean + (y if basis is None else y @ basis.inverse)

    return code


def zero_point(bits: int, *, is_key: bool, clip: float = 1.0, basis: Float[np.ndarray, "D D"] | None = None) -> Codec:
    """Returns a format with the ends of the grid per vector, in an orthogonal basis (the random rotation if None)."""

    def code(x: Float[np.ndarray, "T D"]) -> Float[np.ndarray, "T D"]:
        rotation = quantization.rotation(x.shape[1]) if basis is None else basis
        mean = x.mean(0) if is_key else np.zeros(x.shape[1])
        y = (x - mean) @ rotation
        low, high = (np.quantile(y, q, axis=1, keepdims=True) for q in (1 - clip, clip))
        step = np.maximum(high - low, 1e-9) / (2**bits - 1)
        return (np.clip(np.round((y - low) / step), 0, 2**bits - 1) * step + low) @ rotation.T + mean

    return code


def transform_coding(bits: float, mean: Float[np.ndarray, "D"] | None, basis: Basis) -> Codec:
    """Returns a format with bits by coordinate and one scale per vector; a mean of None is that of the vectors."""
    assert basis.variances is not None
    deviation, widths = np.sqrt(basis.variances), water_filling(basis.variances, bits)

    def code(x: Float[np.ndarray, "T D"]) -> Float[np.ndarray, "T D"]:
        center = x.mean(0) if mean is None else mean
        y = (x - center) @ basis.forward / deviation
        scale = np.sqrt(np.mean(y[:, widths > 0] ** 2, axis=1, keepdims=True))
        y = np.stack([_nearest(column, width) for column, width in zip((y / scale).T, widths, strict=True)], axis=1)
        return y * scale * deviation @ basis.inverse + center

    return code


def water_filling(variances: Float[np.ndarray, "D"], bits: float) -> Int[np.ndarray, "D"]:
    """Returns the bits of each coordinate: one by one where the remaining error is largest.

    Args:
        variances: variances of the coordinates.
        bits: mean number of bits.
    """
    widths, error = np.zeros(len(variances), np.int64), variances.astype(np.float64)
    for _ in range(round(bits * len(variances))):
        index = int(np.argmax(np.where(widths < MAX_BITS, error, -1)))
        widths[index] += 1
        error[index] /= 4
    return widths


def _nearest(x: Float[np.ndarray, "T"], bits: int) -> Float[np.ndarray, "T"]:
    """Returns the nearest entries of a codebook for Gaussian numbers (Lloyd's algorithm)."""
    if bits == 0:
        return np.zeros_like(x)
    if bits not in _CODEBOOKS:
        draws = np.sort(np.random.default_rng(0).normal(size=100_000))
        book = np.quantile(draws, (np.arange(2**bits) + 0.5) / 2**bits)
        for _ in range(200):
            nearest = np.searchsorted((book[1:] + book[:-1]) / 2, draws)
            book = np.array([draws[nearest == entry].mean() for entry in range(2**bits)])
        _CODEBOOKS[bits] = book
    book = _CODEBOOKS[bits]
    return book[np.searchsorted((book[1:] + book[:-1]) / 2, x)]


_CODEBOOKS: dict[int, np.ndarray] = {}


def key_basis(moments: Float[np.ndarray, "D D"], keys: Float[np.ndarray, "T D"]) -> Basis:
    """Returns the basis in which keys are uncorrelated and squared errors are those of logits.

    Args:
        moments: second moments of the queries.
        keys: keys of other texts.
    """
    root = moment_power(moments, 0.5)
    variances, vectors = np.linalg.eigh(root.forward.T @ np.cov(keys.T) @ root.forward)
    return Basis(root.forward @ vectors, vectors.T @ root.inverse, np.maximum(variances, 1e-9))


def moment_power(moments: Float[np.ndarray, "D D"], power: float) -> Basis:
    """Returns a power of the moments of queries."""
    values, vectors = np.linalg.eigh(moments.astype(np.float64))
    values = np.maximum(values, _MIN_MOMENT * values[-1]) ** power
    return Basis(vectors * values @ vectors.T, vectors / values @ vectors.T)


def codecs(
    moments: Float[np.ndarray, "D D"], keys: Float[np.ndarray, "T D"], values: Float[np.ndarray, "T D"]
) -> tuple[dict[tuple[str, float], Codec], dict[tuple[str, float], Codec]]:
    """Returns the formats of keys and of values, by name and bits per number, fitted to other texts."""
    of_keys: dict[tuple[str, float], Codec] = {}
    of_values: dict[tuple[str, float], Codec] = {}
    variances, vectors = np.linalg.eigh(np.cov(values.T))
    value_basis = Basis(vectors, vectors.T, np.maximum(variances, 1e-9))
    eigenbasis = np.linalg.eigh(moments.astype(np.float64))[1]
    per_scale = 16 / moments.shape[0]  # bits of a bfloat16 number per coordinate
    for bits in (4, 3, 2):
        one, two = bits + per_scale, bits + 2 * per_scale
        of_keys[f"int{bits}", one] = package_format(bits, is_key=True)
        of_keys[f"int{bits}, moments^1/4", one] = package_format(bits, is_key=True, basis=moment_power(moments, 0.25))
        of_keys[f"int{bits}, zero point", two] = zero_point(bits, is_key=True)
        of_keys[f"int{bits}, zero point, clipped", two] = zero_point(bits, is_key=True, clip=CLIP["keys"])
        of_keys[f"int{bits}, zero point, eigenbasis", two] = zero_point(bits, is_key=True, basis=eigenbasis)
        of_keys[f"transform coding, {bits} bits", one] = transform_coding(bits, None, key_basis(moments, keys))
        of_values[f"int{bits}", one] = package_format(bits, is_key=False)
        of_values[f"int{bits}, zero point", two] = zero_point(bits, is_key=False)
        of_values[f"int{bits}, zero point, clipped", two] = zero_point(bits, is_key=False, clip=CLIP["values"])
        of_values[f"transform coding, {bits} bits", one] = transform_coding(bits, values.mean(0), value_basis)
    return of_keys, of_values


# Formats of keys and of values that are measured together.
PAIRS = (
    ("int4", "int4"),
    ("int4", "int2"),
    ("int3", "int3"),
    ("int3, moments^1/4", "int3"),
    ("transform coding, 3 bits", "int3"),
    ("transform coding, 2 bits", "int3"),
    ("int2", "int2"),
    ("int2, moments^1/4", "int2"),
    ("transform coding, 2 bits", "int2"),
)


def attend(
    queries: Float[np.ndarray, "Q G D"], keys: Float[np.ndarray, "T D"], values: Float[np.ndarray, "T D"]
) -> Float[np.ndarray, "Q G D"]:
    """Returns the attention of one KV head's queries to all keys."""
    logits = np.einsum("qgd,td->qgt", queries, keys) / np.sqrt(keys.shape[1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("qgt,td->qgd", weights / weights.sum(-1, keepdims=True), values)


def errors_of_head(
    drawn: streams.Streams, calibration: streams.Streams, moments: Float[np.ndarray, "D D"], head: int
) -> Iterator[tuple[str, str, float, float]]:
    """Yields metric, format, bits per number and relative error of attention, for every text."""
    later = calibration.keys[:, 2 * SINKS :, head], calibration.values[:, 2 * SINKS :, head]
    of_keys, of_values = codecs(moments, *(x.reshape(-1, x.shape[-1]) for x in later))
    names = {name: (name, bits) for name, bits in (*of_keys, *of_values)}
    for text in range(len(drawn.keys)):
        keys, values = (np.asarray(x[text, :, head], np.float64) for x in (drawn.keys, drawn.values))
        queries = np.asarray(drawn.queries[text], np.float64)
        queries = queries.reshape(len(queries), drawn.keys.shape[2], -1, keys.shape[1])[:, head]
        exact = attend(queries, keys, values)

        def code(codec: Codec, x: np.ndarray) -> np.ndarray:
            return np.concatenate([x[:SINKS], codec(x[SINKS:])])

        def error(keys: np.ndarray, values: np.ndarray, queries: np.ndarray = queries, exact: np.ndarray = exact):
            return float(np.linalg.norm(attend(queries, keys, values) - exact) / np.linalg.norm(exact))

        coded_keys = {name: code(codec, keys) for name, codec in of_keys.items()}
        coded_values = {name: code(codec, values) for name, codec in of_values.items()}
        for (name, bits), coded in coded_keys.items():
            yield "keys", name, bits, error(coded, values)
        for (name, bits), coded in coded_values.items():
            yield "values", name, bits, error(keys, coded)
        for key, value in PAIRS:
            bits = (names[key][1] + names[value][1]) / 2
            yield "both", f"{key} / {value}", bits, error(coded_keys[names[key]], coded_values[names[value]])


def main(options: Options) -> None:
    """Prints the table and writes the figures."""
    llm = evaluate.load_model(options.model, None)
    profile = llm.profile()
    assert profile is not None
    data_dir = None if options.data_dir is None else pathlib.Path(options.data_dir)
    length = options.tokens + options.queries

    def record(text: str) -> Iterator[tuple[int, streams.Streams]]:
        prompts = streams.text_prompts(llm.tokenizer, text, range(options.seeds), length, data_dir)
        return streams.recorded(llm.model, prompts, options.queries)

    heads = profile.ranked_heads()[: options.heads]
    errors: dict[tuple[str, str, float], list[float]] = {}
    for (layer, drawn), (_, calibration) in zip(record(options.text), record("docs"), strict=True):
        for number, head in heads:
            if number == layer:
                for *key, error in errors_of_head(drawn, calibration, profile.query_moments[layer, head], head):
                    errors.setdefault(tuple(key), []).append(error)  # type: ignore[arg-type]
    figures: list[Figure] = []
    for (metric, name, bits), samples in errors.items():
        label = f"{metric}: {name} ({bits:g} bits)"
        means = np.reshape(samples, (-1, options.seeds)).mean(0)  # of the heads
        figures.append(figure("relative_error", mean_interval(means), setting=label, bits=bits, seeds=options.seeds))
    print_figures("Relative error of attention outputs", figures, "setting")
    write_figures(pathlib.Path(options.output_dir) / "bits.json", figures)


if __name__ == "__main__":
    run_command(main, Options)
