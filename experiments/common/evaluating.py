"""Questions about long texts, answered through compressed caches: what every retrieval and question-answering
experiment does with its documents."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
from tqdm import tqdm

from experiments.common import footprint
from experiments.common.answers import Result
from experiments.common.settings import fitted, possible
from experiments.common.together import prefill_together
from kvjax.registry import PolicyChoice
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.state import GenerationState, cache_specs
from kvjax_models.model.llama import Llama


class Document(Protocol):
    """A text and a question about it; the prompt is one behind the other."""

    @property
    def context(self) -> str: ...
    @property
    def question(self) -> str: ...


D = TypeVar("D", bound=Document)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokens of a text and of the question behind it."""

    context: list[int]
    question: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, document: Document) -> "Prompt":
        return cls(tokenizer.encode(document.context), tokenizer.encode(document.question, add_bos=False))


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts and how answers to them are scored.

    Attributes:
        name: what it is called.
        prompts: at least one.
        scores: by metric, the headline first: of a prompt's number and an answer, from 0 to 1.
        answer_tokens: most tokens of an answer.
    """

    name: str
    prompts: Sequence[Prompt]
    scores: Mapping[str, Callable[[int, str], float]]
    answer_tokens: int


def accuracy_task(
    name: str, tokenizer: Tokenizer, documents: Sequence[D], score: Callable[[D, str], float], answer_tokens: int
) -> Task:
    """Documents that are asked as they stand, scored by accuracy."""
    prompts = [Prompt.of(tokenizer, document) for document in documents]
    return Task(name, prompts, {"accuracy": lambda number, answer: score(documents[number], answer)}, answer_tokens)


def room(tasks: Iterable[Task], question_seen: bool) -> tuple[int, int]:
    """The longest text that a cache compresses and the most tokens behind it, over all prompts of some tasks."""
    longest, most = 0, 0
    for task in tasks:
        for prompt in task.prompts:
            question = len(prompt.question)
            longest = max(longest, len(prompt.context) + (question if question_seen else 0))
            most = max(most, task.answer_tokens + (0 if question_seen else question))
    return longest, most


class Evaluator:
    """A model and settings of its cache, ready for tasks.

    Args:
        sizes: ascending lengths in tokens; a text is read into caches made for the first that holds it. Budgets that
            are shares are of what exact holds for that many tokens and `max_new_tokens`.
        max_new_tokens: most tokens after the text: the question's, where it is unseen, and the answer's.
        streaming: read prompts through the cache.
        question_seen: read the question as part of what is compressed.
        batch: prompts decoded together.

    Attributes:
        settings: those that every size can have.
        refused: why the others cannot.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        chosen: Sequence[PolicyChoice],
        *,
        sizes: Sequence[int],
        max_new_tokens: int,
        streaming: bool,
        question_seen: bool,
        batch: int,
        seed: int,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.sizes, self.max_new_tokens = tuple(sizes), max_new_tokens
        self.streaming, self.question_seen, self.batch, self.seed = streaming, question_seen, batch, seed
        self.settings = list(chosen)
        self.refused: dict[PolicyChoice, str] = {}
        for size in sizes:
            spec = cache_specs(model, **self._made_for(size))[0]
            policies, refused = possible(self.settings, spec, size + max_new_tokens, streaming=streaming)
            self.settings = list(policies)
            self.refused |= refused

    def evaluate(self, task: Task) -> list[Result]:
        """Has every question answered through every setting. Each batch is read exactly once for all settings, or
        streamed through each setting's cache.

        Raises:
            ValueError: for a text that is longer than the largest size, or more tokens behind it than `max_new_tokens`.
        """
        if not self.settings:
            return []
        longest, most = room([task], self.question_seen)
        if longest > self.sizes[-1] or most > self.max_new_tokens:
            raise ValueError(
                f"{task.name}: texts of up to {longest} tokens and {most} behind them do not fit in {self.sizes[-1]} "
                f"and {self.max_new_tokens}"
            )
        prompts = [
            Prompt(prompt.context + prompt.question, []) if self.question_seen else prompt for prompt in task.prompts
        ]
        results = [
            Result(setting, self.streaming, self.question_seen, self.batch, [""] * len(prompts))
            for setting in self.settings
        ]
        label = f"question {'seen' if self.question_seen else 'unseen'}{', streaming' if self.streaming else ''}"
        with tqdm(
            total=len(prompts) * len(results), desc=f"{task.name}, {label}", unit="answer", leave=False
        ) as progress:
            shorter = 0
            for size in self.sizes:
                generators = self._generators(size)
                fitting = [number for number, prompt in enumerate(prompts) if shorter < len(prompt.context) <= size]
                for begin in range(0, len(fitting), self.batch):
                    numbers = fitting[begin : begin + self.batch]
                    states = self._read(generators, prompts, numbers)
                    self._answer(task, prompts, numbers, size, generators, states, results, timed=begin > 0)
                    progress.update(len(numbers) * len(results))
                shorter = size
        for result in results:
            result.scores = {
                metric: [float(score(number, answer)) for number, answer in enumerate(result.answers)]
                for metric, score in task.scores.items()
            }
        return results

    def _rows(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> list[Prompt]:
        """A batch; a short one is filled up with repetitions, which are not counted."""
        return [prompts[numbers[min(row, len(numbers) - 1)]] for row in range(self.batch)]

    def _read(
        self, generators: Sequence[Generator], prompts: Sequence[Prompt], numbers: Sequence[int]
    ) -> list[GenerationState]:
        """The states of all settings behind the texts."""
        states = [generator.init_state(self.seed + numbers[0]) for generator in generators]
        contexts = [prompt.context for prompt in self._rows(prompts, numbers)]
        if self.streaming:
            return [generator.prefill(state, contexts) for generator, state in zip(generators, states, strict=True)]
        return prefill_together(generators, states, contexts)

    def _answer(
        self,
        task: Task,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        size: int,
        generators: Sequence[Generator],
        states: list[GenerationState],
        results: Sequence[Result],
        *,
        timed: bool,
    ) -> None:
        """Adds the answers of all settings to their results; takes the states, each as its turn comes."""
        questions = [prompt.question for prompt in self._rows(prompts, numbers)]
        for generator, result in zip(generators, results, strict=True):
            state = states.pop(0)
            result.uses |= dict.fromkeys(numbers, footprint.cache_use(generator, state, size + self.max_new_tokens))
            if not self.question_seen:
                state = generator.prefill(state, questions)
            answers: list[list[int]] = [[] for _ in questions]
            jax.block_until_ready(state.logits)
            clock = time.perf_counter()
            steps = 0
            for _, tokens in generator.decode(state, task.answer_tokens):
                extend_rows(answers, tokens)
                steps += tokens.shape[1]
            if timed:
                result.decode_seconds += time.perf_counter() - clock
                result.decode_steps += steps
            for number, answer in zip(numbers, answers, strict=False):
                result.answers[number] = self.tokenizer.decode(answer)

    def _generators(self, size: int) -> list[Generator]:
        made_for = self._made_for(size)
        spec = cache_specs(self.model, **made_for)[0]
        return [
            Generator(
                self.model,
                fitted(setting, spec, size + self.max_new_tokens),
                **made_for,
                eos=self.tokenizer.eos_ids,
                allow_beyond_context=True,
            )
            for setting in self.settings
        ]

    def _made_for(self, size: int) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "max_prompt_tokens": size,
            "max_new_tokens": self.max_new_tokens,
            "streaming": self.streaming,
        }
