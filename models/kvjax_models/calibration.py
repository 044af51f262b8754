"""Measures how a model divides its attention among its layers, for `layer_budget_scale="auto"`."""

import dataclasses
import functools
import importlib.resources
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.policies.kvzip import KVzip
from kvjax.policy import Prompt
from kvjax.top_k_policy import TopKPolicy
from kvjax_models import atomic_io
from kvjax_models.generation.prefill import prefill_layers
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import mesh_of
from kvjax_models.user_cache import user_cache_directory

FRACTIONS = (0.03125, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.75)  # of the tokens that are kept
MIN_TOKENS = 64
_SHIPPED = "calibrations.json"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Factors of the budget for every layer of a model.

    Attributes:
        scales: for some fractions of kept tokens, one factor per layer. Their mean is 1.
    """

    scales: Mapping[float, tuple[float, ...]]

    def scale(self, fraction: float) -> tuple[float, ...]:
        """Returns the factors for the nearest fraction, on a logarithmic scale.

        Args:
            fraction: fraction of the tokens that the cache keeps, above 0.

        Returns:
            One factor per layer.
        """
        return self.scales[min(self.scales, key=lambda known: abs(math.log(known / fraction)))]


def calibrate(model: Llama, tokens: Sequence[int], policy: TopKPolicy | None = None) -> Calibration:
    """Measures the factors on one text.

    All layers and heads share one budget, as KVzip is published: the tokens with the highest scores of any layer and
    head are kept, and a layer's factor is its number of kept tokens, relative to the mean. The factors
    depend on the model much more than on the text.

    Args:
        model: the decoder.
        tokens: token ids of a text, at least 64; a thousand tokens of prose are enough.
        policy: the policy that scores tokens; KVzip by default.

    Returns:
        The factors. Layers with a sliding window, which have no budget, get 1.

    Raises:
        ValueError: if there are too few tokens, all layers have a sliding window, or the model is on a mesh.
    """
    if len(tokens) < MIN_TOKENS:
        raise ValueError(f"tokens has {len(tokens)} token ids; calibration needs at least {MIN_TOKENS}")
    if mesh_of(model) is not None:
        raise ValueError("calibration needs a model on a single device; load it without a mesh")
    if policy is None:
        policy = KVzip(budget=len(tokens))
    full = [number for number in range(model.config.layers) if model.config.window(number) is None]
    if not full:
        raise ValueError("every layer of the model has a sliding window; there is no budget to divide")
    scores = np.stack([score for number, score in enumerate(_layer_scores(model, tokens, policy)) if number in full])
    scores[:, :, : policy.sinks] = np.inf
    scales = {}
    for fraction in FRACTIONS:
        threshold = np.partition(scores.reshape(-1), -int(fraction * scores.size))[-int(fraction * scores.size)]
        kept = np.sum(scores >= threshold, axis=(1, 2))
        factors = np.ones(model.config.layers)
        factors[full] = _round_to_powers(kept / np.mean(kept))
        scales[fraction] = tuple(round(float(factor), 3) for factor in factors)
    return Calibration(scales)


def _round_to_powers(factors: Float[np.ndarray, "L"]) -> Float[np.ndarray, "L"]:
    """Returns the factors rounded to powers of the square root of 2, with a mean of 1.

    Few different factors mean few different caches, and so few programs to compile.
    """
    rounded = 2 ** (np.round(2 * np.log2(np.maximum(factors, 2**-3))) / 2)
    return rounded / np.mean(rounded)


def _layer_scores(model: Llama, tokens: Sequence[int], policy: TopKPolicy) -> Iterator[Float[np.ndarray, "H_kv T"]]:
    """Yields each layer's scores of all tokens."""
    count = len(tokens)
    padded, lengths = np.asarray([tokens], np.int32), jnp.array([count])
    needs, layers = policy.requires, model.config.layers
    num_queries = [needs.num_prompt_queries(count)] * layers
    score = functools.partial(_score, policy, model.config.attention_logit_cap)
    for layer in prefill_layers(model, padded, lengths, count, num_queries, needs.repetition):
        yield np.asarray(
            score(layer.keys, layer.values, lengths, layer.queries, layer.sink_logits, layer.repeated)[0, :, :count]
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(
    policy: TopKPolicy,
    logit_cap: float | None,
    keys: Array,
    values: Array,
    lengths: Array,
    queries,
    sink_logits,
    repeated,
) -> Array:
    """Returns the scores [B, H_kv, T] of keys and values [B, T, H_kv, D]."""
    prompt = Prompt(
        keys.swapaxes(1, 2),
        values.swapaxes(1, 2),
        lengths,
        queries,
        sink_logits=sink_logits,
        repeated=repeated,
        logit_cap=logit_cap,
    )
    return policy.score(prompt)


def calibration_key(model: Llama) -> str:
    """Returns the name under which a model's calibration is stored.

    It depends on the sizes of the model and on its last norm, which quantized files store unquantized. All files of a
    model thus share a calibration.

    Args:
        model: the decoder.

    Returns:
        A hexadecimal digest.
    """
    config = model.config
    sizes = f"{config.layers} {config.query_heads} {config.kv_heads} {config.head_dim} {config.width}"
    scale = model.norm.scale[...]
    return atomic_io.sha256_of_bytes(sizes.encode() + np.asarray(scale.astype(jnp.bfloat16)).tobytes())


def save(model: Llama, calibration: Calibration) -> pathlib.Path:
    """Saves a calibration in the user's cache directory, where `find` reads it.

    Args:
        model: the decoder.
        calibration: its calibration.

    Returns:
        The path of the file.
    """
    path = _path(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.write_text(path, json.dumps({str(key): value for key, value in calibration.scales.items()}))
    return path


def find(model: Llama) -> Calibration | None:
    """Returns the saved calibration of a model, else the one in the package.

    Args:
        model: the decoder.

    Returns:
        The calibration; None if the model has none.

    Raises:
        ValueError: if the saved file is damaged.
    """
    path = _path(model)
    if path.is_file():
        return _parse(path.read_text(encoding="utf-8"), path, model)
    found = _shipped().get(calibration_key(model))
    return None if found is None else _from_json(found["scales"])


@functools.cache
def _shipped() -> dict[str, Any]:
    """Returns the calibrations in the package, by `calibration_key`."""
    return json.loads(importlib.resources.files("kvjax_models").joinpath(_SHIPPED).read_text(encoding="utf-8"))


def _path(model: Llama) -> pathlib.Path:
    return user_cache_directory() / "calibrations" / f"{calibration_key(model)}.json"


def _from_json(values: Mapping[str, Sequence[float]]) -> Calibration:
    """Returns the calibration of a JSON object, whose keys are fractions as text."""
    return Calibration({float(key): tuple(float(factor) for factor in factors) for key, factors in values.items()})


def _parse(text: str, path: pathlib.Path, model: Llama) -> Calibration:
    """Returns the calibration of a file that a user may have changed."""
    try:
        found = _from_json(json.loads(text))
        scales = found.scales
        valid = all(0 < key <= 1 and len(value) == model.config.layers for key, value in scales.items())
        valid = valid and all(min(value) >= 0 and max(value) < math.inf for value in scales.values())
    except (ValueError, TypeError, AttributeError, OverflowError):
        valid = False
    if not (valid and scales):
        raise ValueError(f"{path} is not a calibration of this model; remove it, or run `kvjax calibrate` again")
    return found
