"""Passages of books and of WikiText-2, whose likelihood is measured.

- `perplexity_books`, `perplexity_wikitext2`: exact prefill up to a position, then the likelihood of the next tokens
  through the compressed cache. ClusterKV measures perplexity per position in this way.
- `stream_books`, `stream_wikitext2`: the likelihood of all tokens, each computed from the compressed cache, so that
  errors accumulate.
"""

import functools

import numpy as np

from experiments.tasks import data_files
from experiments.tasks.task import Document, Request, Task

CONTINUATION = 64  # measured tokens after the position, by default
_MAX_CHARACTERS = 12  # per token


def make_task(name: str, argument: str, request: Request) -> Task:
    """Returns passages of `request.tokens` tokens; the argument is the number of measured tokens."""
    form, _, source = name.partition("_")
    texts = _read(source, request)
    if not texts:
        raise ValueError(f"no text of {source} has {request.tokens} tokens")
    documents = request.generate(lambda rng, index: _passage(texts[index % len(texts)], rng, request))
    if form == "stream":
        return Task(documents, kind="stream", chat=False)
    return Task(documents, kind="continue", answer_tokens=int(argument or CONTINUATION), chat=False)


def _read(source: str, request: Request) -> list[str]:
    """Returns texts that are long enough."""
    if source == "wikitext2":
        texts = [data_files.read_text(request.data_dir, "wikitext2/test.txt")]
    else:
        texts = [text for _, text in data_files.read_directory(request.data_dir, "books")]
    return [text for text in texts if len(text) > 2 * _MAX_CHARACTERS * request.tokens]


def _passage(text: str, rng: np.random.Generator, request: Request) -> Document:
    """Returns a passage at a random place, which starts at a line."""
    length = _MAX_CHARACTERS * request.tokens
    start = int(rng.integers(len(text) - length))
    return Document(text[text.find("\n", start, start + length // 2) + 1 :][:length])


TASKS = {
    f"{form}_{source}": functools.partial(make_task, f"{form}_{source}")
    for form in ("perplexity", "stream")
    for source in ("books", "wikitext2")
}
