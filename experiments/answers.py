"""Seconds of entire answers; `experiments.speed --measure first_answer answer questions` runs them.

`first_answer` reads a prompt and generates an answer in a new process: without stored programs (cold), with them
(stored), and once more in the same process (warm). `answer` does so after a first answer that compiles. `questions`
asks several questions about a document that was read before: the entries of the document are kept, so that only
questions and answers are computed. transformers keeps them in a `DynamicCache`, of which every question continues a
copy.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.common.caches import Setting
from experiments.common.output import Measured
from experiments.common.statistics import median_interval
from experiments.common.timing import interleaved_seconds
from experiments.common.transformers_decode import TransformersAnswers
from kvjax_models import LanguageModel, load
from kvjax_models.document import Document
from kvjax_models.engine import Engine
from kvjax_models.model.config import LlamaConfig
from kvjax_models.runner.generator import Generator

ROW_MEMORY = 2 * 2**30  # bytes of memory for which `questions` counts rows
TRANSFORMERS = "transformers"
STORED_RUNS = 3  # processes of `first_answer` with stored programs


class Sizes(NamedTuple):
    """Sizes of a measurement.

    Attributes:
        context_tokens: tokens of the prompt or document.
        question_tokens: tokens of every question.
        questions: number of questions.
        answer_tokens: tokens of every answer.
        repetitions: timed runs.
        seed: seed of the random tokens.
        dtype: dtype of transformers' model; None leaves transformers out.
    """

    context_tokens: int
    question_tokens: int
    questions: int
    answer_tokens: int
    repetitions: int
    seed: int
    dtype: str | None


def measure_first_answer(
    llm: LanguageModel, model: pathlib.Path, settings: Sequence[Setting], sizes: Sizes
) -> Iterator[Measured]:
    """Measures the first answer of new processes with every setting.

    Args:
        llm: the model, which gives the sizes of transformers' model.
        model: file or directory of the model.
        settings: the settings.
        sizes: the sizes.

    Yields:
        Labels and values of each setting and of transformers; times do not include loading the model.
    """
    peers: Sequence[float] = ()
    if sizes.dtype is not None:
        runs = [_in_process(_transformers_seconds, llm.model.config, sizes) for _ in range(STORED_RUNS)]
        peers = [first for first, _ in runs]
        yield {"setting": TRANSFORMERS, **sizes._asdict()}, _of_runs(runs)
    dtype = jnp.dtype(llm.model.embedding.param_dtype)
    for setting in settings:
        with tempfile.TemporaryDirectory() as directory:
            cold, *runs = [
                _in_process(_answer_seconds, str(model), setting, sizes, str(dtype), directory)
                for _ in range(1 + STORED_RUNS)
            ]
        values = {"cold_seconds": cold[0], **_of_runs(runs)}
        if peers:
            firsts = np.asarray([first for first, _ in runs])
            values["transformers_ratio"] = float(np.median(firsts) / np.median(peers))
        yield {"setting": str(setting), **sizes._asdict()}, values


def _of_runs(runs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Returns the medians of first and second answers of processes."""
    first, second = np.median(np.asarray(runs), axis=0)
    return {"stored_seconds": float(first), "warm_seconds": float(second)}


def _in_process(function: Callable[..., tuple[float, float]], *arguments: Any) -> tuple[float, float]:
    """Returns the result of a function in a new process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _answer_seconds(model: str, setting: Setting, sizes: Sizes, dtype: str, directory: str) -> tuple[float, float]:
    """Returns the seconds of the first and the second answer of this process, whose programs are in `directory`."""
    os.environ["KVJAX_CACHE"] = directory
    llm = load(model, dtype)
    [prompt] = _random_tokens(llm.model.config, sizes.seed, 1, sizes.context_tokens)

    def answer() -> None:
        cache, (context, new) = setting.cache(llm), (sizes.context_tokens, sizes.answer_tokens)
        _answer(llm, cache.generator(max_prompt_tokens=context, max_new_tokens=new), prompt, sizes)

    return _seconds(answer), _seconds(answer)


def _transformers_seconds(config: LlamaConfig, sizes: Sizes) -> tuple[float, float]:
    """Returns the seconds of transformers' first and second answer in this process."""
    assert sizes.dtype is not None
    peer = TransformersAnswers(config, sizes.dtype)
    prompts = _random_tokens(config, sizes.seed, 1, sizes.context_tokens)

    def answer() -> None:
        peer.answer(prompts, sizes.answer_tokens)

    return _seconds(answer), _seconds(answer)


