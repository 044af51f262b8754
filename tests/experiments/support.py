"""Helpers that the tests of experiments share."""

import json
import subprocess
import sys

from experiments.common import ROOT
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
