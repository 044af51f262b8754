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

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from absl import app, flags
from kvjax_models import generate
from kvjax_models.llama import Llama
from kvjax_models.tokenizer import Tokenizer

from experiments.common import footprint, likelihood, plots, results, settings, sweeping
from experiments.common.resuming import Finished
from experiments.common.tasks import long_texts
from kvjax.registry import PolicyChoice

NAME = "perplexity"
ACCUMULATING, PER_POSITION = FORMS = ("accumulating", "per_position")

sweeping.define_settings()
_FORM = flags.DEFINE_multi_enum("form", list(FORMS), FORMS, "How texts are read; repeatable.")
flags.DEFINE_integer("context_tokens", 2048, "Tokens of a text.")
_POSITION = flags.DEFINE_multi_integer(
    "position", None, "Where per_position predicts; repeatable. By default so that it ends at 1/8, 1/4, 1/2 and all."
)
_NEXT = flags.DEFINE_integer("next_tokens", 32, "How many tokens per_position predicts at each position.")
flags.DEFINE_integer("documents", 20, "Texts.")
_BATCH = flags.DEFINE_integer("batch", 10, "Texts read together.")
_DATA = flags.DEFINE_string("data", None, "A directory of text files (PG19's test set) in place of held-out sources.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    tokens, count = settings.value("context_tokens", quick=512), settings.value("documents", quick=4)
    batch = min(_BATCH.value, count)
    if count % batch:
        raise app.UsageError(f"--documents={count} must be a multiple of --batch={batch}")
    parts = (1,) if flags.FLAGS.quick else (8, 4, 2, 1)
    positions = _POSITION.value or [tokens // part - _NEXT.value - 1 for part in parts]
    model, tokenizer = settings.load_model(flags.FLAGS.model)
    chosen = sweeping.chosen_settings()
    longest = max(tokens, *positions) + _NEXT.value + 1
    texts = functools.cache(lambda: make_texts(tokenizer, longest, count))
    directory = pathlib.Path(flags.FLAGS.output_dir)
    finished = Finished(directory / f"{NAME}.jsonl", fresh=flags.FLAGS.fresh)
    rows: list[results.Row] = []
    for form in _FORM.value:
        units: list[dict[str, Any]] = [{"form": form, "tokens": tokens}]
        if form == PER_POSITION:
            units = [{"form": form, "position": position, "next_tokens": _NEXT.value} for position in positions]
        found = []
        for unit in units:
            unit |= {"texts": count, "longest": longest, "batch": batch, "seed": flags.FLAGS.seed, "data": _DATA.value}
            values = sweeping.every_setting(finished, chosen, unit, functools.partial(run, model, texts, unit))
            readings = [
                likelihood.Reading.from_json(value, setting) for setting, value in sweeping.not_refused(values).items()
            ]
            found += make_rows(readings, model, unit)
        show(found, f"Perplexity of {count} texts, {form.replace('_', ' ')}")
        rows += found
    sweeping.check_any(rows)
    results.write_rows(directory / f"{NAME}.json", rows)
    plot(directory / f"{NAME}.png", rows)
    print(f"\nRows: {directory / f'{NAME}.json'}   plot: {directory / f'{NAME}.png'}")


def make_texts(tokenizer: Tokenizer, tokens: int, count: int) -> list[list[int]]:
    if _DATA.value is not None:
        return long_texts.books(pathlib.Path(_DATA.value), tokenizer, tokens, count)
    return long_texts.held_out(tokenizer, tokens, count, flags.FLAGS.seed)


def run(
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


def make_rows(readings: Sequence[likelihood.Reading], model: Llama, unit: Mapping[str, Any]) -> list[results.Row]:
    """Perplexities and their ratios to exact's, of every setting and stretch."""
    exact = next((one for one in readings if str(one.setting) == "exact"), None)
    found = []
    for one in readings:
        for number, stretch in enumerate(one.stretches):
            samples = {"perplexity": stretch.losses}
            if exact is not None and one is not exact:
                samples["perplexity_ratio"] = stretch.losses - exact.stretches[number].losses
            for metric, logarithms in samples.items():
                estimate = results.mean_interval(logarithms).exponential()
                found.append(
                    results.Row(
                        experiment=NAME,
                        model=flags.FLAGS.model,
                        task=unit["data"] or long_texts.HELD_OUT,
                        policy=one.setting.name,
                        variant=one.setting.variant,
                        metric=metric,
                        value=estimate.value,
                        ci95_low=estimate.low,
                        ci95_high=estimate.high,
                        context_tokens=unit.get("position", stretch.end),
                        batch=unit["batch"],
                        n=len(logarithms),
                        seed=unit["seed"],
                        weight_bytes=generate.weight_bytes(model),
                        **footprint.row_fields([one.use]),
                        extra={
                            "budget": str(one.setting.budget) if one.setting.budget else None,
                            "form": unit["form"],
                            "first_token": stretch.first,
                            "end_token": stretch.end,
                            "recalls": one.use.recalls,
                        },
                    )
                )
    return found


def stretch_of(row: results.Row) -> tuple[int, int]:
    return row.extra["first_token"], row.extra["end_token"]


def show(rows: Sequence[results.Row], title: str) -> None:
    """A line per setting: perplexity over the last stretch (all of the text where it accumulates), and its ratio to
    exact's over each."""
    if not rows:
        return
    last = stretch_of(rows[-1])
    stretches = list(dict.fromkeys(map(stretch_of, rows)))
    lines = []
    for setting, found in results.by_setting(rows).items():
        value = {row.metric: row.estimate for row in found if stretch_of(row) == last}
        ratios = {stretch_of(row): row.estimate for row in found if row.metric == "perplexity_ratio"}
        lines.append(
            (
                setting,
                f"{found[-1].budget_fraction:.1%}",
                str(value["perplexity"]) if value else "-",
                *(f"{ratios[stretch].value:.3f}" if stretch in ratios else "-" for stretch in stretches[:-1]),
                "{:.3f} [{:.3f}, {:.3f}]".format(*ratios[last]) if last in ratios else "-",
            )
        )
    names = [f"{first} to {end - 1}" for first, end in stretches]
    columns = ("policy", "of exact's", f"perplexity, {names[-1]}", *names[:-1], f"{names[-1]} [95%]")
    results.print_table(f"{title}; ratios to exact's by position", columns, lines)


def plot(path: pathlib.Path, rows: Sequence[results.Row]) -> None:
    """Above, perplexity by position; below, its ratio to exact's over the last stretch against cache bytes; a column
    per form."""
    forms = list(dict.fromkeys(row.extra["form"] for row in rows))
    figure, axes = plt.subplots(2, len(forms), figsize=(1 + 5.5 * len(forms), 8), squeeze=False)
    for (above, below), form in zip(axes.T, forms, strict=True):
        own = [row for row in rows if row.extra["form"] == form]
        last = stretch_of(own[-1])
        points: dict[str, list[tuple[float, results.Estimate]]] = {}
        for setting, found in results.by_setting(own).items():
            curve = [row for row in found if row.metric == "perplexity"]
            # All of an accumulating text comes behind its parts.
            curve = curve[:-1] if form == ACCUMULATING else curve
            above.plot([row.context_tokens for row in curve], [row.value for row in curve], marker="o", label=setting)
            for row in found:
                if row.metric == "perplexity_ratio" and stretch_of(row) == last:
                    fraction = 100 * (row.budget_fraction or 0)
                    points.setdefault(results.policy_label(row), []).append((fraction, row.estimate))
        plots.with_intervals(below, points)
        above.set_title(form.replace("_", " "), fontsize=10)
        above.set_xscale("log", base=2)
        above.set_yscale("log")
        above.set_xlabel("tokens")
        above.set_ylabel("perplexity")
        below.axhline(1, color="grey", linewidth=0.8)
        below.set_xlabel("cache bytes (read ones for policies that recall), % of exact's")
        below.set_ylabel("perplexity, as a ratio to exact's")
        above.grid(alpha=0.3)
        below.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=5)
    axes[1][-1].legend(fontsize=7)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
