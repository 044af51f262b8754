"""InfiniGen's offline skew: per kv head, the orthogonal matrix that gathers what queries have in few dimensions.

    python -m experiments.calibrate_skew
    python -m experiments.line_retrieval --policy infinigen:skew=build/skew.npz --budget 25%

Queries of documents are read at every layer, after RoPE; the skew's columns are the right singular vectors of all
queries of a kv head's group, largest singular value first (Lee et al. 2024, section 4; `gen_llama_skewing_matrix.py` of
the released code, which reads one text of 2,048 tokens and has a matrix per query head). Turning queries and keys by it
changes no product of theirs. What it is good for is then measured on later documents: how many of the tokens with the
largest logits are among those with the largest speculated ones.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from experiments.common import results, settings, streams
from experiments.common.options import Experiment, Run
from experiments.common.results import Row
from kvjax.policies.infinigen import select_columns
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.llama import Llama

NAME = "calibrate_skew"
ASKED = 64  # queries per document that recall is measured for


@dataclasses.dataclass(frozen=True)
class Options(Run):
    """Options of this experiment."""

    documents: int = 8  # documents, from --seed on; as many later ones measure recall
    tokens: int = 2048  # tokens of a document
    partial: float = 0.2  # share of the dimensions that speculation looks at
    top: float = 0.05  # share of the tokens that count as those with the largest logits

    QUICK: ClassVar[dict[str, Any]] = {"documents": 2, "tokens": 256}


def run(options: Options) -> list[Row]:
    """The rows of every layer, with and without the skew, which is written."""
    model, tokenizer = settings.load_model(options)
    seeds = options.seeds_of(options.documents)
    turns, values = calibrate(model, tokenizer, seeds, options.tokens)
    pathlib.Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    np.savez(options.file("skew.npz"), skew=turns, singular_values=values, model=options.model)
    later = range(seeds.stop, seeds.stop + options.documents)
    rows = [row for skew in (None, turns) for row in recall_rows(options, model, tokenizer, later, skew)]
    title = f"Of the {options.top:.0%} largest logits, found in {options.partial:.0%} of the dimensions"
    results.print_rows(title, rows, lambda row: f"layer {row.extra['layer']}", lambda row: f"{row.variant} keys")
    return rows


def recall_rows(
    options: Options,
    model: Llama,
    tokenizer: Tokenizer,
    seeds: Sequence[int],
    skew: Float[np.ndarray, "L H_kv D D"] | None,
) -> list[Row]:
    """Of every layer, the share of the tokens with the largest logits that speculation finds among as many."""
    rows, tokens = [], options.tokens
    for layer, drawn in streams.prompt_streams(model, tokenizer, seeds, tokens, tokens):
        heads, head_dim = drawn.keys.shape[2:]
        turn = np.broadcast_to(np.eye(head_dim, dtype=np.float32), (heads, head_dim, head_dim))
        found = speculated(
            jnp.asarray(turn if skew is None else skew[layer]),
            jnp.asarray(drawn.keys.swapaxes(1, 2)),
            jnp.asarray(drawn.queries.reshape(*drawn.queries.shape[:2], heads, -1, head_dim).swapaxes(1, 2)),
            max(1, int(options.partial * head_dim)),
            max(1, math.ceil(options.top * tokens)),
        )
        of: dict[str, Any] = {
            "policy": "infinigen",
            "variant": "plain" if skew is None else "skew",
            "context_tokens": tokens,
        }
        of |= {"n": len(seeds), "seed": seeds[0], "layer": layer, "partial": options.partial, "top": options.top}
        rows.append(results.row(NAME, options.model, "recall", results.mean_interval(np.asarray(found)), **of))
    return rows


def calibrate(
    model: Llama, tokenizer: Tokenizer, seeds: Sequence[int], tokens: int
) -> tuple[Float[np.ndarray, "L H_kv D D"], Float[np.ndarray, "L H_kv D"]]:
    """Right singular vectors, as columns, and singular values of every layer's and kv head's queries."""
    turns, sizes = [], []
    layers = streams.prompt_streams(model, tokenizer, seeds, tokens, tokens)
    for _, drawn in tqdm(layers, total=model.config.layers, desc="queries", leave=False):
        heads, head_dim = drawn.keys.shape[2:]
        grouped = np.asarray(drawn.queries, np.float64).reshape(-1, heads, model.config.query_heads // heads, head_dim)
        moments = np.einsum("nhgd,nhge->hde", grouped, grouped)
        # Eigenvectors of the moments are the right singular vectors; eigenvalues come in rising order.
        values, vectors = np.linalg.eigh(moments)
        turns.append(vectors[..., ::-1])
        sizes.append(np.sqrt(np.maximum(values[..., ::-1], 0)))
    return np.stack(turns).astype(np.float32), np.stack(sizes).astype(np.float32)


@jax.jit(static_argnums=(3, 4))
def speculated(
    turns: Float[Array, "H_kv D D"],
    keys: Float[Array, "R H_kv n D"],
    queries: Float[Array, "R H_kv n G D"],
    columns: int,
    top: int,
) -> Float[Array, "R"]:
    """The share of the `top` tokens with the largest logits that are among as many with the largest speculated ones:
    the mean over heads and each document's last queries."""

    def one(turn: Float[Array, "D D"], keys: Float[Array, "n D"], queries: Float[Array, "n G D"]) -> Float[Array, ""]:
        partial = select_columns(turn, queries, jnp.ones(queries.shape[0], bool), columns)
        asked = queries[-ASKED:].reshape(-1, queries.shape[-1])
        best = jax.lax.top_k(asked @ keys.T, top)[1]
        speculated = jax.lax.top_k((asked @ partial) @ (keys @ partial).T, top)[1]
        return jnp.mean((best[:, :, None] == speculated[:, None]).any(axis=2))

    return jnp.mean(jax.vmap(jax.vmap(one), in_axes=(None, 0, 0))(turns, keys, queries), axis=1)


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
