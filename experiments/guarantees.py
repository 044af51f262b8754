"""What the theorems of SubGen and BalanceKV ask for at the norms that data has, and whether that is worth anything.

    python -m experiments.guarantees --epsilon 0.5

For every stream the largest norms of keys, queries and values are measured, and the radius delta that SubGen's clusters
reach for each number of clusters m; of these numbers the one that takes the fewest slots is shown. From norms and
radius the theorems' settings follow: vacuous where they take no fewer slots than an exact cache.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments.common import results, settings, streams
from kvjax.structures import cluster_table
from kvjax.theory import balancekv_settings, measured_norms, subgen_settings

NAME = "guarantees"
RECORDED = "recorded"

settings.define_run()
_EPSILON = flags.DEFINE_multi_float("epsilon", [0.5, 0.1], "Error asked for, relative to the theorems' norms.")
_NORM = flags.DEFINE_multi_float("norm", [0.5, 1, 2, 4, 15], "l2 norms of synthetic keys and queries; repeatable.")
_STREAM = flags.DEFINE_multi_enum(
    "stream", ["tight", "low_rank", RECORDED], [*streams.SYNTHETIC, RECORDED], "Streams; repeatable."
)
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of a synthetic stream.")
_RECORDED_TOKENS = flags.DEFINE_integer("recorded_tokens", 4032, "Tokens of a recorded stream.")
_QUERIES = 64
_CLUSTERS = (16, 64, 256, 1024)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    rows: list[results.Row] = []
    lines = []
    for label, stream, found in sources():
        tokens, head_dim = found.keys.shape[1], found.keys.shape[3]
        norms = measured_norms(*(jnp.asarray(part) for part in (found.queries, found.keys, found.values)))
        keys = jnp.asarray(found.keys[0, :, 0])
        deltas = {clusters: reached_delta(keys, clusters) for clusters in _CLUSTERS if clusters < tokens}
        for epsilon in _EPSILON.value:
            sizes = {"tokens": tokens, "head_dim": head_dim, "query_norm": norms.query}
            asked = {
                clusters: subgen_settings(epsilon, **sizes, delta=delta, clusters=clusters)
                for clusters, delta in deltas.items()
            }
            clusters = min(asked, key=lambda m: asked[m].samples + m * (1 + asked[m].per_cluster) / 2)
            subgen = asked[clusters]
            balancekv = balancekv_settings(
                epsilon, tokens=tokens, head_dim=head_dim, key_norm=norms.key, query_norm=norms.query
            )
            lines.append(
                (
                    label,
                    f"{norms.key:.1f} / {norms.query:.1f} / {norms.value:.1f}",
                    f"{epsilon:g}",
                    f"{clusters}, {subgen.delta:.2f}",
                    f"{subgen.samples}, {subgen.per_cluster:.2g}",
                    "vacuous" if subgen.vacuous else "fewer slots",
                    f"{balancekv.batch_size:.2g}",
                    "vacuous" if balancekv.vacuous else "fewer slots",
                )
            )
            theorems: dict[tuple[str, str | None], Any] = {
                ("subgen", "variant=paper"): subgen,
                ("balancekv_paper", None): balancekv,
            }
            for (policy, variant), theorem in theorems.items():
                rows.append(
                    results.Row(
                        experiment=NAME,
                        model=flags.FLAGS.model if stream == RECORDED else "synthetic",
                        stream=stream,
                        policy=policy,
                        variant=variant,
                        metric="vacuous",
                        value=float(theorem.vacuous),
                        context_tokens=tokens,
                        seed=flags.FLAGS.seed,
                        extra={"epsilon": epsilon, **norms._asdict(), "message": theorem.message},
                    )
                )
    columns = ("stream", "|k| / |q| / |v|", "epsilon", "m, delta", "SubGen's s, t", "so", "BalanceKV's batch", "so")
    results.print_table("What the theorems ask for", columns, lines)
    path = pathlib.Path(flags.FLAGS.output_dir) / f"{NAME}.json"
    results.write_rows(path, rows)
    print(f"Rows, with the settings in words: {path}")


def sources() -> Iterator[tuple[str, str, streams.Streams]]:
    """Streams with a label and a name: synthetic ones at every norm, the recorded one in every layer."""
    quick, seeds = flags.FLAGS.quick, [flags.FLAGS.seed]
    tokens, recorded_tokens = (1024, 512) if quick else (_TOKENS.value, _RECORDED_TOKENS.value)
    for name in _STREAM.value:
        if name == RECORDED:
            model, tokenizer = settings.load_model(flags.FLAGS.model)
            for layer, found in streams.recorded(model, tokenizer, seeds, recorded_tokens, _QUERIES):
                yield f"{name}, layer {layer}", name, found
        else:
            drawn = streams.synthetic(name, seeds, tokens, _QUERIES)
            for norm in _NORM.value:
                yield f"{name}, norm {norm:g}", name, drawn.scaled(norm)


def reached_delta(keys: jax.Array, clusters: int) -> float:
    """The clusters' radius after a stream of keys [n, D]. Where none ever had to be merged it is the resolution of
    distances, since the theorem needs a radius."""
    table = cluster_table.init_cluster_table(clusters, keys.shape[1], keys.dtype, jax.random.key(0))
    delta = float(_extend(table, keys).delta)
    return delta if delta > 0 else 1e-3 * float(jnp.max(jnp.linalg.norm(keys, axis=1)))


_extend = jax.jit(cluster_table.extend)


if __name__ == "__main__":
    app.run(main)
