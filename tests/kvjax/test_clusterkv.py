"""ClusterKV and Quest against float64 references that are written from the papers."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax.support import QUICKLY, make_spec, row_keys

ROWS, KV_HEADS, GROUP, DIM = 2, 2, 2, 8
PROMPT, NEW = 150, 60
LENGTHS = (150, 61)
SINKS, RECENT, EVERY, CHUNK_CLUSTERS, PERIOD = 3, 5, 16, 2, 10
BUDGET = SINKS + RECENT + 37
SPEC = make_spec(
    ROWS, PROMPT, NEW, query_heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_dim=DIM, rope_frequencies=None
)


@functools.cache
def policy(budget=BUDGET, **options):
    sizes = {"sinks": SINKS, "recent": RECENT, "cluster_tokens": 9, "every": EVERY, "chunk_clusters": CHUNK_CLUSTERS}
    return kvjax.clusterkv(budget, **sizes, period=PERIOD, **options)


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
    return pytest.mark.parametrize("made", policies, ids=lambda made: made.name)


@functools.partial(jax.jit, static_argnames=("made", "spec"), compiler_options=QUICKLY)
def prefill(made, spec, keys, values):
    lengths = jnp.array(LENGTHS[: spec.batch])
    return made.prefill(made.init(spec, row_keys(spec.batch)), keys[:, :PROMPT], values[:, :PROMPT], lengths)[0]


@functools.partial(jax.jit, static_argnames="made", compiler_options=QUICKLY)
def append(made, state, keys, values):
    """One token per row, then compaction where it is due."""
    state = made.extend(state, keys, values)
    return jax.lax.cond(state.window.staging.offset == made.period, made.compact, lambda same: same, state)


@functools.partial(jax.jit, static_argnames=("made", "causal"), compiler_options=QUICKLY)
def attended(made, state, query, causal=False):
    return kvjax.output(made.attend(state, query, causal)[0])


def steps(made, keys, values, spec=SPEC, new=NEW):
    """The state after the prompt and after every appended token, with each row's number of tokens."""
    state = prefill(made, spec, keys, values)
    yield state, np.array(LENGTHS)
    rows = np.arange(ROWS)
    for step in range(new):
        place = np.array(LENGTHS) + step
        state = append(made, state, keys[rows, place][:, None], values[rows, place][:, None])
        yield state, place + 1


def held(state, total):
    """Positions of the tokens that the window shows of each row: sinks, recent, waiting and staged ones."""
    staged, pending = np.asarray(state.window.staging.count), np.asarray(state.selection.pending)
    shown = []
    for row in range(ROWS):
        sinks = min(state.window.sinks, total[row] - staged[row])
        recent = min(state.window.recent, total[row] - staged[row] - sinks)
        newest = recent + pending[row] + staged[row]
        shown.append(np.concatenate([np.arange(sinks), np.arange(total[row] - newest, total[row])]))
    return shown


def clusters_of(state, row, head):
    """Positions of every cluster's tokens, in the order in which they lie."""
    position = np.asarray(state.selection.store.position)[row, head].reshape(-1)
    found = state.selection.index.clusters
    size, first = np.asarray(found.size)[row, head], np.asarray(found.first)[row, head]
    return [position[16 * b : 16 * b + n] for n, b in zip(size, first, strict=True)]


