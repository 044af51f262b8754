"""ClusterKV: everything is kept, sorted by semantic clusters; each query reads the clusters that are nearest to it."""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.attention import QUERY_HEADS, Partials, attend, merge
from kvjax.k_means import k_means
from kvjax.policies.choice import Chosen, first_layers
from kvjax.policies.exact import exact
from kvjax.policies.windowed import init_windowed, over_heads, stream_keys, windowed_policy
from kvjax.policy import CachePolicy, CacheSpec
from kvjax.recall import (
    NOWHERE,
    BlockStore,
    Filed,
    Plan,
    Ranked,
    absorb_chunks,
    arrange,
    arrays_bytes,
    attend_recalled,
    best_parts,
    block_slots,
    blocks_of,
    init_store,
    put,
    put_blocks,
    recalling,
    stored_blocks,
)
from kvjax.segment import Segment, segment
from kvjax.shards import largest_over_heads
from kvjax.staging import appended, check_budget, check_period, init_window, occupancy, window_segments
from kvjax.state import BATCH, HEAD_DIM, array, state, static
from pallas_kernels.k_means import cluster_sums

CLUSTERS = "clusters"
BLOCK = 16  # tokens that lie side by side in the store


@state
class Clusters:
    """One head's clusters: first those of the prompt, then those of every chunk of later tokens. Empty ones have size
    0."""

    mean_key: Float[Array, "C D"] = array(CLUSTERS, HEAD_DIM)  # float32, of the keys as they are stored
    mean_value: Float[Array, "C D"] | None = array(CLUSTERS, HEAD_DIM)  # float32; None without residual clusters
    size: Int[Array, "C"] = array(CLUSTERS)  # int32 tokens
    first: Int[Array, "C"] = array(CLUSTERS)  # int32, the store's block where the cluster begins
    radius: Float[Array, "C"] = array(CLUSTERS)  # float32, the largest distance of a stored key to the mean


class Reading(NamedTuple):
    """What a query reads of the clusters."""

    tokens: int
    blocks: int
    select: Literal["group", "query_head"]
    residual: bool


@state
class Index:
    """What finds one head's tokens again."""

    clusters: Clusters
    stream_key: Key[Array, ""] = array()
    prompt_clusters: int = static()
    prompt_blocks: int = static()
    capacity: int = static()  # tokens that may ever be stored
    reading: Reading = static()


@state
class Certificate:
    """What attention missed at most, as far as the last appended token's queries go."""

    missing: Float[Array, "B H_q"] = array(BATCH, QUERY_HEADS)  # float32, the bound on the last step's missing mass
    rounds: Int[Array, "B"] = array(BATCH)  # int32 rounds of recall so far, one for every appended token at least
    steps: Int[Array, "B"] = array(BATCH)  # int32 appended tokens so far


@dataclasses.dataclass(frozen=True)
class Clustering:
    """How k-means is run."""

    iterations: int
    tolerance: float
    start: Literal["random", "k-means++"]
    sample: int
    polish: int
    turn_to: Literal["directions", "keys"]


