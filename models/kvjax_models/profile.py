"""Measures a profile of a model: which heads retrieve, a scorer of tokens, and statistics of queries.

The model reads texts of 1,024 tokens and repeats them, as for KVzip. The attention that a token receives from the
repetition is its score in each KV head.

1. All layers and heads share one budget, for which the tokens with the highest scores compete. The share of its tokens
   that a head keeps is its need. A few heads keep most of their tokens: these retrieve.
2. A ridge regression maps the input of a layer's attention to the log of the scores. With this map, tokens can be
   scored without repeating the text.
3. Moments of the queries describe which keys a head attends to.

`find` returns the profile of a known model from the package, or the one that `kvjax calibrate` saved in the user's
cache directory. `find_or_measure` measures an unknown model once.
"""

import dataclasses
import functools
import importlib.resources
import json
import math
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Float
from tqdm import tqdm

import kvjax
from kvjax.combinators.head_budgets import Shares, retrieving_heads
from kvjax.methods.top_k.kvzip import KVzip
from kvjax_models import atomic_io
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import DecoderLayer, Llama
from kvjax_models.model.rotary import Rotary, rotation
from kvjax_models.runner.prefill import embed, prefill_layers, prefill_recurrent_layer
from kvjax_models.runner.scorer import predict_log_scores as predict_log_scores
from kvjax_models.sharding import mesh_of
from kvjax_models.user_cache import user_cache_directory

FRACTIONS = (0.03125, 0.0625, 0.125, 0.25, 0.5)  # of the tokens that are kept
RANKING_FRACTION = 0.125  # heads are ranked by their needs at this fraction
TOKENS = 1024  # per text
TEXTS = 24
MIN_TOKENS = 64
SKIPPED_TOKENS = 8  # attention sinks, which neither the scorer nor the moments of queries include
MIN_SCORE = 1e-12  # before the logarithm
RIDGE = 1.0  # weight of the squared coefficients in the regression
MAX_FULL_SHARE = 0.18  # largest share of the heads that keep every token
MAX_BUDGET_SHARE = 0.7  # largest share of all slots that these heads may take
MIN_HEADS = 12  # a model with fewer heads divides its budget by their needs
# For a model without a profile. With few texts, a larger weight predicts new texts better.
_QUICK_TEXTS, _QUICK_RIDGE = 2, 100.0
_FORMAT = 1  # version of the files
_DIRECTORY = "profiles"

