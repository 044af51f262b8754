"""Helpers of the kvjax tests: policies, a stream whose one-hot values identify tokens, and a compiled run over it."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import kvjax
from kvjax.cache import _attend, _stage
from kvjax.combinators.ada_kv import AdaKV
from kvjax.methods.balancekv.balancekv_theory import BalanceKVTheory
from kvjax.methods.top_k.leverage_scores import LeverageScores

HEAD_DIM = 64
FREQUENCIES = tuple((10000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))).tolist())
PROMPT, NEW = 40, 24
LENGTHS = (37, 12, 1)
BATCH = len(LENGTHS)


def make_spec(batch=BATCH, prompt=PROMPT, new=NEW, **changes):
    sizes = {"query_heads": 4, "kv_heads": 2, "head_dim": HEAD_DIM, "rope_frequencies": FREQUENCIES} | changes
    return kvjax.CacheSpec(batch=batch, max_prompt_tokens=prompt, max_new_tokens=new, **sizes)


WINDOW = {"sinks": 2, "recent": 8, "compact_every": 8}
CLUSTERS = {**WINDOW, "chunk_tokens": 8, "chunk_clusters": 2}
# Policies that score the prompt and share `TopKStore`.
SCORED = {
    "compactor": kvjax.Compactor(20, sinks=2, recent=3, chunk=8, compact_every=8),
    "cur": kvjax.CUR(20, sinks=2, local_window_size=8, compact_every=8),
    "expected_attention": kvjax.ExpectedAttention(20, sinks=2, n_future_positions=16, compact_every=8),
    "keydiff": kvjax.KeyDiff(20, sinks=2, compact_every=8),
    "knorm": kvjax.Knorm(20, sinks=2, compact_every=8),
    "lagkv": kvjax.LagKV(20, sinks=2, lag_size=6, compact_every=8),
    "tova": kvjax.TOVA(20, sinks=2, compact_every=8),
}
MATCHING = {"max_references": 64, "sinks": 2, "recent": 4, "compact_every": 8}
POLICIES = {
    "exact": kvjax.Exact(compact_every=8),
    "streaming_llm": kvjax.StreamingLLM(16, sinks=2, compact_every=8),
    "streaming_llm_reindexed": kvjax.StreamingLLM(16, sinks=2, compact_every=8, reindex=True),
    "uniform": kvjax.Uniform(20, **WINDOW),
    "clustergen": kvjax.ClusterGen(20, **WINDOW),
    "subgen": kvjax.SubGen(20, **WINDOW),
    "subgen_mean": kvjax.SubGenMean(20, **WINDOW),
    "balancekv": kvjax.BalanceKV(20, **WINDOW, block_size=8),
    "balancekv_theory": BalanceKVTheory(60, **WINDOW, value_exponents=(0, 0)),
    "h2o": kvjax.H2O(20, recent=8, compact_every=8),
    "h2o_average": kvjax.H2O(20, recent=0, average=True, compact_every=8),
    "cam": kvjax.CaM(20, sinks=2, merged=6, compact_every=8),
    "infinigen": kvjax.InfiniGen(10, alpha=2.0, compact_every=8),
    "snapkv": kvjax.SnapKV(20, window_size=6, compact_every=8),
    "pyramidkv": kvjax.PyramidKV(20, window_size=6, compact_every=8),
    "chelsea": kvjax.Chelsea(20, **WINDOW, chunk=8),
    "clusterkv": kvjax.ClusterKV(20, **CLUSTERS),
    "clusterkv_residual": kvjax.ClusterKVResidual(20, **CLUSTERS, cluster_tokens=4),
    "quest": kvjax.Quest(20, compact_every=8),
    "leverage_scores": LeverageScores(20, sinks=2, compact_every=8),
    "ada_kv": AdaKV(LeverageScores(20, sinks=2, compact_every=8), 0.5),
    "attention_matching": kvjax.AttentionMatching(20, **MATCHING),
} | SCORED
# Budgets that hold every token of a row, so that attention is exact.
ROOMY = {
    name: dataclasses.replace(POLICIES[name], budget=HEAD_DIM + 8)
    for name in (
        *("cam", "h2o", "snapkv", "pyramidkv", "streaming_llm", "streaming_llm_reindexed", "uniform", "chelsea"),
        *("subgen_mean", "clusterkv", "clusterkv_residual", "quest", "leverage_scores", "attention_matching"),
        "balancekv",
    )
}
ROOMY |= {"infinigen": kvjax.InfiniGen(HEAD_DIM, alpha=1e6, compact_every=8), "ada_kv": AdaKV(ROOMY["leverage_scores"])}

# Without AdaKV, whose heads share the budget of one device.
ON_A_MESH = {name: policy for name, policy in POLICIES.items() if name != "ada_kv"}

# Variants of policies that only the heavy tests run.
VARIANTS = (
    "streaming_llm_reindexed",
    "balancekv_theory",
    "h2o_average",
    "clusterkv_residual",
    "ada_kv",
    "attention_matching",
    *SCORED,
)


def each(cases, quick=None):
    """Returns test parameters; all but the cases in `quick` (by default all but `VARIANTS`) are marked heavy."""
    cases = list(cases)
    quick = set(cases) - set(VARIANTS) if quick is None else quick
    heavy = functools.partial(pytest.param, marks=pytest.mark.heavy)
    return [case if case in quick else heavy(*case) if isinstance(case, tuple) else heavy(case) for case in cases]


# Environment of a process with simulated devices. XLA:CPU needs more threads than devices; otherwise collectives that
# wait for each other occupy all threads and deadlock.
THREADS = {"NPROC": "32"}

every_policy = pytest.mark.parametrize("name", each(POLICIES))
# For properties of the kinds of state, not of the policies.
few_policies = pytest.mark.parametrize("name", each(POLICIES, quick=("exact", "uniform", "subgen_mean")))


class Stream(NamedTuple):
    keys: np.ndarray  # [B, N, H_kv, D]
    values: np.ndarray  # [B, N, H_kv, D], one-hot: value i is 1 at dimension i, so attention's output names tokens
    queries: np.ndarray  # [B, N, H_q, D]; zero in odd heads, whose attention weights are then the log-weights alone

    def row(self, number):
        return Stream(*(part[number : number + 1] for part in self))


def make_stream(seed=0, batch=BATCH, tokens=PROMPT + NEW, kv_heads=2, query_heads=4):
    rng = np.random.default_rng(seed)
    assert tokens <= HEAD_DIM
    values = np.broadcast_to(np.eye(HEAD_DIM, dtype=np.float32)[:tokens, None], (batch, tokens, kv_heads, HEAD_DIM))
    keys = rng.normal(size=(batch, tokens, kv_heads, HEAD_DIM)).astype(np.float32)
    queries = 2 * rng.normal(size=(batch, tokens, query_heads, HEAD_DIM)).astype(np.float32)
    queries[:, :, 1::2] = 0
    return Stream(keys, values, queries)


def prompt_of(stream, lengths, padded=PROMPT, garbage=0):
    """Returns the first tokens of every row, left-aligned and padded with noise."""
    rng = np.random.default_rng(1000 + garbage)
    inside = np.arange(padded)[None, :, None, None] < np.asarray(lengths)[:, None, None, None]

    def part(tokens):
        tokens = tokens[:, :padded]
        tokens = np.pad(tokens, ((0, 0), (0, padded - tokens.shape[1]), (0, 0), (0, 0)))
        return np.where(inside, tokens, 10 * rng.normal(size=tokens.shape)).astype(np.float32)

    return part(stream.keys), part(stream.values), part(stream.queries)


def after(stream, lengths, count=NEW, skip=0):
    """Returns the `count` tokens of every row after its first `lengths + skip`."""
    rows = np.arange(len(stream.keys))[:, None]
    place = np.asarray(lengths)[:, None] + skip + np.arange(count)
    return Stream(*(part[rows, place] for part in stream))


def row_keys(batch=BATCH, seed=0):
    return jax.random.split(jax.random.key(seed), batch)


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def begin(policy, spec, keys_of_rows, keys, values, queries, lengths):
    """Returns the cache and the counters after a prompt, with the last queries that the policy requires."""
    (cache, counters), lengths = kvjax.init(policy, spec, keys_of_rows), jnp.asarray(lengths, jnp.int32)
    prompt = keys, values, lengths, last_queries(cache.policy, queries, lengths)
    return kvjax.prefill(cache, counters, *prompt)[:2]


def prefilled(policy, stream=None, spec=None, lengths=LENGTHS):
    """Returns the cache and the counters after the prompts of a stream, by default the standard one."""
    stream = make_stream() if stream is None else stream
    return begin(policy, spec or make_spec(), row_keys(), *prompt_of(stream, lengths), lengths)


def decoded(policy, stream=None, spec=None, lengths=LENGTHS):
    """Returns what `go` returns after the prompts and all later tokens of a stream."""
    stream = make_stream() if stream is None else stream
    return go(*prefilled(policy, stream, spec, lengths), after(stream, lengths))


def last_queries(policy, queries, lengths):
    """Returns the last queries of every row that the policy requires, or None."""
    count = policy.requires.num_prompt_queries(queries.shape[1])
    place = jnp.maximum(jnp.asarray(lengths)[:, None] - count + jnp.arange(count), 0)
    return jnp.take_along_axis(jnp.asarray(queries), place[..., None, None], axis=1) if count else None


def go(cache, counters, stream, block=1, compact_every=None):
    """Appends the stream's tokens in blocks, and compacts after every `compact_every` tokens.

    Returns:
        For every appended token the attention outputs [B, N, H_q, D] and the weights [B, N, H_kv, D] of all tokens,
        which are the output of a query of zeros over the one-hot values; the cache and the counters.
    """
    outputs, weights, *after = _go(block, cache, counters, stream, compact_every or cache.policy.compact_every)
    return np.asarray(outputs), np.asarray(weights), *after


@functools.partial(jax.jit, static_argnames=("block",))
def _go(block, cache, counters, stream, every):
    batch, tokens = stream.keys.shape[:2]
    blocks = jax.tree.map(lambda x: jnp.moveaxis(jnp.reshape(x, (batch, -1, block, *x.shape[2:])), 1, 0), stream)

    def step(carry, item):
        number, (keys, values, queries) = item
        # The two parts of `kvjax.step`; the weights need the partials in between.
        cache, counters = _stage(*carry, keys, values, None)
        partials, cache = _attend(cache, counters, queries, None, causal=True)
        weights = (partials.numerator * jnp.exp(partials.max)[..., None])[:, :, 1::2]
        is_full = (number + 1) * block % every == 0
        carry = jax.lax.cond(is_full, kvjax.compact, lambda *same: same, cache, counters)
        return carry, (kvjax.normalize(partials), weights)

    carry, (outputs, weights) = jax.lax.scan(step, (cache, counters), (jnp.arange(tokens // block), blocks))
    joined = [jnp.moveaxis(x, 0, 1).reshape(batch, tokens, *x.shape[3:]) for x in (outputs, weights)]
    return *joined, *carry


@functools.cache
def whole_run(name, block=1, kv_dtype=None):
    """Returns what `go` returns for the standard stream with prompts of different lengths."""
    stream = make_stream()
    return go(*prefilled(POLICIES[name], stream, make_spec(kv_dtype=kv_dtype)), after(stream, LENGTHS), block)


def with_integer_keys(tree):
    """Returns a tree, or its abstract form, with PRNG keys as integers, which chex can compare."""

    def convert(leaf):
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)

    return jax.tree.map(convert, tree)


@jax.jit
def read_weights(cache, counters):
    """Returns the weight [B, H_kv, D] of every token, identified by its one-hot value."""
    batch, kv_heads, _, head_dim = cache.staging.keys.shape
    group = cache.spec.query_heads // cache.spec.kv_heads
    read = kvjax.attend(cache, counters, jnp.zeros((batch, 1, kv_heads * group, head_dim)))
    return (read.numerator * jnp.exp(read.max)[..., None])[:, 0, ::group]


def attend_after_prompt(policy, keys, values, queries, batch=1):
    """Attends with queries [Q, D] after a prompt of keys and values [T, D] in every row.

    Returns:
        The outputs [B, Q, D], which differ by the rows' randomness, and the policy's state.
    """
    spec = kvjax.CacheSpec(batch, 1, 1, keys.shape[1], max_prompt_tokens=len(keys), max_new_tokens=8)
    return _attend_after_prompt(policy, spec, keys, values, queries, row_keys(batch))


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def _attend_after_prompt(policy, spec, keys, values, queries, keys_of_rows):
    def rows(x):
        return jnp.broadcast_to(x[:, None], (spec.batch, len(x), 1, spec.head_dim))

    lengths = jnp.full(spec.batch, spec.max_prompt_tokens, jnp.int32)
    empty = kvjax.init(policy, spec, keys_of_rows)
    cache, counters, _ = kvjax.prefill(*empty, rows(keys), rows(values), lengths)
    return kvjax.normalize(kvjax.attend(cache, counters, rows(queries)))[:, :, 0], cache.state


def check_estimates(numbers, estimate, exact, max_half_width):
    """Checks that estimates are unbiased, with errors of order n^-1/2.

    Args:
        numbers: the numbers n of samples.
        estimate: a function of a number of samples and a PRNG key that returns an estimate [V].
        exact: the exact value [V].
        max_half_width: largest half width of the confidence interval of the slope.
    """
    squared, estimate_all = [], jax.jit(jax.vmap(estimate, in_axes=(None, 0)), static_argnums=0)
    for number in numbers:
        estimates = np.asarray(estimate_all(number, jax.random.split(jax.random.key(number), 400)))
        deviation = estimates.std(axis=0) / np.sqrt(len(estimates))
        assert (np.abs(estimates.mean(axis=0) - exact) < 4 * deviation).all()
        squared.append(np.sum((estimates - exact) ** 2, axis=1))
    # Five fits, each of a fifth of the streams, give the interval.
    parts = np.log(np.array(squared).reshape(len(numbers), 5, -1).mean(axis=-1)) / 2
    slopes = [stats.linregress(np.log(numbers), part).slope for part in parts.T]
    half_width = stats.t.ppf(0.995, 4) * np.std(slopes, ddof=1) / np.sqrt(5)
    assert abs(np.mean(slopes) + 0.5) < half_width < max_half_width


def softmax_attention(query, keys, values, scale=None, logit_cap=None, sink_logit=-np.inf):
    """Returns float64 attention of one query [D] over one head's tokens [N, D], and an attention sink."""
    logits = keys.astype(np.float64) @ query.astype(np.float64) * (scale or query.shape[-1] ** -0.5)
    logits = logits if logit_cap is None else logit_cap * np.tanh(logits / logit_cap)
    weights = np.exp(logits - logits.max())
    return weights @ values.astype(np.float64) / (weights.sum() + np.exp(sink_logit - logits.max()))
