"""How much of a prompt every layer needs: shares of one budget, for a selection's `shares`.

    python -m experiments.calibrate_layers --budget 25%
    python -m experiments.ruler --policy "kvzip:head_floor=0.0,shares=(0.4,2.9,0.5,0.2)" --budget 25%

KVzip's published budget is over all layers and heads: of all scores the largest stay, wherever they are. What a layer
gets of it differs far more from layer to layer than from text to text; so it is found once, on some documents, and
buffers have sizes that are known before a prompt is. (LU-KV, https://arxiv.org/abs/2602.08585, has such curves, too.)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.common import results, settings
from experiments.common.named_tasks import LINES, make_task
from experiments.common.options import LANGUAGE_CHECKPOINT, Experiment, Run, each
from experiments.common.results import Row
from experiments.common.tasks import long_texts, ruler
from kvjax.budget import Budget
from kvjax.policies.kvzip import KVzip
from kvjax.policy import Prompt
from kvjax_models.llama import Llama
from kvjax_models.prefill import read_layers

NAME = "calibrate_layers"
TEXT = "text"
CHUNK = 128  # tokens that are read at a time


@dataclasses.dataclass(frozen=True)
class Options(Run):
    """Options of this experiment."""

    model: str = LANGUAGE_CHECKPOINT
    budget: tuple[str, ...] = each("25%", "12.5%")  # shares of all tokens that stay; repeatable
    task: tuple[str, ...] = each(*ruler.NEEDLE_TASKS, TEXT, choices=(*ruler.TASKS, LINES, TEXT))
    """What documents are; repeatable."""
    documents: int = 4  # documents of each kind
    context_tokens: int = 2048  # tokens of a document

    QUICK: ClassVar[dict[str, Any]] = {"context_tokens": 512, "documents": 2, "task": ("niah_single_1", TEXT)}


def run(options: Options) -> list[Row]:
    """The rows of every kind of document, budget and layer."""
    budgets = [Budget.parse(text) for text in options.budget]
    if any(budget.fraction is None for budget in budgets):
        raise ValueError(f"--budget={', '.join(options.budget)}: give shares of all tokens, such as 25%")
    model, tokenizer = settings.load_model(options)
    tokens, seeds = options.context_tokens, options.seeds_of(options.documents)
    rows = []
    for task in options.task:
        if task == TEXT:
            texts = long_texts.held_out(tokenizer, tokens, options.documents, options.seed)
        else:
            texts = [prompt.context for prompt in make_task(task, tokenizer, tokens, seeds, 1).prompts]
        scores = [layer_scores(model, text) for text in texts]
        for budget in budgets:
            found = np.array([shares_of(one, budget.fraction or 0.0) for one in scores])
            of: dict[str, Any] = {
                "policy": "kvzip",
                "task": task,
                "context_tokens": tokens,
                "n": len(found),
                "seed": options.seed,
            }
            of["budget"] = str(budget)
            rows += [
                results.row(NAME, options.model, "layer_share", results.mean_interval(shares), layer=layer, **of)
                for layer, shares in enumerate(found.T)
            ]
    for text in map(str, budgets):
        show([row for row in rows if row.extra["budget"] == text], text)
    return rows


def show(rows: Sequence[Row], budget: str) -> None:
    """A line per kind of document, and the mean of all as a policy's setting."""
    layer = lambda row: f"layer {row.extra['layer']}"  # noqa: E731
    title = f"Shares of the layers at {budget}, of the mean layer's"
    results.print_rows(title, rows, lambda row: str(row.task), layer)
    by_layer: dict[int, list[float]] = {}
    for row in rows:
        by_layer.setdefault(row.extra["layer"], []).append(row.value)
    print(f"shares=({','.join(f'{np.mean(shares):.2f}' for shares in by_layer.values())})")


def layer_scores(model: Llama, text: Sequence[int]) -> Float[np.ndarray, "L H_kv T"]:
    """KVzip's scores of a text's tokens in every layer."""
    policy = KVzip(len(text) + 64)
    padded = np.zeros((1, -(-len(text) // CHUNK) * CHUNK), np.int32)
    padded[0, : len(text)] = text
    lengths = jnp.array([len(text)], jnp.int32)
    scores = []
    for read in read_layers(model, padded, lengths, CHUNK, [0] * model.config.layers, policy.repeat):
        keys, values = read.keys.swapaxes(1, 2), read.values.swapaxes(1, 2)
        prompt = Prompt(keys, values, lengths, None, repeated=read.repeated)
        scores.append(np.asarray(policy.score(prompt))[0, :, : len(text)])
    return np.stack(scores)


def shares_of(scores: Float[np.ndarray, "L H_kv T"], kept: float) -> Float[np.ndarray, "L"]:
    """What each layer keeps where the largest scores of all stay, in multiples of the mean."""
    least = np.quantile(scores, 1 - kept)
    return np.mean(scores > least, axis=(1, 2)) / np.mean(scores > least)


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
