"""What a trained language model can do under exact attention: perplexity of held-out text, and the tasks."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence

import jax
import matplotlib.pyplot as plt
import numpy as np
import tqdm

import kvjax
from experiments.common import plots, results, sources
from experiments.training import answer_loss, mixture
from kvjax_models import generate, llama
from kvjax_models.tokenizer import Tokenizer

# Beyond the seeds that experiments with caches use, so that none of their problems decided what was shipped.
_SEED = 3_000_000
# Where the first range of positions ends; every further one is as long as all before it.
_FIRST_POSITIONS = 64


def perplexities(model: llama.Llama, tokenizer: Tokenizer, tokens: int, windows: int, name: str) -> list[results.Row]:
    """Perplexity of the held-out packages by how much context a token has, over windows of so many tokens.

    Windows begin anywhere in the packages, so that every position sees the same kind of text.
    """
    packages = [tokenizer.encode(sources.repository(package)) for package in sources.packages(held_out=True)]
    text = np.concatenate([np.array(package, np.int32) for package in packages])
    begins = np.random.default_rng(_SEED).integers(len(text) - tokens, size=windows)
    losses_of = jax.jit(answer_loss.text_losses)
    losses = []
    for begin in tqdm.tqdm(begins, desc="perplexity", leave=False):
        window = np.concatenate([[tokenizer.prefix[0]], text[begin : begin + tokens]])
        losses.append(np.asarray(losses_of(model, window[None]))[0])
    bounds = [0, *(_FIRST_POSITIONS << doubling for doubling in range(int(np.log2(tokens / _FIRST_POSITIONS)))), tokens]
    rows = []
    for low, high in itertools.pairwise(bounds):
        mean = results.mean_interval(np.stack(losses)[:, low:high].mean(axis=1)).exponential()
        made = _row(name, "perplexity", "held_out_packages", tokens, mean, windows)
        rows.append(dataclasses.replace(made, extra={"positions": [low, high]}))
    return rows


def accuracy(model: llama.Llama, tokenizer: Tokenizer, task: str, tokens: int, problems: int, name: str) -> results.Row:
    """The score of a task's published problems of so many tokens, answered greedily under exact attention."""
    fresh = [mixture.problem(task, tokenizer, np.random.default_rng([_SEED, n]), tokens) for n in range(problems)]
    most_new = fresh[0].answer_tokens
    generator = generate.Generator(
        model, kvjax.Exact(), batch=1, max_prompt=tokens, max_new=most_new, eos=tokenizer.eos_ids
    )
    scores = []
    for problem in tqdm.tqdm(fresh, desc=f"{task}, {tokens} tokens", leave=False):
        state = generator.read(generator.start(0), [tokenizer.encode(problem.prompt)])
        answers: list[list[int]] = [[]]
        for _, written in generator.write(state, most_new):
            generate.collect(answers, written)
        scores.append(mixture.TASKS[task].score(tokenizer.decode(answers[0]), problem.answers))
    mean = results.Estimate(float(np.mean(scores)), *results.score_interval(scores))
    return dataclasses.replace(_row(name, "accuracy", task, tokens, mean, problems), question_seen=True)


def _row(model: str, metric: str, task: str, tokens: int, mean: results.Estimate, count: int) -> results.Row:
    bounds = {"ci95_low": mean.low, "ci95_high": mean.high}
    sizes = {"context_tokens": tokens, "n": count, "seed": _SEED}
    return results.Row("training", model, "exact", metric, mean.value, task, **bounds, **sizes)  # type: ignore[arg-type]


COLUMNS = ("", "value", "95%", "n")


def table_line(row: results.Row) -> tuple[str, ...]:
    """The line of a table with `COLUMNS` that says what was measured."""
    what = f"{row.task}, {row.context_tokens:,} tokens"
    if row.metric == "perplexity":
        what = "perplexity at {} to {}".format(*row.extra["positions"])
    return what, f"{row.value:.3g}", f"{row.ci95_low:.3g} to {row.ci95_high:.3g}", str(row.n)


def markdown_table(rows: Sequence[results.Row]) -> str:
    """Rows as a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(table_line, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot_training(log: pathlib.Path, path: pathlib.Path) -> None:
    """Losses of a run's log, step by step and smoothed, with the length of its sequences."""
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axis = plt.subplots(figsize=(8, 4.2))
    for name, label in (("natural_loss", "natural text"), ("answer_loss", "answers")):
        losses = np.array([step[name] for step in steps])
        width = max(1, len(losses) // 50)
        axis.plot(np.convolve(losses, np.full(width, 1 / width), mode="valid"), label=label)
    for step, (before, after) in enumerate(itertools.pairwise(steps)):
        if before["tokens"] != after["tokens"]:
            axis.axvline(step + 1, color="grey", linestyle=":")
    axis.set_xlabel("step (dotted: sequences grow)")
    axis.set_ylabel("loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend()
    plots.save(figure, path)
