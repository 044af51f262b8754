"""Seconds of entire answers, and requests per second; measures of `experiments.speed`.

`first_answer` reads a prompt and generates an answer in a new process: without stored programs (cold), with them
(stored), and once more in the same process (warm). `questions` asks several questions about a document that was read
before: the entries of the document are kept, so that only questions and answers are computed. transformers keeps them
in a `DynamicCache`, of which every question continues a copy. `throughput` answers as many prompts at a time as fit in
the memory of some rows of the full cache.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments.common.caches import Setting
from experiments.common.output import Measured
from experiments.common.speed_options import (
    TRANSFORMERS,
    Options,
    dtype_of,
    make_possible,
    measure_runs,
    random_tokens,
)
from experiments.common.statistics import median_interval
from experiments.common.timing import interleaved_seconds, timed
from experiments.common.transformers_decode import TransformersAnswers
from kvjax_models import LanguageModel, load
from kvjax_models.document import Document
from kvjax_models.engine import Engine
from kvjax_models.language_model import resolve_path
from kvjax_models.model.config import LlamaConfig

ROW_MEMORY = 2 * 2**30  # bytes of memory for which `questions` counts rows
STORED_RUNS = 3  # processes of `first_answer` with stored programs


def measure_first_answer(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Measures the first answer of new processes with every setting.

    Args:
        options: the options.
        llm: the model, which gives the sizes of transformers' model.
        context: tokens of the prompt.

    Yields:
        Labels and values of each setting and of transformers; times do not include loading the model.

    Raises:
        ValueError: if the options name no model, which new processes could load.
    """
    if options.model is None:
        raise ValueError("--measure first_answer loads a model in new processes; pass --model")
    path, dtype, labels = str(resolve_path(options.model)), dtype_of(llm), options.labels(llm, context)
    prompts, tokens = random_tokens(llm, options.seed, 1, context), options.tokens
    peers: list[tuple[float, float]] = []
    if options.transformers:
        config = llm.model.config
        peers = [_in_process(_transformers_seconds, config, dtype, prompts, tokens) for _ in range(STORED_RUNS)]
        yield {"setting": TRANSFORMERS, **labels}, _of_runs(peers)
    for setting in options.settings:
        with tempfile.TemporaryDirectory() as directory:
            cold, *runs = [
                _in_process(_answer_seconds, path, setting, dtype, prompts[0], tokens, directory)
                for _ in range(1 + STORED_RUNS)
            ]
        values = {"cold_seconds": cold[0], **_of_runs(runs)}
        if peers:
            values["transformers_ratio"] = values["stored_seconds"] / _of_runs(peers)["stored_seconds"]
        yield {"setting": str(setting), **labels}, values


def _of_runs(runs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Returns the medians of first and second answers of processes."""
    first, second = np.median(np.asarray(runs), axis=0)
    return {"stored_seconds": float(first), "warm_seconds": float(second)}


def _in_process(function: Callable[..., tuple[float, float]], *arguments: Any) -> tuple[float, float]:
    """Returns the result of a function in a new process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _answer_seconds(
    model: str, setting: Setting, dtype: str, prompt: list[int], tokens: int, directory: str
) -> tuple[float, float]:
    """Returns the seconds of the first and the second answer of this process, whose programs are in `directory`."""
    os.environ["KVJAX_CACHE"] = directory
    llm = load(model, dtype)

    def answer() -> None:
        generator = setting.cache(llm).generator(max_prompt_tokens=len(prompt), max_new_tokens=tokens)
        serve(Engine(llm.model, llm.tokenizer, lambda *_: (generator,), rows=1), [prompt], tokens)

    return timed(answer)[0], timed(answer)[0]


def _transformers_seconds(
    config: LlamaConfig, dtype: str, prompts: list[list[int]], tokens: int
) -> tuple[float, float]:
    """Returns the seconds of transformers' first and second answer in this process."""
    peer = TransformersAnswers(config, dtype)
    return timed(peer.answer, prompts, tokens)[0], timed(peer.answer, prompts, tokens)[0]


def measure_questions(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Measures the answers to questions about one document, as one batch.

    Args:
        options: the options.
        llm: the model.
        context: tokens of the document.

    Yields:
        Labels and values of each setting and of transformers, as a batch of copies and one question after the other.
    """
    [text] = random_tokens(llm, options.seed, 1, context)
    questions = random_tokens(llm, options.seed + 1, options.questions, options.question_tokens)
    new = options.question_tokens + options.tokens
    documents = make_possible(options.settings, lambda setting: setting.cache(llm).read(text, max_new_tokens=new))

    def ask(document: Document) -> None:
        serve(document.engine(rows=len(questions)), questions, options.tokens, document)

    runs: dict[str, Callable[[], Any]] = {str(name): functools.partial(ask, one) for name, one in documents.items()}
    if options.transformers:
        peer = TransformersAnswers(llm.model.config, dtype_of(llm))
        cache = peer.read(text)
        runs[f"{TRANSFORMERS}, batch"] = lambda: peer.answer(questions, options.tokens, cache)
        runs[f"{TRANSFORMERS}, one by one"] = lambda: [peer.answer([one], options.tokens, cache) for one in questions]
    labels = {**options.labels(llm, context), "questions": options.questions}
    measured = measure_runs(runs, options.repetitions)
    for setting, document in documents.items():
        held, row_bytes = document.cache_bytes, document.suffix_sizes().row_bytes
        rows = max((ROW_MEMORY - held) // row_bytes, 0)
        bytes_of_rows = {"document_bytes": held, "row_bytes": row_bytes, "rows_in_2_gib": rows}
        yield {"setting": str(setting), **labels}, measured.pop(str(setting)) | bytes_of_rows
    for name, values in measured.items():
        yield {"setting": name, **labels}, values


def measure_throughput(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields requests per second of every setting, at the memory of every number of rows of the full cache."""
    tokens, full = options.answer_tokens, options.settings[0]
    sizes = make_possible(
        options.settings, lambda setting: setting.cache(llm).rows(context, options.answer_tokens)[-1].row_bytes
    )
    for full_rows in options.full_rows:
        counts = {setting: full_rows * sizes[full] // size for setting, size in sizes.items()}
        rows = {setting: count for setting, count in counts.items() if count}
        runs = []
        for setting, count in rows.items():
            prompts = random_tokens(llm, options.seed, count, context)
            runs.append(functools.partial(serve, setting.cache(llm).engine(rows=count), prompts, tokens))
        seconds = dict(zip(rows, interleaved_seconds(runs, options.repetitions), strict=True))
        labels = {**options.labels(llm, context), "answer_tokens": tokens, "full_rows": full_rows}
        for setting, count in rows.items():
            rate, full_rate = count / seconds[setting], full_rows / seconds[full]
            values = {
                "rows": count,
                "requests_per_second": median_interval(rate),
                "requests_per_second_ratio": median_interval(rate / full_rate),
                "tokens_per_second": median_interval(tokens * rate),
            }
            yield {"setting": str(setting), **labels}, values


def serve(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, document: Document | None = None) -> None:
    """Answers prompts, or questions about a document, with `tokens` tokens each."""
    for number, prompt in enumerate(prompts):
        engine.add(prompt, document, max_new_tokens=tokens, seed=number)
    engine.complete()
