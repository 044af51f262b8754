"""Draws the site's pictures: the tokens that policies keep of one short text, two diagrams, and a model's heads.

    python docs/pictures.py            # all pictures, in docs/images
    python docs/pictures.py kept       # one of `PICTURES`; this one needs SmolLM2-135M

`experiments.render` draws the pictures of results.

The values of the text are unit vectors, one dimension per token. The value of an entry therefore names the tokens that
it stands for, and the attention output is the attention that each token receives.
"""

import dataclasses
import pathlib
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import kvjax
from kvjax import staging
from kvjax.policy import Policy
from kvjax.registry import POLICIES
from kvjax.segment import BlockStoreRead

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGES = pathlib.Path(__file__).parent / "images"
TOKENS, PROMPT, HEAD_DIM = 128, 112, 32  # 16 tokens follow the prompt; the last 8 of them are staged
# Passages of the text: topic and number of tokens. The needle is in the third one and has a key unlike all others.
PASSAGES = ((0, 20), (1, 24), (2, 16), (0, 20), (3, 24), (2, 24))
NEEDLE = 50
# Settings for a short text; every policy gets the ones that it has.
SETTINGS: dict[str, Any] = {
    "budget": 40, "sinks": 4, "recent": 8, "compact_every": 8, "chunk": 16, "block_size": 8, "cluster_tokens": 8,
    "chunk_tokens": 16, "chunk_clusters": 2, "lag_size": 8, "merged": 4, "kernel_size": 3, "window_size": 8,
    "alpha": 3.0, "partial": 0.5,
}  # fmt: skip
SETTINGS_BY_POLICY: dict[str, dict[str, Any]] = {
    "balancekv": {"block_size": 16},
    "clusterkv": {"block_size": 1, "full_layers": 0},
    "h2o": {"recent": 16},
    "snapkv": {"recent": 0},
    # All values have the same norm, so that light tokens have no meaning.
    "subgen": {"light_values": 0, "self_normalization": 0.0, "samples": 21, "clusters": 7},
}
KEPT, MERGED, STAGED, STORED, ARROW = "#2667a8", "#e08e45", "#888888", "#e3e7ec", "#222222"
# Compilation takes most of the time.
FAST_COMPILATION = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Rows of the overview.
OVERVIEW = (
    "exact", "streaming_llm", "uniform", "balancekv", "subgen", "subgen_mean", "clustergen", "chelsea", "h2o", "snapkv",
    "leverage_scores", "clusterkv", "quest",
)  # fmt: skip


class Text(NamedTuple):
    """A synthetic text: keys and values of its tokens, queries of its tokens, and the query of a question."""

    keys: jax.Array  # [1, TOKENS, 1, HEAD_DIM]
    values: jax.Array  # [1, TOKENS, 1, TOKENS], unit vectors
    queries: jax.Array  # [1, TOKENS, 1, HEAD_DIM]; each attends to the topic of its token
    question: jax.Array  # [1, 1, 1, HEAD_DIM]; attends to the needle, and less to its topic


def make_text() -> Text:
    """Returns the text of all pictures."""
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(HEAD_DIM, HEAD_DIM)))[0]
    topics = np.repeat(*np.transpose(PASSAGES))
    noise = rng.normal(size=(2, TOKENS, HEAD_DIM))
    keys = 4 * directions[topics] + 0.35 * noise[0]
    queries = 3 * directions[topics] + 0.5 * noise[1]
    keys[0] = 3 * directions[8] + 2 * directions[:4].sum(axis=0)  # a sink: every query attends to it
    keys[NEEDLE] = 5 * directions[9]
    question = 5.0 * directions[9] + 2.4 * directions[topics[NEEDLE]]

    def one_head(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, jnp.float32).reshape(1, -1, 1, x.shape[-1])

    return Text(one_head(keys), one_head(np.eye(TOKENS)), one_head(queries), one_head(question))


def make_policy(name: str) -> Policy:
    """Returns a registered policy with settings for the text.

    Args:
        name: the registered name.

    Returns:
        The policy.
    """
    fields = {field.name for field in dataclasses.fields(POLICIES[name])}  # type: ignore[arg-type]
    settings = {key: value for key, value in SETTINGS.items() if key in fields} | SETTINGS_BY_POLICY.get(name, {})
    return POLICIES[name](**settings)