Progress = Callable[[int, int], None]  # receives the steps that are done, and all steps


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """The retrieving heads of a model, a scorer of tokens, and statistics of queries.

    Layers with a sliding window, which cache exactly their window, have zeros in all arrays.

    Attributes:
        head_needs: share of its tokens that each KV head keeps if all layers and heads share one budget of
            `FRACTIONS[f]` of the tokens; a mean over texts.
        kept_mass: share of all scores that the kept tokens have, for each fraction.
        scorer: coefficients of a linear map to the log of each token's score, for the normalized residual stream that
            enters attention (`DecoderLayer.normalize`), a constant, and log(1 + position); None if not measured.
        query_moments: mean of q q^T over tokens and the query heads of each KV head's group, for rotated queries.
        query_means: mean query before the rotary embedding.
        query_norms: mean norm of the queries before the rotary embedding.
    """

    head_needs: Float[np.ndarray, "F L H_kv"]
    kept_mass: Float[np.ndarray, "F"]
    scorer: Float[np.ndarray, "L W+2 H_kv"] | None
    query_moments: Float[np.ndarray, "L H_kv D D"]
    query_means: Float[np.ndarray, "L H_q D"]
    query_norms: Float[np.ndarray, "L H_q"]

    def __repr__(self) -> str:
        """Returns the sizes and the heads that retrieve most, without the arrays."""
        (layers, kv_heads), ranked = self.head_needs.shape[1:], self.ranked_heads()
        first = ", ".join(map(str, ranked[:MIN_HEADS]))
        scorer = "no scorer" if self.scorer is None else "a scorer"
        return f"Profile({layers} layers, {kv_heads} KV heads, {scorer}; most retrieving (layer, head): {first})"

    def needs(self, fraction: float) -> Float[np.ndarray, "L H_kv"]:
        """Returns the needs of all heads at the nearest fraction, on a logarithmic scale.

        Args:
            fraction: fraction of the tokens that the cache keeps, above 0.

        Returns:
            The share of its tokens that each KV head keeps.
        """
        distances = [abs(math.log(known / fraction)) for known in FRACTIONS]
        return self.head_needs[distances.index(min(distances))]

    def ranked_heads(self) -> list[tuple[int, int]]:
        """Returns (layer, KV head) of all heads without a sliding window, most retrieving first."""
        needs = self.needs(RANKING_FRACTION)
        order = np.argsort(-needs, axis=None, kind="stable")
        heads = (divmod(int(index), needs.shape[1]) for index in order)
        return [(layer, head) for layer, head in heads if needs[layer, head] > 0]

    @property
    def has_few_heads(self) -> bool:
        """Whether the model has too few KV heads for some of them to keep every token within a small budget."""
        return len(self.ranked_heads()) < MIN_HEADS

    def shares(self, kept: float) -> Shares:
        """Returns the shares of the budget with which the retrieving heads keep every token.

        In a model with few heads, the shares are the heads' needs.

        Args:
            kept: average number of slots of a head, relative to the tokens.

        Returns:
            The shares of `kvjax.HeadBudgets`; None for layers whose heads all have a sliding window.
        """
        ranked, (layers, kv_heads) = self.ranked_heads(), self.head_needs.shape[1:]
        count = min(MAX_FULL_SHARE, MAX_BUDGET_SHARE * kept) * len(ranked)
        full = ranked[: max(1, math.floor(count))]
        with_budget = {layer for layer, _ in ranked}
        shares = retrieving_heads(layers, kv_heads, full)
        if self.has_few_heads:
            shares = tuple(tuple(map(float, row)) for row in self.needs(kept))
        return tuple(row if layer in with_budget else None for layer, row in enumerate(shares))


class LayerSample:
    """One layer's measurements of one text of T tokens."""

    def __init__(self, scores: Float[np.ndarray, "H_kv T"], x: Array, queries: Array, moments: Array):
        """Copies the arrays to the host.

        Args:
            x: normalized residual stream [T, W].
            queries: queries before the rotary embedding [T, H_q, D].
            moments: second moments of the rotated queries [H_kv, D, D].
        """
        self.scores, self.x = scores, np.asarray(x)
        later = np.asarray(queries)[SKIPPED_TOKENS:]
        self.query_means = later.mean(axis=0, dtype=np.float64)
        self.query_norms = np.linalg.norm(later, axis=-1).mean(axis=0, dtype=np.float64)
        self.query_moments = np.asarray(moments, np.float64)

    def features(self) -> Float[np.ndarray, "T-8 W+2"]:
        """Returns the inputs of the regression."""
        position = np.log1p(np.arange(len(self.x)))[:, None]
        features = np.concatenate([self.x, np.ones_like(position), position], axis=1, dtype=np.float64)
        return features[SKIPPED_TOKENS:]

    def targets(self) -> Float[np.ndarray, "T-8 H_kv"]:
        """Returns the log scores."""
        return np.log(np.maximum(self.scores.astype(np.float64), MIN_SCORE)).T[SKIPPED_TOKENS:]


class Ridge:
    """Normal equations of a ridge regression, in float64."""

    def __init__(self) -> None:
        """Creates an empty regression."""
        self._gram: Any = 0.0
        self._product: Any = 0.0

    def add(self, features: Float[np.ndarray, "N W"], targets: Float[np.ndarray, "N H"]) -> None:
        """Adds samples."""
        self._gram = self._gram + features.T @ features
        self._product = self._product + features.T @ targets

    def solve(self, weight: float = RIDGE) -> Float[np.ndarray, "W H"]:
        """Returns the coefficients.

        Args:
            weight: weight of the squared coefficients.
        """
        return np.linalg.solve(self._gram + weight * np.eye(len(self._gram)), self._product)


