"""Scores answers of a model about compressed texts, text by text."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Float

import kvjax
from experiments.common import caches, traces
from experiments.common.caches import CacheSize, Setting
from experiments.common.rows import Row, RowFile
from experiments.common.units import Item, Unit, make_units
from experiments.tasks.task import Task
from kvjax.spec import check_integer
from kvjax_models import LanguageModel
from kvjax_models.cache import CachedModel, read_together
from kvjax_models.compile_cache import length_bucket
from kvjax_models.document import Document
from kvjax_models.engine import Collector, Completion, Engine
from kvjax_models.prefix import Prefix
from kvjax_models.runner.generator import Generator, prefill_together
from kvjax_models.runner.state import GenerationState

_MAX_UNITS = 10_000  # of a task
_MAX_SEED = 2**32 // _MAX_UNITS - 1


@dataclasses.dataclass(frozen=True)
class Score:
    """The result of one question."""

    score: float
    answer: str | None = None
    answer_tokens: int | None = None
    kl: float | None = None


class CompressedPrompt(NamedTuple):
    """A prompt with its question that waits for its answer."""

    unit: Unit
    size: CacheSize
    prefix: Prefix


Group: TypeAlias = dict[Setting, tuple[CachedModel, Generator]]
Measured: TypeAlias = tuple[CacheSize, list[Score]]
Measure: TypeAlias = Callable[[], Measured]


class Evaluator:
    """A model and a task.

    Attributes:
        llm: model and tokenizer.
        model: name of the model in rows.
        task: the task.
        question_seen: whether one cache has the text, question and answer (or the rest of a passage), as for
            `CachedModel.generate`.
        tokens: maximum number of tokens of the task's prompts.
        seed: seed of documents and policies.
        batch: maximum number of questions that are answered at a time, of one text if the question is unseen.
        group: maximum number of settings that share a prefill; their caches exist at the same time. By default as many
            as hold a quarter of the memory.
    """

    def __init__(
        self,
        llm: LanguageModel,
        model: str,
        task: Task,
        *,
        question_seen: bool,
        tokens: int,
        seed: int,
        batch: int = 16,
        group: int | None = None,
    ):
        """Prepares the units of the task; see the attributes for the arguments.

        Raises:
            ValueError: if the seed is out of range, or `group` is less than 1.
        """
        if check_integer("seed", seed, minimum=0) > _MAX_SEED:
            raise ValueError(f"seed={seed} must be at most {_MAX_SEED}, because every unit of a task has its own seed")
        self.llm, self.model, self.task = llm, model, task
        self.question_seen, self.tokens, self.seed = question_seen, tokens, seed
        self.batch = batch
        self.group = None if group is None else check_integer("group", group, minimum=1)
        self.units = make_units(task, llm.tokenizer, question_seen, tokens)
        items = [item for unit in self.units for item in unit.items]
        answer = max((len(choice) for item in items for choice in item.choices), default=0)
        if task.kind in ("generate", "trace"):
            answer = task.answer_tokens
        needed = max(1, max(len(item.tokens) for item in items) + answer)
        # Tasks of similar needs share compiled programs; `CachedModel.rows` rounds for sequences itself.
        self.capacity = needed if question_seen else length_bucket(needed)[-1]
        self.rows = min(batch, max(len(unit.items) for unit in self.units))
        self._waiting: dict[Setting, list[CompressedPrompt]] = {}

    def run(self, settings: Sequence[Setting], rows: RowFile) -> None:
        """Measures every setting on every unit that `rows` does not have.

        Args:
            settings: the settings.
            rows: file that receives the rows of a unit and a setting when they are complete.
        """
        for number, unit in enumerate(self.units):
            missing = [one for one in settings if not all(row.key in rows for row in self._rows(unit, one))]
            for group in self._groups(self._possible(unit, missing, rows)):
                self._measure(unit, group, rows)
            is_last = number == len(self.units) - 1
            is_full = self._waiting_bytes() > memory_bytes() // 4
            for setting, prompts in [*self._waiting.items()]:
                if is_last or is_full or len(prompts) == self.batch:
                    self._answer(setting, self._waiting.pop(setting), rows)
            if missing:
                logging.info("%s: unit %d of %d", self.task.name, number + 1, len(self.units))

    def _possible(self, unit: Unit, settings: Sequence[Setting], rows: RowFile) -> Group:
        """Returns the settings that are possible for the text of a unit; the others have rows with their error."""
        possible = {}
        for setting in settings:
            try:
                possible[setting] = self._sizes(unit, setting)
                setting.check(possible[setting][1])
            except ValueError as error:
                possible.pop(setting, None)
                rows.append(self._rows(unit, setting, error=str(error)))
        return possible

    def _groups(self, settings: Group) -> Iterator[Group]:
        """Yields the settings in groups that share a prefill."""
        group: Group = {}
        limit, held = memory_bytes() // 4, 0
        for setting, (cache, generator) in settings.items():
            is_full = held + generator.row_bytes > limit if self.group is None else len(group) == self.group
            if group and is_full:
                yield group
                group, held = {}, 0
            group[setting] = cache, generator
            held += generator.row_bytes
        if group:
            yield group

    def _measure(self, unit: Unit, settings: Group, rows: RowFile) -> None:
        """Measures some settings on a unit; a setting that fails has rows with its error.

        A prompt with its question is only compressed; `run` answers several of them together.
        """
        if self.question_seen and self.task.kind == "generate":
            self._compress(unit, settings)
            return
        measures = self._prepare(unit, list(settings.values()))
        for setting, (_, generator) in settings.items():
            try:
                size, scores = measures.pop(0)()  # so that its buffers are freed
            except ValueError as error:  # a fault counter of the policy
                rows.append(self._rows(unit, setting, error=str(error)))
                continue
            rows.append(self._scored(unit, setting, generator, size, scores))

    def _sizes(self, unit: Unit, setting: Setting) -> tuple[CachedModel, Generator]:
        """Returns the cache of a setting and its sizes for the text of a unit."""
        cache = setting.cache(self.llm)
        if self.task.kind == "stream":
            return cache, cache.generator(max_prompt_tokens=len(unit.text), max_new_tokens=1, streaming=True)
        if not self.question_seen:
            return cache, cache.document_generator(len(unit.text), self.capacity)
        return cache, cache.rows(len(unit.text), self.capacity)[-1]

    def _seed(self, unit: Unit) -> int:
        """Returns the seed of a unit, which differs between units and seeds of the run."""
        return _MAX_UNITS * self.seed + self.units.index(unit)

    def _prefill(self, unit: Unit, generators: list[Generator]) -> Sequence[GenerationState]:
        """Compresses a prompt with its question with several settings."""
        empty = [generator.init_state(self._seed(unit)) for generator in generators]
        *_, states = prefill_together(generators, empty, [unit.text], shared_lengths=True)
        assert states is not None
        return states

    def _prepare(self, unit: Unit, settings: list[tuple[CachedModel, Generator]]) -> list[Measure]:
        """Compresses the text of a unit with several settings; returns functions that measure each of them."""
        seed, generators = self._seed(unit), [generator for _, generator in settings]
        if self.task.kind == "stream":
            return [functools.partial(self._stream, unit, generator, seed) for generator in generators]
        if self.question_seen:
            pairs = zip(generators, self._prefill(unit, generators), strict=True)
            return [functools.partial(self._continue, unit, generator, state) for generator, state in pairs]
        chosen = [cache for cache, _ in settings]
        if self.task.kind == "trace":
            chosen.append(Setting(caches.FULL).cache(self.llm))
        documents = read_together(chosen, unit.text, max_new_tokens=self.capacity, seed=seed)
        if self.task.kind == "trace":
            full = documents.pop()
            answers = [traces.follow(full, item.tokens, self.task.answer_tokens) for item in unit.items]
            return [functools.partial(self._trace, unit, document, answers) for document in documents]
        return [functools.partial(self._ask, unit, document) for document in documents]

    def _ask(self, unit: Unit, document: Document) -> Measured:
        """Answers the questions of a unit about its document, or scores its passage."""
        if self.task.kind == "continue":
            [log_probs] = document.score([unit.items[0].tokens])
            # The first token is predicted by the exact prefill.
            return caches.text_size(document), [Score(-float(np.mean(log_probs[1:])))]
        if self.task.kind == "choose":
            texts = [[item.tokens + choice for choice in item.choices] for item in unit.items]
            scores = [choose(item, document.score(one)) for item, one in zip(unit.items, texts, strict=True)]
            return caches.text_size(document), scores
        engine = document.engine(rows=self.rows)
        for item in unit.items:
            engine.add(item.tokens, document, max_new_tokens=self.task.answer_tokens)
        completions, _ = engine.complete()
        pairs = zip(completions, unit.items, strict=True)
        return caches.text_size(document), [self._score(item, one) for one, item in pairs]

    def _continue(self, unit: Unit, generator: Generator, state: GenerationState) -> Measured:
        """Scores the choices of a question that is part of the prompt, or the rest of a passage."""
        [item] = unit.items
        size = self._sequence_size(unit, generator, state)
        if self.task.kind == "continue":
            _, [of_passage], _ = generator.score(state, [item.tokens])
            return size, [Score(-float(np.mean(of_passage[1:])))]
        rows = len(item.choices)
        _, log_probs, _ = generator.with_batch(rows).score(kvjax.repeat_rows(state, rows), item.choices)
        return size, [choose(item, log_probs)]

    def _compress(self, unit: Unit, settings: Group) -> None:
        """Compresses a prompt with its question with several settings, for `_answer`."""
        states = self._prefill(unit, [generator for _, generator in settings.values()])
        for (setting, (_, generator)), state in zip(settings.items(), states, strict=True):
            prefix = Prefix.of(generator, unit.text, state, num_first=len(unit.text))
            prompt = CompressedPrompt(unit, self._sequence_size(unit, generator, state), prefix)
            self._waiting.setdefault(setting, []).append(prompt)

    def _waiting_bytes(self) -> int:
        """Returns the bytes that the rows of all waiting prompts will take."""
        return sum(one.prefix.generator.row_bytes for prompts in self._waiting.values() for one in prompts)

    def _answer(self, setting: Setting, prompts: list[CompressedPrompt], rows: RowFile) -> None:
        """Answers prompts together; one that fails has a row with its error."""
        cache = setting.cache(self.llm)

        def sizes(num_tokens: int, max_new_tokens: int) -> tuple[Generator, ...]:
            """Returns the sizes with which prompts are compressed; `max_new_tokens` is part of the capacity."""
            del max_new_tokens
            return cache.rows(num_tokens, self.capacity)[-1:]

        engine, collector = Engine(self.llm.model, self.llm.tokenizer, sizes, rows=len(prompts)), Collector()
        by_number = {}
        for prompt in prompts:
            try:
                number = engine.add([], prompt.prefix, max_new_tokens=self.task.answer_tokens)
            except ValueError as error:
                rows.append(self._rows(prompt.unit, setting, error=str(error)))
            else:
                by_number[number] = prompt
        for output in engine.run():
            unit, size, prefix = by_number[output.number]
            if output.error is not None:
                rows.append(self._rows(unit, setting, error=output.error))
            elif (completion := collector.add(output)) is not None:
                score = self._score(unit.items[0], completion)
                rows.append(self._scored(unit, setting, prefix.generator, size, [score]))

    def _score(self, item: Item, completion: Completion) -> Score:
        return Score(*self.task.score_answer(completion.text, item.question), len(completion.tokens))

    def _sequence_size(self, unit: Unit, generator: Generator, state: GenerationState) -> CacheSize:
        """Returns the size of a cache of prompt and answer."""
        return caches.sequence_size(generator, len(unit.text) + self.capacity, kvjax.cache_bytes(state.layers).host)

    def _trace(self, unit: Unit, document: Document, answers: list[Any]) -> Measured:
        """Compares next-token distributions with the full cache's, along its answers."""
        scores = []
        for item, (answer, reference) in zip(unit.items, answers, strict=True):
            _, log_probs = traces.follow(document, item.tokens, len(answer), answer)
            agreement, kl = traces.compare(reference, log_probs)
            text = self.llm.tokenizer.decode_continuation(answer, unit.text + item.tokens)
            scores.append(Score(agreement, text, len(answer), kl))
        return caches.text_size(document), scores

    def _stream(self, unit: Unit, generator: Generator, seed: int) -> Measured:
        """Returns the mean negative log-likelihood of a passage that is processed through the compressed cache."""
        state, [log_probs], _ = generator.score(generator.init_state(seed), [unit.text])
        size = caches.sequence_size(generator, len(unit.text), kvjax.cache_bytes(state.layers).host)
        return dataclasses.replace(size, tail_fraction=0.0), [Score(-float(np.mean(log_probs[1:])))]

    def _scored(
        self, unit: Unit, setting: Setting, generator: Generator, size: CacheSize, scores: Sequence[Score]
    ) -> list[Row]:
        """Returns the rows of a unit with scores."""
        rows = self._rows(unit, setting, settings=kvjax.describe(generator.policies[-1]), **dataclasses.asdict(size))
        return [dataclasses.replace(row, **dataclasses.asdict(one)) for row, one in zip(rows, scores, strict=True)]

    def _rows(self, unit: Unit, setting: Setting, **fields: Any) -> list[Row]:
        """Returns the rows of a unit without scores."""
        labels: dict[str, Any] = {"model": self.model, "task": self.task.name, "policy": setting.policy}
        labels |= {"budget": setting.label, "kv_dtype": setting.kv_dtype, "tokens": self.tokens, "seed": self.seed}
        labels["question"] = "seen" if self.question_seen else "unseen"
        labels["metric"] = "nll" if self.task.kind in ("continue", "stream") else "score"
        labels["dtype"] = str(jnp.dtype(self.llm.model.embedding.param_dtype))
        labels |= {"document": unit.document, "prompt_tokens": len(unit.text), "score": None} | fields
        chances = [1 / len(item.choices) if item.choices else 0.0 for item in unit.items]
        return [Row(item=item.number, chance=one, **labels) for item, one in zip(unit.items, chances, strict=True)]


def memory_bytes() -> int:
    """Returns the bytes of memory of the device, or of the machine for CPUs."""
    statistics = jax.devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose(item: Item, log_probs: Sequence[Float[np.ndarray, "T"]]) -> Score:
    """Chooses the choice of a question with the largest mean log-probability of its tokens."""
    means = [float(np.mean(one[-len(choice) :])) for one, choice in zip(log_probs, item.choices, strict=True)]
    chosen = int(np.argmax(means))
    return Score(float(chosen == int(item.question.answers[0])), item.question.choices[chosen])
