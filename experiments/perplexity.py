"""Perplexity of long texts read through compressed caches, where errors accumulate and where they do not.

    python -m experiments.perplexity --model DIRECTORY --context_tokens 4096 --budget 25%
    python -m experiments.perplexity --model DIRECTORY --data PG19_TEST --context_tokens 32000 --budget 1024

- `accumulating`: the text streams through the cache from its first token on, a block of tokens at a time, so
  that every key and value depends on what was compressed before. Policies that only compress whole prompts are left
  out.
- `per_position`, ClusterKV's form (its Figure 10): at each of several positions the text up to it is read exactly and
  compressed, and the tokens behind it are predicted through the cache; `--next_tokens 1` is as published. The first
  token of those is left out: it is predicted by the exact reading.

Texts are sources of packages that no model here was trained on (`sources`), in the role of PG19, or files of a
directory. Every policy reads the same texts: beside its perplexity stands its ratio to exact's, paired by text. A run
that was stopped goes on where it was.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from experiments.common import footprint, likelihood, plots, results, settings, sweeping
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from experiments.common.tasks import long_texts
from kvjax.registry import PolicyChoice
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.llama import Llama, parameter_bytes

NAME = "perplexity"
ACCUMULATING, PER_POSITION = FORMS = ("accumulating", "per_position")


@dataclasses.dataclass(frozen=True)
class Options(sweeping.Settings):
    """Options of this experiment."""

    form: tuple[str, ...] = each(*FORMS, choices=FORMS)  # how texts are read; repeatable
    context_tokens: int = 2048  # tokens of a text
    position: tuple[int, ...] = each()
    """Where per_position predicts; repeatable. By default so that it ends at 1/8, 1/4, 1/2 and all."""
    next_tokens: int = 32  # how many tokens per_position predicts at each position
    documents: int = 20  # texts
    batch: int = 10  # texts read together
    data: str | None = None  # a directory of text files (PG19's test set) in place of held-out sources

    QUICK: ClassVar[dict[str, Any]] = {**sweeping.QUICK, "context_tokens": 512, "documents": 4}

    def positions(self) -> list[int]:
        """Where per_position predicts."""
        parts = (1,) if self.quick else (8, 4, 2, 1)
        return list(self.position) or [self.context_tokens // part - self.next_tokens - 1 for part in parts]


def run(options: Options) -> list[Row]:
    """The rows of every form, position and setting."""
    count, tokens = options.documents, options.context_tokens
    batch = min(options.batch, count)
    if count % batch:
        raise ValueError(f"--documents={count} must be a multiple of --batch={batch}")
    model, tokenizer = settings.load_model(options)
    longest = max(tokens, *options.positions()) + options.next_tokens + 1
    texts = functools.cache(lambda: make_texts(options, tokenizer, longest))
    finished = options.finished(NAME)
    rows: list[Row] = []
    for form in options.form:
        units: list[dict[str, Any]] = [{"form": form, "tokens": tokens}]
        if form == PER_POSITION:
            next_tokens = options.next_tokens
            units = [{"form": form, "position": one, "next_tokens": next_tokens} for one in options.positions()]
        found = []
        for unit in units:
            unit |= {"texts": count, "longest": longest, "batch": batch, "seed": options.seed, "data": options.data}
            read = functools.partial(readings_of, model, texts, unit)
            values = sweeping.every_setting(options, finished, options.chosen(), unit, read)
            readings = [
                likelihood.Reading.from_json(value, setting) for setting, value in sweeping.not_refused(values).items()
            ]
            found += make_rows(readings, options.model, parameter_bytes(model), unit)
        title = f"Perplexity of {count} texts, {form.replace('_', ' ')}; ratios are to exact's"
        of = lambda row: f"{results.setting_label(row)} ({row.budget_fraction:.1%})"  # noqa: E731
        results.print_rows(title, found, of, lambda row: "{}, {} to {}".format(row.metric, *stretch_of(row)))
        rows += found
    return rows


def make_texts(options: Options, tokenizer: Tokenizer, tokens: int) -> list[list[int]]:
    """So many tokens of every text."""
    if options.data is not None:
        return long_texts.books(pathlib.Path(options.data), tokenizer, tokens, options.documents)
    return long_texts.held_out(tokenizer, tokens, options.documents, options.seed)


def readings_of(
    model: Llama, texts: Callable[[], list[list[int]]], unit: Mapping[str, Any], chosen: list[PolicyChoice]
) -> dict[PolicyChoice, Any]:
    """What came of some settings in one form, at one position where it has one."""
    shared: dict[str, Any] = {"batch": unit["batch"], "seed": unit["seed"]}
    if unit["form"] == ACCUMULATING:
        cut = [text[: unit["tokens"]] for text in texts()]
        readings, refused = likelihood.accumulating(model, chosen, cut, **shared)
    else:
        position = unit["position"]
        cut = [text[: position + unit["next_tokens"] + 1] for text in texts()]
        readings, refused = likelihood.at_position(model, chosen, cut, position, **shared)
    sweeping.drop_programs()
    found = {reading.setting: reading.to_json() for reading in readings}
    return sweeping.with_refused(found, refused)


def make_rows(readings: Sequence[likelihood.Reading], model: str, weights: int, unit: Mapping[str, Any]) -> list[Row]:
    """Perplexities and their ratios to exact's, of every setting and stretch."""
    exact = next((one for one in readings if str(one.setting) == "exact"), None)
    found = []
    for one in readings:
        for number, stretch in enumerate(one.stretches):
            samples = {"perplexity": stretch.losses}
            if exact is not None and one is not exact:
                samples["perplexity_ratio"] = stretch.losses - exact.stretches[number].losses
            for metric, logarithms in samples.items():
                fields = {
                    "task": unit["data"] or long_texts.HELD_OUT,
                    "context_tokens": unit.get("position", stretch.end),
                    "batch": unit["batch"],
                    "n": len(logarithms),
                    "seed": unit["seed"],
                    "parameter_bytes": weights,
                    "form": unit["form"],
                    "first_token": stretch.first,
                    "end_token": stretch.end,
                    "recalls": one.use.recalls,
                    **footprint.row_fields([one.use]),
                }
                estimate = results.mean_interval(logarithms).exponential()
                found.append(results.row(NAME, model, metric, estimate, one.setting, **fields))
    return found


def stretch_of(row: Row) -> tuple[int, int]:
    return row.extra["first_token"], row.extra["end_token"]


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Of every form, perplexity by position, and its ratio to exact's over the last stretch against cache bytes (in
    another file)."""
    curves, ratios = [], []
    for form in dict.fromkeys(row.extra["form"] for row in rows):
        own = [row for row in rows if row.extra["form"] == form]
        last = stretch_of(own[-1])
        # All of an accumulating text comes behind its parts.
        parts = [row for row in own if form == PER_POSITION or stretch_of(row) != last]
        curves += [row for row in parts if row.metric == "perplexity"]
        ratios += [row for row in own if row.metric == "perplexity_ratio" and stretch_of(row) == last]
    form_of = lambda row: row.extra["form"].replace("_", " ")  # noqa: E731
    logarithmic: dict[str, Any] = {"xscale": "log", "yscale": "log", "xlabel": "tokens", "ylabel": "perplexity"}
    plots.by_rows(
        path, curves, panel=form_of, x=lambda row: row.context_tokens, label=results.setting_label, **logarithmic
    )
    if ratios:
        plots.against_bytes(
            path.with_name(f"{NAME}_ratio.png"),
            ratios,
            panel=form_of,
            ylabel="perplexity, as a ratio to exact's",
        )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