def clusterkv(
    budget: int,
    *,
    sinks: int = 16,
    recent: int = 0,
    cluster_tokens: int = 80,
    every: int = 320,
    chunk_clusters: int = 4,
    select: Literal["group", "query_head"] = "group",
    residual: bool = True,
    iterations: int = 10,
    sample: int = 4,
    certify: bool = False,
    target: float | None = None,
    full_layers: int = 0,
    period: int = 64,
    variant: Literal["clusters", "reference"] = "clusters",
) -> CachePolicy:
    """Keeps every key and value; a query reads sinks, recent tokens, tokens that wait to be clustered, and whole
    clusters in descending order of <query, mean key> until the budget is reached, the last one cut.

    A prompt is clustered by cosine k-means when it has been read, later tokens `every` at a time, those alone; until
    then they are attended to, beside the budget. A cluster that is cut loses its latest tokens.

    Args:
        budget: tokens read per query head, sinks and recent ones included, waiting and staged ones not. Tokens lie in
            blocks of 16, and a query reads no more of them than the budget takes in clusters of average size: one whose
            clusters are much smaller may run out of blocks before it has so many tokens.
        sinks, recent: tokens always read; the paper's 16 and 0 by default. Sinks are never clustered.
        cluster_tokens: tokens of a prompt per cluster, on average; the paper's 80 by default.
        every, chunk_clusters: so many later tokens make so many clusters; the paper's 320 and 4.
        select: "query_head": every query head reads clusters of its own, as published; "group": all heads of a group
            read the same ones, those that hold the most attention per token by the clusters' means, summed over the
            group. A budget then costs so many times less, and at equal bytes read the error is lower on every stream
            tried.
        residual: clusters that are not read stay present as one entry each: their mean key and mean value, weighing as
            many tokens as were not read (one that is cut: by the means of the whole cluster).
        iterations, sample: of k-means; for a prompt all iterations but the last two look at every `sample`-th key.
        certify: keeps in the state (`state.selection.learnt`) how much of the last appended token's attention, as a
            share of all, went to tokens that were not read: at most that, see `missing_mass`.
        target: recalls in rounds, each of the budget's tokens in whole blocks, until that share is at most this for all
            query heads of the row; implies `certify`, which then counts the rounds. Bytes read are those of one round.
        full_layers: so many first layers keep exact caches and read all of them; the paper's two are for deep models.
        period: tokens between compactions; no more than `every`.
        variant: "reference" follows the released code of the accuracy study: 400 clusters for any prompt, k-means++,
            at most 20 iterations on all keys that turn to the sum of keys, selection per query head, no residual
            clusters, and later tokens are never clustered.

    Raises:
        ValueError: for sizes that cannot be.

    Source: ClusterKV (Liu et al. 2024), sections 3 and 4; https://github.com/sjtu-zhao-lab/ClusterKV.
    """
    check_budget(budget, sinks, recent)
    check_period(period)
    for name, least in {"cluster_tokens": 1, "every": 1, "chunk_clusters": 1, "full_layers": 0}.items():
        if locals()[name] < least:
            raise ValueError(f"{name}={locals()[name]}; it must be at least {least}")
    if period > every:
        raise ValueError(f"period={period} must not exceed every={every}: a chunk is clustered per compaction")
    if select not in ("group", "query_head"):
        raise ValueError(f"select={select!r}; it must be 'group' or 'query_head'")
    if target is not None and not 0 <= target < 1:
        raise ValueError(f"target={target}; a share of attention that may be missing lies in [0, 1)")
    if variant not in ("clusters", "reference"):
        raise ValueError(f"variant={variant!r}; it must be 'clusters' or 'reference'")
    reference = variant == "reference"
    if reference:
        select, residual = "query_head", False
        clustering = Clustering(20, 1e-4, "k-means++", sample=1, polish=1, turn_to="keys")
    else:
        clustering = Clustering(iterations, 1e-4, "random", sample, min(2, iterations), turn_to="directions")
    tokens = budget - sinks - recent
    slots = block_slots(tokens, min(cluster_tokens, max(every // chunk_clusters, 1)), BLOCK)
    reading = Reading(tokens, slots, select, residual)
    certify = certify or target is not None

    def init(spec, row_keys):
        tokens = max(spec.max_prompt - sinks - recent, 0)
        prompt_clusters = min(tokens, 400) if reference else -(-tokens // cluster_tokens)
        prompt_blocks = blocks_of(tokens, prompt_clusters, BLOCK)
        later = spec.max_new + recent
        chunks = 0 if reference else later // every
        blocks = prompt_blocks + chunks * blocks_of(every, chunk_clusters, BLOCK)
        clusters = prompt_clusters + chunks * chunk_clusters

        def one(stream_key):
            return (
                init_store(spec, blocks, BLOCK),
                Index(
                    init_clusters(clusters, spec.head_dim, residual),
                    stream_key,
                    prompt_clusters,
                    prompt_blocks,
                    capacity=tokens + chunks * every,
                    reading=reading,
                ),
            )

        store, index = over_heads(one)(stream_keys(row_keys, spec.kv_heads))
        waiting = min(later, every - 1 + period) if chunks else later
        window = init_window(spec, sinks + recent + waiting, sinks, recent, period)
        filed = Filed(
            store=store,
            index=index,
            pending=jnp.zeros(spec.batch, jnp.int32),
            chunks=jnp.zeros(spec.batch, jnp.int32),
            learnt=init_certificate(spec) if certify else None,
            group=spec.query_heads // spec.kv_heads,
        )
        return init_windowed(spec, window, filed)

    def select_prompt(state, keys, values, queries):
        filed = state.selection
        clusters, blocks = filed.index.prompt_clusters, filed.index.prompt_blocks
        if not clusters or keys.shape[1] <= sinks:
            return state
        _, _, count = occupancy(state.window)
        used = jnp.full_like(count, clusters) if reference else -(-count // cluster_tokens)
        position = jnp.arange(sinks, keys.shape[1], dtype=jnp.int32)

        def one(store, index, keys, values, count, used):
            return file_clusters(
                store,
                index,
                jax.random.fold_in(index.stream_key, 0),
                (keys, values, position),
                position < sinks + count,
                first_cluster=0,
                first_block=0,
                clusters=clusters,
                blocks=blocks,
                used=used,
                clustering=clustering,
            )

        later = lambda x: x[:, sinks:].swapaxes(1, 2).astype(state.window.keys.dtype)  # noqa: E731
        store, index = over_heads(one, 0, 0, 0, 0, None, None)(
            filed.store, filed.index, later(keys), later(values), count, used
        )
        return dataclasses.replace(state, selection=dataclasses.replace(filed, store=store, index=index))

    def file(filed, keys, values, position, full):
        made = blocks_of(every, chunk_clusters, BLOCK)

        def one(store, index, keys, values, position, full, chunk):
            return file_clusters(
                store,
                index,
                jax.random.fold_in(index.stream_key, 1 + chunk),
                (keys[0], values[0], position[0]),
                jnp.broadcast_to(full[0], (every,)),
                first_cluster=jnp.where(full[0], index.prompt_clusters + chunk * chunk_clusters, NOWHERE),
                first_block=jnp.where(full[0], index.prompt_blocks + chunk * made, NOWHERE),
                clusters=chunk_clusters,
                blocks=made,
                used=chunk_clusters,
                clustering=dataclasses.replace(clustering, sample=1),
                gate=jnp.any(full_rows),
            )

        full_rows = full[:, 0]
        store, index = over_heads(one, 0, 0, 0, 0, None, None, None)(
            filed.store, filed.index, keys, values, position, full, filed.chunks
        )
        return dataclasses.replace(filed, store=store, index=index)

    def absorb(state, block):
        index = state.selection.index
        room = (index.clusters.size.shape[2] - index.prompt_clusters) // chunk_clusters
        # The reference's chunk is never full.
        chunk = state.window.keys.shape[2] + 1 if reference else every
        return absorb_chunks(state, block, chunk, file, most=room)

    def segments(state, queries):
        return window_segments(state.window, selected=state.selection.pending, queries=queries)

    def plan(state, query) -> Plan:
        read = choose(state, query)
        return Plan(read.block, read.tokens, rest_segments(state, read.taken))

    def index_bytes(state):
        clusters = state.selection.index.clusters
        shown = arrays_bytes(clusters.size, clusters.first, *((clusters.radius,) if certify else ()))
        # Attention itself reads the mean keys again where residual clusters are shown.
        return shown if residual else shown + arrays_bytes(clusters.mean_key)

    base = windowed_policy(
        "clusterkv", init=init, select=select_prompt, absorb=absorb, segments=segments, period=period
    )
    made = recalling(base, plan, index_bytes)
    if certify:
        made = made._replace(attend=functools.partial(attend_certified, base, target), segments=None, plan=None)
    return first_layers(full_layers, exact(period=period), made)


def init_clusters(count: int, head_dim: int, residual: bool) -> Clusters:
    """So many empty clusters of one head."""
    return Clusters(
        mean_key=jnp.zeros((count, head_dim)),
        mean_value=jnp.zeros((count, head_dim)) if residual else None,
        size=jnp.zeros(count, jnp.int32),
        first=jnp.zeros(count, jnp.int32),
        radius=jnp.zeros(count),
    )


def file_clusters(
    store: BlockStore,
    index: Index,
    rng: Key[Array, ""],
    tokens: tuple[Float[Array, "T D"], Float[Array, "T D"], Int[Array, "T"]],
    valid: Bool[Array, "T"],
    *,
    first_cluster: Int[Array, ""] | int,
    first_block: Int[Array, ""] | int,
    clusters: int,
    blocks: int,
    used: Int[Array, ""] | int,
    clustering: Clustering,
    gate: Bool[Array, ""] | None = None,
) -> tuple[BlockStore, Index]:
    """Clusters one head's tokens (keys, values, positions, in the order of the text) and writes them, sorted by
    cluster, and the clusters at the given places; what lies past the end is dropped.

    Args:
        used: how many of the clusters may hold tokens.
        gate: where not, nothing is to be written and clustering is left out; a scalar of the batch.
    """
    keys, values, position = tokens

    def label_of(_) -> Int[Array, "T"]:
        return k_means(rng, keys, valid, clusters, used=used, **dataclasses.asdict(clustering)).label

    if gate is None:
        label = label_of(None)
    else:
        label = jax.lax.cond(gate, label_of, lambda _: jnp.full(valid.shape, clusters, jnp.int32), None)
    size = jnp.zeros(clusters, jnp.int32).at[label].add(1, mode="drop")
    needed = -(-size // BLOCK)
    first = jnp.cumsum(needed) - needed
    order = jnp.argsort(label, stable=True)
    home = jnp.minimum(label[order], clusters - 1)
    rank = jnp.arange(label.shape[0]) - (jnp.cumsum(size) - size)[home]
    slot = jnp.where(label[order] < clusters, first[home] * BLOCK + rank, blocks * BLOCK)
    source = jnp.full(blocks * BLOCK, label.shape[0], jnp.int32).at[slot].set(order, mode="drop")
    arranged = arrange(source.reshape(blocks, BLOCK), keys, values, position)

    def mean(x: Float[Array, "T D"]) -> Float[Array, "C D"]:
        return cluster_sums(label, x.astype(jnp.float32), clusters) / jnp.maximum(size, 1)[:, None]

    mean_key = mean(keys)
    away = keys.astype(jnp.float32) - mean_key[jnp.minimum(label, clusters - 1)]
    radius = jnp.sqrt(jnp.zeros(clusters).at[label].max(jnp.sum(away * away, axis=1), mode="drop"))
    found = Clusters(
        mean_key=mean_key,
        mean_value=None if index.clusters.mean_value is None else mean(values),
        size=size,
        first=first_block + first,
        radius=radius,
    )
    written = put(index.clusters, first_cluster + jnp.arange(clusters), found)
    return put_blocks(store, first_block + jnp.arange(blocks), arranged), dataclasses.replace(index, clusters=written)


def choose(state, query: Float[Array, "B 1 H_q D"], round: Int[Array, ""] | None = None) -> Ranked:
    """What one query of every row reads, for every query head [B, H_q, ...] or every kv head [B, H_kv, ...]: the
    budget's tokens (everything, where it is as large as the store), or the given round's whole blocks."""
    filed = state.selection
    clusters, reading = filed.index.clusters, filed.index.reading
    batch, kv_heads = filed.store.position.shape[:2]
    stored = stored_blocks(filed.store)
    logits = cluster_logits(clusters, query)
    score = logits if reading.select == "query_head" else group_score(logits, clusters.size)[:, :, None]
    tokens, skip = reading.tokens, None
    blocks = stored if tokens >= filed.index.capacity else min(stored, reading.blocks)
    if round is not None:
        blocks = round_blocks(state)
        tokens, skip = stored * BLOCK, round * blocks

    def one(score: Float[Array, "G C"], size, first) -> Ranked:
        rank = functools.partial(best_parts, tokens=tokens, blocks=blocks, places=BLOCK, skip=skip)
        return jax.vmap(lambda score: rank(score, size, first))(score)

    ranked = over_heads(one)(score, clusters.size, clusters.first)
    return Ranked(*(x.reshape(batch, kv_heads * x.shape[2], x.shape[3]) for x in ranked))


def round_blocks(state) -> int:
    """Blocks of one round: at least one, so that rounds come to an end."""
    return min(stored_blocks(state.selection.store), max(1, -(-state.selection.index.reading.tokens // BLOCK)))


def cluster_logits(clusters: Clusters, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G C"]:
    """<query, mean key> / sqrt(D) of every query head and cluster."""
    batch, kv_heads, _, head_dim = clusters.mean_key.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)
    product = jnp.einsum("bhgd,bhcd->bhgc", grouped, clusters.mean_key, precision=jax.lax.Precision.HIGHEST)
    return product / math.sqrt(head_dim)


def group_score(logits: Float[Array, "B H_kv G C"], size: Int[Array, "B H_kv C"]) -> Float[Array, "B H_kv C"]:
    """The logarithm of the attention that a cluster's mean key gets per token, summed over the heads of a group: what a
    budget of tokens buys most of in descending order. Of one head alone the order is that of its logits."""
    total = jax.nn.logsumexp(logits + _log_count(size)[:, :, None], axis=3, keepdims=True)
    return jax.nn.logsumexp(logits - jnp.where(jnp.isneginf(total), 0.0, total), axis=2)


def attend_read(state, query: Float[Array, "B 1 H_q D"], read: Ranked) -> tuple[Partials, ...]:
    """Partials of the blocks that are read, where there are any."""
    if not read.block.shape[2]:
        return ()
    return (attend_recalled(query, state.selection.store, read.block, read.tokens),)


def rest_segments(state, taken: Int[Array, "B H C"]) -> tuple[Segment, ...]:
    """Clusters as entries that weigh as many tokens as were not read, for kv heads or query heads; nothing without
    residual clusters."""
    clusters = state.selection.index.clusters
    if clusters.mean_value is None or not clusters.size.shape[2]:
        return ()
    repeats = taken.shape[1] // clusters.size.shape[1]
    spread = (lambda x: x) if repeats == 1 else functools.partial(jnp.repeat, repeats=repeats, axis=1)
    weight = _log_count(spread(clusters.size) - taken)
    return (segment(spread(clusters.mean_key), spread(clusters.mean_value), log_num=weight),)


def missing_mass(state, query: Float[Array, "B T H_q D"], causal: bool = False) -> Float[Array, "B T H_q"]:
    """An upper bound on the share of attention's mass (softmax's denominator over all tokens) that lies on tokens which
    the queries do not read, in float32.

    The keys of cluster c lie within its radius r_c of its mean key m_c, so n unread ones of it hold no more mass than
    n exp((<q, m_c> + |q| r_c) / sqrt(D)). Attention's output is off by at most twice this share times the largest norm
    of a value, with residual clusters or without: those, too, weigh no more than that bound.

    Args:
        state: of `clusterkv`, as one layer keeps it.
        query, causal: as for `attend`.

    Raises:
        ValueError: for another policy's state.
    """
    if isinstance(state, Chosen):
        state = state.cache
    if not isinstance(getattr(state, "selection", None), Filed) or not isinstance(state.selection.index, Index):
        raise ValueError(f"state={type(state).__name__} is not that of a clusterkv cache: it has no clusters")
    window = window_segments(
        state.window,
        selected=state.selection.pending,
        queries=query.shape[1] if causal and query.shape[1] > 1 else None,
    )
    kept = attend(query, window)

    def one(item):
        query, kept = (jax.tree.map(lambda x: x[:, None], part) for part in item)
        read = choose(state, query)
        return missing_share(state, query, read.taken, merge(kept, *attend_read(state, query, read)))[:, 0]

    return jax.lax.map(one, jax.tree.map(lambda x: x.swapaxes(0, 1), (query, kept))).swapaxes(0, 1)


def missing_share(
    state, query: Float[Array, "B 1 H_q D"], taken: Int[Array, "B H C"], attended: Partials
) -> Float[Array, "B 1 H_q"]:
    """`missing_mass` of one query per row that has read so many tokens of each cluster; `attended` are the partials of
    all tokens read, and of them alone."""
    clusters = state.selection.index.clusters
    batch, kv_heads, count, head_dim = clusters.mean_key.shape
    grouped = query.reshape(batch, kv_heads, -1, 1, head_dim).astype(jnp.float32)
    length = jnp.linalg.norm(grouped, axis=-1) / math.sqrt(head_dim)
    # What float32 may lose of a logit: a rounding per dimension of products no larger than those of the norms.
    reach = clusters.radius + 1e-5 * (clusters.radius + jnp.linalg.norm(clusters.mean_key, axis=-1))
    most = cluster_logits(clusters, query) + length * reach[:, :, None]
    left = clusters.size[:, :, None] - taken.reshape(batch, kv_heads, -1, count)
    unread = jax.nn.logsumexp(most + _log_count(left), axis=-1).reshape(attended.den.shape)
    read = attended.max + jnp.log(attended.den)
    return jnp.where(jnp.isneginf(unread), 0.0, jax.nn.sigmoid(unread - read))


def init_certificate(spec: CacheSpec) -> Certificate:
    return Certificate(
        missing=jnp.zeros((spec.batch, spec.query_heads)),
        rounds=jnp.zeros(spec.batch, jnp.int32),
        steps=jnp.zeros(spec.batch, jnp.int32),
    )


def attend_certified(
    base: CachePolicy, target: float | None, state, query: Float[Array, "B T H_q D"], causal: bool = False
) -> tuple[Partials, Any]:
    """Attention that bounds what it misses and, with a target, recalls in rounds until that is little enough. `base`
    shows the window."""
    assert base.segments is not None
    kept = attend(query, base.segments(state, query, causal))

    def one(item) -> tuple[Partials, Array, Array]:
        query, kept = (jax.tree.map(lambda x: x[:, None], part) for part in item)
        if target is None:
            read = choose(state, query)
            found = merge(kept, *attend_read(state, query, read))
            missing, taken = missing_share(state, query, read.taken, found), read.taken
            rounds = jnp.ones(query.shape[0], jnp.int32)
        else:
            found, missing, taken, rounds = recall_until(state, target, query, kept)
        found = merge(found, *(attend(query, (one,)) for one in rest_segments(state, taken)))
        return (*jax.tree.map(lambda x: x[:, 0], (found, missing)), rounds)

    items = jax.tree.map(lambda x: x.swapaxes(0, 1), (query, kept))
    found, missing, rounds = jax.tree.map(lambda x: x.swapaxes(0, 1), jax.lax.map(one, items))
    if not causal:
        return found, state
    real = appended(state.window.staging, query.shape[1])
    last = query.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    newest = jnp.take_along_axis(missing, last[:, None, None], axis=1)[:, 0]
    old = state.selection.learnt
    learnt = Certificate(
        missing=jnp.where(jnp.any(real, axis=1)[:, None], newest, old.missing),
        rounds=old.rounds + jnp.sum(jnp.where(real, rounds, 0), axis=1),
        steps=old.steps + jnp.sum(real, axis=1, dtype=jnp.int32),
    )
    return found, dataclasses.replace(state, selection=dataclasses.replace(state.selection, learnt=learnt))


def recall_until(state, target: float, query: Float[Array, "B 1 H_q D"], kept: Partials):
    """Rounds of recall until every row's bound is at most the target, or all is read; a row that is done reads no more.

    Returns:
        Partials of what was read, the bound [B, 1, H_q], tokens read of each cluster and the rounds [B] of each row.
    """
    stored = stored_blocks(state.selection.store)
    first = choose(state, query, jnp.int32(0))
    found = merge(kept, *attend_read(state, query, first))
    missing = missing_share(state, query, first.taken, found)
    rounds = jnp.ones(query.shape[0], jnp.int32)
    if not stored:
        return found, missing, first.taken, rounds
    most = -(-stored // round_blocks(state))
    searching = lambda missing: largest_over_heads(jnp.max(missing, axis=(1, 2))) > target  # noqa: E731

    def step(carry):
        number, found, missing, taken, rounds = carry
        more = searching(missing)
        read = choose(state, query, number)
        next_found = merge(found, *attend_read(state, query, read))
        next_missing = missing_share(state, query, read.taken, next_found)

        def pick(new, old):
            return jnp.where(more.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return (
            number + 1,
            jax.tree.map(pick, next_found, found),
            pick(next_missing, missing),
            pick(read.taken, taken),
            rounds + more,
        )

    running = lambda carry: (carry[0] < most) & jnp.any(searching(carry[2]))  # noqa: E731
    carry = (jnp.int32(1), found, missing, first.taken, rounds)
    return jax.lax.while_loop(running, step, carry)[1:]


def _log_count(count: Int[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), -jnp.inf)
