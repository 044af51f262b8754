"""Next-token distributions of compressed caches along the full cache's greedy answer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax_models.generation.decode import append_block
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState, check_faults, commit_to_device, compact_layers


@jax.jit
def divergence(reference: Float[Array, "B V"], logits: Float[Array, "B V"]) -> Float[Array, "B"]:
    """Returns the Kullback-Leibler divergence of softmax(logits) from softmax(reference), in nats."""
    log_p, log_q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def compare(
    generators: Sequence[Generator], states: Sequence[GenerationState], steps: int
) -> tuple[Float[np.ndarray, "S B"], Float[np.ndarray, "S B"], list[list[int]]]:
    """Feeds the first generator's most likely tokens to all generators and compares their distributions.

    A sequence ends with the first generator's end-of-text token.

    Args:
        generators: generators of one model with one batch size; the first has a full cache.
        states: a state of each after the prompt; their buffers are donated.
        steps: number of tokens.

    Returns:
        For every generator and row, the share of steps with the same most likely token and the mean divergence; and the
        tokens of each row.
    """
    first = generators[0]
    states = [commit_to_device(state, first.mesh) for state in states]
    equal, kl = np.zeros((2, len(generators), first.batch))
    alive, counts = np.ones(first.batch, bool), np.zeros(first.batch)
    tokens: list[list[int]] = [[] for _ in range(first.batch)]
    for step in range(1, steps + 1):
        reference = states[0].logits
        token = np.argmax(np.asarray(reference), axis=-1).astype(np.int32)
        for index, state in enumerate(states):
            equal[index] += alive * (np.argmax(np.asarray(state.logits), axis=-1) == token)
            kl[index] += alive * np.asarray(divergence(reference, state.logits))
        counts += alive
        for row in np.flatnonzero(alive):
            tokens[row].append(int(token[row]))
        alive &= ~np.isin(token, first.eos)
        if not alive.any():
            break
        for index, generator in enumerate(generators):
            state = append_block(
                generator.model,
                generator.mesh,
                states[index],
                jnp.asarray(token[:, None]),
                jnp.asarray(alive, jnp.int32),
                generator.scorer,
            )
            if step % generator.block_size == 0:
                state = compact_layers(state)
            states[index] = state
    for state in states:
        check_faults(state, first.mesh)
    return equal / counts, kl / counts, tokens
