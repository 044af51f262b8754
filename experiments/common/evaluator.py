"""Scores answers of a model through compressed caches, unit by unit."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import logging

import kvjax
from experiments.common import caches, traces
from experiments.common.caches import Setting
from experiments.common.prefill import prefill_together
from experiments.common.rows import Row, RowFile
from experiments.common.units import Item, Unit, batched, make_units
from experiments.tasks.task import Task
from kvjax.spec import check_integer
from kvjax_models import LanguageModel
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState

_MAX_UNITS = 10_000  # of a task
_MAX_SEED = 2**32 // _MAX_UNITS - 1
_ROUNDING = 8  # the capacity after the prompt is a multiple of it, so that tasks share programs


@dataclasses.dataclass(frozen=True)
class Score:
    """The result of one question."""

    value: float
    answer: str | None = None
    kl: float | None = None


class Evaluator:
    """A model, settings of its cache and a task.

    Attributes:
        llm: model and tokenizer.
        model: name of the model in rows.
        task: the task.
        question_seen: whether the compressed prompt includes the question.
        tokens: maximum number of tokens of the task's prompts.
        seed: seed of documents and policies.
        batch: maximum number of batch rows.
        group: maximum number of settings that share a prefill; their caches exist at the same time.
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
        batch: int = 8,
        group: int = 8,
        capacity: int | None = None,
    ):
        """Prepares the units of the task; see the attributes.

        Args:
            llm: as the attribute.
            model: as the attribute.
            task: as the attribute.
            question_seen: as the attribute.
            tokens: as the attribute.
            seed: as the attribute.
            batch: as the attribute.
            group: as the attribute.
            capacity: tokens after the compressed prompt that caches have capacity for; by default as many as the task
                needs. Tasks with equal capacity share compiled programs.

        Raises:
            ValueError: if the task needs a larger capacity, or the seed is out of range.
        """
        if check_integer("seed", seed, minimum=0) > _MAX_SEED:
            raise ValueError(f"seed={seed} must be at most {_MAX_SEED}, because every unit of a task has its own seed")
        self.llm, self.model, self.task = llm, model, task
        self.question_seen, self.tokens, self.seed = question_seen, tokens, seed
        self.batch, self.group = batch, group
        self.units = make_units(task, llm.tokenizer, question_seen, batch, tokens)
        answer = 0 if task.kind in ("continue", "stream", "choose") else task.answer_tokens
        if task.kind == "choose":
            choices = [
                choice for unit in self.units for item in unit.items for choice in self._encode_choices(unit, item)
            ]
            answer = max(map(len, choices), default=0)
        self.max_new_tokens = max(len(item.tokens) for item in self._items()) + answer
        self.capacity = capacity or -(-max(self.max_new_tokens, 1) // _ROUNDING) * _ROUNDING
        if self.max_new_tokens > self.capacity:
            raise ValueError(f"capacity={capacity} is too small: {task.name} needs {self.max_new_tokens} tokens")
        self._generators: dict[Any, Generator] = {}

    def _items(self) -> Iterator[Item]:
        for unit in self.units:
            yield from unit.items

    def run(self, settings: Sequence[Setting], rows: RowFile) -> None:
        """Measures every setting on every unit that `rows` does not have.

        Args:
            settings: the settings.
            rows: file that receives the rows of a unit and a setting when they are complete.
        """
        for number, unit in enumerate(self.units):
            missing = [setting for setting in settings if not self._is_done(unit, setting, rows)]
            if self.task.kind == "trace" and missing:
                self._run_traces(unit, missing, rows)
                continue
            for first in range(0, len(missing), self.group):
                self._run_group(unit, missing[first : first + self.group], rows)
            if missing:
                logging.info("%s: unit %d of %d", self.task.name, number + 1, len(self.units))

    def _run_group(self, unit: Unit, settings: Sequence[Setting], rows: RowFile) -> None:
        """Measures some settings on a unit, with one prefill."""
        generators = self._make_all(unit, settings, rows)
        if not generators:
            return
        if self.task.kind == "stream":
            states: list[Any] = [None] * len(generators)
        else:
            empty = [generator.init_state(self._seed(unit)) for generator in generators.values()]
            states = prefill_together(list(generators.values()), empty, unit.prompts)
        for setting, generator in generators.items():
            state = states.pop(0)  # so that its buffers are freed
            try:
                if state is None:
                    scores, size = self._stream(unit, setting, generator)
                else:
                    size = self._size(unit, generator, state)
                    scores = self._score(unit, setting, generator, state)
            except ValueError as error:  # a fault counter of the policy
                rows.append([self._row(unit, item, setting, error=str(error)) for item in unit.items])
                continue
            rows.append(
                [
                    self._row(unit, item, setting, generator, size, score)
                    for item, score in zip(unit.items, scores, strict=True)
                ]
            )

    def _run_traces(self, unit: Unit, settings: Sequence[Setting], rows: RowFile) -> None:
        """Compares next-token distributions of some settings with the full cache's."""
        full = Setting(caches.FULL)
        generators = self._make_all(unit, list(dict.fromkeys([full, *settings])), rows)
        empty = [generator.init_state(self._seed(unit)) for generator in generators.values()]
        states = prefill_together(list(generators.values()), empty, unit.prompts)
        sizes = [self._size(unit, *pair) for pair in zip(generators.values(), states, strict=True)]
        questions = self._pad([item.tokens for item in unit.items], len(unit.prompts))
        if any(questions):
            states = [
                generator.prefill(state, questions)
                for generator, state in zip(generators.values(), states, strict=True)
            ]
        agreement, divergence, answers = traces.compare(list(generators.values()), states, self.task.answer_tokens)
        for index, (setting, generator) in enumerate(generators.items()):
            if setting in settings:
                found = zip(unit.items, agreement[index], divergence[index], answers, strict=False)
                rows.append(
                    [
                        self._row(
                            unit,
                            item,
                            setting,
                            generator,
                            sizes[index],
                            Score(float(equal), self._decode(unit, item, answer), float(kl)),
                        )
                        for item, equal, kl, answer in found
                    ]
                )

    def _score(self, unit: Unit, setting: Setting, generator: Generator, state: GenerationState) -> list[Score]:
        """Returns the scores of all items of a unit."""
        if self.task.kind == "choose":
            return [self._choose(unit, setting, state, item) for item in unit.items]
        scores: list[Score] = []
        for items in batched(unit.items, self.batch):
            rows = self._pad([item.row for item in items], max(len(unit.prompts), min(len(unit.items), self.batch)))
            forked, of_rows = (state, generator)
            # Without forks, the state is donated, which is possible only once.
            if rows != list(range(generator.batch)) or len(items) < len(unit.items):
                of_rows = self._make(unit, setting, len(rows))
                forked = kvjax.take_rows(state, jnp.asarray(rows))
            texts = self._pad([item.tokens for item in items], len(rows))
            if self.task.kind == "continue":
                _, log_probs = of_rows.score(forked, texts)
                # The first token is predicted by the exact prefill.
                scores += [Score(-float(np.mean(row[1:]))) for row in log_probs[: len(items)]]
                continue
            if any(texts):
                forked = of_rows.prefill(forked, texts)
            answers, _ = of_rows.decode_all(forked, self.task.answer_tokens, compact_last=False)
            scores += [self._score_answer(unit, item, answer) for item, answer in zip(items, answers, strict=False)]
        return scores

    def _decode(self, unit: Unit, item: Item, tokens: Sequence[int]) -> str:
        """Returns the text of a generated answer."""
        return self.llm.tokenizer.decode_continuation(tokens, unit.context(item))

    def _encode_choices(self, unit: Unit, item: Item) -> list[list[int]]:
        """Returns the tokens of the choices of a question."""
        context = unit.context(item)
        return [self.llm.tokenizer.encode_continuation(choice, context) for choice in item.question.choices]

    def _score_answer(self, unit: Unit, item: Item, tokens: list[int]) -> Score:
        """Scores a generated answer."""
        assert self.task.score is not None
        answer = self._decode(unit, item, tokens)
        if self.task.stop is not None:
            answer = answer.strip().partition(self.task.stop)[0]
        return Score(float(self.task.score(answer, item.question)), answer)

    def _choose(self, unit: Unit, setting: Setting, state: GenerationState, item: Item) -> Score:
        """Compares the mean log-probabilities of the choices of a question."""
        most = max(len(item.question.choices) for item in self._items())
        choices = self._encode_choices(unit, item)
        texts = self._pad([item.tokens + choice for choice in choices], most)
        generator = self._make(unit, setting, most)
        _, log_probs = generator.score(kvjax.take_rows(state, jnp.full(most, item.row)), texts)
        means = [float(np.mean(row[-len(choice) :])) for row, choice in zip(log_probs, choices, strict=False)]
        chosen = int(np.argmax(means))
        return Score(float(chosen == int(item.question.answers[0])), item.question.choices[chosen])

    def _stream(self, unit: Unit, setting: Setting, generator: Generator) -> tuple[list[Score], caches.CacheSize]:
        """Returns the mean negative log-likelihoods of passages that are processed through the compressed cache."""
        state, log_probs = generator.score(generator.init_state(self._seed(unit)), unit.prompts)
        scores = [Score(-float(np.mean(row[1:]))) for row in log_probs[: len(unit.items)]]
        return scores, caches.measure_size(generator, state, len(unit.prompts[0]))

    def _make_all(self, unit: Unit, settings: Sequence[Setting], rows: RowFile) -> dict[Setting, Generator]:
        """Returns the generators of settings; rows record the error of a setting that is not possible."""
        generators = {}
        for setting in settings:
            try:
                generators[setting] = self._make(unit, setting, len(unit.prompts))
            except ValueError as error:
                rows.append([self._row(unit, item, setting, error=str(error)) for item in unit.items])
        return generators

    def _make(self, unit: Unit, setting: Setting, batch: int) -> Generator:
        """Returns the generator of a setting for prompts of a unit's length."""
        bucket, key = unit.bucket, (unit.bucket, setting, batch)
        if key not in self._generators:
            streaming = self.task.kind == "stream"
            first = next((one for (size, other, _), one in self._generators.items() if (size, other) == key[:2]), None)
            self._generators[key] = (
                first.with_batch(batch)
                if first is not None
                else caches.make_generator(
                    self.llm,
                    setting,
                    batch=batch,
                    max_prompt_tokens=bucket[-1],
                    max_new_tokens=1 if streaming else self.capacity,
                    budget_tokens=self._shortest(bucket),
                    tail_tokens=0 if streaming else self.max_new_tokens,
                    streaming=streaming,
                )
            )
        return self._generators[key]

    def _shortest(self, bucket: range) -> int:
        """Returns the length of the shortest prompt of a bucket, so that no prompt gets more than its budget."""
        return min(len(prompt) for unit in self.units if unit.bucket == bucket for prompt in unit.prompts)

    def _size(self, unit: Unit, generator: Generator, state: GenerationState) -> caches.CacheSize:
        """Returns the size of a cache, relative to a full cache of the unit's longest prompt."""
        return caches.measure_size(generator, state, max(map(len, unit.prompts)), self.max_new_tokens)

    def _seed(self, unit: Unit) -> int:
        """Returns the seed of the policies' random numbers, which differs between units and seeds of the run."""
        return _MAX_UNITS * self.seed + self.units.index(unit)

    def _is_done(self, unit: Unit, setting: Setting, rows: RowFile) -> bool:
        return all(self._row(unit, item, setting).key in rows for item in unit.items)

    def _row(
        self,
        unit: Unit,
        item: Item,
        setting: Setting,
        generator: Generator | None = None,
        size: caches.CacheSize | None = None,
        score: Score | None = None,
        error: str | None = None,
    ) -> Row:
        """Returns the row of a question."""
        choices = len(item.question.choices) if self.task.kind == "choose" else 0
        return Row(
            model=self.model,
            task=self.task.name,
            policy=setting.policy,
            budget=setting.budget,
            kv_dtype=setting.kv_dtype,
            question="seen" if self.question_seen else "unseen",
            tokens=self.tokens,
            seed=self.seed,
            document=item.document,
            item=item.number,
            score=None if score is None else score.value,
            metric="nll" if self.task.kind in ("continue", "stream") else "score",
            dtype=str(jnp.dtype(self.llm.model.embedding.param_dtype)),
            answer=None if score is None else score.answer,
            error=error,
            prompt_tokens=len(unit.prompts[item.row]),
            settings={} if generator is None else kvjax.describe(generator.policies[-1]),
            chance=1 / choices if choices else 0.0,
            kl=None if score is None else score.kl,
            **({} if size is None else dataclasses.asdict(size)),
        )

    @staticmethod
    def _pad(values: list[Any], count: int) -> list[Any]:
        """Repeats the last value until there are `count`."""
        return values + [values[-1]] * (count - len(values))
