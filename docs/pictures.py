"""The site's pictures: what every policy keeps of one short text, by running it, and two drawings of the idea.

    python docs/pictures.py            # all of them, to docs/images
    python docs/pictures.py subgen     # one policy's

Values of the text are unit vectors, one dimension per token, so that an entry's value says which tokens it holds, and
attention's output how much of the query's attention each token was given.
"""

import dataclasses
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import kvjax
from kvjax import staging
from kvjax.policy import ALL_QUERIES, Policy, Repeated
from kvjax.registry import POLICIES
from kvjax.segment import Recalled, Segment, parts_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGES = pathlib.Path(__file__).parent / "images"
TOKENS, PROMPT, HEAD_DIM = 128, 112, 32  # 16 tokens come after the prompt, of which the last 8 are staged
# Passages of the text: topic and tokens. The needle is a token of its own kind inside the fourth.
PASSAGES = ((0, 20), (1, 24), (2, 16), (0, 20), (3, 24), (2, 24))
NEEDLE = 50
# Small enough for so short a text; a policy gets those that it has.
SETTINGS: dict[str, Any] = {
    "budget": 40, "sinks": 4, "recent": 8, "compact_every": 8, "chunk": 16, "block_size": 16, "cluster_tokens": 8,
    "every": 16, "chunk_clusters": 2, "places": 8, "lag_size": 8, "merged": 4, "kernel": 3,
    "alpha": 3.0, "partial": 0.5,
}  # fmt: skip
OTHERWISE: dict[str, dict[str, Any]] = {
    "balancekv_paper": {"budget": 60, "value_exponents": (0, 0), "c": 1.0},
    "cam": {"budget": 14},  # so that tokens leave that are still attended to
    "clusterkv_paper": {"places": 1},
    "clusterkv_reference": {"places": 1, "clusters": 14, "every": None},
    "h2o": {"recent": 16},
    "kvzip": {"chunk": TOKENS},
}
OWN, MERGED, STAGED, HELD, EXACT = (
    "#2667a8",
    ("#e08e45", "#c2513f", "#8d6bb0", "#5a9e6f", "#b58a2c"),
    "#888888",
    "#e3e7ec",
    "#222222",
)
# Compiling takes most of the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# In the picture of all: one of every kind.
OVERVIEW = (
    "exact", "streaming_llm", "uniform", "balancekv", "subgen", "clustergen", "chelsea", "h2o", "snapkv", "kvzip",
    "leverage_scores", "clusterkv_paper", "quest",
)  # fmt: skip


class Text(NamedTuple):
    keys: jax.Array  # [1, TOKENS, 1, HEAD_DIM]
    values: jax.Array  # [1, TOKENS, 1, TOKENS], unit vectors
    queries: jax.Array  # [1, TOKENS, 1, HEAD_DIM]: tokens ask for their own topic
    question: jax.Array  # [1, 1, 1, HEAD_DIM]: asks for the needle, and some for the topic that holds it


def text() -> Text:
    """The text of all pictures."""
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(HEAD_DIM, HEAD_DIM)))[0]
    topics = np.repeat(*np.transpose(PASSAGES))
    noise = rng.normal(size=(2, TOKENS, HEAD_DIM))
    keys = 4 * directions[topics] + 0.35 * noise[0]
    queries = 3 * directions[topics] + 0.5 * noise[1]
    keys[0] = 3 * directions[8] + 2 * directions[:4].sum(axis=0)  # what every query attends to: a sink
    keys[NEEDLE] = 5 * directions[9]
    question = 5.0 * directions[9] + 2.4 * directions[topics[NEEDLE]]
    one_head = lambda x: jnp.asarray(x, jnp.float32).reshape(1, -1, 1, x.shape[-1])  # noqa: E731
    return Text(one_head(keys), one_head(np.eye(TOKENS)), one_head(queries), one_head(question))


def policy_of(name: str) -> Policy:
    """A registered policy with settings for a text as short as this."""
    fields = {field.name for field in dataclasses.fields(POLICIES[name])}  # type: ignore[arg-type]
    settings = {key: value for key, value in SETTINGS.items() if key in fields} | OTHERWISE.get(name, {})
    return POLICIES[name](**settings)


