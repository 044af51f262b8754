"""Long texts to be read on: sources of packages that no model here was trained on, or books that a user has."""

import pathlib

import numpy as np

from experiments.common import sources
from kvjax_models.formats.tokenizer import Tokenizer

HELD_OUT = "held-out sources"


def held_out(tokenizer: Tokenizer, tokens: int, count: int, seed: int) -> list[list[int]]:
    """Stretches of the held-out packages, one package's files after the other's, each of `tokens` tokens with what the
    tokenizer puts first. No two overlap; the seed decides which.

    Raises:
        ValueError: where there are not so many.
    """
    whole = [
        token for package in sources.PACKAGES for token in tokenizer.encode(sources.repository(package), add_bos=False)
    ]
    fresh = tokens - len(tokenizer.prefix_ids)
    stretches = len(whole) // fresh
    if count > stretches:
        raise ValueError(f"held-out packages have {stretches} stretches of {tokens} tokens, not {count}")
    chosen = np.random.default_rng(seed).permutation(stretches)[:count]
    return [[*tokenizer.prefix_ids, *whole[number * fresh : (number + 1) * fresh]] for number in chosen]


def books(directory: pathlib.Path, tokenizer: Tokenizer, tokens: int, count: int) -> list[list[int]]:
    """The first `tokens` tokens of the first `count` text files of a directory that are as long: PG19's test set
    (https://github.com/google-deepmind/pg19) holds a book per file.

    Raises:
        ValueError: where there are not so many.
    """
    found = []
    for path in sorted(directory.glob("*.txt")):
        text = tokenizer.encode(path.read_text(encoding="utf-8"))
        found += [text[:tokens]] if len(text) >= tokens else []
        if len(found) == count:
            return found
    raise ValueError(f"{directory} has {len(found)} files NAME.txt of {tokens} tokens or more, not {count}")
