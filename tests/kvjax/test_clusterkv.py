"""ClusterKV and Quest against float64 references that are written from the papers."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from kvjax.policies.clusterkv_certified import ClusterKVCertified

import kvjax
from kvjax.attention import attend_with_stats
from kvjax.budget import row_bytes
from kvjax.policies.clusterkv_paper import ClusterKVPaper
from kvjax.policies.clusterkv_reference import ClusterKVReference
from kvjax.stores.staging import Tokens, staged
from tests.kvjax.support import make_spec, row_keys

ROWS, KV_HEADS, GROUP, DIM = 2, 2, 2, 8
PROMPT, NEW = 150, 60
LENGTHS = (150, 61)
SINKS, RECENT, EVERY, CHUNK_CLUSTERS, STAGED = 3, 5, 16, 2, 10
BUDGET = SINKS + RECENT + 37
SPEC = make_spec(
    ROWS, PROMPT, NEW, query_heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_dim=DIM, rope_frequencies=None
)


SIZES = {"sinks": SINKS, "recent": RECENT, "cluster_tokens": 9, "chunk_tokens": EVERY, "chunk_clusters": CHUNK_CLUSTERS}
SIZES |= {"reach": 0.0}


def clusterkv(budget=BUDGET, **options):
    return kvjax.ClusterKV(budget, **SIZES | options, compact_every=STAGED)


def certified(budget=BUDGET, **options):
    return ClusterKVCertified(budget, **SIZES | options, compact_every=STAGED)


def quest(budget=50, **options):
    return kvjax.Quest(budget, **options, compact_every=STAGED)


def make_tokens(kind, seed=0):
    """Keys and values [B, N, H_kv, D] of PROMPT + NEW tokens."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, PROMPT + NEW, KV_HEADS, DIM)
    keys, values = rng.normal(size=(2, *shape)).astype(np.float32)
    if kind == "equal":  # one huge cluster, all others empty
        keys[:] = np.round(2 * keys[:1, :1, :1])  # whose means are exact
    if kind == "ties":  # few distinct keys, so many clusters coincide
        keys = rng.integers(-1, 2, shape).astype(np.float32) * (np.arange(DIM) < 2)
    if kind == "outlier":  # all but a few alike
        keys[:, 20:] = keys[:, 20:21] + 0.01 * keys[:, 20:]
    return keys, values


def every_policy(*policies):
    return pytest.mark.parametrize("policy", policies, ids=lambda policy: type(policy).__name__)


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def prefill(policy, spec, keys, values):
    cache, lengths = kvjax.init(policy, spec, row_keys(spec.batch)), jnp.array(LENGTHS[: spec.batch])
    return kvjax.prefill(cache, keys[:, :PROMPT], values[:, :PROMPT], lengths)[0]


@jax.jit
def append(cache, keys, values):
    """One token per row, then compaction where it is due."""
    cache = kvjax.append(cache, keys, values)
    return jax.lax.cond(cache.counters.offset == cache.spec.staging, kvjax.compact, lambda same: same, cache)


@jax.jit
def attended(cache, query):
    return kvjax.normalize(kvjax.attend(cache, query))


step = jax.jit(kvjax.step)


def next_tokens(number, *parts):
    """Of each part [B, N, ...] every row's token that comes so many after its prompt."""
    return [part[np.arange(ROWS), np.array(LENGTHS) + number][:, None] for part in parts]


def steps(policy, keys, values, spec=SPEC, new=NEW):
    """The cache after the prompt and after every appended token, with each row's number of tokens."""
    cache = prefill(policy, spec, keys, values)
    yield cache, np.array(LENGTHS)
    for number in range(new):
        cache = append(cache, *next_tokens(number, keys, values))
        yield cache, np.array(LENGTHS) + number + 1


def held(cache, total):
    """Positions of the tokens that the window shows of each row: sinks, recent, waiting and staged ones."""
    state, shown = cache.state, []
    staged_tokens, pending = np.asarray(cache.counters.count), np.asarray(state.pending)
    for row in range(ROWS):
        sinks = min(state.window.sinks, total[row] - staged_tokens[row])
        recent = min(state.window.recent, total[row] - staged_tokens[row] - sinks)
        newest = recent + pending[row] + staged_tokens[row]
        shown.append(np.concatenate([np.arange(sinks), np.arange(total[row] - newest, total[row])]))
    return shown


