"""Chooses next tokens from logits, with parameters and a random key for every batch row.

Parameters are arrays over the rows of a batch, so that requests with different ones share a compiled program. A row's
token depends on its own logits, parameters and key alone, whatever the other rows ask for.

A row of NaN has no valid token, but argmax returns one. A generation loop therefore calls `is_finite` at every step,
accumulates the result in its state, and raises an error when it reads the state on the host.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.messages import shorten
from kvjax.spec import is_number
from kvjax.state import state
from kvjax_models.sharding import constrain_replicated

MIN_TEMPERATURE = 1e-30  # far above the smallest float32 numbers, which devices flush to zero
MAX_LOGPROBS = 20  # most likely tokens whose log-probabilities a request may ask for, as in OpenAI's interface
_MAX_PENALTY = 2.0  # of presence and frequency, as in OpenAI's interface
_MAX_BIAS, _MAX_BIASES = 100.0, 300  # of a token, and tokens with one, as in OpenAI's interface
ANY_TOKEN = -1  # a word of `RowSampling.allowed` with every bit


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a sequence are chosen.

    Penalties change the logits first, then the bias is added and tokens that a schema does not allow are excluded; then
    temperature, top_k, top_p and min_p apply in this order, as in transformers. Among equal logits, the smaller
    token id counts as more likely, so that top_k keeps exactly k tokens.

    Attributes:
        temperature: divisor of the logits; 0 selects the most likely token and needs no randomness.
        top_k: sample among the k most likely tokens; None: all.
        top_p: sample among the smallest set of most likely tokens whose probability reaches p; None: all.
        min_p: sample among the tokens with at least p times the probability of the most likely one; None: all.
        repetition_penalty: divisor of positive logits, and factor of negative ones, of tokens that occur in the prompt
            or the answer (Keskar et al. 2019); 1: none.
        presence_penalty: subtracted from the logits of tokens that occur in the answer, -2 to 2.
        frequency_penalty: subtracted for every occurrence in the answer, -2 to 2.
        logprobs: number of most likely tokens, up to 20, whose log-probabilities are returned with each new token,
            before penalties and temperature; None: no log-probabilities.
        json_schema: schema of a JSON value that is the entire answer, as a dictionary or JSON; {"type": "object"} for
            any object. It is written as `json.dumps` does, with the properties in the order of the schema.
        grammar: grammar in the Lark form of llguidance that the entire answer matches. At most one of the two.
        logit_bias: added to the logits of up to 300 tokens, -100 to 100, by token id.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    json_schema: Any = None  # a dictionary or JSON; JSON once it is checked
    grammar: str | None = None
    logit_bias: Any = ()  # a mapping; a tuple of pairs once it is checked

    def __post_init__(self) -> None:
        """Checks the parameters.

        Raises:
            ValueError: if one is invalid.
        """
        if not is_number(self.temperature) or not (
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf
        ):
            raise ValueError(
                f"temperature={shorten(self.temperature)} must be 0 (greedy), or finite and at least {MIN_TEMPERATURE}"
            )
        if self.top_k is not None and not (_is_integer(self.top_k) and self.top_k >= 1):
            raise ValueError(f"top_k={shorten(self.top_k)} must be an integer of at least 1, or None for all tokens")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value <= 1):
                raise ValueError(
                    f"{name}={shorten(value)} must be greater than 0 and at most 1, or None for all tokens"
                )
        if not (is_number(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                f"repetition_penalty={shorten(self.repetition_penalty)} must be greater than 0; 1 disables it"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (is_number(value) and abs(value) <= _MAX_PENALTY):
                raise ValueError(f"{name}={shorten(value)} must be between -{_MAX_PENALTY:g} and {_MAX_PENALTY:g}")
        if self.logprobs is not None and not (_is_integer(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS):
            raise ValueError(
                f"logprobs={shorten(self.logprobs)} must be an integer from 0 to {MAX_LOGPROBS}, or None for none"
            )
        if self.json_schema is not None and self.grammar is not None:
            raise ValueError("an answer has either a json_schema or a grammar")
        # Hashable, because requests with equal parameters share the prefill of a prompt.
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))


def _schema_text(schema: Any) -> str | None:
    if schema is None:
        return None
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(value, Mapping):
            return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        pass
    raise ValueError(f"json_schema={shorten(schema)} must be a JSON object: a dictionary, or its text")


def _biases(bias: Any) -> tuple[tuple[int, float], ...]:
    """Returns the bias of every token, in order."""
    items = [*(bias.items() if isinstance(bias, Mapping) else bias)]
    for token, value in items:
        if not (_is_integer(token) and token >= 0 and is_number(value) and abs(value) <= _MAX_BIAS):
            raise ValueError(
                f"logit_bias={shorten(bias)} must map token ids to numbers from -{_MAX_BIAS:g} to {_MAX_BIAS:g}"
            )
    if len(items) > _MAX_BIASES:
        raise ValueError(f"logit_bias has {len(items)} tokens; it may have up to {_MAX_BIASES}")
    return tuple(sorted((int(token), float(value)) for token, value in items))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


GREEDY = Sampling()


class SamplingOptions(TypedDict, total=False):
    """The parameters of `Sampling`, as options of a function."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int | None
    json_schema: Mapping[str, Any] | str | None
    grammar: str | None
    logit_bias: Mapping[int, float]


