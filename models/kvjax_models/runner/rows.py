"""Batches of token lists of different lengths: padded arrays and back."""

from collections.abc import Sequence

import numpy as np


def pad_prompts(
    prompts: Sequence[Sequence[int]], batch: int, multiple: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads prompts on the right to one array.

    Args:
        prompts: token ids of each row.
        batch: expected number of prompts.
        multiple: the padded length is a multiple of it.

    Returns:
        The padded tokens and the lengths of the prompts, int32.

    Raises:
        ValueError: if a prompt is empty or contains unknown tokens, or there is not one per row.
    """
    if len(prompts) != batch:
        raise ValueError(f"expected {batch} prompts, one per batch row, got {len(prompts)}")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if not lengths.all():
        raise ValueError(f"prompt {int(np.argmin(lengths))} is empty; it must have at least one token")
    tokens = np.zeros((batch, -(-int(np.max(lengths)) // multiple) * multiple), np.int32)
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt {row} must be a list of integers, got {ids.dtype}{list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"token ids must be between 0 and {vocab_size - 1}, got {ids.min()} to {ids.max()} in prompt {row}"
            )
        tokens[row, : len(prompt)] = ids
    return tokens, lengths


def trim_rows(rows: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Returns the rows of a padded array without padding."""
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