def measure(
    model: Llama,
    tokenizer: Tokenizer,
    texts: Sequence[str] | None = None,
    *,
    max_texts: int = TEXTS,
    progress: Progress | None = None,
    ridge: float = RIDGE,
) -> Profile:
    """Measures the profile of a model.

    All texts pass through the layers together, so that the normal equations of a single layer exist at a time. Memory
    grows with the residual streams of the texts.

    Args:
        texts: texts, which are cut into parts of 1,024 tokens; `calibration_texts()` by default.
        max_texts: maximum number of parts; with several texts, their parts take turns.
        progress: a function that is called after each layer of each part.
        ridge: weight of the squared coefficients of the scorer, above 0.

    Returns:
        The profile.

    Raises:
        ValueError: if there are too few tokens, all layers have a sliding window, or the model is on a mesh.
    """
    full = _layers_without_window(model)
    if mesh_of(model) is not None:
        raise ValueError("a profile is measured on a single device; load the model without a mesh")
    if not full:
        raise ValueError("every layer of the model has a sliding window; no head has a budget")
    if max_texts < 1:
        raise ValueError(f"max_texts={max_texts} must be at least 1")
    sources = calibration_texts() if texts is None else texts
    chunks = make_chunks(tokenizer, sources, TOKENS, max_texts)
    chunks = [chunk for chunk in chunks if len(chunk) >= MIN_TOKENS]
    if not chunks:
        raise ValueError(f"the texts have fewer than {MIN_TOKENS} tokens; pass longer ones")
    return _measure_chunks(model, chunks, progress, ridge)


def calibration_texts() -> list[str]:
    """Returns a text of each kind: reference, records, story, source code, dialogue and prose."""
    path = importlib.resources.files("kvjax_models") / "profiles" / "texts.txt"
    return path.read_text(encoding="utf-8").split("\n\f\n")[1:]


def make_chunks(tokenizer: Tokenizer, sources: Sequence[str], tokens: int, count: int) -> list[list[int]]:
    """Encodes texts in chunks: the first chunk of each text, then the second one of each text, and so on.

    Every chunk starts with the BOS token if the model has one. The last tokens of a text are left out unless the text
    is shorter than a chunk.

    Args:
        tokens: maximum number of tokens of a chunk.
        count: maximum number of chunks.

    Returns:
        Token ids of each chunk.
    """
    prefix = list(tokenizer.prefix_ids)
    size = tokens - len(prefix)
    bodies: list[list[list[int]]] = []
    for source in filter(None, sources):
        ids = tokenizer.encode(source[: 20 * tokens * count])  # of long files, more than what is needed
        ids = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
        bodies.append([ids[first : first + size] for first in range(0, max(len(ids) - size, 0) + 1, size)])
    longest = max((len(body) for body in bodies), default=0)
    interleaved = [body[number] for number in range(longest) for body in bodies if number < len(body)]
    return [prefix + chunk for chunk in interleaved[:count]]