@state
class RowSampling:
    """The parameters of all rows, and the tokens that penalties refer to."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]  # int32; 0: all
    top_p: Float[Array, "B"]  # 1: all
    min_p: Float[Array, "B"]  # 0: all
    repetition_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    logprobs: Int[Array, "B"]  # int32; -1: none
    in_prompt: Bool[Array, "B V"]  # tokens that occur in the prompt
    bias_tokens: Int[Array, "B K"]  # int32 tokens with a bias
    biases: Float[Array, "B K"]  # 0: none
    allowed: Int[Array, "B W"]  # int32, a bit for every token that may come next, the lowest one first
    counts: Int[Array, "B V"]  # int32, how often each token occurs in the answer


def num_words(vocab_size: int) -> int:
    """Returns the length of `RowSampling.allowed`."""
    return -(-vocab_size // 32)


def row_sampling(samplings: Sequence[Sampling], vocab_size: int, mesh: Mesh | None = None) -> RowSampling:
    """Returns the parameters of rows without tokens.

    Args:
        mesh: mesh on which the arrays are replicated; None for a single device.

    Returns:
        The parameters as arrays, each with its own buffer.
    """

    def column(name: str, default: float, dtype: type = np.float32) -> np.ndarray:
        values = (getattr(one, name) for one in samplings)
        return np.array([default if value is None else value for value in values], dtype)

    bias_tokens = np.zeros((len(samplings), _MAX_BIASES), np.int32)
    biases = np.zeros((len(samplings), _MAX_BIASES), np.float32)
    for row, one in enumerate(samplings):
        for index, (token, value) in enumerate(one.logit_bias):
            bias_tokens[row, index], biases[row, index] = token, value
    columns = {
        "temperature": column("temperature", 0),
        "top_k": np.minimum(column("top_k", 0, np.int64), vocab_size).astype(np.int32),
        "top_p": column("top_p", 1),
        "min_p": column("min_p", 0),
        "repetition_penalty": column("repetition_penalty", 1),
        "presence_penalty": column("presence_penalty", 0),
        "frequency_penalty": column("frequency_penalty", 0),
        "logprobs": column("logprobs", -1, np.int32),
        "bias_tokens": bias_tokens,
        "biases": biases,
        "allowed": np.full((len(samplings), num_words(vocab_size)), ANY_TOKEN, np.int32),
    }
    return _without_tokens(columns, vocab_size, mesh)


# Compiled, so that it can also be traced for absent devices.
@functools.partial(jax.jit, static_argnames=("vocab_size", "mesh"))
def _without_tokens(columns: dict[str, Array], vocab_size: int, mesh: Mesh | None) -> RowSampling:
    shape = (*columns["temperature"].shape, vocab_size)
    sampling = RowSampling(**columns, in_prompt=jnp.zeros(shape, bool), counts=jnp.zeros(shape, jnp.int32))
    return jax.tree.map(lambda x: constrain_replicated(x, mesh), sampling)


def with_prompt(sampling: RowSampling, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> RowSampling:
    """Returns the parameters after tokens of the prompt, the first `lengths[b]` of row b."""
    vocab_size = sampling.in_prompt.shape[1]
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, vocab_size)
    in_prompt = jax.vmap(lambda row, tokens: row.at[tokens].set(True, mode="drop"))(sampling.in_prompt, tokens)
    return dataclasses.replace(sampling, in_prompt=in_prompt)


def with_answer(sampling: RowSampling, token: Int[Array, "B"], running: Bool[Array, "B"]) -> RowSampling:
    """Returns the parameters after a token of the answers of running rows."""
    rows = jnp.arange(len(token))
    return dataclasses.replace(sampling, counts=sampling.counts.at[rows, token].add(running.astype(jnp.int32)))


class SampledTokens(NamedTuple):
    """The tokens of one step, with the log-probabilities that rows ask for and zeros elsewhere.

    Attributes:
        token: int32 token ids.
        logprob: float32 log-probability of each token.
        top_tokens: int32 ids of the `MAX_LOGPROBS` most likely tokens, or of all tokens of a smaller vocabulary.
        top_logprobs: their float32 log-probabilities.
    """

    token: Int[Array | np.ndarray, "B"]
    logprob: Float[Array | np.ndarray, "B"]
    top_tokens: Int[Array | np.ndarray, "B K"]
    top_logprobs: Float[Array | np.ndarray, "B K"]


def sample(logits: Float[Array, "B V"], keys: Key[Array, "B"], sampling: RowSampling) -> SampledTokens:
    """Samples one token per row.

    Args:
        logits: finite logits of any float dtype (see `is_finite`); computed in float32.
        keys: one typed key per row (`jax.random.key`), new for every step.

    Returns:
        The tokens.
    """
    logits = logits.astype(jnp.float32)
    # Conditionals, because passes over the vocabulary and above all the sort cost time that most steps do not need.
    penalizes = (
        (sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0) | (sampling.repetition_penalty != 1)
    )
    changes = jnp.any(penalizes) | jnp.any(sampling.biases != 0) | jnp.any(sampling.allowed != ANY_TOKEN)
    scores = jax.lax.cond(changes, _change_logits, lambda logits, _: logits, logits, sampling)
    draws = sampling.temperature > 0
    token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    token = jax.lax.cond(jnp.any(draws), lambda: jnp.where(draws, _draw(scores, keys, sampling), token), lambda: token)
    return SampledTokens(token, *_log_probabilities(logits, token, sampling.logprobs >= 0))


def is_finite(logits: Float[Array, "B V"]) -> Bool[Array, "B"]:
    """Returns which rows have only finite logits; check before tokens are banned by -inf."""
    return jnp.isfinite(logits).all(axis=-1)


def _penalize(logits: Float[Array, "B V"], sampling: RowSampling) -> Float[Array, "B V"]:
    factor = sampling.repetition_penalty[:, None]
    occurs = sampling.counts > 0
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(sampling.in_prompt | occurs, repeated, logits)
    return (
        logits
        - sampling.presence_penalty[:, None] * occurs
        - sampling.frequency_penalty[:, None] * sampling.counts.astype(jnp.float32)
    )


def _change_logits(logits: Float[Array, "B V"], sampling: RowSampling) -> Float[Array, "B V"]:
    """Applies the penalties, adds the biases, and replaces the logits of tokens that are not allowed by -inf."""
    rows = jnp.arange(len(logits))[:, None]
    logits = _penalize(logits, sampling).at[rows, sampling.bias_tokens].add(sampling.biases)
    bits = (sampling.allowed[:, :, None] >> jnp.arange(32)) & 1
    return jnp.where(bits.reshape(len(logits), -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def _draw(logits: Float[Array, "B V"], keys: Key[Array, "B"], sampling: RowSampling) -> Int[Array, "B"]:
    """Draws a token of every row, whose temperature may be 0 if the result is not used."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # Relative to the maximum: at low temperatures the logits themselves would overflow.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    restricts = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    scaled = jax.lax.cond(jnp.any(restricts), _keep_most_likely, lambda scaled, _: scaled, scaled, sampling)
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)