@pytest.mark.parametrize("kind", ["normal", "equal", "ties", "outlier"])
def test_clusters_are_a_partition_at_every_step(kind):
    keys, values = make_tokens(kind)
    for number, (state, total) in enumerate(steps(policy(), keys, values)):
        if number % 7 and number < NEW - 2:
            continue
        kvjax.check(state)
        for row, head in itertools.product(range(ROWS), range(KV_HEADS)):
            clusters = clusters_of(state, row, head)
            stored = np.asarray(state.selection.store.position)[row, head]
            everything = np.concatenate([*clusters, held(state, total)[row]])
            np.testing.assert_array_equal(np.sort(everything), np.arange(total[row]))
            assert (stored >= 0).sum() == sum(map(len, clusters))  # nothing lies outside of the clusters
            own = state.selection.index.clusters
            for cluster, tokens in enumerate(clusters):
                assert (np.diff(tokens) > 0).all()  # in the order of the text, so that cutting loses the latest
                if len(tokens):
                    mean = keys[row, tokens, head].astype(np.float64).mean(axis=0)
                    np.testing.assert_allclose(own.mean_key[row, head, cluster], mean, atol=1e-5)
                    distance = np.linalg.norm(keys[row, tokens, head] - mean, axis=1).max()
                    np.testing.assert_allclose(own.radius[row, head, cluster], distance, atol=1e-5)
    assert (np.asarray(state.selection.chunks) == np.asarray(total - SINKS - RECENT - np.maximum(
        np.array(LENGTHS) - SINKS - RECENT, 0)) // EVERY).all()  # fmt: skip


def test_generated_tokens_are_clustered_among_themselves_a_chunk_at_a_time():
    keys, values = make_tokens("normal")
    *_, (state, _) = steps(policy(), keys, values)
    for row, head in itertools.product(range(ROWS), range(KV_HEADS)):
        clusters = clusters_of(state, row, head)
        later = clusters[state.selection.index.prompt_clusters :]
        begin = LENGTHS[row] - RECENT
        for chunk in range(int(state.selection.chunks[row])):
            tokens = np.sort(np.concatenate(later[CHUNK_CLUSTERS * chunk : CHUNK_CLUSTERS * (chunk + 1)]))
            np.testing.assert_array_equal(tokens, begin + EVERY * chunk + np.arange(EVERY))


@pytest.mark.parametrize(
    "padded", [1, 32, *(pytest.param(size, marks=pytest.mark.heavy) for size in (SINKS, SINKS + 1, PROMPT))]
)
def test_prompts_are_clustered_alike_however_they_are_padded(padded):
    made, (keys, values) = policy(), make_tokens("normal")
    lengths = jnp.array([min(padded, 20), 1])
    states = [
        made.prefill(made.init(SPEC, row_keys(ROWS)), keys[:, :size], values[:, :size], lengths)[0]
        for size in (padded, PROMPT)
    ]
    for one, other in zip(*(jax.tree.leaves(state.selection.store.position) for state in states), strict=True):
        np.testing.assert_array_equal(one, other)
    stored = np.asarray(states[0].selection.store.position >= 0).sum(axis=(1, 2, 3))
    np.testing.assert_array_equal(stored, KV_HEADS * np.maximum(np.asarray(lengths) - SINKS - RECENT, 0))


def read_in_order(clusters, order, budget):
    """The tokens that are read of each cluster, in that order: up to the budget, in no more blocks of 16 than it takes
    in clusters of average size (9 tokens of a prompt, 8 of a chunk)."""
    tokens = budget - SINKS - RECENT
    blocks = -(-tokens // 16) - (-tokens // 8) if budget < 400 else 10**6
    taken = []
    for cluster in order:
        taken.append(clusters[cluster][: min(tokens, 16 * blocks)])
        tokens -= len(taken[-1])
        blocks -= -(-len(taken[-1]) // 16)
    return taken


def by_numpy(state, total, keys, values, query, row, *, budget, select, residual):
    """Attention of one token's queries [H_q, D] in float64, from the clusters of the state."""
    out = []
    for head in range(KV_HEADS):
        clusters = clusters_of(state, row, head)
        k, v = keys[row, :, head].astype(np.float64), values[row, :, head].astype(np.float64)
        mean_key, mean_value = (
            [x[tokens].mean(axis=0) if len(tokens) else np.zeros(DIM) for tokens in clusters] for x in (k, v)
        )
        asked = query[head * GROUP : (head + 1) * GROUP].astype(np.float64)
        logits = asked @ np.array(mean_key).T / np.sqrt(DIM)
        sizes = np.array([len(tokens) for tokens in clusters])
        if select == "group":
            mass = np.exp(logits) / (np.exp(logits) * sizes).sum(axis=1, keepdims=True)
            logits = np.repeat(mass.sum(axis=0)[None], GROUP, axis=0)
        for one, score in zip(asked, logits, strict=True):
            order = np.argsort(-score, kind="stable")
            entries = [(k[t], v[t], 1.0) for t in held(state, total)[row]]
            for cluster, taken in zip(order, read_in_order(clusters, order, budget), strict=True):
                entries += [(k[t], v[t], 1.0) for t in taken]
                if residual and sizes[cluster] > len(taken):
                    entries.append((mean_key[cluster], mean_value[cluster], sizes[cluster] - len(taken)))
            weight = np.array([n * np.exp(e @ one / np.sqrt(DIM)) for e, _, n in entries])
            out.append(weight @ np.array([e for _, e, _ in entries]) / weight.sum())
    return np.array(out)


@pytest.mark.parametrize("kind", ["normal", "equal", "outlier"])
@pytest.mark.parametrize(
    "budget, select, residual",
    [
        (SINKS + RECENT, "group", True),
        (SINKS + RECENT + 4, "query_head", False),  # less than a cluster
        (BUDGET, "query_head", True),
        (BUDGET, "group", False),
        (400, "group", True),
    ],
)
def test_a_query_reads_whole_clusters_in_order_up_to_the_budget(kind, budget, select, residual):
    made = policy(budget, select=select, residual=residual)
    (keys, values), query = (
        make_tokens(kind),
        3 * np.random.default_rng(5).normal(size=(ROWS, NEW, KV_HEADS * GROUP, DIM)),
    )
    query = query.astype(np.float32)
    for number, (state, total) in enumerate(steps(made, keys, values, new=31)):
        if number in (0, 20, 31):
            out = attended(made, state, query[:, number : number + 1])
            for row in range(ROWS):
                expected = by_numpy(
                    state, total, keys, values, query[row, number], row, budget=budget, select=select, residual=residual
                )
                np.testing.assert_allclose(out[row, 0], expected, atol=2e-5)


@every_policy(policy(), policy(select="query_head", residual=False), kvjax.quest(50, period=PERIOD))
def test_several_queries_at_once_read_what_each_reads_alone(made):
    (keys, values), rng = make_tokens("normal"), np.random.default_rng(5)
    *_, (state, _) = steps(made, keys, values, new=3)
    query = 3 * rng.normal(size=(ROWS, 5, KV_HEADS * GROUP, DIM)).astype(np.float32)
    together = attended(made, state, query)
    shown = jax.jit(
        lambda state: kvjax.output(kvjax.attend(query, made.segments(state, query))), compiler_options=QUICKLY
    )(state)
    for number in range(5):
        alone = attended(made, state, query[:, number : number + 1])
        np.testing.assert_allclose(together[:, number], alone[:, 0], atol=1e-6)
        np.testing.assert_allclose(shown[:, number], alone[:, 0], atol=1e-6)


def true_share(state, total, keys, query, row, *, budget, select):
    """The share of attention's mass, by query head, on tokens that a query [H_q, D] does not read."""
    missing = []
    for head in range(KV_HEADS):
        k = keys[row, : total[row], head].astype(np.float64)
        clusters = clusters_of(state, row, head)
        means = np.array([k[tokens].mean(axis=0) if len(tokens) else np.zeros(DIM) for tokens in clusters])
        sizes = np.array([len(tokens) for tokens in clusters])
        asked = query[head * GROUP : (head + 1) * GROUP].astype(np.float64)
        score = np.exp(asked @ means.T / np.sqrt(DIM))
        if select == "group":
            score = np.repeat((score / (score * sizes).sum(axis=1, keepdims=True)).sum(axis=0)[None], GROUP, axis=0)
        for one, order in zip(asked, np.argsort(-score, axis=1, kind="stable"), strict=True):
            read = set(np.concatenate([held(state, total)[row], *read_in_order(clusters, order, budget)]).tolist())
            mass = np.exp(k @ one / np.sqrt(DIM))
            missing.append(mass[[t for t in range(total[row]) if t not in read]].sum() / mass.sum())
    return np.array(missing)


bound = jax.jit(kvjax.missing_mass, compiler_options=QUICKLY)


@pytest.mark.parametrize("kind", ["normal", "equal", "outlier"])
@pytest.mark.parametrize(
    "select, dtype",
    [("query_head", jnp.float32), ("group", jnp.bfloat16)],
    ids=["query_head-float32", "group-bfloat16"],
)
def test_no_more_mass_is_missing_than_is_certified(kind, select, dtype):
    made, spec = policy(select=select), dataclasses.replace(SPEC, dtype=dtype)
    keys, values = make_tokens(kind)
    keys = np.array(jnp.asarray(keys, dtype).astype(jnp.float32))  # attention is to what is stored
    query = np.random.default_rng(3).normal(size=(ROWS, NEW, KV_HEADS * GROUP, DIM)).astype(np.float32)
    tightest = 1.0
    for number, (state, total) in enumerate(steps(made, keys, values, spec, new=22)):
        if number % 11:
            continue
        for length in (0, 0.1, 1, 8):
            certified = bound(state, length * query[:, number : number + 1])
            for row in range(ROWS):
                share = true_share(state, total, keys, length * query[row, number], row, budget=BUDGET, select=select)
                assert (np.asarray(certified[row, 0]) >= share - 1e-6).all()
                tightest = min(tightest, float((certified[row, 0] - share).min()))
    assert tightest < 1e-3  # a query of zeros misses exactly its share of the tokens


def test_a_certificate_of_everything_read_is_zero():
    *_, (state, _) = steps(policy(400), *make_tokens("normal"), new=3)
    assert not np.asarray(bound(state, np.ones((ROWS, 2, KV_HEADS * GROUP, DIM), np.float32))).any()
    with pytest.raises(ValueError, match="not that of a clusterkv cache"):
        kvjax.missing_mass(kvjax.quest(32).init(SPEC, row_keys(ROWS)), jnp.zeros((ROWS, 1, KV_HEADS * GROUP, DIM)))


@functools.partial(jax.jit, static_argnames=("made", "causal"), compiler_options=QUICKLY)
def attend_and_learn(made, state, query, causal):
    return made.attend(state, query, causal)


TARGETS = {target: policy(SINKS + RECENT + 20, target=target) for target in (0.0, 0.3)}


@pytest.mark.parametrize("target", TARGETS)
def test_recall_goes_on_until_the_target(target):
    made = TARGETS[target]
    keys, values = make_tokens("normal")
    query = np.random.default_rng(3).normal(size=(ROWS, 1, KV_HEADS * GROUP, DIM)).astype(np.float32)
    query[1] *= 0.01  # so this row's bound is near the share of tokens
    exact = kvjax.exact(period=PERIOD)
    *_, (state, _) = steps(made, keys, values, new=12)
    *_, (all_tokens, _) = steps(exact, keys, values, new=12)
    partials, after = attend_and_learn(made, state, query, True)
    learnt = after.selection.learnt
    assert (np.asarray(learnt.missing) <= target).all()
    stored = state.selection.store.position.shape[2]
    rounds = np.asarray(learnt.rounds)
    assert (np.asarray(learnt.steps) == 1).all() and (rounds >= 1).all() and (rounds <= -(-stored // 2)).all()
    if target == 0:
        np.testing.assert_allclose(kvjax.output(partials), attended(exact, all_tokens, query), atol=1e-5)
    else:
        assert rounds[0] != rounds[1]  # each row its own
        error = np.abs(np.asarray(kvjax.output(partials) - attended(exact, all_tokens, query))).max()
        assert error <= 2 * target * np.linalg.norm(values, axis=-1).max()
    # Without causal nothing is learnt; rows that appended nothing learn nothing.
    _, same = attend_and_learn(made, after, query, False)
    assert int(same.selection.learnt.steps[0]) == 1
    idle = made.extend(after, keys[:, :1], values[:, :1], jnp.array([1, 0]))
    learnt = attend_and_learn(made, idle, query, True)[1].selection.learnt
    np.testing.assert_array_equal(learnt.steps, [2, 1])
    assert int(learnt.rounds[1]) == rounds[1]


def test_a_row_recalls_as_if_alone():
    made = TARGETS[0.3]
    keys, values = make_tokens("normal")
    query = np.random.default_rng(3).normal(size=(ROWS, 1, KV_HEADS * GROUP, DIM)).astype(np.float32)
    state = prefill(made, SPEC, keys, values)
    together = attended(made, state, query)
    alone = prefill(made, dataclasses.replace(SPEC, batch=1), keys[:1], values[:1])
    np.testing.assert_allclose(attended(made, alone, query[:1]), together[:1], atol=1e-5)


@every_policy(policy(), kvjax.quest(50, period=PERIOD))
def test_more_tokens_than_there_is_room_for_are_counted(made):
    keys, values = make_tokens("normal")
    state = prefill(made, SPEC, keys, values)
    for number in range(NEW + 50):
        state = append(made, state, keys[:, number : number + 1], values[:, number : number + 1])
    with pytest.raises(ValueError, match="full cache"):
        kvjax.check(state)


def test_first_layers_may_keep_all():
    made = kvjax.clusterkv(40, full_layers=1)
    spec = dataclasses.replace(SPEC, layers=2)
    exact = kvjax.row_bytes(kvjax.exact(), spec)
    assert kvjax.row_bytes(made, spec) == exact
    assert kvjax.row_bytes(made, dataclasses.replace(spec, layer=1)) == kvjax.row_bytes(kvjax.clusterkv(40), spec)
    assert made.recalls


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budget": 10}, "budget=10 slots cannot hold sinks=16"),
        ({"cluster_tokens": 0}, "cluster_tokens=0"),
        ({"every": 40}, "period=64 must not exceed every=40"),
        ({"select": "heads"}, "select='heads'"),
        ({"variant": "paper"}, "variant='paper'"),
        ({"target": 1.0}, "target=1.0"),
        ({"chunk_clusters": 0}, "chunk_clusters=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kvjax.clusterkv(**({"budget": 100} | options))


# --- quest ---


@pytest.mark.parametrize("budget", [1, 50, 95])
def test_quest_reads_the_pages_of_largest_bounds(budget):
    made = kvjax.quest(budget, period=PERIOD)
    (keys, values), rng = make_tokens("normal"), np.random.default_rng(5)
    query = 3 * rng.normal(size=(ROWS, NEW + 1, KV_HEADS * GROUP, DIM)).astype(np.float32)
    for number, (state, total) in enumerate(steps(made, keys, values)):
        if number not in (0, 9, 33, NEW):
            continue
        kvjax.check(state)
        out = attended(made, state, query[:, number : number + 1])
        compacted = total - np.asarray(state.window.staging.count)
        for row, head in np.ndindex(ROWS, KV_HEADS * GROUP):
            k, v = (x[row, : total[row], head // GROUP].astype(np.float64) for x in (keys, values))
            q = query[row, number, head].astype(np.float64)
            pages = compacted[row] // 16
            paged = k[: 16 * pages].reshape(pages, 16, DIM)
            score = np.maximum(q * paged.min(axis=1), q * paged.max(axis=1)).sum(axis=1)
            chosen = np.argsort(-score, kind="stable")[: max(3, budget // 16)]
            read = np.concatenate([*(16 * page + np.arange(16) for page in chosen), np.arange(16 * pages, total[row])])
            weight = np.exp(k[read] @ q / np.sqrt(DIM))
            np.testing.assert_allclose(out[row, 0, head], weight @ v[read] / weight.sum(), atol=2e-5)