def _measure_chunks(model: Llama, chunks: Sequence[Sequence[int]], progress: Progress | None, ridge: float) -> Profile:
    config = model.config
    layers, kv_heads, dim = len(config.attention_layers), config.kv_heads, config.head_dim
    scorer = np.zeros((layers, config.width + 2, kv_heads), np.float32)
    profile = Profile(
        head_needs=np.zeros((len(FRACTIONS), layers, kv_heads), np.float32),
        kept_mass=np.zeros(len(FRACTIONS), np.float32),
        scorer=scorer,
        query_moments=np.zeros((layers, kv_heads, dim, dim), np.float32),
        query_means=np.zeros((layers, config.query_heads, dim), np.float32),
        query_norms=np.zeros((layers, config.query_heads), np.float32),
    )
    full = _layers_without_window(model)
    scores: list[list[np.ndarray]] = [[] for _ in chunks]
    passes = [read_layers(model, tokens) for tokens in chunks]
    for number in range(layers):
        regression = Ridge()
        for text, samples in enumerate(passes):
            sample = next(samples)
            if sample is not None:
                scores[text].append(sample.scores)
                profile.query_moments[number] += sample.query_moments / len(chunks)
                profile.query_means[number] += sample.query_means / len(chunks)
                profile.query_norms[number] += sample.query_norms / len(chunks)
                regression.add(sample.features(), sample.targets())
            if progress is not None:
                progress(number * len(chunks) + text + 1, layers * len(chunks))
        if number in full:
            scorer[number] = regression.solve(ridge)
    for text_scores in scores:
        needs, mass = head_needs(np.stack(text_scores))
        profile.head_needs[:, full] += needs / len(chunks)
        profile.kept_mass[:] += mass / len(chunks)
    return profile


