"""ClusterKV, its variant and Quest against float64 references that follow the papers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import kvjax
from kvjax.budget import row_bytes
from kvjax.segment import BlockStoreRead
from tests.kvjax.support import each, make_spec, row_keys

ROWS, KV_HEADS, GROUP, DIM = 2, 2, 2, 8
PROMPT, NEW = 150, 60
LENGTHS = (150, 61)
SINKS, RECENT, CHUNK_TOKENS, CHUNK_CLUSTERS, STAGED = 3, 5, 16, 2, 10
BUDGET = SINKS + RECENT + 37
SPEC = make_spec(ROWS, PROMPT, NEW, head_dim=DIM, rope_frequencies=None)
SIZES = {"sinks": SINKS, "recent": RECENT, "chunk_tokens": CHUNK_TOKENS, "chunk_clusters": CHUNK_CLUSTERS}
SIZES["compact_every"] = STAGED


def clusterkv(budget=BUDGET, **options):
    return kvjax.ClusterKV(budget, **SIZES | options)


def residual(budget=BUDGET, **options):
    return kvjax.ClusterKVResidual(budget, **SIZES | {"cluster_tokens": 9} | options)


def quest(budget=50, **options):
    return kvjax.Quest(budget, **options, compact_every=STAGED)


def make_tokens(kind, seed=0):
    """Keys and values [B, N, H_kv, D] of PROMPT + NEW tokens."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, PROMPT + NEW, KV_HEADS, DIM)
    keys, values = rng.normal(size=(2, *shape)).astype(np.float32)
    if kind == "equal":  # one cluster has all tokens; integers make its mean exact
        keys[:] = np.round(2 * keys[:1, :1, :1])
    if kind == "ties":  # few distinct keys, so that many clusters are equal
        keys = rng.integers(-1, 2, shape).astype(np.float32) * (np.arange(DIM) < 2)
    if kind == "outlier":  # all keys but 20 are nearly equal
        keys[:, 20:] = keys[:, 20:21] + 0.01 * keys[:, 20:]
    return keys, values


