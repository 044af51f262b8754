"""Sweeps of experiments in which models answer questions: their flags, the units that a second start does not repeat,
tables, plots."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from kvjax_models.llama import Llama
from kvjax_models.tokenizer import Tokenizer

from experiments.common import evaluating, multihost, plots, results, settings
from experiments.common.results import Estimate, Row
from experiments.common.resuming import Finished
from kvjax.registry import PolicyChoice

# Every system as published and as this project proposes it, and every baseline.
POLICIES = (
    "exact",
    "uniform",
    "streaming_llm",
    "clustergen:variant=paper,recent=64",
    "subgen",
    "balancekv_reference",
    "balancekv",
    "chelsea:slope=None",
    "chelsea",
    "clusterkv_paper",
    "clusterkv",
    "clusterkv:cluster_tokens=16,residual=False",
    "quest",
    "infinigen",
    "h2o",
    "h2o:average=True",
    "cam",
    "snapkv",
    "pyramidkv",
    "compactor",
    "expected_attention",
    "keydiff",
    "kvzip:head_floor=0.0",
    "lagkv",
    "leverage_scores",
    "leverage_scores:storage=int8",
    "tova",
)
BUDGETS = ("50%", "25%")
REFUSED = "refused"
QUICK_POLICIES, QUICK_BUDGETS = ("exact", "uniform", "streaming_llm"), ("50%",)


def define_flags(
    *,
    documents: int,
    batch: int,
    policies: Sequence[str] = POLICIES,
    budgets: Sequence[str] = BUDGETS,
    model: str = settings.LANGUAGE_CHECKPOINT,
) -> None:
    """Defines the flags of an experiment that asks questions; calls `define_settings`."""
    define_settings(policies=policies, budgets=budgets, model=model)
    flags.DEFINE_integer(
        "documents", documents, "Documents per task and length" + ("." if documents else "; 0 for all.")
    )
    flags.DEFINE_integer("batch", batch, "Documents decoded together.")
    flags.DEFINE_multi_enum(
        "question", ["unseen"], ["unseen", "seen"], "Whether the question is part of what is compressed; repeatable."
    )
    flags.DEFINE_multi_enum(
        "prefill",
        ["exact"],
        ["exact", "streaming"],
        "Whether prompts are read exactly or through the cache; repeatable.",
    )


def define_settings(
    *,
    policies: Sequence[str] = POLICIES,
    budgets: Sequence[str] = BUDGETS,
    model: str = settings.LANGUAGE_CHECKPOINT,
) -> None:
    """Defines the flags of a sweep over settings; calls `settings.define_common`."""
    settings.define_common(policies=policies, budgets=budgets, model=model)
    flags.DEFINE_bool("fresh", False, "Begin anew, whatever an earlier run with this output_dir did.")
    flags.DEFINE_integer("together", 8, "Settings that share a reading of the prompts, and are held at once.")


def chosen_settings() -> list[PolicyChoice]:
    """The settings that flags name."""
    policies = settings.value("policy", quick=QUICK_POLICIES)
    return settings.settings(policies, settings.value("budget", quick=QUICK_BUDGETS))


def every_setting(
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
        lambda setting: dict(unit) | {"model": flags.FLAGS.model, **settings.description(setting)},
        functools.partial(_run_or_refuse, run),
        flags.FLAGS.together,
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


def check_any(rows: Sequence[Row]) -> None:
    """Raises a ValueError where every setting was left out of all of a run."""
    if not rows:
        raise ValueError("every setting was left out, for the reasons above")


def drop_programs() -> None:
    """Drops compiled programs, for when caches of other sizes come next: every program that XLA:CPU compiled holds
    memory maps, and a process may have some 65,000 of them."""
    jax.clear_caches()


class Sweep:
    """The settings of a run over its tasks, as flags say, with what is done kept in OUTPUT_DIR/NAME.jsonl.

    Args:
        experiment: its name.
        documents: how many per task, 0 for all there are.
        prompts: how many a task has, where that is not `documents`: no larger batch is read.
        chosen: the settings, where not those of the flags.
        seed: decides documents and the policies' randomness, where not the flag's.
        fresh: begin anew, even if the flag does not say so.
    """

    def __init__(
        self,
        experiment: str,
        documents: int,
        *,
        prompts: int | None = None,
        chosen: Sequence[PolicyChoice] | None = None,
        seed: int | None = None,
        fresh: bool = False,
    ) -> None:
        options = flags.FLAGS
        self.experiment, self.documents = experiment, documents
        self.model: Llama
        self.tokenizer: Tokenizer
        self.model, self.tokenizer = settings.load_model(options.model)
        self.chosen = list(chosen or chosen_settings())
        self.seed = options.seed if seed is None else seed
        self.batch = min(options.batch, prompts or documents or options.batch)
        self.directory = pathlib.Path(options.output_dir)
        self.finished = Finished(self.directory / f"{experiment}.jsonl", fresh=fresh or options.fresh)

    def kinds(self) -> list[tuple[str, str]]:
        """Kinds of prefill and of question that are asked for."""
        return [(prefill, question) for prefill in flags.FLAGS.prefill for question in flags.FLAGS.question]

    def evaluate(
        self,
        task: str,
        make: Callable[[], evaluating.Task],
        sizes: Callable[[], tuple[Sequence[int], int]],
        prefill: str,
        question: str,
        **unit: Any,
    ) -> list[evaluating.Result]:
        """What every setting does with a task: now, or before.

        Args:
            make, sizes: the task, and `sizes` and `max_new` of `evaluating.Evaluator`; called only if a setting is not
                done.
            unit: what else decides both.
        """
        values = self._values(self.chosen, task, make, sizes, prefill, question, unit)
        return self._results(values, prefill, question)

    def evaluate_all(
        self,
        tasks: Sequence[str],
        make: Callable[[], Mapping[str, evaluating.Task]],
        prefill: str,
        question: str,
        room: tuple[int, int] | None = None,
        **unit: Any,
    ) -> dict[str, list[evaluating.Result]]:
        """The same of several tasks, which share the sizes of caches and so their programs: settings that are held at
        once answer all of them before the next ones come.

        Args:
            room: the most tokens of a text and behind it, where caches are larger than these tasks need.
        """

        def sizes() -> tuple[Sequence[int], int]:
            longest, most = room or evaluating.room(make().values(), question == "seen")
            return [longest], most

        def task_of(name: str) -> evaluating.Task:
            return make()[name]

        # Which tasks there are decides sizes; sizes that are given stand for them.
        unit |= {"tasks": list(tasks)} if room is None else {"room": list(room)}
        values: dict[str, dict[PolicyChoice, Any]] = {task: {} for task in tasks}
        for begin in range(0, len(self.chosen), flags.FLAGS.together):
            group = self.chosen[begin : begin + flags.FLAGS.together]
            for task in tasks:
                make_task = functools.partial(task_of, task)
                values[task] |= self._values(group, task, make_task, sizes, prefill, question, unit)
            drop_programs()
        return {task: self._results(of_task, prefill, question) for task, of_task in values.items()}

    def _values(
        self,
        chosen: Sequence[PolicyChoice],
        task: str,
        make: Callable[[], evaluating.Task],
        sizes: Callable[[], tuple[Sequence[int], int]],
        prefill: str,
        question: str,
        unit: Mapping[str, Any],
    ) -> dict[PolicyChoice, Any]:
        """Results, as JSON has them, or reasons of refusal."""

        def run(group: list[PolicyChoice]) -> dict[PolicyChoice, Any]:
            lengths, max_new = sizes()
            evaluator = evaluating.Evaluator(
                self.model,
                self.tokenizer,
                group,
                sizes=lengths,
                max_new=max_new,
                streaming=prefill == "streaming",
                question_seen=question == "seen",
                batch=self.batch,
                seed=self.seed,
            )
            done = {result.setting: result.to_json() for result in evaluator.evaluate(make())}
            return with_refused(done, evaluator.refused)

        shared = {"task": task, "prefill": prefill, "question": question, "documents": self.documents, **unit}
        return every_setting(self.finished, chosen, shared | {"batch": self.batch, "seed": self.seed}, run)

    def _results(self, values: Mapping[PolicyChoice, Any], prefill: str, question: str) -> list[evaluating.Result]:
        streaming, seen = prefill == "streaming", question == "seen"
        return [
            evaluating.Result.from_json(value, setting, streaming, seen, self.batch)
            for setting, value in not_refused(values).items()
        ]

    def rows(self, evaluated: Sequence[evaluating.Result], task: str, context_tokens: int, **extra: Any) -> list[Row]:
        """The rows of a task of this run."""
        return evaluating.rows(
            evaluated,
            self.model,
            experiment=self.experiment,
            model_name=flags.FLAGS.model,
            task=task,
            context_tokens=context_tokens,
            seed=self.seed,
            **extra,
        )

    def write(self, rows: Sequence[Row], draw: Callable[[pathlib.Path, Sequence[Row]], None]) -> None:
        """Writes OUTPUT_DIR/NAME.json and, by `draw`, NAME.png, and says so.

        Raises:
            ValueError: where there are no rows.
        """
        check_any(rows)
        json, png = (self.directory / f"{self.experiment}.{kind}" for kind in ("json", "png"))
        results.write_rows(json, rows)
        draw(png, rows)
        if multihost.is_first():
            print(f"\nRows: {json}   plot: {png}")


def show(title: str, rows: Sequence[Row], metric: str = "accuracy") -> None:
    """The table of one length and kind: of a single task all there is to say, of several a column each."""
    if not rows:
        return
    if len({row.task for row in rows}) == 1:
        show_details(title, rows, metric)
    else:
        show_tasks(title, rows, metric)


def show_details(title: str, rows: Sequence[Row], metric: str) -> None:
    """A line per setting: bytes, score, difference to exact, time."""
    columns = ("policy", "held", "read per token", "of exact's", f"{metric} [95%]", "to exact's [95%]", "ms per step")
    lines = []
    for setting, of_setting in results.by_setting(rows).items():
        by_metric = {row.metric: row for row in of_setting}
        row = by_metric[metric]
        difference, time = by_metric.get(f"{metric}_difference"), by_metric.get("ms_per_token")
        lines.append(
            (
                setting,
                results.readable_bytes(row.device_bytes or 0)
                + (f" + {results.readable_bytes(row.host_bytes)} in the host" if row.host_bytes else ""),
                results.readable_bytes(row.read_bytes_per_token or 0),
                f"{row.budget_fraction:.1%}" + (" read" if row.extra["recalls"] else ""),
                row.estimate.fixed(),
                "-" if difference is None else difference.estimate.fixed("+"),
                "-" if time is None else f"{time.value:.2f}",
            )
        )
    results.print_table(title, columns, lines)


def show_tasks(title: str, rows: Sequence[Row], metric: str) -> None:
    """A line per setting and a column per task, their mean and its difference to exact last."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    lines = []
    for setting, of_setting in results.by_setting(rows).items():
        value = {row.task: row.value for row in of_setting if row.metric == metric}
        fraction = np.mean([row.budget_fraction for row in of_setting])
        mean, difference = mean_row(of_setting, metric), mean_row(of_setting, f"{metric}_difference")
        lines.append(
            (
                setting,
                f"{fraction:.1%}",
                *(f"{value[name]:.2f}" for name in tasks),
                "-" if mean is None else f"{mean.value:.2f}",
                "-" if difference is None else difference.fixed("+"),
            )
        )
    names = (str(name).replace("niah_", "") for name in tasks)
    results.print_table(title, ("policy", "of exact's", *names, "mean", "to exact's [95%]"), lines)


