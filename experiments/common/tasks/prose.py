"""English prose to hide things in, without downloading any."""

import functools
import re

import numpy as np


@functools.cache
def _topics() -> tuple[tuple[str, ...], ...]:
    """The articles of Python's own help, as words: prose of some 100,000 words under the PSF licence that is wherever
    this runs (it differs between versions of Python)."""
    from pydoc_data import topics

    articles = (tuple(re.sub(r"\s+", " ", text).split(" ")) for _, text in sorted(topics.topics.items()))
    return tuple(article for article in articles if len(article) > 100)


def words(rng: np.random.Generator) -> tuple[str, ...]:
    """All the prose there is, article after article in a drawn order."""
    articles = _topics()
    return tuple(word for number in rng.permutation(len(articles)) for word in articles[number])


def sentences(text: str) -> list[str]:
    """The text cut behind full stops, question and exclamation marks that white space follows."""
    return re.split(r"(?<=[.!?])\s+", text.strip())
