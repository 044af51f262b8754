"""Layer budgets that are measured on a text: how much of a shared budget each layer and KV head needs.

KVzip scores every token of a text in every KV head. If all heads of all layers competed for one budget, each would keep
the tokens of the highest scores. A layer's scale is the number of tokens that it would keep, relative to the mean over
layers. `layer_budget_scale="auto"` of a top-k policy takes the scales of the model.
"""

import dataclasses
import functools
import hashlib
import importlib.resources
import json
import pathlib
import pydoc_data.topics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.policy import Policy, Prompt
from kvjax.registry import AnyPolicy, PolicyChoice
from kvjax.top_k_policy import AUTO, TopKPolicy
from kvjax_models import atomic_io
from kvjax_models.fingerprint import canonical_json
from kvjax_models.generation.prefill import PrefilledLayer, prefill_layers
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import mesh_of
from kvjax_models.user_cache import user_cache_directory

if TYPE_CHECKING:
    from kvjax_models.language_model import LanguageModel

SHIPPED_FILE = "calibrations.json"  # in this package: calibrations of known models, by `model_key`
MIN_TOKENS = 64
_DIGITS = 4  # of printed and saved scales
_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Budget scales of a model's layers and KV heads, measured on a text.

    Attributes:
        layer_scale: share of a layer's budget, relative to the mean over all layers without a sliding window; 1 for
            layers with a sliding window, which keep their window.
        head_scale: the same for the KV heads of each layer.
        budget: fraction of all tokens for which the scales were measured.
        tokens: length of the text.
        text_sha256: digest of the text's tokens.
    """

    layer_scale: tuple[float, ...]
    head_scale: tuple[tuple[float, ...], ...]
    budget: float
    tokens: int
    text_sha256: str

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Calibration":
        """Returns the calibration that `dataclasses.asdict` and JSON have written.

        Args:
            values: the JSON object.

        Returns:
            The calibration.
        """
        heads = tuple(tuple(map(float, row)) for row in values["head_scale"])
        return cls(**values | {"layer_scale": tuple(map(float, values["layer_scale"])), "head_scale": heads})


def default_text() -> str:
    """Returns a text that every installation has: the language reference of Python's standard library."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def calibrate(
    llm: "LanguageModel", text: str | None = None, *, budget: float = 0.25, max_tokens: int = 2048
) -> Calibration:
    """Measures the budget scales of a model's layers and heads with KVzip's scores.

    Args:
        llm: the model, on a single device.
        text: the text; `default_text` by default.
        budget: fraction of all tokens that all heads keep together.
        max_tokens: number of tokens to which the text is shortened.

    Returns:
        The scales.

    Raises:
        ValueError: if the budget is not in (0, 1), the text is too short, or the model is on a mesh.
    """
    if not 0 < budget < 1:
        raise ValueError(f"budget={budget} must be above 0 and below 1")
    if mesh_of(llm.model) is not None:
        raise ValueError("calibration needs a model on a single device; load it without a mesh")
    config = llm.model.config
    tokens = llm.encode(default_text() if text is None else text)[: min(max_tokens, config.max_length)]
    if len(tokens) < MIN_TOKENS:
        raise ValueError(f"a text of {len(tokens)} tokens is too short for a calibration; pass at least {MIN_TOKENS}")
    full_layers = [number for number in range(config.layers) if config.window(number) is None]
    if not full_layers:
        raise ValueError("all layers have a sliding window, which no budget changes")
    scores = _kvzip_scores(llm.model, tokens)
    shares = _kept_shares(np.stack([scores[number] for number in full_layers]), budget)
    head_scale = np.ones((config.layers, config.kv_heads))
    head_scale[full_layers] = shares
    rounded = head_scale.round(_DIGITS)
    return Calibration(
        layer_scale=tuple(head_scale.mean(axis=1).round(_DIGITS).tolist()),
        head_scale=tuple(map(tuple, rounded.tolist())),
        budget=budget,
        tokens=len(tokens),
        text_sha256=hashlib.sha256(repr(tokens).encode()).hexdigest(),
    )


