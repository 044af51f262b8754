"""Sweeps of experiments in which models answer questions: their options, and the units that a second start does not
repeat."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax

from experiments.common import answers, evaluating, settings, suites, tables
from experiments.common.answers import Result
from experiments.common.options import LANGUAGE_CHECKPOINT, Policies, each
from experiments.common.results import Row
from experiments.common.resuming import Finished
from kvjax.registry import PolicyChoice

REFUSED = "refused"
QUICK: dict[str, Any] = {"policy": suites.SUITES["quick"].policies, "budget": suites.SUITES["quick"].budgets}


@dataclasses.dataclass(frozen=True)
class Settings(Policies):
    """Options of a sweep over settings."""

    model: str = LANGUAGE_CHECKPOINT
    policy: tuple[str, ...] = each(*suites.SUITES["all"].policies)
    budget: tuple[str, ...] = each(*suites.SUITES["all"].budgets)
    fresh: bool = False  # begin anew, whatever an earlier run with this output_dir did
    together: int = 8  # settings that share a reading of the prompts, and are held at once

    QUICK = QUICK

    def chosen(self) -> list[PolicyChoice]:
        """The settings that are asked for."""
        return settings.settings(self.policy, self.budget)

    def finished(self, name: str) -> Finished:
        """The units of OUTPUT_DIR/NAME.jsonl."""
        return Finished(self.file(f"{name}.jsonl"), fresh=self.fresh)


@dataclasses.dataclass(frozen=True)
class Questions(Settings):
    """Options of an experiment that asks questions."""

    documents: int = 50  # per task and length; of longbench 0 for all
    batch: int = 10  # documents decoded together
    question: tuple[str, ...] = each("unseen", choices=("unseen", "seen"))
    """Whether the question is part of what is compressed; repeatable."""
    prefill: tuple[str, ...] = each("exact", choices=("exact", "streaming"))
    """Whether prompts are read exactly or through the cache; repeatable."""

    QUICK: ClassVar[dict[str, Any]] = {**QUICK, "documents": 4}


@dataclasses.dataclass(frozen=True)
class AtLengths(Questions):
    """Options of an experiment that asks questions about texts of given lengths."""

    context_tokens: tuple[int, ...] = each(2048)  # most tokens of prompt and answer (of lines the least); repeatable

    QUICK: ClassVar[dict[str, Any]] = {**Questions.QUICK, "context_tokens": (1024,)}


def every_setting(
    options: Settings,
    finished: Finished,
    chosen: Sequence[PolicyChoice],
    unit: Mapping[str, Any],
    run: Callable[[list[PolicyChoice]], Mapping[PolicyChoice, Any]],
) -> dict[PolicyChoice, Any]:
    """What comes of each setting in a unit of a run: run now, or before.

    Args:
        run: values, as JSON has them, of some of the settings; {REFUSED: reason} of one that cannot be. Where it raises
            a ValueError, each is run by itself, and refused where it raises one again.
    """
    return finished.of_each(
        chosen,
        lambda setting: dict(unit) | {"model": settings.model_identity(options.model), **settings.description(setting)},
        functools.partial(_run_or_refuse, run),
        options.together,
    )


def _run_or_refuse(
    run: Callable[[list[PolicyChoice]], Mapping[PolicyChoice, Any]], group: list[PolicyChoice]
) -> Mapping[PolicyChoice, Any]:
    try:
        return run(group)
    except ValueError as error:
        if len(group) == 1:
            return {group[0]: {REFUSED: str(error)}}
    return {setting: value for alone in group for setting, value in _run_or_refuse(run, [alone]).items()}


def with_refused(done: Mapping[PolicyChoice, Any], refused: Mapping[PolicyChoice, str]) -> dict[PolicyChoice, Any]:
    """What `every_setting` wants of a run: values, and the reasons of settings that cannot be."""
    return {**done, **{setting: {REFUSED: reason} for setting, reason in refused.items()}}


def not_refused(values: Mapping[PolicyChoice, Any]) -> dict[PolicyChoice, Any]:
    """What `every_setting` found, without settings that cannot be, which are said with their reason."""
    for setting, value in values.items():
        if REFUSED in value:
            settings.tell_left_out(setting, value[REFUSED])
    return {setting: value for setting, value in values.items() if REFUSED not in value}


def drop_programs() -> None:
    """Drops compiled programs, for when caches of other sizes come next: every program that XLA:CPU compiled holds
    memory maps, and a process may have some 65,000 of them."""
    jax.clear_caches()


class Sweep:
    """The settings of a run over its tasks, with what is done kept in OUTPUT_DIR/NAME.jsonl.

    Args:
        experiment: its name.
        documents: how many per task, where not as options say; 0 for all there are.
        prompts: how many a task has, where that is not `documents`: no larger batch is read.
        chosen: the settings, where not those of the options.
    """

    def __init__(
        self,
        experiment: str,
        options: Questions,
        *,
        documents: int | None = None,
        prompts: int | None = None,
        chosen: Sequence[PolicyChoice] | None = None,
    ) -> None:
        self.experiment, self.options = experiment, options
        self.documents = options.documents if documents is None else documents
        self.model, self.tokenizer = settings.load_model(options)
        self.chosen = list(chosen or options.chosen())
        self.seed = options.seed
        self.batch = min(options.batch, prompts or self.documents or options.batch)
        self.finished = options.finished(experiment)

    def length(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text))

    def kinds(self) -> list[tuple[str, str]]:
        """Kinds of prefill and of question that are asked for."""
        return [(prefill, question) for prefill in self.options.prefill for question in self.options.question]

    def over_lengths(
        self,
        title: str,
        names: Sequence[str],
        make: Callable[[int], Mapping[str, evaluating.Task]],
        more: Callable[[Mapping[str, Sequence[Result]], int], list[Row]] | None = None,
        **unit: Any,
    ) -> list[Row]:
        """The rows of tasks at every length and kind that is asked for, shown as they come.

        Args:
            make: the tasks of a length.
            more: further rows of what came of all tasks at a length.
            unit: what else decides the tasks.
        """
        rows: list[Row] = []
        assert isinstance(self.options, AtLengths)
        for tokens in self.options.context_tokens:
            made = functools.cache(functools.partial(make, tokens))
            for prefill, question in self.kinds():
                answered = self.evaluate(names, made, prefill, question, context_tokens=tokens, **unit)
                found = [row for name in names for row in self.rows(answered[name], name, tokens)]
                tables.show(f"{title}, {tokens} tokens, prefill {prefill}, question {question}", found)
                rows += found + (more(answered, tokens) if more else [])
        return rows

    def evaluate(
        self,
        tasks: Sequence[str],
        make: Callable[[], Mapping[str, evaluating.Task]],
        prefill: str,
        question: str,
        room: tuple[int, int] | None = None,
        sizes: Sequence[int] = (),
        **unit: Any,
    ) -> dict[str, list[Result]]:
        """What every setting does with tasks: now, or before. They share the sizes of caches and so their programs:
        settings that are held at once answer all of them before the next ones come.

        Args:
            make: the tasks; called only if a setting is not done.
            room: the most tokens of a text and behind it, where caches are larger than these tasks need.
            sizes: `sizes` of `evaluating.Evaluator`, where texts are read into caches of several.
            unit: what else decides the tasks.
        """
        streaming, seen = prefill == "streaming", question == "seen"

        def run(task: str, group: list[PolicyChoice]) -> dict[PolicyChoice, Any]:
            longest, most = room or evaluating.room(make().values(), seen)
            evaluator = evaluating.Evaluator(
                self.model,
                self.tokenizer,
                group,
                sizes=sizes or [longest],
                max_new_tokens=most,
                streaming=streaming,
                question_seen=seen,
                batch=self.batch,
                seed=self.seed,
            )
            done = {result.setting: result.to_json() for result in evaluator.evaluate(make()[task])}
            return with_refused(done, evaluator.refused)

        shared = {"prefill": prefill, "question": question, "documents": self.documents}
        shared |= {"batch": self.batch, "seed": self.seed, **unit}
        # Which tasks there are decides sizes; sizes that are given stand for them.
        shared |= {"tasks": list(tasks)} if room is None else {"room": list(room)}
        values: dict[str, dict[PolicyChoice, Any]] = {task: {} for task in tasks}
        for begin in range(0, len(self.chosen), self.options.together):
            group = self.chosen[begin : begin + self.options.together]
            for task in tasks:
                of_task = {"task": task, **shared}
                values[task] |= every_setting(self.options, self.finished, group, of_task, functools.partial(run, task))
            drop_programs()
        return {
            task: [
                Result.from_json(value, setting, streaming, seen, self.batch)
                for setting, value in not_refused(of_task).items()
            ]
            for task, of_task in values.items()
        }

    def rows(self, evaluated: Sequence[Result], task: str, context_tokens: int, **extra: Any) -> list[Row]:
        """The rows of a task of this run."""
        return answers.rows(
            evaluated,
            self.model,
            experiment=self.experiment,
            model_name=self.options.model,
            task=task,
            context_tokens=context_tokens,
            seed=self.seed,
            **extra,
        )
