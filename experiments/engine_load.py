"""Measures an engine whose requests differ, against what its parts promise.

    python -m experiments.engine_load --model smollm2-135m --measure batch documents mixed kept
    python -m experiments.engine_load --model smollm2-135m --measure requests --requests 100

- `batch`: eight prompts at once, in times of one alone.
- `documents`: milliseconds of a step with four documents of different lengths and a question to each, in times of four
  questions to the longest one.
- `mixed`: the same with two documents, two questions each and two prompts of different lengths, in times of six prompts
  of the longer length.
- `kept`: bytes of a conversation that is kept.
- `requests`: random requests (100 to 3,000 tokens, four documents, sampling, stop strings, several answers, aborts).
  Every answer is compared with the one alone: equal tokens, or two nearly equal logits at the first that differs.
"""

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from absl import logging

from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.rounding import NEAR, answer_alone, gap_at
from kvjax_models import CachedModel, LanguageModel, load
from kvjax_models.document import Document
from kvjax_models.engine import Engine
from kvjax_models.runner.sampling import GREEDY, Sampling

Asked: TypeAlias = tuple[list[int], Document | None]  # a prompt, or a question and its document
_MEASURES = ("batch", "documents", "mixed", "kept", "requests")


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the measurement."""

    model: str = "smollm2-135m"  # Name of `kvjax models`, GGUF file or Hugging Face directory.
    policy: str = "exact"
    budget: str | None = None
    measure: tuple[str, ...] = repeatable(*_MEASURES[:-1], choices=_MEASURES)
    answer_tokens: int = 48  # Tokens of every answer; `requests` draws its own lengths.
    repetitions: int = 5  # Timed runs after the first two, which compile.
    requests: int = 1000  # Number of requests.
    rows: int = 8  # Maximum number of rows of `requests`.
    seed: int = 0  # Seed of the requests.


class Load:
    """Random requests to one model with the cache that the options name."""

    def __init__(self, options: Options, llm: LanguageModel) -> None:
        """Makes the cache of `llm`."""
        self.options, self.llm = options, llm
        self.cache: CachedModel = llm.cache(options.policy, options.budget)
        self._random = np.random.default_rng(options.seed)

    def tokens(self, count: int) -> list[int]:
        """Returns random tokens."""
        return self._random.integers(0, self.llm.model.config.vocab_size, count).tolist()

    def documents(self, *lengths: int) -> list[Document]:
        """Returns random documents."""
        return [self.cache.read(self.tokens(length), max_new_tokens=128) for length in lengths]

    def measure_batch(self) -> dict[str, Any]:
        """Returns seconds of eight prompts of 600 tokens at once, and of one."""
        prompts: list[Asked] = [(self.tokens(600), None) for _ in range(8)]
        return self._compare("seconds", prompts[:1], prompts)

    def measure_documents(self) -> dict[str, Any]:
        """Returns milliseconds of a step of questions to several documents, and to one."""
        documents = self.documents(370, 900, 1800, 3500)
        mixed: list[Asked] = [(self.tokens(16), one) for one in documents]
        return self._compare("ms_per_step", [(question, documents[-1]) for question, _ in mixed], mixed)

    def measure_mixed(self) -> dict[str, Any]:
        """Returns milliseconds of a step of questions and prompts, and of as many long prompts."""
        mixed: list[Asked] = [(self.tokens(16), one) for one in self.documents(900, 1800) * 2]
        mixed += [(self.tokens(count), None) for count in (100, 1500)]
        return self._compare("ms_per_step", [(self.tokens(1500), None) for _ in mixed], mixed)

    def measure_kept(self) -> dict[str, Any]:
        """Returns the bytes of a conversation of 40 tokens."""
        engine = self.cache.engine(rows=1)
        engine.add(self.tokens(20), max_new_tokens=20, keep=True)
        *_, output = engine.run()
        prefix = output.prefix
        assert prefix is not None
        held = sum(x.nbytes for x in jax.tree.leaves((prefix.entries, prefix.logits, prefix.recurrent)))
        return {"tokens": len(prefix.tokens), "bytes": held}

    def measure_requests(self) -> dict[str, Any]:
        """Returns counts of random requests, and of answers that differ from those alone."""
        rng, documents = random.Random(self.options.seed), self.documents(200, 700, 1500, 3000)
        engine = self.cache.engine(rows=self.options.rows, max_prefill_tokens=2048, stream_interval=8)
        requests = [_make_request(self, rng, documents) for _ in range(self.options.requests)]
        waiting, numbers, aborted = iter(range(len(requests))), dict[int, int](), set[int]()
        tokens: dict[int, list[int]] = {index: [] for index in range(len(requests))}
        memory: list[int] = []
        gaps: list[float | None] = []  # of the finished ones
        while True:
            while engine.num_waiting < 8 and (index := next(waiting, None)) is not None:
                numbers[engine.add(**requests[index])] = index
                if rng.random() < 0.05:
                    aborted.add(index)
            if not engine.has_unfinished:
                break
            for output in engine.step():
                index = numbers[output.number]
                tokens[index] += output.tokens
                if output.finish_reason is None:
                    if index in aborted and rng.random() < 0.5:
                        engine.abort(output.number)
                    continue
                gaps.append(self._gap(requests[index], tokens.pop(index), index in aborted))
                if len(gaps) in (len(requests) // 5, len(requests)):
                    memory.append(sum(x.nbytes for x in jax.live_arrays()))
                if len(gaps) % 100 == 0:
                    logging.info("%d requests: %s", len(gaps), _count(gaps))
        counts = {"requests": len(requests), "aborted": len(aborted), "programs": engine.num_programs}
        return {**counts, "bytes_after_a_fifth_and_all": memory, **_count(gaps)}

    def _gap(self, request: dict[str, Any], tokens: Sequence[int], was_aborted: bool) -> float | None:
        """Compares an answer with the one alone.

        Returns:
            None if the tokens are equal; otherwise the difference of the two best logits at the first other token.
        """
        outputs = answer_alone(self.cache, **request)
        alone = [token for output in outputs for token in output.tokens]
        if was_aborted:
            alone = alone[: len(tokens)]
        if alone == [*tokens]:
            return None
        pairs = enumerate(zip(alone, tokens, strict=False))
        place = next((place for place, (one, other) in pairs if one != other), None)
        return float("inf") if place is None else gap_at(outputs, request["sampling"], place)

    def _compare(self, metric: str, base: Sequence[Asked], other: Sequence[Asked]) -> dict[str, Any]:
        """Returns medians of two alternating mixes of requests, and of their ratios; the first two runs compile."""
        engines = [self.cache.engine(rows=1 if len(asked) == 1 else 8) for asked in (base, other)]
        pairs = list(zip(engines, (base, other), strict=True))
        runs = [[self._run(*pair)[metric] for pair in pairs] for _ in range(self.options.repetitions + 2)][2:]
        medians = [statistics.median(values) for values in zip(*runs, strict=True)]
        ratio = statistics.median(two / one for one, two in runs)
        values = {f"base_{metric}": medians[0], metric: medians[1], "ratio": ratio}
        return {name: float(f"{value:.4g}") for name, value in values.items()}

    def _run(self, engine: Engine, asked: Sequence[Asked]) -> dict[str, float]:
        """Returns the seconds of requests, and the milliseconds of a step."""
        begin, before = time.perf_counter(), engine.decode_seconds
        for prompt, document in asked:
            engine.add(prompt, document, max_new_tokens=self.options.answer_tokens)
        engine.complete()
        milliseconds = 1000 * (engine.decode_seconds - before) / self.options.answer_tokens
        return {"seconds": time.perf_counter() - begin, "ms_per_step": milliseconds}


def _make_request(load: Load, rng: random.Random, documents: Sequence[Document]) -> dict[str, Any]:
    """Returns the arguments of a random request."""
    document = rng.choice([None, None, *documents])
    count = rng.randint(4, 64) if document is not None else round(100 * 30 ** rng.random())
    sampling = rng.choice([GREEDY, GREEDY, Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=1.0, top_k=40)])
    return {
        "prompt": load.tokens(count),
        "prefix": document,
        "sampling": sampling,
        "stop": rng.choice([(), (), ("e", "\n")]),
        "max_new_tokens": rng.randint(4, 48),
        "seed": rng.randrange(2**32),
    }


def _count(gaps: Sequence[float | None]) -> dict[str, int]:
    """Returns how many answers differ from those alone, and how many by more than rounding."""
    differing = [gap for gap in gaps if gap is not None]
    return {"differ": len(differing), "differ_by_more_than_rounding": sum(gap > NEAR for gap in differing)}


def main(options: Options) -> None:
    """Prints a line of JSON per measure.

    Args:
        options: the options.
    """
    requests = Load(options, load(options.model))
    for measure in options.measure:
        values = getattr(requests, f"measure_{measure}")()
        print(json.dumps({"measure": measure, "policy": options.policy, **values}), flush=True)


if __name__ == "__main__":
    run_command(main, Options)
