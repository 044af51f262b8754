"""Texts in which tasks hide sentences: published essays, or the documentation of Python."""

import functools
import pathlib
import re

import numpy as np

from experiments.tasks import data_files

DOCS = "docs"  # argument of tasks that use Python's documentation instead of the essays


@functools.cache
def _python_documentation() -> tuple[tuple[str, ...], ...]:
    """Returns the words of each article of Python's help: prose of 100,000 words under the PSF license."""
    from pydoc_data import topics

    articles = (tuple(re.sub(r"\s+", " ", text).split(" ")) for _, text in sorted(topics.topics.items()))
    return tuple(article for article in articles if len(article) > 100)


@functools.cache
def _essays(data_dir: pathlib.Path | None) -> tuple[tuple[str, ...], ...]:
    """Returns the words of each essay by Paul Graham, which RULER and needle tests use."""
    return tuple(tuple(text.split()) for _, text in data_files.read_directory(data_dir, "essays"))


def words(rng: np.random.Generator, source: str, data_dir: pathlib.Path | None) -> tuple[str, ...]:
    """Returns all words of a haystack, with its articles in random order.

    Args:
        rng: determines the order.
        source: "docs" for Python's documentation, "" for the essays.
        data_dir: directory of the essays.

    Returns:
        The words.
    """
    articles = _python_documentation() if source == DOCS else _essays(data_dir)
    return tuple(word for index in rng.permutation(len(articles)) for word in articles[index])


def take(all_words: tuple[str, ...], count: int) -> str:
    """Returns the first words as text; repeats all of them if there are too few."""
    repeats = -(-count // len(all_words))
    return " ".join((repeats * all_words)[:count])


def sentences(text: str) -> list[str]:
    """Splits a text after full stops, question marks and exclamation marks that whitespace follows."""
    return re.split(r"(?<=[.!?])\s+", text.strip())