def _kvzip_scores(model: Llama, tokens: list[int]) -> list[Float[np.ndarray, "H_kv T"]]:
    """Returns KVzip's score of every token, for every layer."""
    policy, count = kvjax.KVzip(len(tokens)), len(tokens)
    padded = np.zeros((1, -(-count // _CHUNK) * _CHUNK), np.int32)
    padded[0, :count] = tokens
    lengths = jnp.asarray([count], jnp.int32)
    num_queries = [0] * model.config.layers
    layers = prefill_layers(model, padded, lengths, _CHUNK, num_queries, policy.requires.repetition)
    cap = model.config.attention_logit_cap
    return [np.asarray(_score_layer(policy, cap, layer, lengths))[0, :, :count] for layer in layers]


@functools.partial(jax.jit, static_argnames=("policy", "logit_cap"))
def _score_layer(
    policy: kvjax.KVzip, logit_cap: float | None, layer: PrefilledLayer, lengths: Int[Array, "B"]
) -> Float[Array, "B H_kv T"]:
    """Returns the scores of one layer's prompt."""
    prompt = Prompt(
        keys=layer.keys.swapaxes(1, 2),
        values=layer.values.swapaxes(1, 2),
        lengths=lengths,
        queries=None,
        layer_carry=None,
        sink_logits=layer.sink_logits,
        repeated=layer.repeated,
        logit_cap=logit_cap,
    )
    return policy.score(prompt)


def _kept_shares(scores: Float[np.ndarray, "L H_kv T"], budget: float) -> Float[np.ndarray, "L H_kv"]:
    """Returns how many tokens each head has among the best of all heads, relative to the mean over heads."""
    flat = scores.reshape(-1)
    count = max(int(budget * flat.size), 1)
    kept = np.zeros(flat.size)
    kept[np.argpartition(-flat, count - 1)[:count]] = 1
    shares = kept.reshape(scores.shape).mean(axis=2)
    return shares / shares.mean()


def model_key(model: Llama) -> str:
    """Returns a digest of the configuration and the last norm, which no dtype of the parameters changes."""
    norm = np.asarray(model.norm.scale[...].astype(jnp.bfloat16)).view(np.uint16)
    config = canonical_json(dataclasses.asdict(model.config))
    return hashlib.sha256(config.encode() + norm.tobytes()).hexdigest()[:16]


def save_calibration(model: Llama, calibration: Calibration) -> pathlib.Path:
    """Saves a calibration in the user's cache directory, from which `load_calibration` reads it.

    Args:
        model: the model.
        calibration: its calibration.

    Returns:
        The file.
    """
    path = _saved_file(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.write_text(path, json.dumps(dataclasses.asdict(calibration)) + "\n")
    return path


def load_calibration(model: Llama) -> Calibration:
    """Returns the calibration that the user has saved for a model, or that ships with this package.

    Args:
        model: the model.

    Returns:
        The calibration.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if the saved file is invalid or belongs to a model with other layers.
    """
    path = _saved_file(model)
    if path.is_file():
        values, source = path.read_text(), str(path)
    else:
        shipped = json.loads((importlib.resources.files("kvjax_models") / SHIPPED_FILE).read_text())
        if (key := model_key(model)) not in shipped:
            raise FileNotFoundError(
                'this model has no calibration for layer_budget_scale="auto"; run `kvjax calibrate --model MODEL` once'
            )
        values, source = json.dumps(shipped[key]), SHIPPED_FILE
    try:
        calibration = Calibration.from_json(json.loads(values))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source} is not a calibration ({error}); run `kvjax calibrate` again") from error
    if len(calibration.layer_scale) != model.config.layers:
        raise ValueError(
            f"{source} has {len(calibration.layer_scale)} layers, not {model.config.layers}; run `kvjax calibrate`"
        )
    return calibration


def resolve_layer_budgets(model: Llama, policy: AnyPolicy) -> AnyPolicy:
    """Replaces `layer_budget_scale="auto"` by the scales of a model's calibration.

    Args:
        model: the model.
        policy: a policy, in any of the forms that `resolve_policy` takes.

    Returns:
        The policy in the same form, or its `PolicyChoice` instead of a text.
    """
    if isinstance(policy, str):
        policy = PolicyChoice.parse(policy)
    if isinstance(policy, PolicyChoice):
        if ("layer_budget_scale", AUTO) not in policy.settings:
            return policy
        settings = dict(policy.settings) | {"layer_budget_scale": repr(load_calibration(model).layer_scale)}
        return dataclasses.replace(policy, settings=tuple(settings.items()))
    if isinstance(policy, TopKPolicy):
        return _with_scales(model, policy)
    if isinstance(policy, type | Policy):
        return policy
    make: Callable[[int], Policy] = policy

    def make_scaled(budget: int) -> Policy:
        return _with_scales(model, make(budget))

    return make_scaled


def _with_scales(model: Llama, policy: Policy) -> Policy:
    """Returns a policy whose `layer_budget_scale` is not "auto"."""
    if not isinstance(policy, TopKPolicy) or policy.layer_budget_scale != AUTO:
        return policy
    return dataclasses.replace(policy, layer_budget_scale=load_calibration(model).layer_scale)


def _saved_file(model: Llama) -> pathlib.Path:
    return user_cache_directory() / "calibrations" / f"{model_key(model)}.json"
