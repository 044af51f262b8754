"""kvjax's policies beside kvpress's presses: one checkpoint, the same documents, equal bytes.

    python -m experiments.peers --kvpress_python PYTHON
    python -m experiments.peers --kvpress_python PYTHON --model line-retrieval-2l-4k --task line_retrieval

PYTHON is the interpreter of an environment that has kvpress (`make parity` makes one). Budgets are counted in two ways:

- `25%`: a share of all that exact holds, tokens of the question and of the answer included. A press keeps every later
  token, and so much less of the text.
- `25% of the text`: kvpress's: a share of the text's bytes, and what later tokens take on top, for policies too.

A policy with a budget of its own (`NAME@25%`) stands at that one alone.

Presses that only mask what they drop are compared by what they do not mask, as if they had freed it; what they hold
stands beside. A question that is seen is compressed with the text, but for its last token, which a press is asked with.
Documents are drawn with seeds of their own: settings were chosen on seeds below 50.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from experiments.common import (
    evaluating,
    footprint,
    likelihood,
    presses,
    ranking,
    results,
    settings,
    suites,
    sweeping,
    tables,
)
from experiments.common.answers import Result
from experiments.common.named_tasks import LINES, make_task
from experiments.common.options import Experiment, each
from experiments.common.ranking import TO_BEST, at, best_press, pressed
from experiments.common.results import Row
from experiments.common.tasks import long_texts, ruler
from kvjax.budget import Budget
from kvjax.registry import PolicyChoice
from kvjax_models.generation.state import cache_specs

NAME = "peers"
PERPLEXITY = "perplexity"
ALL, TEXT = "all", "the text"  # what budgets are shares of
NEXT_TOKENS = 32  # that perplexity is measured on, behind the first
TILE = 16  # sizes of caches are multiples of it, so that other documents find the same programs
EXACT = PolicyChoice.parse("exact")


@dataclasses.dataclass(frozen=True)
class Options(sweeping.Questions):
    """Options of this experiment."""

    documents: int = 25  # per task and seed
    batch: int = 25  # documents decoded together
    budget: tuple[str, ...] = each("25%", "12.5%", f"25% of {TEXT}", f"12.5% of {TEXT}")
    seeds: int = 4  # seeds from --seed on, each with so many documents per task
    task: tuple[str, ...] = each(*ruler.NEEDLE_TASKS, PERPLEXITY, choices=(*ruler.TASKS, LINES, PERPLEXITY))
    """What is asked; repeatable."""
    context_tokens: int = 2048  # most tokens of prompt and answer; of line retrieval the least
    press: tuple[str, ...] = each(*presses.PRESSES, choices=presses.PRESSES)  # presses; repeatable
    kvpress_python: str = sys.executable  # an interpreter that can import kvpress

    QUICK: ClassVar[dict[str, Any]] = {
        "documents": 2,
        "seeds": 1,
        "task": ("niah_single_1", PERPLEXITY),
        "context_tokens": 1024,
        "press": ("StreamingLLM", "KVzip"),
        "policy": suites.SUITES["peers, quick"].policies,
        "budget": suites.SUITES["peers, quick"].budgets,
    }


def run(options: Options) -> list[Row]:
    """The rows of all that is asked."""
    # The settings come with sizes.
    sweep = sweeping.Sweep(NAME, options, documents=options.documents * options.seeds, chosen=[EXACT])
    found: list[Row] = []
    with Peers(sweep, options) as peers:
        asked = [name for name in options.task if name != PERPLEXITY]
        for question in options.question if asked else ():
            found += peers.answers(asked, question)
        if PERPLEXITY in options.task:
            found += peers.perplexity()
    ranking.show(found)
    return found


class Peers:
    """Policies and presses on the documents that options say."""

    def __init__(self, sweep: sweeping.Sweep, options: Options) -> None:
        self.sweep, self.options = sweep, options
        self.tokens, self.documents = options.context_tokens, options.documents
        self.seeds = options.seeds_of(options.seeds)
        self.process = presses.Presses(options.kvpress_python, settings.model_directory(options.model))
        self.finished = options.finished(f"{NAME}_kvpress")

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()

    def answers(self, names: Sequence[str], question: str) -> list[Row]:
        """The rows of tasks that ask."""
        seen = question == "seen"
        make = functools.cache(functools.partial(self._tasks, names))
        tasks = make()
        longest, most = (-(-size // TILE) * TILE for size in evaluating.room(tasks.values(), seen))
        budgets = self._budgets(longest, most)
        sweep = self.sweep
        sweep.chosen = chosen(self.options.policy, list(budgets))
        unit: dict[str, Any] = {"context_tokens": self.tokens, "seeds": len(self.seeds)}
        answered = sweep.evaluate(names, make, "exact", question, (longest, most), **unit)
        for press in tqdm(self.options.press, desc=f"presses, question {question}", unit="press", leave=False):
            for budget, slots in budgets.items():
                for name in names:
                    if result := self._press(press, budget, slots - most, (longest, most), tasks[name], seen):
                        answered[name].append(result)
        rows = [row for name in names for row in sweep.rows(answered[name], name, self.tokens)]
        return rows + [row for budget in budgets for row in self._to_best(answered, str(budget), seen)]

    def perplexity(self) -> list[Row]:
        """The rows of texts that go on."""
        position, count = self.tokens - NEXT_TOKENS - 1, self.documents * len(self.seeds)
        most = self.tokens - position
        budgets = self._budgets(position, most)
        texts = functools.cache(lambda: long_texts.held_out(self.sweep.tokenizer, self.tokens, count, self.sweep.seed))

        def run(some: list[PolicyChoice]) -> dict[PolicyChoice, Any]:
            shared: dict[str, Any] = {"batch": self.sweep.batch, "seed": self.sweep.seed}
            readings, refused = likelihood.at_position(self.sweep.model, some, texts(), position, **shared)
            sweeping.drop_programs()
            return sweeping.with_refused({reading.setting: reading.to_json() for reading in readings}, refused)

        def run_press(press: str, kept: int) -> dict[str, Any]:
            return self.process.losses(press, kept, texts(), position)

        unit = {"task": PERPLEXITY, "position": position, "texts": count, "seed": self.sweep.seed}
        policies = chosen(self.options.policy, list(budgets))
        values = sweeping.not_refused(sweeping.every_setting(self.options, self.sweep.finished, policies, unit, run))
        losses = {
            setting: likelihood.Reading.from_json(value, setting).stretches[0].losses
            for setting, value in values.items()
        }
        uses = {setting: footprint.CacheUse(*value["use"]) for setting, value in values.items()}
        for press in tqdm(self.options.press, desc=PERPLEXITY, unit="press", leave=False):
            for budget, slots in budgets.items():
                reply = self._ask(
                    unit | {"press": press, "kept": slots - most}, functools.partial(run_press, press, slots - most)
                )
                if reply:
                    setting = pressed(press, budget)
                    losses[setting] = np.asarray(reply["losses"])
                    uses[setting] = self._use(reply["held"][0], most, self.tokens)
        exact = losses.get(EXACT)
        rows = []
        for setting, own in losses.items():
            samples = {PERPLEXITY: own} if exact is None else {PERPLEXITY: own, ranking.RATIO: own - exact}
            of = footprint.row_fields([uses[setting]]) | {"n": count, "question_seen": False}
            of |= {"task": PERPLEXITY, "recalls": uses[setting].recalls}
            for metric, logarithms in samples.items():
                rows.append(self._row(setting, metric, results.mean_interval(logarithms).exponential(), **of))
        return rows

    def _row(self, setting: PolicyChoice, metric: str, found: results.Estimate, **fields: Any) -> Row:
        of: dict[str, Any] = {"context_tokens": self.tokens, "seed": self.sweep.seed, "prefill": "exact", **fields}
        return results.row(NAME, self.options.model, metric, found, setting, **of)

    def _budgets(self, longest: int, most: int) -> dict[Budget, int]:
        """Budgets, and the slots per head, of texts and later tokens, that they come to."""
        spec = cache_specs(self.sweep.model, batch=1, max_prompt_tokens=longest, max_new_tokens=most)[0]
        found = {}
        for text in self.options.budget:
            number, _, counted = text.partition(" of ")
            share = Budget.parse(number).fraction
            if share is None or counted not in ("", ALL, TEXT):
                raise ValueError(f"--budget={text}: give a share such as 25%, or 25% of {TEXT}")
            slots = int(share * longest) + most if counted == TEXT else int(share * (longest + most))
            if slots <= most:
                tqdm.write(f"left out: --budget={text}: of {slots} slots questions and answers take {most}")
                continue
            found[Budget(f"{number} of {counted or ALL}", bytes=spec.full_cache_bytes(slots) * spec.layers)] = slots
        return found

    def _tasks(self, names: Sequence[str]) -> dict[str, evaluating.Task]:
        """The same tasks of all seeds, one seed's documents behind the other's."""
        return {name: make_task(name, self.sweep.tokenizer, self.tokens, self.seeds, self.documents) for name in names}

    def _press(
        self, press: str, budget: Budget, kept: int, room: tuple[int, int], task: evaluating.Task, seen: bool
    ) -> Result | None:
        """What a press does with a task, None where it cannot.

        Args:
            kept: tokens of a text that it keeps.
            room: tokens of a text, and behind it, that exact has slots for.
        """
        answers: list[str] = []
        held: list[float] = []
        prompts = [(prompt.context, prompt.question) for prompt in task.prompts]
        if seen:
            prompts = [((text + question)[:-1], question[-1:]) for text, question in prompts]
        for number, seed in enumerate(self.seeds):
            own = prompts[number * self.documents : (number + 1) * self.documents]
            unit = {"task": task.name, "seed": seed, "documents": self.documents, "tokens": self.tokens, "seen": seen}
            unit |= {"press": press, "kept": kept}
            ask = functools.partial(self.process.answer, press, kept, own, task.answer_tokens)
            reply = self._ask(unit, ask)
            if reply is None:
                return None
            answers += reply["answers"]
            held += reply["held"]
        uses = {number: self._use(one, room[1], sum(room)) for number, one in enumerate(held)}
        scores = {
            name: [float(score(at, one)) for at, one in enumerate(answers)] for name, score in task.scores.items()
        }
        return Result(pressed(press, budget), False, seen, 1, answers, uses, scores)

    def _ask(self, unit: dict[str, Any], ask: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """A press's reply, now or before; None, which is said, where it failed."""
        unit |= {"model": settings.model_identity(self.options.model)}
        if unit not in self.finished:
            try:
                self.finished.add(unit, ask())
            except presses.PressFailed as error:
                self.finished.add(unit, {sweeping.REFUSED: str(error)})
        reply = self.finished[unit]
        if sweeping.REFUSED in reply:
            tqdm.write(f"left out: {unit['press']} on {unit['task']}: {reply[sweeping.REFUSED]}")
            return None
        return reply

    def _use(self, held: float, later: int, whole: int) -> footprint.CacheUse:
        """What a press holds of a text, and later tokens beside it, where exact holds `whole` tokens."""
        spec = cache_specs(self.sweep.model, batch=1, max_prompt_tokens=whole - 1, max_new_tokens=1)[0]
        token = spec.full_cache_bytes(1) * spec.layers
        taken = round((held + later) * token)
        return footprint.CacheUse(taken, 0, taken, False, taken / (token * whole))

    def _to_best(self, answered: dict[str, list[Result]], budget: str, seen: bool) -> list[Row]:
        """The differences of all to the press that is best on the mean of all tasks."""
        best = best_press(answered, budget)
        rows = []
        for task, of_task in answered.items():
            by_setting = {one.setting: one for one in of_task}
            for setting, one in by_setting.items():
                if best is None or not at(one, budget) or setting == best:
                    continue
                found = results.paired_difference(one.scores["accuracy"], by_setting[best].scores["accuracy"])
                of: dict[str, Any] = {"task": task, "budget": budget, "best_press": best.name, "question_seen": seen}
                rows.append(self._row(setting, TO_BEST, found, n=len(one.answers), **of))
        return rows


def chosen(policies: Sequence[str], budgets: Sequence[Budget]) -> list[PolicyChoice]:
    """Every policy at every budget, or at its own; one that takes none once."""
    found = []
    for text in policies:
        name, _, own = text.partition("@")
        choice = PolicyChoice.parse(name)
        wanted = [one for one in budgets if not own or str(one) in (own, f"{own} of {ALL}")]
        if own and not wanted:
            raise ValueError(f"--policy={text}: its budget is none of --budget ({', '.join(map(str, budgets))})")
        found += [dataclasses.replace(choice, budget=budget) for budget in (wanted if choice.takes_budget else [None])]
    return found


EXPERIMENT = Experiment(NAME, Options, run, tables.plot)
if __name__ == "__main__":
    EXPERIMENT.main()
