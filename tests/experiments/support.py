"""Helpers that the tests of experiments share."""

import json
import subprocess
import sys

from experiments.common import ROOT
from experiments.common.rows import Row
from experiments.tasks.task import Request
from tests.models import tiny


def command(*arguments):
    """Runs a module as a command in another process."""
    words = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def request(tokens=1500, documents=3, seed=0, data_dir=None, **options):
    """Returns a request with the tokenizer of the tiny model, which has a token per character."""
    return Request(tiny.make_llm().tokenizer, tokens, documents, seed, data_dir, **options)


def figures(path):
    """Reads a file of figures."""
    return json.loads(path.read_text())


def row(policy, task, document, score, item=0, **options):
    """Returns a row of a question about a document."""
    budget = None if policy == "exact" else "25%"
    labels = {"kv_dtype": None, "question": "unseen", "tokens": 100, "seed": 0, "cache_fraction": 0.25}
    return Row("m", task, policy, document=document, item=item, score=score, **{"budget": budget} | labels | options)


def rows_of(policy, task, scores, **options):
    """Returns a row per document."""
    return [row(policy, task, str(number), score, **options) for number, score in enumerate(scores)]