def head_needs(
    scores: Float[np.ndarray, "L H T"], sinks: int = KVzip(TOKENS).sinks
) -> tuple[Float[np.ndarray, "F L H"], Float[np.ndarray, "F"]]:
    """Computes the share of its tokens that each head keeps of a budget that all share, for each of `FRACTIONS`.

    Args:
        scores: scores of the tokens of all heads.
        sinks: first tokens that every head keeps.

    Returns:
        The shares, whose mean is the fraction, and the share of all scores that the kept tokens have.
    """
    ranked = scores.astype(np.float64)
    ranked[:, :, :sinks] = np.inf
    order, flat = np.argsort(-ranked, axis=None, kind="stable"), scores.reshape(-1).astype(np.float64)
    needs, mass = [], []
    for fraction in FRACTIONS:
        kept = order[: round(fraction * scores.size)]
        counts = np.bincount(kept // scores.shape[2], minlength=scores.shape[0] * scores.shape[1])
        needs.append(counts.reshape(scores.shape[:2]) / scores.shape[2])
        mass.append(flat[kept].sum() / flat.sum())
    return np.stack(needs), np.asarray(mass)


def read_layers(model: Llama, tokens: Sequence[int]) -> Iterator[LayerSample | None]:
    """Yields the measurements of each layer with attention of a text.

    Args:
        tokens: token ids of the text.

    Yields:
        The measurements; None for layers with a sliding window.
    """
    count, numbers = len(tokens), model.config.attention_layers
    padded, lengths = np.asarray([tokens], np.int32), jnp.array([count])
    repeat = KVzip(budget=count).requires.repetition
    x = embed(model, padded.reshape(1, 1, count))
    for number in range(numbers[0]):  # of a hybrid model
        x, _ = prefill_recurrent_layer(model.layers[number], None, x, lengths)
    inputs = _attention_inputs(model.layers[numbers[0]], model.config.rotary(numbers[0], count), x)
    for index, layer in enumerate(prefill_layers(model, padded, lengths, count, [0] * len(numbers), repeat)):
        received = None if layer.repeated is None else layer.repeated.received
        yield None if received is None else LayerSample(np.asarray(received[0, :, :count]), *inputs)
        if index + 1 < len(numbers):  # before the next step donates the residual stream
            number = numbers[index + 1]
            inputs = _attention_inputs(model.layers[number], model.config.rotary(number, count), layer.x)


@functools.partial(jax.jit, static_argnames=("rotary",))
def _attention_inputs(
    layer: DecoderLayer, rotary: Rotary, x: Float[Array, "1 1 T W"]
) -> tuple[Float[Array, "T W"], Float[Array, "T H_q D"], Float[Array, "H_kv D D"]]:
    """Returns the normalized residual stream, queries before the rotary embedding, and moments of rotated ones."""
    count = x.shape[2]
    angles = rotation(rotary, jnp.arange(count)[None])
    unrotated = angles._replace(cos=jnp.ones_like(angles.cos), sin=jnp.zeros_like(angles.sin))
    queries = layer.project_queries(x[0], unrotated).astype(jnp.float32)
    rotated = layer.project_queries(x[0], angles)[0, SKIPPED_TOKENS:].astype(jnp.float32)
    groups = rotated.reshape(len(rotated), -1, layer.attention.group_size, rotated.shape[2])
    moments = jnp.einsum("thgd,thge->hde", groups, groups) / (groups.shape[0] * groups.shape[2])
    return layer.normalize(x)[0, 0].astype(jnp.float32), queries[0], moments


def _layers_without_window(model: Llama) -> list[int]:
    """Returns the positions of layers without a sliding window among those with attention."""
    numbers = enumerate(model.config.attention_layers)
    return [index for index, number in numbers if model.config.window(number) is None]


def profile_key(model: Llama) -> str:
    """Returns the name under which a model's profile is stored.

    It depends on the sizes of the model and on its last norm, which quantized files store unquantized. All files of a
    model thus share a profile.

    Returns:
        A hexadecimal digest.
    """
    config = model.config
    sizes = f"{config.layers} {config.query_heads} {config.kv_heads} {config.head_dim} {config.width}"
    scale = model.norm.scale[...]
    return atomic_io.sha256_of_bytes(sizes.encode() + np.asarray(scale.astype(jnp.bfloat16)).tobytes())


def find(model: Llama) -> Profile | None:
    """Returns the saved profile of a model, else the one in the package.

    Returns:
        The profile; None if the model has none.

    Raises:
        ValueError: if the saved file is damaged or belongs to another model.
    """
    saved = _path(model)
    key = saved.stem
    path = saved if saved.is_file() else _shipped().get(key)
    return None if path is None else _read(path, path.stat().st_mtime_ns, key, model.config)


def find_or_measure(model: Llama, tokenizer: Tokenizer | None, *, scorer: bool = False) -> Profile | None:
    """Returns the profile of a model; measures and saves it if the model has none.

    The measurement of a few texts shows a progress bar. `kvjax calibrate` measures more texts.

    Args:
        tokenizer: its tokenizer; None if it is not known.
        scorer: whether to measure the scorer of a saved profile that has none.

    Returns:
        The profile. On a mesh, without a tokenizer, or if all layers have a sliding window, nothing is measured: it may
        then be None, or without a scorer.
    """
    found = find(model)
    is_complete = found is not None and (found.scorer is not None or not scorer)
    if is_complete or tokenizer is None or mesh_of(model) is not None or not _layers_without_window(model):
        return found
    with tqdm(desc="measuring the model once", unit="layer", disable=None, leave=False) as bar:
        progress = progress_of(bar)
        profile = measure(model, tokenizer, max_texts=_QUICK_TEXTS, progress=progress, ridge=_QUICK_RIDGE)
    if found is not None:  # the shares of the heads do not change
        profile = dataclasses.replace(found, scorer=profile.scorer)
    try:
        save(model, profile)
    except OSError as error:
        logging.warning("the profile of the model cannot be saved and will be measured again: %s", error)
    return profile


def progress_of(bar: tqdm) -> Progress:
    """Returns a function for `measure` that updates a progress bar."""

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


def save(model: Llama, profile: Profile) -> pathlib.Path:
    """Saves a profile in the user's cache directory, where `find` reads it.

    Returns:
        The path of the file.
    """
    path = _path(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, model, profile)
    return path


def write_file(path: pathlib.Path, model: Llama, profile: Profile) -> None:
    """Writes a profile.

    The scorer is stored in float16, moments as variances and, in float16, the lower triangle of the correlations.

    Args:
        path: the file, which is replaced if it exists.
    """
    moments = profile.query_moments
    variances = np.diagonal(moments, axis1=-2, axis2=-1)
    deviations = np.sqrt(np.maximum(variances, np.finfo(np.float32).tiny))
    correlations = moments / (deviations[..., :, None] * deviations[..., None, :])
    rows, columns = np.tril_indices(moments.shape[-1], -1)
    arrays = {
        "head_needs": profile.head_needs.astype(np.float32),
        "kept_mass": profile.kept_mass.astype(np.float32),
        "query_variances": variances.astype(np.float32),
        "query_correlations": correlations[..., rows, columns].astype(np.float16),
        "query_means": profile.query_means.astype(np.float32),
        "query_norms": profile.query_norms.astype(np.float32),
    }
    if profile.scorer is not None:
        is_small = np.max(np.abs(profile.scorer)) < np.finfo(np.float16).max
        arrays["scorer"] = profile.scorer.astype(np.float16 if is_small else np.float32)
    header = {"format": _FORMAT, "model": profile_key(model), "kvjax": kvjax.__version__}
    with atomic_io.atomic_replace(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, header=np.asarray(json.dumps(header)), **arrays)


@functools.lru_cache(maxsize=8)
def _read(path: pathlib.Path, modified: int, key: str, config: LlamaConfig) -> Profile:
    """Reads the file of a `profile_key`, which was `modified` at a time in nanoseconds; every call asks for it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        valid = _header(arrays) == {"format": _FORMAT, "model": key} and _are_valid(arrays, config)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, EOFError, zipfile.BadZipFile, zlib.error):
        valid = False
    if not valid:
        raise ValueError(f"{path} is not a profile of this model; remove it, or run `kvjax calibrate` again")
    deviations = np.sqrt(arrays["query_variances"])
    correlations = np.zeros((*deviations.shape, deviations.shape[-1]), np.float32)
    rows, columns = np.tril_indices(deviations.shape[-1], -1)
    correlations[..., rows, columns] = correlations[..., columns, rows] = arrays["query_correlations"]
    correlations += np.eye(deviations.shape[-1], dtype=np.float32)
    return Profile(
        arrays["head_needs"],
        arrays["kept_mass"],
        arrays["scorer"].astype(np.float32) if "scorer" in arrays else None,
        correlations * deviations[..., :, None] * deviations[..., None, :],
        arrays["query_means"],
        arrays["query_norms"],
    )


def _header(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the version of a file and the key of its model."""
    header = json.loads(str(arrays["header"]))
    return {"format": header["format"], "model": header["model"]}


def _are_valid(arrays: Mapping[str, np.ndarray], config: LlamaConfig) -> bool:
    """Returns whether the arrays of a file have the sizes of a model and possible values."""
    layers, kv_heads = len(config.attention_layers), config.kv_heads
    query_heads, dim = config.query_heads, config.head_dim
    shapes = {
        "head_needs": (len(FRACTIONS), layers, kv_heads),
        "kept_mass": (len(FRACTIONS),),
        "query_variances": (layers, kv_heads, dim),
        "query_correlations": (layers, kv_heads, dim * (dim - 1) // 2),
        "query_means": (layers, query_heads, dim),
        "query_norms": (layers, query_heads),
    }
    if "scorer" in arrays:
        shapes["scorer"] = (layers, config.width + 2, kv_heads)
    return all(
        arrays[name].shape == shape
        and np.issubdtype(arrays[name].dtype, np.floating)
        and np.all(np.isfinite(arrays[name]))
        and (name in ("scorer", "query_means", "query_correlations") or np.min(arrays[name]) >= 0)
        and (name not in ("head_needs", "kept_mass") or np.max(arrays[name]) <= 1.001)
        for name, shape in shapes.items()
    )


def shipped_directory() -> pathlib.Path:
    """Returns the directory of the profiles in the package, which are named for known models."""
    return pathlib.Path(str(importlib.resources.files("kvjax_models"))) / _DIRECTORY


@functools.cache
def _shipped() -> dict[str, pathlib.Path]:
    """Returns the files of the profiles in the package, by `profile_key`."""
    paths = {}
    for path in sorted(shipped_directory().glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            paths[_header({"header": file["header"]})["model"]] = path
    return paths


def _path(model: Llama) -> pathlib.Path:
    return user_cache_directory() / _DIRECTORY / f"{profile_key(model)}.npz"