def _keep_most_likely(scaled: Float[Array, "B V"], sampling: RowSampling) -> Float[Array, "B V"]:
    """Replaces the logits that top_k, top_p or min_p excludes by -inf; each keeps the n most likely tokens."""
    ordered = -jnp.sort(-scaled, axis=-1)
    rank = jnp.arange(scaled.shape[1])
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, scaled.shape[1])[:, None]
    probability = jax.nn.softmax(jnp.where(rank < top_k, ordered, -jnp.inf), axis=-1)
    # The nucleus includes the token that crosses p (Holtzman et al. 2020, section 3.1).
    top_p = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)[:, None]  # rounded sums may exceed 1
    kept = (rank < top_k) & (jnp.cumsum(probability, axis=-1) - probability < top_p)
    kept &= ordered >= jnp.log(sampling.min_p)[:, None]
    count = jnp.maximum(jnp.sum(kept, axis=-1, keepdims=True), 1)
    smallest = jnp.take_along_axis(ordered, count - 1, axis=-1)
    above, equal = scaled > smallest, scaled == smallest
    first_equal = jnp.cumsum(equal, axis=-1) <= count - jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(above | (equal & first_equal), scaled, -jnp.inf)


def _log_probabilities(
    logits: Float[Array, "B V"], token: Int[Array, "B"], wanted: Bool[Array, "B"]
) -> tuple[Float[Array, "B"], Int[Array, "B K"], Float[Array, "B K"]]:
    """Returns log-probabilities as in `SampledTokens`."""
    batch, count = len(token), min(MAX_LOGPROBS, logits.shape[1])

    def compute() -> tuple[Array, Array, Array]:
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        values, tokens = jax.lax.top_k(log_probs, count)
        return jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0], tokens.astype(jnp.int32), values

    def skip() -> tuple[Array, Array, Array]:
        return jnp.zeros(batch), jnp.zeros((batch, count), jnp.int32), jnp.zeros((batch, count))

    return jax.lax.cond(jnp.any(wanted), compute, skip)