def _seconds(run: Callable[[], None]) -> float:
    """Returns the seconds of a function."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_answer(llm: LanguageModel, generators: Mapping[Setting, Generator], sizes: Sizes) -> Iterator[Measured]:
    """Measures the prefill of a prompt and its answer with every setting.

    Args:
        llm: the model.
        generators: a generator with one row of every setting.
        sizes: the sizes.

    Yields:
        Labels and values of each setting and of transformers; ratios are to the first setting in the same repetition.
    """
    [prompt] = _random_tokens(llm.model.config, sizes.seed, 1, sizes.context_tokens)
    runs: dict[str, Callable[[], Any]] = {
        str(setting): functools.partial(_answer, llm, one, prompt, sizes) for setting, one in generators.items()
    }
    if sizes.dtype is not None:
        peer = TransformersAnswers(llm.model.config, sizes.dtype)
        runs[TRANSFORMERS] = lambda: peer.answer([prompt], sizes.answer_tokens)
    for name, values in _ratios(runs, sizes.repetitions).items():
        yield {"setting": name, **sizes._asdict()}, values


def measure_questions(llm: LanguageModel, settings: Sequence[Setting], sizes: Sizes) -> Iterator[Measured]:
    """Measures the answers to questions about one document, as one batch.

    Args:
        llm: the model.
        settings: the settings; the first one is the full cache.
        sizes: the sizes.

    Yields:
        Labels and values of each setting and of transformers, as a batch of copies and one question after the other.
    """
    [text] = _random_tokens(llm.model.config, sizes.seed, 1, sizes.context_tokens)
    questions = _random_tokens(llm.model.config, sizes.seed + 1, sizes.questions, sizes.question_tokens)
    needed = sizes.question_tokens + sizes.answer_tokens
    documents: dict[str, Document] = {}
    for setting in settings:
        try:
            documents[str(setting)] = setting.cache(llm).read(text, max_new_tokens=needed)
        except ValueError as error:
            print(f"{setting} is left out: {error}")

    def ask(document: Document) -> None:
        engine = document.engine(rows=len(questions))
        for question in questions:
            engine.add(question, document, max_new_tokens=sizes.answer_tokens)
        engine.complete()

    runs: dict[str, Callable[[], Any]] = {name: functools.partial(ask, one) for name, one in documents.items()}
    if sizes.dtype is not None:
        peer = TransformersAnswers(llm.model.config, sizes.dtype)
        cache = peer.read(text)
        runs["transformers, batch"] = lambda: peer.answer(questions, sizes.answer_tokens, cache)
        runs["transformers, one by one"] = lambda: [peer.answer([one], sizes.answer_tokens, cache) for one in questions]
    for name, values in _ratios(runs, sizes.repetitions).items():
        if name in documents:
            text_bytes = documents[name].cache_bytes
            row_bytes = documents[name].suffix_sizes().row_bytes
            values |= {"document_bytes": text_bytes, "row_bytes": row_bytes}
            values["rows_in_2_gib"] = max((ROW_MEMORY - text_bytes) // row_bytes, 0)
        yield {"setting": name, **sizes._asdict()}, values


def _answer(llm: LanguageModel, generator: Generator, prompt: Sequence[int], sizes: Sizes) -> None:
    """Reads a prompt and generates an answer."""
    engine = Engine(llm.model, llm.tokenizer, lambda *_: (generator,), rows=1)
    engine.add(prompt, max_new_tokens=sizes.answer_tokens, seed=sizes.seed)
    engine.complete()


def _random_tokens(config: LlamaConfig, seed: int, count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (count, length)).tolist()


def _ratios(runs: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, dict[str, Any]]:
    """Returns seconds of every run, and ratios to the first run and to transformers in the same repetition."""
    times = dict(zip(runs, interleaved_seconds(list(runs.values()), repetitions), strict=True))
    full = next(iter(times.values()))
    peers = [name for name in times if name.startswith(TRANSFORMERS)]
    values: dict[str, dict[str, Any]] = {}
    for name, seconds in times.items():
        values[name] = {"seconds": median_interval(seconds), "seconds_ratio": median_interval(seconds / full)}
        if peers:
            fastest: Float[np.ndarray, "R"] = np.min([times[peer] for peer in peers], axis=0)
            values[name]["transformers_ratio"] = median_interval(seconds / fastest)
    return values