def clusters_of(cache, row, head):
    """Positions of every cluster's tokens, in the order in which they lie."""
    state = cache.state
    position = np.asarray(state.store.position)[row, head].reshape(-1)
    size, first = np.asarray(state.clusters.size)[row, head], np.asarray(state.clusters.first)[row, head]
    begin = state.store.position.shape[3] * first
    return [position[b : b + n] for n, b in zip(size, begin, strict=True)]


@pytest.mark.parametrize("kind", ["normal", "equal", "ties", "outlier"])
def test_clusters_are_a_partition_at_every_step(kind):
    keys, values = make_tokens(kind)
    for number, (cache, total) in enumerate(steps(clusterkv(), keys, values)):
        if number % 7 and number < NEW - 2:
            continue
        kvjax.raise_faults(cache)
        for row, head in itertools.product(range(ROWS), range(KV_HEADS)):
            clusters = clusters_of(cache, row, head)
            stored = np.asarray(cache.state.store.position)[row, head]
            everything = np.concatenate([*clusters, held(cache, total)[row]])
            np.testing.assert_array_equal(np.sort(everything), np.arange(total[row]))
            assert (stored >= 0).sum() == sum(map(len, clusters))  # nothing lies outside of the clusters
            own = cache.state.clusters
            for cluster, tokens in enumerate(clusters):
                assert (np.diff(tokens) > 0).all()  # in the order of the text, so that cutting loses the latest
                if len(tokens):
                    mean = keys[row, tokens, head].astype(np.float64).mean(axis=0)
                    np.testing.assert_allclose(own.mean_key[row, head, cluster], mean, atol=1e-5)
                    distance = np.linalg.norm(keys[row, tokens, head] - mean, axis=1).max()
                    np.testing.assert_allclose(own.radius[row, head, cluster], distance, atol=1e-5)
    assert (np.asarray(cache.state.chunks) == np.asarray(total - SINKS - RECENT - np.maximum(
        np.array(LENGTHS) - SINKS - RECENT, 0)) // EVERY).all()  # fmt: skip


def test_generated_tokens_are_clustered_among_themselves_a_chunk_at_a_time():
    keys, values = make_tokens("normal")
    *_, (cache, _) = steps(clusterkv(), keys, values)
    for row, head in itertools.product(range(ROWS), range(KV_HEADS)):
        clusters = clusters_of(cache, row, head)
        later = clusters[cache.state.prompt_clusters :]
        begin = LENGTHS[row] - RECENT
        for chunk in range(int(cache.state.chunks[row])):
            tokens = np.sort(np.concatenate(later[CHUNK_CLUSTERS * chunk : CHUNK_CLUSTERS * (chunk + 1)]))
            np.testing.assert_array_equal(tokens, begin + EVERY * chunk + np.arange(EVERY))


@pytest.mark.parametrize(
    "padded", [1, 32, *(pytest.param(size, marks=pytest.mark.heavy) for size in (SINKS, SINKS + 1, PROMPT))]
)
def test_prompts_are_clustered_alike_however_they_are_padded(padded):
    keys, values = make_tokens("normal")
    lengths = jnp.array([min(padded, 20), 1])
    short, long = (
        kvjax.prefill(kvjax.init(clusterkv(), SPEC, row_keys(ROWS)), keys[:, :size], values[:, :size], lengths)[0]
        for size in (padded, PROMPT)
    )
    np.testing.assert_array_equal(short.state.store.position, long.state.store.position)
    stored = np.asarray(short.state.store.position >= 0).sum(axis=(1, 2, 3))
    np.testing.assert_array_equal(stored, KV_HEADS * np.maximum(np.asarray(lengths) - SINKS - RECENT, 0))


def read_in_order(clusters, order, budget, block_size=16):
    """The tokens that are read of each cluster, in that order: up to the budget, in no more blocks than it takes in
    clusters of average size (9 tokens of a prompt, 8 of a chunk)."""
    tokens = budget - SINKS - RECENT
    blocks = -(-tokens // block_size) - (-tokens // 8) if budget < 400 else 10**6
    taken = []
    for cluster in order:
        taken.append(clusters[cluster][: min(tokens, block_size * blocks)])
        tokens -= len(taken[-1])
        blocks -= -(-len(taken[-1]) // block_size)
    return taken


def by_numpy(cache, total, keys, values, query, row, *, budget, select, residual, score_stddevs, block_size):
    """Attention of one token's queries [H_q, D] in float64, from the clusters of the cache."""
    out = []
    for head in range(KV_HEADS):
        clusters = clusters_of(cache, row, head)
        k, v = keys[row, :, head].astype(np.float64), values[row, :, head].astype(np.float64)
        mean_key, mean_value = (
            [x[tokens].mean(axis=0) if len(tokens) else np.zeros(DIM) for tokens in clusters] for x in (k, v)
        )
        asked = query[head * GROUP : (head + 1) * GROUP].astype(np.float64)
        logits = asked @ np.array(mean_key).T / np.sqrt(DIM)
        sizes = np.array([len(tokens) for tokens in clusters])
        away = [
            np.mean(np.sum((k[t] - mean) ** 2, axis=1)) if len(t) else 0
            for t, mean in zip(clusters, mean_key, strict=True)
        ]
        logits += score_stddevs * np.linalg.norm(asked, axis=1, keepdims=True) * np.sqrt(away) / DIM
        if select == "group":
            mass = np.exp(logits) / (np.exp(logits) * sizes).sum(axis=1, keepdims=True)
            logits = np.repeat(mass.sum(axis=0)[None], GROUP, axis=0)
        for one, score in zip(asked, logits, strict=True):
            order = np.argsort(-score, kind="stable")
            entries = [(k[t], v[t], 1.0) for t in held(cache, total)[row]]
            for cluster, taken in zip(order, read_in_order(clusters, order, budget, block_size), strict=True):
                entries += [(k[t], v[t], 1.0) for t in taken]
                if residual and sizes[cluster] > len(taken):
                    entries.append((mean_key[cluster], mean_value[cluster], sizes[cluster] - len(taken)))
            weight = np.array([n * np.exp(e @ one / np.sqrt(DIM)) for e, _, n in entries])
            out.append(weight @ np.array([e for _, e, _ in entries]) / weight.sum())
    return np.array(out)


@pytest.mark.parametrize("kind", ["normal", "equal", "outlier"])
@pytest.mark.parametrize(
    "budget, options",
    [
        (SINKS + RECENT, {}),
        (SINKS + RECENT + 4, {"select": "query_head", "residual": False}),  # less than a cluster
        (BUDGET, {"select": "query_head", "reach": 2.0}),
        (BUDGET, {"residual": False, "reach": 0.5}),
        (BUDGET, {"places": 4}),
        (BUDGET, {"select": "query_head", "residual": False, "places": 1}),
        (400, {}),
    ],
)
def test_a_query_reads_whole_clusters_in_order_up_to_the_budget(kind, budget, options):
    options = {"select": "group", "residual": True, "reach": 0.0, "places": 16} | options
    policy = clusterkv(budget, **options)
    (keys, values), query = (
        make_tokens(kind),
        3 * np.random.default_rng(5).normal(size=(ROWS, NEW, KV_HEADS * GROUP, DIM)),
    )
    query = query.astype(np.float32)
    for number, (cache, total) in enumerate(steps(policy, keys, values, new=31)):
        if number in (0, 20, 31):
            out = attended(cache, query[:, number : number + 1])
            for row in range(ROWS):
                expected = by_numpy(cache, total, keys, values, query[row, number], row, budget=budget, **options)
                np.testing.assert_allclose(out[row, 0], expected, atol=2e-5)


@pytest.mark.parametrize("count", [5, pytest.param(9, marks=pytest.mark.heavy)])
@every_policy(clusterkv(), clusterkv(select="query_head", residual=False), quest())
def test_several_queries_at_once_read_what_each_reads_alone(policy, count):
    (keys, values), rng = make_tokens("normal"), np.random.default_rng(5)
    *_, (cache, _) = steps(policy, keys, values, new=3)
    query = 3 * rng.normal(size=(ROWS, count, KV_HEADS * GROUP, DIM)).astype(np.float32)
    together = attended(cache, query)
    for number in range(count):
        alone = attended(cache, query[:, number : number + 1])
        np.testing.assert_allclose(together[:, number], alone[:, 0], atol=1e-6)


def true_share(cache, total, keys, query, row, *, budget, select):
    """The share of attention's mass, by query head, on tokens that a query [H_q, D] does not read."""
    missing = []
    for head in range(KV_HEADS):
        k = keys[row, : total[row], head].astype(np.float64)
        clusters = clusters_of(cache, row, head)
        means = np.array([k[tokens].mean(axis=0) if len(tokens) else np.zeros(DIM) for tokens in clusters])
        sizes = np.array([len(tokens) for tokens in clusters])
        asked = query[head * GROUP : (head + 1) * GROUP].astype(np.float64)
        score = np.exp(asked @ means.T / np.sqrt(DIM))
        if select == "group":
            score = np.repeat((score / (score * sizes).sum(axis=1, keepdims=True)).sum(axis=0)[None], GROUP, axis=0)
        for one, order in zip(asked, np.argsort(-score, axis=1, kind="stable"), strict=True):
            read = set(np.concatenate([held(cache, total)[row], *read_in_order(clusters, order, budget)]).tolist())
            mass = np.exp(k @ one / np.sqrt(DIM))
            missing.append(mass[[t for t in range(total[row]) if t not in read]].sum() / mass.sum())
    return np.array(missing)


@jax.jit
def bound(cache, query):
    """What every query's certificate says of the share that it misses [B, T, H_q]."""
    num_visible_staged = cache.counters.count[:, None]
    reading = (cache.policy.segments(cache.state, num_visible_staged), staged(cache.staging, 1))
    _, ((_, recall), _) = attend_with_stats(query, reading, None, kv_heads=KV_HEADS)
    return recall.missing


@pytest.mark.parametrize("kind", ["normal", "equal", "outlier"])
@pytest.mark.parametrize(
    "select, dtype",
    [("query_head", jnp.float32), ("group", jnp.bfloat16)],
    ids=["query_head-float32", "group-bfloat16"],
)
def test_no_more_mass_is_missing_than_is_certified(kind, select, dtype):
    policy, spec = certified(select=select), dataclasses.replace(SPEC, dtype=dtype)
    keys, values = make_tokens(kind)
    keys = np.array(jnp.asarray(keys, dtype).astype(jnp.float32))  # attention is to what is stored
    query = np.random.default_rng(3).normal(size=(ROWS, NEW, KV_HEADS * GROUP, DIM)).astype(np.float32)
    tightest = 1.0
    for number, (cache, total) in enumerate(steps(policy, keys, values, spec, new=22)):
        if number % 11:
            continue
        for length in (0, 0.1, 1, 8):
            missing = np.asarray(bound(cache, length * query[:, number : number + 1]))[:, 0]
            for row in range(ROWS):
                share = true_share(cache, total, keys, length * query[row, number], row, budget=BUDGET, select=select)
                assert (missing[row] >= share - 1e-6).all()
                tightest = min(tightest, float((missing[row] - share).min()))
    assert tightest < 1e-3  # a query of zeros misses exactly its share of the tokens


def test_a_step_leaves_its_certificate_in_the_state():
    keys, values = make_tokens("normal")
    query = np.random.default_rng(3).normal(size=(ROWS, NEW, KV_HEADS * GROUP, DIM)).astype(np.float32)
    cache = prefill(certified(), SPEC, keys, values)
    assert not np.asarray(cache.state.certificate.missing).any()
    for number in range(3):
        _, cache = step(cache, query[:, number : number + 1], *next_tokens(number, keys, values))
        missing = np.asarray(cache.state.certificate.missing)
        np.testing.assert_allclose(missing, bound(cache, query[:, number : number + 1])[:, 0], rtol=1e-5)
        for row in range(ROWS):
            share = true_share(
                cache, np.array(LENGTHS) + number + 1, keys, query[row, number], row, budget=BUDGET, select="group"
            )
            assert (missing[row] >= share - 1e-6).all()
    assert np.asarray(cache.state.certificate.steps).tolist() == [3, 3]
    # Of several tokens at once the last one's queries count, and without a target each recalls once.
    parts = [np.concatenate(x, axis=1) for x in zip(*(next_tokens(n, keys, values) for n in (3, 4)), strict=True)]
    _, cache = step(cache, query[:, 3:5], *parts)
    np.testing.assert_allclose(cache.state.certificate.missing, bound(cache, query[:, 4:5])[:, 0], rtol=1e-5)
    assert np.asarray(cache.state.certificate.steps).tolist() == [5, 5]
    assert np.asarray(cache.state.certificate.rounds).tolist() == [5, 5]


def test_a_certificate_of_everything_read_is_zero():
    *_, (cache, _) = steps(certified(400), *make_tokens("normal"), new=3)
    assert not np.asarray(bound(cache, np.ones((ROWS, 2, KV_HEADS * GROUP, DIM), np.float32))).any()


def test_a_certificate_changes_no_attention():
    keys, values = make_tokens("normal")
    query = np.random.default_rng(3).normal(size=(ROWS, 2, KV_HEADS * GROUP, DIM)).astype(np.float32)
    plain, bounded = (attended(prefill(policy, SPEC, keys, values), query) for policy in (clusterkv(), certified()))
    np.testing.assert_allclose(plain, bounded, atol=1e-6)


TARGETS = {target: certified(SINKS + RECENT + 20, target=target) for target in (0.0, 0.3)}


@pytest.mark.parametrize("target", TARGETS)
def test_recall_goes_on_until_the_target(target):
    keys, values = make_tokens("normal")
    query = np.random.default_rng(3).normal(size=(ROWS, 1, KV_HEADS * GROUP, DIM)).astype(np.float32)
    query[1] *= 0.01  # so this row's bound is near the share of tokens
    *_, (before, _) = steps(TARGETS[target], keys, values, new=11)
    *_, (of_all, _) = steps(kvjax.Exact(STAGED), keys, values, new=11)
    newest = next_tokens(11, keys, values)
    output, cache = step(before, query, *newest)
    exact, _ = step(of_all, query, *newest)
    certificate = cache.state.certificate
    assert (np.asarray(certificate.missing) <= target).all()
    stored = cache.state.store.position.shape[2]
    rounds = np.asarray(certificate.rounds)
    assert (np.asarray(certificate.steps) == 1).all() and (rounds >= 1).all() and (rounds <= -(-stored // 2)).all()
    if target == 0:
        np.testing.assert_allclose(output, exact, atol=1e-5)
    else:
        assert rounds[0] != rounds[1]  # each row its own
        assert np.abs(np.asarray(output - exact)).max() <= 2 * target * np.linalg.norm(values, axis=-1).max()
    # Rows that appended nothing learn nothing.
    _, idle = step(cache, query, *newest, jnp.array([1, 0]))
    certificate = idle.state.certificate
    np.testing.assert_array_equal(certificate.steps, [2, 1])
    assert int(certificate.rounds[1]) == rounds[1]
    np.testing.assert_array_equal(certificate.missing[1], cache.state.certificate.missing[1])


def test_a_row_recalls_as_if_alone():
    keys, values = make_tokens("normal")
    query = np.random.default_rng(3).normal(size=(ROWS, 1, KV_HEADS * GROUP, DIM)).astype(np.float32)
    together = attended(prefill(TARGETS[0.3], SPEC, keys, values), query)
    alone = prefill(TARGETS[0.3], dataclasses.replace(SPEC, batch=1), keys[:1], values[:1])
    np.testing.assert_allclose(attended(alone, query[:1]), together[:1], atol=1e-5)


@every_policy(clusterkv(), certified(), quest())
def test_more_tokens_than_there_is_room_for_are_counted(policy):
    """A cache takes no token past its spec; a policy that is given more than it has room for counts them itself."""
    keys, values = make_tokens("normal")
    full = cache = prefill(policy, SPEC, keys, values)
    for number in range(NEW + 50):
        cache = append(cache, keys[:, number : number + 1], values[:, number : number + 1])
    with pytest.raises(ValueError, match=r"past max_prompt_tokens \+ max_new_tokens.* \(50 in all\)"):
        kvjax.raise_faults(cache)
    assert np.isnan(attended(cache, np.ones((ROWS, 1, KV_HEADS * GROUP, DIM), np.float32))[0]).all()

    @jax.jit
    def compact(state, keys, values, first):
        count = jnp.full(ROWS, STAGED)
        slot = jnp.broadcast_to(jnp.arange(STAGED), (ROWS, STAGED))
        return policy.compact(state, Tokens(keys.swapaxes(1, 2), values.swapaxes(1, 2), count, first, slot))

    state = full.state
    for number in range(0, NEW + 50, STAGED):
        part = slice(number, number + STAGED)
        state = compact(state, keys[:, part], values[:, part], np.array(LENGTHS, np.int32) + number)
    with pytest.raises(ValueError, match="full cache"):
        kvjax.raise_faults(state)


def test_first_layers_may_keep_all():
    policy = kvjax.FirstLayers(1, kvjax.ClusterKV(40))
    spec = dataclasses.replace(SPEC, layers=2)
    assert row_bytes(policy, spec) == row_bytes(kvjax.Exact(), spec)
    assert row_bytes(policy, dataclasses.replace(spec, layer=1)) == row_bytes(kvjax.ClusterKV(40), spec)
    assert policy.is_retrieval


@pytest.mark.parametrize(
    "policy, least",
    [
        (ClusterKVPaper(60, cluster_tokens=4), 1),
        (ClusterKVReference(60, clusters=40), 1),
        (kvjax.ClusterKV(60, clusters=40), 0.9),
    ],
)
def test_small_clusters_are_read_up_to_the_budget(policy, least):
    """Clusters of three tokens in blocks of 16 would end at the blocks of a few large ones."""
    keys, values = make_tokens("normal")
    cache = prefill(policy, SPEC, keys, values)
    query = np.random.default_rng(3).normal(size=(ROWS, 1, KV_HEADS * GROUP, DIM)).astype(np.float32)
    _, recalled = policy.segments(cache.state, None)
    read = np.asarray(recalled.choose(jnp.asarray(query), None).tokens.sum(axis=-1))
    # Of a shorter prompt as many clusters are smaller still; token by token that is no matter.
    own = read if policy.block_size == 1 else read[:1]
    assert own.max() <= 44 and own.mean() >= least * 44


def test_the_released_code_clusters_no_later_tokens():
    policy = ClusterKVReference(60, clusters=7)
    keys, values = make_tokens("normal")
    *_, (cache, _) = steps(dataclasses.replace(policy, compact_every=STAGED), keys, values, new=40)
    assert cache.state.store.position.max() < PROMPT and cache.state.clusters.size.shape[2] == 7
    np.testing.assert_array_equal(cache.state.pending, [40, 40])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budget": 10}, "budget=10 slots cannot hold sinks=16"),
        ({"cluster_tokens": 0}, "cluster_tokens=0"),
        ({"chunk_tokens": 40}, "compact_every=64 must not exceed every=40"),
        ({"select": "heads"}, "select='heads'"),
        ({"turn_to": "means"}, "turn_to='means'"),
        ({"target": 1.0}, "target=1.0"),
        ({"chunk_clusters": 0}, "chunk_clusters=0"),
        ({"places": 0}, "block_size=0"),
        ({"reach": -1.0}, "score_stddevs=-1.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ClusterKVCertified(**({"budget": 100} | options))


# --- quest ---


@pytest.mark.parametrize("budget, select", [(1, "query_head"), (50, "query_head"), (95, "query_head"), (50, "group")])
def test_quest_reads_the_pages_of_largest_bounds(budget, select):
    (keys, values), rng = make_tokens("normal"), np.random.default_rng(5)
    query = 3 * rng.normal(size=(ROWS, NEW + 1, KV_HEADS * GROUP, DIM)).astype(np.float32)
    for number, (cache, total) in enumerate(steps(quest(budget, select=select), keys, values)):
        if number not in (0, 9, 33, NEW):
            continue
        kvjax.raise_faults(cache)
        out = attended(cache, query[:, number : number + 1])
        compacted = total - np.asarray(cache.counters.count)
        for row, head in np.ndindex(ROWS, KV_HEADS * GROUP):
            k, v = (x[row, : total[row], head // GROUP].astype(np.float64) for x in (keys, values))
            q = query[row, number, head].astype(np.float64)
            pages = compacted[row] // 16
            paged = k[: 16 * pages].reshape(pages, 16, DIM)
            first = head // GROUP * GROUP
            asking = query[row, number, first : first + GROUP] if select == "group" else q[None]
            bound = np.maximum(asking[:, None] * paged.min(axis=1), asking[:, None] * paged.max(axis=1)).sum(axis=2)
            score = scipy.special.softmax(bound / np.sqrt(DIM), axis=1).sum(axis=0)
            chosen = np.argsort(-score, kind="stable")[: max(3, budget // 16)]
            read = np.concatenate([*(16 * page + np.arange(16) for page in chosen), np.arange(16 * pages, total[row])])
            weight = np.exp(k[read] @ q / np.sqrt(DIM))
            np.testing.assert_allclose(out[row, 0, head], weight @ v[read] / weight.sum(), atol=2e-5)


def test_pages_of_a_group_are_read_once():
    keys, values = make_tokens("normal")
    apart, shared = (
        kvjax.read_bytes(prefill(quest(select=one), SPEC, keys, values)) for one in ("query_head", "group")
    )
    of_pages = 50 // 16 * 16 * 2 * DIM * 4
    assert apart - shared >= ROWS * KV_HEADS * (GROUP - 1) * of_pages