def filled(policy: Policy, read: Text) -> kvjax.Cache:
    """The cache of one head when the text has been read: a prompt, then token by token."""
    spec = kvjax.CacheSpec(
        batch=1, query_heads=1, kv_heads=1, head_dim=HEAD_DIM, value_dim=TOKENS, max_prompt=PROMPT,
        max_new=TOKENS - PROMPT, rope_frequencies=(0.0,) * (HEAD_DIM // 2), layer=1, layers=4,
    )  # fmt: skip
    init = jax.jit(lambda keys: kvjax.init(policy, spec, keys), compiler_options=QUICKLY)
    cache = init(jax.random.split(jax.random.key(0), 1))
    asked = PROMPT if cache.policy.prompt_queries == ALL_QUERIES else cache.policy.prompt_queries
    # A repetition of the text asks, at every token, for that token.
    again = Repeated(2 * read.keys[:, :PROMPT], read.keys[:, :PROMPT], jnp.array([[PROMPT]]))
    prefill, step = (jax.jit(function, compiler_options=QUICKLY) for function in (kvjax.prefill, kvjax.step))
    cache, _ = prefill(
        cache, read.keys[:, :PROMPT], read.values[:, :PROMPT], jnp.array([PROMPT]),
        read.queries[:, PROMPT - asked : PROMPT] if asked else None,
        repeated=again if cache.policy.repeat else None,
    )  # fmt: skip
    for token in range(PROMPT, TOKENS):
        _, cache = step(cache, *(x[:, token : token + 1] for x in (read.queries, read.keys, read.values)))
    return cache


class Kept(NamedTuple):
    """What attention reads, as entries of the numerator: E of them."""

    shares: np.ndarray  # [E, TOKENS]: how much of each token's value the entry holds
    weight: np.ndarray  # [E]: how many tokens it counts for
    held: np.ndarray  # [TOKENS]: kept, and read by other questions


def kept(cache: kvjax.Cache, question: jax.Array) -> Kept:
    """What the question reads of a cache, staged tokens left out."""
    shares, weight, held = [], [], np.zeros(TOKENS, bool)
    parts: list[Any] = list(parts_of(cache.policy.read(cache.state, staging.newer_tokens(cache.staging, 1))))
    for part in parts:
        if isinstance(part, Recalled):
            store, choice = part.store, part.choose(question, None)
            held[np.unique(store.position)[np.unique(store.position) >= 0]] = True
            for block, count in zip(*(np.asarray(x[0, 0]) for x in choice[:2]), strict=True):
                own = np.asarray(store.position[0, 0, block, :count])
                shares += list(np.eye(TOKENS)[own])
                weight += [1.0] * len(own)
            parts += choice.rest
        elif isinstance(part, Segment) and part.values is not None and part.feeds != "denominator":
            slots = np.arange(part.values.shape[2])
            log = np.zeros(len(slots)) if part.log_num is None else np.asarray(part.log_num[0, 0], np.float64)
            start = 0 if part.start is None else int(part.start[0, 0])
            stop = len(slots) if part.stop is None else int(part.stop[0, 0])
            read = (slots >= start) & (slots < stop) & ~np.isneginf(log)
            shares += list(np.asarray(part.values[0, 0], np.float64)[read])
            weight += list(np.exp(log[read]))
    return Kept(np.array(shares), np.array(weight), held)


def draw_policy(name: str, read: Text) -> None:
    """Above, of every token, how many tokens its value counts for; below, what the question attends to."""
    cache = filled(policy_of(name), read)
    found = kept(cache, read.question)
    exact = np.asarray(jax.nn.softmax(read.keys[0, :, 0] @ read.question[0, 0, 0] / np.sqrt(HEAD_DIM)))
    attended = np.asarray(kvjax.output(kvjax.attend(cache, read.question))[0, 0, 0])
    error = np.linalg.norm(attended - exact) / np.linalg.norm(exact)

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 3.3), height_ratios=(3, 2), sharex=True, layout="constrained"
    )
    _draw_kept(above, found, int(cache.staging.count[0]))
    above.set_title(f"{name}: {_in_words(found)}", loc="left", fontsize=10)
    tokens = np.arange(TOKENS)
    below.bar(tokens, exact, width=1.0, color=HELD, label="exact")
    below.plot(tokens, attended, ".", markersize=3.5, color="#c2513f", label=f"here (error {error:.2f})")
    below.set(xlim=(-1, TOKENS), xlabel="token", ylabel="attention", ylim=(0, 1.15 * max(exact.max(), attended.max())))
    below.legend(loc="upper right", fontsize=8, frameon=False)
    below.annotate("needle", (NEEDLE, 0.92 * exact[NEEDLE]), (NEEDLE + 2, 0.92 * exact[NEEDLE]), fontsize=8)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, name)