def mean_row(rows: Sequence[Row], metric: str) -> Estimate | None:
    """The mean over tasks of a metric, None where there is none."""
    estimates = [row.estimate for row in rows if row.metric == metric]
    return results.mean_of(estimates) if estimates else None


def plot(path: pathlib.Path, rows: Sequence[Row], metric: str = "accuracy") -> None:
    """The mean over tasks against cache bytes, a panel per length, kind of prefill and of question."""
    panel = lambda row: (row.context_tokens, row.extra["prefill"], row.question_seen)  # noqa: E731
    scored = [row for row in rows if row.metric == metric]
    panels = sorted(set(map(panel, scored)))
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 5.5 * len(panels), 4.2), squeeze=False, sharey=True)
    for axis, which in zip(axes[0], panels, strict=True):
        points: dict[str, list[tuple[float, Estimate]]] = {}
        for of_setting in results.by_setting([row for row in scored if panel(row) == which]).values():
            fraction = float(np.mean([row.budget_fraction for row in of_setting]))
            mean = mean_row(of_setting, metric)
            assert mean is not None
            points.setdefault(results.policy_label(of_setting[0]), []).append((100 * fraction, mean))
        plots.with_intervals(axis, points)
        tokens, prefill, seen = which
        axis.set_title(f"{tokens} tokens, {prefill} prefill, question {'seen' if seen else 'unseen'}", fontsize=10)
        axis.set_xlabel("cache bytes (read ones for policies that recall), % of exact's")
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(metric.replace("_", " "))
    axes[0][-1].legend(fontsize=8, loc="lower right")
    plots.save(figure, path)