def fill_cache(policy: Policy, text: Text) -> tuple[kvjax.Cache, kvjax.Counters]:
    """Returns the cache of one head after the text: a prompt, then one token at a time.

    Args:
        policy: policy of the cache.
        text: keys, values and queries of one head.

    Returns:
        The cache and the counters.
    """
    spec = kvjax.CacheSpec(
        batch=1, query_heads=1, kv_heads=1, head_dim=HEAD_DIM, value_dim=TOKENS, max_prompt_tokens=PROMPT,
        max_new_tokens=TOKENS - PROMPT, rope_frequencies=(0.0,) * (HEAD_DIM // 2), layer=1, layers=4,
    )  # fmt: skip
    init = jax.jit(lambda keys: kvjax.init(policy, spec, keys), compiler_options=FAST_COMPILATION)
    cache, counters = init(jax.random.split(jax.random.key(0), 1))
    prefill = jax.jit(kvjax.prefill, compiler_options=FAST_COMPILATION)
    step = jax.jit(kvjax.step, compiler_options=FAST_COMPILATION)
    cache, counters, _ = prefill(
        cache,
        counters,
        text.keys[:, :PROMPT],
        text.values[:, :PROMPT],
        jnp.array([PROMPT]),
        kvjax.prompt_queries(cache.policy, text.queries[:, :PROMPT]),
    )
    for token in range(PROMPT, TOKENS):
        new = (x[:, token : token + 1] for x in (text.queries, text.keys, text.values))
        _, cache, counters = step(cache, counters, *new)
    return cache, counters


class Entries(NamedTuple):
    """The E entries that one question reads of a cache, without staged tokens."""

    shares: np.ndarray  # [E, TOKENS]: share of each token's value in the entry
    weight: np.ndarray  # [E]: weight in the numerator
    stored: np.ndarray  # [TOKENS]: whether the token is in a block store


def read_entries(cache: kvjax.Cache, counters: kvjax.Counters, question: jax.Array) -> Entries:
    """Returns the entries that a question reads of a cache, staged tokens excluded.

    Args:
        cache: a cache of one row and head.
        counters: its counters.
        question: the query [1, 1, 1, D].

    Returns:
        The entries.
    """
    shares, weight, stored = [], [], np.zeros(TOKENS, bool)
    visible = staging.num_visible_staged(counters, 1)
    segments = list(cache.policy.segments(cache.state, visible))
    for segment in segments:
        if isinstance(segment, BlockStoreRead):
            store, selection = segment.store, segment.select(question)
            positions = np.unique(store.position)
            stored[positions[positions >= 0]] = True
            indices, lengths = (np.asarray(x[0, 0]) for x in (selection.block_indices, selection.block_lengths))
            for block, length in zip(indices, lengths, strict=True):
                members = np.asarray(store.position[0, 0, block, :length])
                shares += list(np.eye(TOKENS)[members])
                weight += [1.0] * len(members)
            segments += selection.residual
        elif segment.values is not None:
            slots = np.arange(segment.values.shape[2])
            log = np.zeros(len(slots)) if segment.log_num is None else np.asarray(segment.log_num[0, 0], np.float64)
            start = 0 if segment.start is None else int(segment.start[0, 0])
            stop = len(slots) if segment.stop is None else int(segment.stop[0, 0])
            is_read = (slots >= start) & (slots < stop) & ~np.isneginf(log)
            shares += list(np.asarray(segment.values[0, 0], np.float64)[is_read])
            weight += list(np.exp(log[is_read]))
    return Entries(np.array(shares), np.array(weight), stored)


def draw_overview() -> None:
    """Draws one row per policy with the weight of every token."""
    text = make_text()
    figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    blue, orange, pale, grey = (np.array(matplotlib.colors.to_rgb(color)) for color in (KEPT, MERGED, STORED, STAGED))
    image = np.ones((len(OVERVIEW), TOKENS, 3))
    for row, name in enumerate(OVERVIEW):
        cache, counters = fill_cache(make_policy(name), text)
        entries = read_entries(cache, counters, text.question)
        counts = entries.weight @ entries.shares
        single = entries.shares.max(axis=1) > 0.99
        merged = (entries.weight * ~single) @ entries.shares > counts / 2
        image[row, entries.stored] = pale
        # Larger weights are darker.
        light = 1 - 0.18 * np.clip(np.log2(np.maximum(counts, 1)), 0, 3)[:, None]
        color = np.where(merged[:, None], orange, blue) * light
        image[row] = np.where(counts[:, None] > 1e-3, color, image[row])
        image[row, TOKENS - int(counters.count[0]) :] = grey
        jax.clear_caches()
    axis.imshow(image, aspect="auto", interpolation="nearest", extent=(-0.5, TOKENS - 0.5, len(OVERVIEW), 0))
    for row in range(1, len(OVERVIEW)):
        axis.axhline(row, color="white", linewidth=3)
    axis.set_yticks(np.arange(len(OVERVIEW)) + 0.5, OVERVIEW)
    starts = [start for start in np.cumsum([0, *(tokens for _, tokens in PASSAGES)]) if abs(start - NEEDLE) > 8]
    axis.set_xticks([*starts, NEEDLE], [*map(str, starts), "needle"])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    patches = {"kept": KEPT, "merged": MERGED, "stored, not read": STORED, "staged": STAGED}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in patches.values()]
    figure.legend(handles, patches, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    _save(figure, "overview")


# --- diagrams ---


def draw_segments() -> None:
    """Draws three ways in which a few entries stand for sixteen tokens."""
    figure, axis = plt.subplots(figsize=(8, 1.3), layout="constrained")
    rng = np.random.default_rng(3)
    topics = [0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 1, 0, 0, 2, 2, 0]
    cells = plt.get_cmap("Set2")

    def box(column: int, row: int, topic: int) -> None:
        axis.add_patch(plt.Rectangle((column - 0.4, row - 0.31), 0.8, 0.62, color=cells(topic)))

    for token, topic in enumerate(topics):
        box(token, 3, topic)
    rows = {
        "full cache": (3, "16 entries of weight 1"),
        "selection": (2, "the tokens with the highest scores, weight 1"),
        "sampling": (1, "6 random tokens of weight 16/6: right on average"),
        "merging": (0, "3 means, weighted by their number of tokens"),
    }
    for token in (0, 4, 6, 8, 14, 15):
        box(token, 2, topics[token])
    for token in sorted(rng.choice(16, 6, replace=False)):
        box(token, 1, topics[token])
        axis.text(token, 1, "2.7", ha="center", va="center", fontsize=7)
    for topic, column in ((0, 3), (1, 7), (2, 11)):
        box(column, 0, topic)
        axis.text(column, 0, str(topics.count(topic)), ha="center", va="center", fontsize=8)
    for name, (row, description) in rows.items():
        axis.text(-0.8, row, name, ha="right", va="center", fontsize=10)
        axis.text(15.9, row, description, ha="left", va="center", fontsize=8, color="#444444")
    axis.set(xlim=(-3.4, 27), ylim=(-0.6, 3.6), aspect="equal")
    axis.axis("off")
    _save(figure, "idea_segments")


def draw_staging() -> None:
    """Draws the way of a token: the staging buffer, then the policy's state."""
    figure, axis = plt.subplots(figsize=(8, 1.75), layout="constrained")

    def buffer(left: float, bottom: float, name: str, slots: int, occupied: int, color: str) -> float:
        """Draws a buffer from `left` on with its `name`; `occupied` slots get a `color`. Returns its right end."""
        for slot in range(slots):
            face = color if slot < occupied else "white"
            axis.add_patch(
                plt.Rectangle((left + slot, bottom), 0.9, 0.9, facecolor=face, edgecolor="#666666", linewidth=0.7)
            )
        axis.text(left + slots / 2, bottom + 1.15, name, ha="center", fontsize=9)
        return left + slots

    buffer(0, 1, "the policy's state", 16, 16, KEPT)
    end = buffer(20, 1, "staging buffer: compact_every slots", 8, 5, STAGED)
    arrow = {"arrowstyle": "->", "color": ARROW, "linewidth": 1.2}
    axis.annotate("", (end - 2.7, 1.45), (end + 1.6, 1.45), arrowprops=arrow)
    axis.text(end + 1.8, 1.45, "a new token\nper decode step", va="center", fontsize=9)
    axis.annotate("", (8, 0.85), (24, 0.85), arrowprops=arrow | {"connectionstyle": "arc3,rad=-0.25"})
    axis.text(
        16,
        -1.75,
        "compaction: the policy drops, samples or merges tokens",
        ha="center",
        fontsize=9,
    )
    axis.annotate("", (8, 3.6), (8, 2.75), arrowprops=arrow)
    axis.annotate("", (24, 3.6), (24, 2.75), arrowprops=arrow)
    axis.text(16, 3.75, "attention reads both at every decode step", ha="center", fontsize=9)
    axis.set(xlim=(-0.5, 36), ylim=(-2.4, 4.4), aspect="equal")
    axis.axis("off")
    _save(figure, "idea_staging")


def draw_kept() -> None:
    """Runs the first program of docs/kept.md and saves its figure."""
    page = (pathlib.Path(__file__).parent / "kept.md").read_text()
    program = re.search(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert program is not None
    names: dict[str, Any] = {}
    exec(compile(program[1], "kept.md", "exec"), names)
    _save(names["figure"], "kept")


def _save(figure: plt.Figure, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=130)
    plt.close(figure)


PICTURES = {
    "idea_segments": draw_segments,
    "idea_staging": draw_staging,
    "overview": draw_overview,
    "kept": draw_kept,
}


def main(names: list[str]) -> None:
    """Draws the named pictures; without names, all."""
    if unknown := set(names) - set(PICTURES):
        sys.exit(f"unknown pictures {', '.join(sorted(unknown))}; choose from {', '.join(PICTURES)}")
    for name in names or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
