"""What the theorems of SubGen and BalanceKV ask for at the norms that data has, and whether that is worth anything.

    python -m experiments.guarantees --epsilon 0.5

For every stream the largest norms of keys, queries and values are measured, and the radius delta that SubGen's clusters
reach for each number of clusters m; of these numbers the one that takes the fewest slots is shown. From norms and
radius the theorems' settings follow: vacuous where they take no fewer slots than an exact cache.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from experiments.common import cases, results
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from kvjax.structures import cluster_table
from kvjax.theory import balancekv_settings, measured_norms, subgen_settings

NAME = "guarantees"
CLUSTERS = (16, 64, 256, 1024)


@dataclasses.dataclass(frozen=True)
class Options(cases.Streams):
    """Options of this experiment."""

    epsilon: tuple[float, ...] = each(0.5, 0.1)  # error asked for, relative to the theorems' norms
    norm: tuple[float, ...] = each(0.5, 1.0, 2.0, 4.0, 15.0)  # l2 norms of synthetic keys and queries; repeatable
    stream: tuple[str, ...] = each("tight", "low_rank", cases.RECORDED, choices=cases.STREAMS)  # streams; repeatable
    seeds: int = 1  # of which the first one's keys are clustered

    QUICK: ClassVar[dict[str, Any]] = {**cases.Streams.QUICK, "seeds": 1}


def run(options: Options) -> list[Row]:
    """The rows of every case and error."""
    rows: list[Row] = []
    lines = []
    for case in cases.cases(options):
        found = case.drawn
        tokens, head_dim = found.keys.shape[1], found.keys.shape[3]
        norms = measured_norms(*(jnp.asarray(part) for part in (found.queries, found.keys, found.values)))
        keys = jnp.asarray(found.keys[0, :, 0])
        deltas = {clusters: reached_delta(keys, clusters) for clusters in CLUSTERS if clusters < tokens}
        for epsilon in options.epsilon:
            sizes: dict[str, Any] = {"tokens": tokens, "head_dim": head_dim, "query_norm": norms.query}
            asked = {
                clusters: subgen_settings(epsilon, **sizes, delta=delta, clusters=clusters)
                for clusters, delta in deltas.items()
            }
            clusters = min(asked, key=lambda m: asked[m].samples + m * (1 + asked[m].per_cluster) / 2)
            subgen, balancekv = asked[clusters], balancekv_settings(epsilon, **sizes, key_norm=norms.key)
            lines.append(
                (
                    str(case),
                    f"{norms.key:.1f} / {norms.query:.1f} / {norms.value:.1f}",
                    f"{epsilon:g}",
                    f"{clusters}, {subgen.delta:.2f}",
                    f"{subgen.samples}, {subgen.per_cluster:.2g}",
                    "vacuous" if subgen.vacuous else "fewer slots",
                    f"{balancekv.batch_size:.2g}",
                    "vacuous" if balancekv.vacuous else "fewer slots",
                )
            )
            shared: dict[str, Any] = {
                "stream": case.stream,
                "context_tokens": tokens,
                "seed": options.seed,
                "epsilon": epsilon,
            }
            for theorem, policy, variant in ((subgen, "subgen", "variant=paper"), (balancekv, "balancekv_paper", None)):
                of: dict[str, Any] = {
                    "policy": policy,
                    "variant": variant,
                    "message": theorem.message,
                    **{f"{name}_norm": norm for name, norm in norms._asdict().items()},
                }
                model = options.model_of(case.stream)
                rows.append(results.row(NAME, model, "vacuous", float(theorem.vacuous), **shared, **of))
    columns = ("stream", "|k| / |q| / |v|", "epsilon", "m, delta", "SubGen's s, t", "so", "BalanceKV's batch", "so")
    results.print_table("What the theorems ask for", columns, lines)
    return rows


def reached_delta(keys: jax.Array, clusters: int) -> float:
    """The clusters' radius after a stream of keys [n, D]. Where none ever had to be merged it is the resolution of
    distances, since the theorem needs a radius."""
    table = cluster_table.init_cluster_table(clusters, keys.shape[1], keys.dtype, jax.random.key(0))
    delta = float(_extend(table, keys).delta)
    return delta if delta > 0 else 1e-3 * float(jnp.max(jnp.linalg.norm(keys, axis=1)))


_extend = jax.jit(cluster_table.extend)


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
