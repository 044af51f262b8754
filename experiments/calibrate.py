"""Calibrates policies offline for a model: Chelsea's outlier heads, and InfiniGen's skew.

    python -m experiments.calibrate --model smollm2-135m --text wikitext2 --data_dir DIR
    python -m experiments.evaluate --policy chelsea:heads=build/heads.json --policy
    infinigen:skew=build/skew.npz

Outlier heads (Chelsea, appendix B) are the heads in which the fewest tokens have a neighbor of cosine .8 in their
chunk; they keep all tokens. With two texts, the overlap of their heads is written too (Chelsea, figures 6 and 7). The
skew (InfiniGen, section 4) consists of the right singular vectors of each KV head's queries.
"""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy import stats

import kvjax
from experiments import evaluate
from experiments.attention import SINKS, share_without_edge
from experiments.common import streams
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import Figure, figure, print_figures, write_figures
from kvjax.combinators.head_budgets import retrieving_heads, save_shares


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a calibration."""

    model: str = "smollm2-135m"  # Name of `kvjax models`, GGUF file or Hugging Face directory.
    text: tuple[str, ...] = repeatable("docs")  # docs, books, wikitext2 or essays; repeatable.
    data_dir: pathlib.Path | None = None  # Directory of published files.
    seeds: int = 4  # Passages of each text.
    tokens: int = 2048  # Tokens of a passage.
    fraction: float = 0.04  # Share of the heads that are outliers; at least one is.
    output_dir: pathlib.Path = pathlib.Path("build")  # Of heads.json, skew.npz and outlier_heads.json (of two texts).


def main(options: Options) -> None:
    """Writes the outlier heads and the skew."""
    llm = evaluate.load_model(options.model, "float32")
    shares, moments = [], []
    for text in options.text:
        prompts = streams.text_prompts(llm.tokenizer, text, range(options.seeds), options.tokens, options.data_dir)
        share, moment = zip(
            *(layer_figures(drawn) for _, drawn in streams.recorded(llm.model, prompts, 1, prompt_queries=True)),
            strict=True,
        )
        shares.append(np.stack(share))
        moments.append(np.stack(moment))
    ranking = np.mean(shares, axis=0)
    directory = options.output_dir
    directory.mkdir(parents=True, exist_ok=True)
    heads = tuple(sorted(outliers(ranking, options.fraction)))
    provenance = {"texts": options.text, "tokens": options.tokens, "model": options.model, "kvjax": kvjax.__version__}
    save_shares(directory / "heads.json", retrieving_heads(len(ranking), len(ranking[0]), heads), provenance)
    skew, singular_values = skew_of(np.sum(moments, axis=0))
    np.savez(directory / "skew.npz", skew=skew, singular_values=singular_values, model=options.model)
    print(f"outlier heads (layer, KV head): {heads}\nwritten: {directory / 'heads.json'}, {directory / 'skew.npz'}")
    if len(shares) == 2:
        found = agreement(shares[0], shares[1], options.fraction)
        write_figures(directory / "outlier_heads.json", found)
        print_figures("Agreement of the texts", found, "case")


def layer_figures(drawn: streams.Streams) -> tuple[Float[np.ndarray, "H"], Float[np.ndarray, "H D D"]]:
    """Returns the share of tokens without a similar neighbor and the second moments of queries, per KV head."""
    share = share_without_edge(jnp.asarray(drawn.keys[:, SINKS:]).swapaxes(1, 2))
    assert drawn.prompt_queries is not None
    heads, dim = drawn.keys.shape[2:]
    grouped = np.asarray(drawn.prompt_queries, np.float64).reshape(-1, heads, drawn.queries.shape[2] // heads, dim)
    return np.asarray(share).mean(axis=0), np.einsum("nhgd,nhge->hde", grouped, grouped)


def outliers(ranking: Float[np.ndarray, "L H"], fraction: float) -> set[tuple[int, int]]:
    """Returns the heads with the largest values: a share of all heads, at least one."""
    count = max(1, round(fraction * ranking.size))
    best = np.argsort(-ranking, axis=None, kind="stable")[:count]
    return {(int(place) // ranking.shape[1], int(place) % ranking.shape[1]) for place in best}


def agreement(first: Float[np.ndarray, "L H"], second: Float[np.ndarray, "L H"], fraction: float) -> list[Figure]:
    """Returns how far two texts agree: overlap (Jaccard index) of the outlier heads, and rank correlation."""
    heads = outliers(first, fraction), outliers(second, fraction)
    rank = float(stats.spearmanr(first.ravel(), second.ravel()).statistic)
    values = {"overlap": len(heads[0] & heads[1]) / len(heads[0] | heads[1]), "rank_correlation": rank}
    return [figure(name, value, case=f"{len(heads[0])} of {first.size} heads") for name, value in values.items()]


def skew_of(moments: Float[np.ndarray, "L H D D"]) -> tuple[Float[np.ndarray, "L H D D"], Float[np.ndarray, "L H D"]]:
    """Returns the right singular vectors of the queries as columns, largest singular value first, and the values."""
    # Eigenvectors of the second moments; eigenvalues are in ascending order.
    values, vectors = np.linalg.eigh(moments)
    singular_values = np.sqrt(np.maximum(values[..., ::-1], 0))
    return vectors[..., ::-1].astype(np.float32), singular_values.astype(np.float32)


if __name__ == "__main__":
    run_command(main, Options)
