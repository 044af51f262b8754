"""How much of a prompt every layer needs: shares of one budget, for a selection's `shares`.

    python -m experiments.calibrate_layers --budget 25%
    python -m experiments.ruler --policy "kvzip:head_floor=0.0,shares=(0.4,2.9,0.5,0.2)" --budget 25%

KVzip's published budget is over all layers and heads: of all scores the largest stay, wherever they are. What a layer
gets of it differs far more from layer to layer than from text to text; so it is found once, on some documents, and
buffers have sizes that are known before a prompt is. (LU-KV, https://arxiv.org/abs/2602.08585, has such curves, too.)
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from absl import app, flags
from jaxtyping import Float

from experiments.common import results, settings
from experiments.common.layer_shares import layer_scores, shares_of
from experiments.common.named_tasks import LINES, make_task
from experiments.common.tasks import long_texts, ruler
from kvjax.budget import Budget

NAME = "calibrate_layers"
TEXT = "text"

settings.define_run(model=settings.LANGUAGE_CHECKPOINT)
_BUDGET = flags.DEFINE_multi_string("budget", ["25%", "12.5%"], "Shares of all tokens that stay; repeatable.")
_TASK = flags.DEFINE_multi_enum(
    "task", [*ruler.NEEDLE_TASKS, TEXT], [*ruler.TASKS, LINES, TEXT], "What documents are; repeatable."
)
_DOCUMENTS = flags.DEFINE_integer("documents", 4, "Documents of each kind.")
_TOKENS = flags.DEFINE_integer("context_tokens", 2048, "Tokens of a document.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    model, tokenizer = settings.load_model(flags.FLAGS.model)
    tokens, documents = settings.value("context_tokens", quick=512), settings.value("documents", quick=2)
    seed, budgets = flags.FLAGS.seed, [Budget.parse(text) for text in _BUDGET.value]
    if any(budget.fraction is None for budget in budgets):
        raise app.UsageError(f"--budget={_BUDGET.value}: give shares of all tokens, such as 25%")
    rows = []
    for task in settings.value("task", quick=["niah_single_1", TEXT]):
        if task == TEXT:
            texts = long_texts.held_out(tokenizer, tokens, documents, seed)
        else:
            asked = make_task(task, tokenizer, tokens, range(seed, seed + documents), 1)
            texts = [prompt.context for prompt in asked.prompts]
        scores = [layer_scores(model, text) for text in texts]
        for budget in budgets:
            found = np.array([shares_of(one, budget.fraction or 0.0) for one in scores])
            rows += [make_row(task, budget, layer, found[:, layer], tokens) for layer in range(found.shape[1])]
    directory = pathlib.Path(flags.FLAGS.output_dir)
    results.write_rows(directory / f"{NAME}.json", rows)
    for budget in budgets:
        show([row for row in rows if row.extra["budget"] == str(budget)], str(budget))
    print(f"Rows: {directory / f'{NAME}.json'}")


def make_row(task: str, budget: Budget, layer: int, found: Float[np.ndarray, "n"], tokens: int) -> results.Row:
    value, low, high = results.mean_interval(found)
    return results.Row(
        experiment=NAME,
        model=flags.FLAGS.model,
        policy="kvzip",
        metric="layer_share",
        value=value,
        ci95_low=low,
        ci95_high=high,
        task=task,
        context_tokens=tokens,
        n=len(found),
        seed=flags.FLAGS.seed,
        extra={"budget": str(budget), "layer": layer},
    )


def show(rows: Sequence[results.Row], budget: str) -> None:
    """A line per kind of document, and the mean of all as a policy's setting."""
    layers = 1 + max(row.extra["layer"] for row in rows)
    by_task: dict[str, list[results.Row]] = {}
    for row in rows:
        by_task.setdefault(str(row.task), []).append(row)
    lines = [(task, *(row.estimate.fixed() for row in of_task)) for task, of_task in by_task.items()]
    names = [f"layer {layer}" for layer in range(layers)]
    results.print_table(f"Shares of the layers at {budget}, of the mean layer's", ("", *names), lines)
    shares = np.mean([[row.value for row in of_task] for of_task in by_task.values()], axis=0)
    print(f"shares=({','.join(f'{share:.2f}' for share in shares)})")


if __name__ == "__main__":
    app.run(main)
