"""InfiniGen's offline skew: per kv head, the orthogonal matrix that gathers what queries have in few dimensions.

    python -m experiments.calibrate_skew
    python -m experiments.line_retrieval --policy infinigen:skew=build/skew.npz --budget 25%

Queries of documents are read at every layer, after RoPE; the skew's columns are the right singular vectors of all
queries of a kv head's group, largest singular value first (Lee et al. 2024, section 4; `gen_llama_skewing_matrix.py` of
the released code, which reads one text of 2,048 tokens and has a matrix per query head). Turning queries and keys by it
changes no product of theirs. What it is good for is then measured on later documents: how many of the tokens with the
largest logits are among those with the largest speculated ones.
"""

import math
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxtyping import Float
from kvjax_models.llama import Llama
from kvjax_models.tokenizer import Tokenizer

from experiments.common import results, settings, skewing, streams

NAME = "calibrate_skew"

settings.define_run()
_DOCUMENTS = flags.DEFINE_integer("documents", 8, "Documents, from --seed on; as many later ones measure recall.")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "Tokens of a document.")
_PARTIAL = flags.DEFINE_float("partial", 0.2, "Share of the dimensions that speculation looks at.")
_TOP = flags.DEFINE_float("top", 0.05, "Share of the tokens that count as those with the largest logits.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    model, tokenizer = settings.load_model(flags.FLAGS.model)
    documents, tokens = (2, 256) if flags.FLAGS.quick else (_DOCUMENTS.value, _TOKENS.value)
    first = flags.FLAGS.seed
    turns, values = skewing.calibrate(model, tokenizer, range(first, first + documents), tokens)
    directory = pathlib.Path(flags.FLAGS.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    np.savez(directory / "skew.npz", skew=turns, singular_values=values, model=flags.FLAGS.model)
    rows = [
        row
        for turned in (False, True)
        for row in recall_rows(
            model, tokenizer, range(first + documents, first + 2 * documents), tokens, turns if turned else None
        )
    ]
    results.write_rows(directory / f"{NAME}.json", rows)
    show(rows)
    print(f"Skew: {directory / 'skew.npz'}   rows: {directory / f'{NAME}.json'}")


def recall_rows(
    model: Llama,
    tokenizer: Tokenizer,
    seeds: Sequence[int],
    tokens: int,
    skew: Float[np.ndarray, "L H_kv D D"] | None,
) -> list[results.Row]:
    """Of every layer, the share of the tokens with the largest logits that speculation finds among as many."""
    rows = []
    for layer, drawn in streams.prompt_streams(model, tokenizer, seeds, tokens, tokens):
        heads, head_dim = drawn.keys.shape[2:]
        turn = np.broadcast_to(np.eye(head_dim, dtype=np.float32), (heads, head_dim, head_dim))
        found = skewing.speculated(
            jnp.asarray(turn if skew is None else skew[layer]),
            jnp.asarray(drawn.keys.swapaxes(1, 2)),
            jnp.asarray(drawn.queries.reshape(*drawn.queries.shape[:2], heads, -1, head_dim).swapaxes(1, 2)),
            max(1, int(_PARTIAL.value * head_dim)),
            max(1, math.ceil(_TOP.value * tokens)),
        )
        estimate = results.mean_interval(np.asarray(found))
        rows.append(
            results.Row(
                experiment=NAME,
                model=flags.FLAGS.model,
                policy="infinigen",
                variant="plain" if skew is None else "skew",
                metric="recall",
                value=estimate.value,
                ci95_low=estimate.low,
                ci95_high=estimate.high,
                context_tokens=tokens,
                n=len(seeds),
                seed=seeds[0],
                extra={"layer": layer, "partial": _PARTIAL.value, "top": _TOP.value},
            )
        )
    return rows


def show(rows: Sequence[results.Row]) -> None:
    lines = [
        (str(row.extra["layer"]), str(row.variant), f"{row.value:.3f} [{row.ci95_low:.3f}, {row.ci95_high:.3f}]")
        for row in rows
    ]
    title = f"Of the {_TOP.value:.0%} largest logits, found in {_PARTIAL.value:.0%} of the dimensions"
    results.print_table(title, ("layer", "keys", "recall [95%]"), lines)


if __name__ == "__main__":
    app.run(main)