def draw_overview(read: Text) -> None:
    """A row per policy: what it keeps of every token."""
    figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    blue, orange, pale, grey = (np.array(matplotlib.colors.to_rgb(color)) for color in (OWN, MERGED[0], HELD, STAGED))
    image = np.ones((len(OVERVIEW), TOKENS, 3))
    for row, name in enumerate(OVERVIEW):
        cache = filled(policy_of(name), read)
        found = kept(cache, read.question)
        counts = found.weight @ found.shares
        alone = found.shares.max(axis=1) > 0.99
        merged = (found.weight * ~alone) @ found.shares > counts / 2
        image[row, found.held] = pale
        # The more tokens it counts for, the darker.
        light = 1 - 0.18 * np.clip(np.log2(np.maximum(counts, 1)), 0, 3)[:, None]
        color = np.where(merged[:, None], orange, blue) * light
        image[row] = np.where(counts[:, None] > 1e-3, color, image[row])
        image[row, TOKENS - int(cache.staging.count[0]) :] = grey
        jax.clear_caches()
    axis.imshow(image, aspect="auto", interpolation="nearest", extent=(-0.5, TOKENS - 0.5, len(OVERVIEW), 0))
    for row in range(1, len(OVERVIEW)):
        axis.axhline(row, color="white", linewidth=3)
    axis.set_yticks(np.arange(len(OVERVIEW)) + 0.5, OVERVIEW)
    starts = [start for start in np.cumsum([0, *(tokens for _, tokens in PASSAGES)]) if abs(start - NEEDLE) > 8]
    axis.set_xticks([*starts, NEEDLE], [*map(str, starts), "needle"])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    patches = {"kept": OWN, "in a mean": MERGED[0], "held, not read": HELD, "staged": STAGED}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in patches.values()]
    figure.legend(handles, patches, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    _save(figure, "overview")


def _draw_kept(axis: plt.Axes, found: Kept, staged: int) -> None:
    axis.bar(np.flatnonzero(found.held), 1.0, width=0.9, color=HELD)
    foot, merged = np.zeros(TOKENS), 0
    for shares, weight in sorted(
        zip(found.shares, found.weight, strict=True), key=lambda entry: int(np.argmax(entry[0]))
    ):
        members = np.flatnonzero(shares > 1e-3)
        alone = shares.max() > 0.99
        for token in members:
            own = alone and shares[token] > 0.99
            color = OWN if own else MERGED[merged % len(MERGED)]
            axis.bar(token, weight * shares[token], bottom=foot[token], width=0.9, color=color)
            foot[token] += weight * shares[token]
        merged += len(members) > 1
    axis.bar(np.arange(TOKENS - staged, TOKENS), 1.0, width=0.9, color=STAGED)
    top = max(1.3, min(1.1 * foot.max(), 12))
    # The text itself: passages of one topic have one colour.
    for number, (topic, length) in enumerate(PASSAGES):
        first = sum(tokens for _, tokens in PASSAGES[:number])
        axis.barh(-0.07 * top, length - 0.4, left=first - 0.3, height=0.07 * top, color=plt.get_cmap("Pastel2")(topic))
        axis.text(first, -0.075 * top, f"topic {topic + 1}", va="center", fontsize=6)
    axis.plot(NEEDLE, -0.075 * top, "v", color=EXACT, markersize=4)
    axis.set(ylim=(-0.12 * top, top), ylabel="counts for")


def _in_words(found: Kept) -> str:
    alone = found.shares.max(axis=1) > 0.99 if len(found.shares) else np.zeros(0, bool)
    weighted = alone & (np.abs(found.weight - 1) > 1e-3)
    words = [f"{int((alone & ~weighted).sum())} tokens as they are"]
    if weighted.any():
        words.append(f"{int(weighted.sum())} that count for others too")
    if (~alone).any():
        words.append(f"{int((~alone).sum())} means")
    if found.held.any():
        words.append(f"read of {int(found.held.sum())} held")
    return f"{', '.join(words)}; 8 staged"


# --- the idea ---


def draw_segments() -> None:
    """Three ways in which a few entries stand for sixteen tokens."""
    figure, axis = plt.subplots(figsize=(8, 1.3), layout="constrained")
    rng = np.random.default_rng(3)
    topics = [0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 1, 0, 0, 2, 2, 0]
    cells = plt.get_cmap("Set2")
    box = lambda place, row, topic, height=0.62: axis.add_patch(  # noqa: E731
        plt.Rectangle((place - 0.4, row - height / 2), 0.8, height, color=cells(topic))
    )
    for token, topic in enumerate(topics):
        box(token, 3, topic)
    rows = {
        "everything": (3, "16 entries, each of weight 1"),
        "choose": (2, "the tokens that matter most, each of weight 1"),
        "sample": (1, "6 tokens, each of weight 16/6: the sum is right on average"),
        "merge": (0, "3 means, each weighing as many tokens as it has"),
    }
    for token in (0, 4, 6, 8, 14, 15):
        box(token, 2, topics[token])
    for token in sorted(rng.choice(16, 6, replace=False)):
        box(token, 1, topics[token])
        axis.text(token, 1, "2.7", ha="center", va="center", fontsize=7)
    for topic, place in ((0, 3), (1, 7), (2, 11)):
        box(place, 0, topic)
        axis.text(place, 0, str(topics.count(topic)), ha="center", va="center", fontsize=8)
    for name, (row, says) in rows.items():
        axis.text(-0.8, row, name, ha="right", va="center", fontsize=10)
        axis.text(15.9, row, says, ha="left", va="center", fontsize=8, color="#444444")
    axis.set(xlim=(-3.4, 27), ylim=(-0.6, 3.6), aspect="equal")
    axis.axis("off")
    _save(figure, "idea_segments")


def draw_staging() -> None:
    """Where a token goes: staging first, the policy's store at the next compaction."""
    figure, axis = plt.subplots(figsize=(8, 1.75), layout="constrained")

    def buffer(left: float, low: float, name: str, slots: int, full: int, color: str) -> float:
        for slot in range(slots):
            face = color if slot < full else "white"
            axis.add_patch(
                plt.Rectangle((left + slot, low), 0.9, 0.9, facecolor=face, edgecolor="#666666", linewidth=0.7)
            )
        axis.text(left + slots / 2, low + 1.15, name, ha="center", fontsize=9)
        return left + slots

    buffer(0, 1, "the policy's store: as large as its budget", 16, 16, OWN)
    end = buffer(20, 1, "staging: compact_every slots", 8, 5, STAGED)
    arrow = {"arrowstyle": "->", "color": EXACT, "linewidth": 1.2}
    axis.annotate("", (end - 2.7, 1.45), (end + 1.6, 1.45), arrowprops=arrow)
    axis.text(end + 1.8, 1.45, "a new token,\nat every step", va="center", fontsize=9)
    axis.annotate("", (8, 0.85), (24, 0.85), arrowprops=arrow | {"connectionstyle": "arc3,rad=-0.25"})
    axis.text(
        16, -1.75, "compaction, when staging is full: the policy drops, samples or merges", ha="center", fontsize=9
    )
    axis.annotate("", (8, 3.6), (8, 2.75), arrowprops=arrow)
    axis.annotate("", (24, 3.6), (24, 2.75), arrowprops=arrow)
    axis.text(16, 3.75, "attention reads both, at every step", ha="center", fontsize=9)
    axis.set(xlim=(-0.5, 36), ylim=(-2.4, 4.4), aspect="equal")
    axis.axis("off")
    _save(figure, "idea_staging")


def _save(figure: plt.Figure, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=130)
    plt.close(figure)


def main(names: list[str]) -> None:
    if unknown := set(names) - set(POLICIES):
        sys.exit(f"{', '.join(sorted(unknown))}: no policy; known: {', '.join(POLICIES)}")
    if not names:
        draw_segments()
        draw_staging()
        draw_overview(text())
    for name in names or POLICIES:
        draw_policy(name, text())
        jax.clear_caches()


if __name__ == "__main__":
    main(sys.argv[1:])
