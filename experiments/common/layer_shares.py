"""What every layer gets of one budget for all of them."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvjax.policies.kvzip import KVzip
from kvjax.policy import Prompt
from kvjax_models.llama import Llama
from kvjax_models.prefill import read_layers

CHUNK = 128  # tokens that are read at a time


def layer_scores(model: Llama, text: Sequence[int]) -> Float[np.ndarray, "L H_kv T"]:
    """KVzip's scores of a text's tokens in every layer."""
    policy = KVzip(len(text) + 64)
    padded = np.zeros((1, -(-len(text) // CHUNK) * CHUNK), np.int32)
    padded[0, : len(text)] = text
    lengths = jnp.array([len(text)], jnp.int32)
    scores = []
    for read in read_layers(model, padded, lengths, CHUNK, [0] * model.config.layers, policy.repeat):
        keys, values = read.keys.swapaxes(1, 2), read.values.swapaxes(1, 2)
        prompt = Prompt(keys, values, lengths, None, repeated=read.repeated)
        scores.append(np.asarray(policy.score(prompt))[0, :, : len(text)])
    return np.stack(scores)


def shares_of(scores: Float[np.ndarray, "L H_kv T"], kept: float) -> Float[np.ndarray, "L"]:
    """What each layer keeps where the largest scores of all stay, in multiples of the mean."""
    least = np.quantile(scores, 1 - kept)
    return np.mean(scores > least, axis=(1, 2)) / np.mean(scores > least)
