"""Kinds of text to read a model on, offline: prompts of its own tokens."""

import pathlib
import sysconfig
from collections.abc import Callable, Sequence

import numpy as np

from experiments.common.tasks import line_retrieval as task
from kvjax_models.formats.tokenizer import Tokenizer


def prompts(name: str, tokenizer: Tokenizer, seeds: Sequence[int], tokens: int) -> list[list[int]]:
    """A prompt of at least so many tokens per seed, decided by its seed alone; no seed of training is used.

    Raises:
        ValueError: for an unknown corpus, with the known ones.
    """
    if name not in CORPORA:
        raise ValueError(f"corpus {name!r} is not known; known: {', '.join(CORPORA)}")
    return [CORPORA[name](tokenizer, seed, tokens) for seed in seeds]


def _lines(tokenizer: Tokenizer, seed: int, tokens: int) -> list[int]:
    """A document of line retrieval and a question about it, the text that the shipped checkpoint was trained for."""

    def make(rng: np.random.Generator) -> task.Document:
        return task.generate_for_tokens(rng, lambda text: len(tokenizer.encode(text)), tokens)

    [document] = task.documents(task.EVALUATION_SEED + seed, 1, make)
    return tokenizer.encode(document.context + document.question)


def _code(tokenizer: Tokenizer, seed: int, tokens: int) -> list[int]:
    """Modules of this Python's standard library, one after the other in an order of the seed's, cut to the length: text
    of another kind that is wherever this runs (it differs between versions of Python)."""
    paths = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found: list[int] = []
    for number in np.random.default_rng(seed).permutation(len(paths)):
        found += tokenizer.encode(paths[number].read_text(encoding="utf-8"))
        if len(found) >= tokens:
            return found[:tokens]
    raise ValueError(f"the standard library has only {len(found)} tokens of the {tokens} that were asked for")


CORPORA: dict[str, Callable[[Tokenizer, int, int], list[int]]] = {"lines": _lines, "code": _code}