def make_queries(count=1, seed=3, scale=1.0):
    return scale * np.random.default_rng(seed).normal(size=(ROWS, count, KV_HEADS * GROUP, DIM)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def prefill(policy, spec, keys, values):
    empty, lengths = kvjax.init(policy, spec, row_keys(spec.batch)), jnp.array(LENGTHS[: spec.batch])
    return kvjax.prefill(*empty, keys[:, :PROMPT], values[:, :PROMPT], lengths)[:2]


@jax.jit
def append(cache, counters, keys, values):
    """Appends one token per row, and compacts a full staging buffer."""
    cache, counters = kvjax.append(cache, counters, keys, values)
    full = counters.offset == counters.slots
    return jax.lax.cond(full, kvjax.compact, lambda *same: same, cache, counters)


@jax.jit
def attend(cache, counters, query):
    return kvjax.normalize(kvjax.attend(cache, counters, query))


def softmax_attention(query, keys, values, count=1.0):
    weight = count * np.exp(keys @ query / np.sqrt(DIM))
    return weight @ values / weight.sum()


def steps(policy, keys, values, new=NEW):
    """Yields the cache after the prompt and after every appended token, its counters, and each row's tokens."""
    state = prefill(policy, SPEC, keys, values)
    yield *state, np.array(LENGTHS)
    for number in range(new):
        place = np.array(LENGTHS) + number
        state = append(*state, *(part[np.arange(ROWS), place][:, None] for part in (keys, values)))
        yield *state, place + 1


def window_tokens(cache, counters, total):
    """Returns the positions of each row's sinks, recent, pending and staged tokens."""
    state, positions = cache.state, []
    staged, pending = np.asarray(counters.count), np.asarray(state.pending)
    for row in range(ROWS):
        sinks = min(state.window.sinks, total[row] - staged[row])
        recent = min(state.window.recent, total[row] - staged[row] - sinks)
        newest = recent + pending[row] + staged[row]
        positions.append(np.concatenate([np.arange(sinks), np.arange(total[row] - newest, total[row])]))
    return positions


def clusters_of(cache, row, head):
    """Returns the positions of every cluster's tokens, in the order of their slots."""
    state = cache.state
    position = np.asarray(state.store.position)[row, head].reshape(-1)
    size, first = np.asarray(state.clusters.size)[row, head], np.asarray(state.clusters.first_block)[row, head]
    begin = state.store.position.shape[3] * first
    return [position[b : b + n] for n, b in zip(size, begin, strict=True)]


@pytest.mark.parametrize("kind", ["normal", "equal", "ties", "outlier"])
@pytest.mark.parametrize("make", [clusterkv, residual])
def test_clusters_are_a_partition_at_every_step(make, kind):
    keys, values = make_tokens(kind)
    heads = list(np.ndindex(ROWS, KV_HEADS))
    for number, (cache, counters, total) in enumerate(steps(make(), keys, values)):
        if number % 7 and number < NEW - 2:
            continue
        kvjax.raise_faults((cache, counters))
        for row, head in heads:
            clusters = clusters_of(cache, row, head)
            positions = np.concatenate([*clusters, window_tokens(cache, counters, total)[row]])
            np.testing.assert_array_equal(np.sort(positions), np.arange(total[row]))
            assert (np.asarray(cache.state.store.position)[row, head] >= 0).sum() == sum(map(len, clusters))
            for cluster, tokens in enumerate(clusters):
                assert (np.diff(tokens) > 0).all()  # so that a cut cluster loses its newest tokens
                if len(tokens):
                    mean = keys[row, tokens, head].astype(np.float64).mean(axis=0)
                    np.testing.assert_allclose(cache.state.clusters.mean_key[row, head, cluster], mean, atol=1e-5)
    pending = total - SINKS - RECENT - np.maximum(np.array(LENGTHS) - SINKS - RECENT, 0)
    np.testing.assert_array_equal(cache.state.chunks, pending // CHUNK_TOKENS)
    for row, head in heads:
        later = clusters_of(cache, row, head)[cache.state.prompt_clusters :]
        for chunk in range(int(cache.state.chunks[row])):
            tokens = np.sort(np.concatenate(later[CHUNK_CLUSTERS * chunk : CHUNK_CLUSTERS * (chunk + 1)]))
            begin = LENGTHS[row] - RECENT + CHUNK_TOKENS * chunk
            np.testing.assert_array_equal(tokens, begin + np.arange(CHUNK_TOKENS))


@pytest.mark.parametrize("padded", each((1, 32, SINKS, SINKS + 1, PROMPT), quick=(1, 32)))
def test_clusters_do_not_depend_on_the_padding_of_prompts(padded):
    keys, values = make_tokens("normal")
    lengths = jnp.array([min(padded, 20), 1])
    short, long = (
        kvjax.prefill(*kvjax.init(clusterkv(), SPEC, row_keys(ROWS)), keys[:, :size], values[:, :size], lengths)[0]
        for size in (padded, PROMPT)
    )
    np.testing.assert_array_equal(short.state.store.position, long.state.store.position)
    stored = np.asarray(short.state.store.position >= 0).sum(axis=(1, 2, 3))
    np.testing.assert_array_equal(stored, KV_HEADS * np.maximum(np.asarray(lengths) - SINKS - RECENT, 0))


def cut_clusters(clusters, order, policy):
    """Returns the tokens that are read of each cluster, in order.

    A query reads up to the budget, in at most the blocks that clusters of average size need (8 tokens of a chunk).
    """
    tokens, block_size = policy.budget - SINKS - RECENT, policy.block_size or 1
    blocks = -(-tokens // block_size) - (-tokens // 8) if policy.budget < 400 else 10**6
    parts = []
    for cluster in order:
        parts.append(clusters[cluster][: min(tokens, block_size * blocks)])
        tokens -= len(parts[-1])
        blocks -= -(-len(parts[-1]) // block_size)
    return parts


def expected_attention(cache, counters, total, keys, values, queries, row):
    """Returns the attention of one token's queries [H_q, D] in float64, from the clusters of the cache."""
    outputs, policy = [], cache.policy
    is_residual = isinstance(policy, kvjax.ClusterKVResidual)
    for head in range(KV_HEADS):
        clusters = clusters_of(cache, row, head)
        k, v = keys[row, :, head].astype(np.float64), values[row, :, head].astype(np.float64)
        mean_key, mean_value = (
            np.array([x[tokens].mean(axis=0) if len(tokens) else np.zeros(DIM) for tokens in clusters]) for x in (k, v)
        )
        group = queries[head * GROUP : (head + 1) * GROUP].astype(np.float64)
        logits, sizes = group @ mean_key.T / np.sqrt(DIM), np.array([len(tokens) for tokens in clusters])
        if is_residual:
            squares = [np.sum((k[t] - mean) ** 2) for t, mean in zip(clusters, mean_key, strict=True)]
            deviation = np.sqrt(squares / np.maximum(sizes, 1))
            logits += policy.score_stddevs * np.linalg.norm(group, axis=1, keepdims=True) * deviation / DIM
            mass = np.exp(logits) / (np.exp(logits) * sizes).sum(axis=1, keepdims=True)
            logits = np.repeat(mass.sum(axis=0)[None], GROUP, axis=0)
        for query, score in zip(group, logits, strict=True):
            order = np.argsort(-score, kind="stable")
            parts = cut_clusters(clusters, order, policy)
            read = np.concatenate([window_tokens(cache, counters, total)[row], *parts])
            left = sizes[order] - [len(part) for part in parts] if is_residual else np.zeros(len(order))
            entries = [np.concatenate([x[read], mean[order]]) for x, mean in ((k, mean_key), (v, mean_value))]
            outputs.append(softmax_attention(query, *entries, np.concatenate([np.ones(len(read)), left])))
    return np.array(outputs)


@pytest.mark.parametrize("kind", each(["normal", "equal", "outlier"], quick=["normal", "outlier"]))
@pytest.mark.parametrize(
    "policy",
    [
        residual(SINKS + RECENT, score_stddevs=0.0),
        residual(score_stddevs=0.5),
        residual(score_stddevs=2.0, block_size=4),
        residual(400),
        clusterkv(SINKS + RECENT + 4),  # less than a cluster
        clusterkv(),
        clusterkv(block_size=16),
        clusterkv(400, clusters=7, kmeans_init="random"),
    ],
    ids=str,
)
def test_queries_read_clusters_in_order_up_to_the_budget(kind, policy):
    keys, values = make_tokens(kind)
    queries = make_queries(NEW, seed=5, scale=3)
    for number, (*state, total) in enumerate(steps(policy, keys, values, new=31)):
        if number in (0, 20, 31):
            outputs = attend(*state, queries[:, number : number + 1])
            for row in range(ROWS):
                expected = expected_attention(*state, total, keys, values, queries[row, number], row)
                np.testing.assert_allclose(outputs[row, 0], expected, atol=2e-5)


def test_the_first_two_layers_are_full():
    policy, full = kvjax.ClusterKV(40, block_size=1), kvjax.Exact()
    for layer in range(4):
        spec = dataclasses.replace(SPEC, layer=layer, layers=4)
        assert policy.for_layer(spec) == (full if layer < 2 else policy)
        assert (row_bytes(policy, spec) == row_bytes(full, spec)) == (layer < 2)
        everywhere = dataclasses.replace(policy, full_layers=0)
        assert everywhere.for_layer(spec) == everywhere
        host = kvjax.HostMemory(policy).for_layer(spec)
        assert host == (full if layer < 2 else kvjax.HostMemory(policy))
    # A model of at most two layers would not be compressed.
    assert policy.for_layer(SPEC) == policy == policy.for_layer(dataclasses.replace(SPEC, layers=2))


def test_large_clusters_are_stored_in_blocks_that_kernels_read():
    for tokens, block_size in ((1024, 1), (16384, 1), (32768, 16)):
        spec = dataclasses.replace(SPEC, max_prompt_tokens=tokens)
        assert kvjax.ClusterKV(1000).for_layer(spec).block_size == block_size
        assert kvjax.ClusterKV(1000, block_size=1).for_layer(spec).block_size == 1
    choice = kvjax.PolicyChoice.parse("clusterkv:full_layers=1@40 slots")
    assert choice.make() == kvjax.ClusterKV(40, full_layers=1)


@pytest.mark.parametrize(
    "tokens, clusters", [(0, 0), (5, 1), (800, 100), (3200, 400), (7500, 400), (32_000, 400), (64_000, 800)]
)
def test_the_number_of_clusters_follows_the_paper_and_its_code(tokens, clusters):
    policy = kvjax.ClusterKV(100)
    assert policy.num_clusters(tokens) == policy.num_clusters(jnp.int32(tokens)) == clusters
    assert kvjax.ClusterKV(100, clusters=400).num_clusters(tokens) == min(tokens, 400)


@pytest.mark.parametrize(
    "policy, min_fraction", [(clusterkv(60, clusters=40), 1), (residual(60, cluster_tokens=4), 0.9)]
)
def test_small_clusters_are_read_up_to_the_budget(policy, min_fraction):
    """Clusters of three tokens fill their blocks of 16 poorly; the number of blocks allows for that."""
    cache, _ = prefill(policy, SPEC, *make_tokens("normal"))
    (read,) = (one for one in policy.segments(cache.state, None) if isinstance(one, BlockStoreRead))
    tokens = np.asarray(read.select(jnp.asarray(make_queries())).block_lengths.sum(axis=-1))
    # The clusters of the shorter prompt are smaller than average, which matters in blocks of several tokens.
    if (policy.block_size or 1) > 1:
        tokens = tokens[:1]
    budget = 60 - SINKS - RECENT
    assert tokens.max() <= budget and tokens.mean() >= min_fraction * budget


def test_the_released_accuracy_study_does_not_cluster_later_tokens():
    policy = kvjax.ClusterKV(60, clusters=7, chunk_tokens=None, compact_every=STAGED)
    *_, (cache, *_) = steps(policy, *make_tokens("normal"), new=40)
    assert cache.state.store.position.max() < PROMPT
    assert (cache.state.prompt_clusters, cache.state.max_chunks) == (7, 0)
    np.testing.assert_array_equal(cache.state.pending, [40, 40])


# --- quest ---


@pytest.mark.parametrize("budget, select", [(1, "query_head"), (50, "query_head"), (95, "query_head"), (50, "group")])
def test_quest_reads_the_pages_of_largest_bounds(budget, select):
    keys, values = make_tokens("normal")
    queries = make_queries(NEW + 1, seed=5, scale=3)
    for number, (cache, counters, total) in enumerate(steps(quest(budget, select=select), keys, values)):
        if number not in (0, 9, 33, NEW):
            continue
        kvjax.raise_faults((cache, counters))
        outputs = attend(cache, counters, queries[:, number : number + 1])
        compacted = total - np.asarray(counters.count)
        for row, head in np.ndindex(ROWS, KV_HEADS * GROUP):
            k, v = (x[row, : total[row], head // GROUP].astype(np.float64) for x in (keys, values))
            q = queries[row, number, head].astype(np.float64)
            pages = compacted[row] // 16
            paged = k[: 16 * pages].reshape(pages, 16, DIM)
            first = head // GROUP * GROUP
            scoring = queries[row, number, first : first + GROUP] if select == "group" else q[None]
            bound = np.maximum(scoring[:, None] * paged.min(axis=1), scoring[:, None] * paged.max(axis=1)).sum(axis=2)
            score = scipy.special.softmax(bound / np.sqrt(DIM), axis=1).sum(axis=0)
            best = np.argsort(-score, kind="stable")[: max(3, budget // 16)]
            read = np.concatenate([*(16 * page + np.arange(16) for page in best), np.arange(16 * pages, total[row])])
            expected = softmax_attention(q, k[read], v[read])
            np.testing.assert_allclose(outputs[row, 0, head], expected, atol=2e-5)


def test_a_group_that_selects_together_reads_its_pages_once():
    keys, values = make_tokens("normal")
    separate, shared = (
        kvjax.read_bytes(prefill(quest(select=select), SPEC, keys, values)[0]) for select in ("query_head", "group")
    )
    page_bytes = 50 // 16 * 16 * 2 * DIM * 4
    assert separate - shared >= ROWS * KV_HEADS * (GROUP - 1) * page_bytes
