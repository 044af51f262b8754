"""Next-token distributions of a compressed text along an answer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvjax_models.document import Document
from kvjax_models.runner.decode import Group, append_block
from kvjax_models.runner.state import check_faults, commit_to_device, compact_layers


def follow(
    document: Document, question: Sequence[int], max_new_tokens: int, answer: Sequence[int] | None = None
) -> tuple[list[int], Float[np.ndarray, "T V"]]:
    """Computes the distribution of every token of an answer.

    Args:
        document: the compressed text.
        question: tokens after the text.
        max_new_tokens: maximum number of tokens of the answer.
        answer: the tokens; by default the most likely ones, up to an end-of-text token.

    Returns:
        The tokens, and the log-probabilities of the vocabulary before each of them.
    """
    suffix, entries = document.suffix_sizes(), document.prefix.entries
    state = document.prefix.start_rows(suffix)
    if question:
        state = suffix.prefill(state, [question], entries)
    state = commit_to_device(state, suffix.mesh)
    tokens: list[int] = []
    rows = []
    for step in range(max_new_tokens if answer is None else len(answer)):
        rows.append(np.asarray(jax.nn.log_softmax(state.logits[0])))
        tokens.append(int(np.argmax(rows[-1])) if answer is None else answer[step])
        if answer is None and tokens[-1] in suffix.eos:
            break
        block = jnp.array([tokens[-1:]], jnp.int32), jnp.ones(1, jnp.int32)
        state = append_block(Group(suffix.split_model, state, entries), *block)
        if len(tokens) % suffix.block_size == 0:
            state = compact_layers(state)
    check_faults(state, suffix.mesh)
    return tokens, np.stack(rows)


def compare(reference: Float[np.ndarray, "T V"], log_probs: Float[np.ndarray, "T V"]) -> tuple[float, float]:
    """Returns the share of tokens with the same most likely one, and the mean divergence from the reference in nats."""
    equal = np.argmax(reference, axis=-1) == np.argmax(log_probs, axis=-1)
    divergence = np.sum(np.exp(reference) * (reference - log_probs), axis=-1)
    return float(np.mean(equal)), float(np.mean(divergence))
