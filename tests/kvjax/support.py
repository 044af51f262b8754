"""What the kvjax tests share: the policies, a stream whose values name their tokens, and a compiled run over it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

HEAD_DIM = 64
FREQUENCIES = tuple((10000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))).tolist())
PROMPT, NEW = 40, 24
LENGTHS = (37, 12, 1)
BATCH = len(LENGTHS)


def make_spec(batch=BATCH, prompt=PROMPT, new=NEW, **others):
    sizes = {"query_heads": 4, "kv_heads": 2, "head_dim": HEAD_DIM, "rope_frequencies": FREQUENCIES} | others
    return kvjax.CacheSpec(batch=batch, max_prompt=prompt, max_new=new, **sizes)


# Each is built once: compiled functions are kept by the policy's identity.
POLICIES = {
    "exact": kvjax.exact(period=8),
    "streaming_llm": kvjax.streaming_llm(16, sinks=2, period=8),
    "streaming_llm_reindexed": kvjax.streaming_llm(16, sinks=2, period=8, reindex=True),
    "uniform": kvjax.uniform(20, sinks=2, recent=8, period=8),
    "clustergen_paper": kvjax.clustergen(20, sinks=2, recent=8, period=8, variant="paper"),
    "clustergen_mean_value": kvjax.clustergen(20, sinks=2, recent=8, period=8),
    "subgen_mean_value": kvjax.subgen(20, sinks=2, recent=8, period=8),
    "subgen_paper": kvjax.subgen(20, sinks=2, recent=8, period=8, variant="paper"),
    "balancekv_pairs": kvjax.balancekv(20, sinks=2, recent=8, period=8),
    "balancekv_reference": kvjax.balancekv(20, sinks=2, recent=8, period=8, variant="reference", block_size=8),
    "balancekv_paper": kvjax.balancekv(60, sinks=2, recent=8, period=8, variant="paper", value_exponents=(0, 0)),
    "h2o": kvjax.h2o(20, recent=8, period=8),
    "h2o_average": kvjax.h2o(20, recent=0, average=True, period=8),
    "cam": kvjax.cam(20, sinks=2, merged=6, period=8),
    "infinigen": kvjax.infinigen(10, alpha=2.0, period=8),
    "snapkv": kvjax.snapkv(20, window=6, period=8),
    "pyramidkv": kvjax.pyramidkv(20, window=6, period=8),
    "chelsea": kvjax.chelsea(20, sinks=2, recent=8, chunk=8, period=8),
    "chelsea_paper": kvjax.chelsea(20, sinks=2, recent=8, chunk=8, period=8, slope=None),
    "chelsea_drop": kvjax.chelsea(20, sinks=2, recent=8, chunk=8, period=8, joins="drop"),
    "clusterkv": kvjax.clusterkv(20, sinks=2, recent=8, cluster_tokens=4, every=8, chunk_clusters=2, period=8),
    "clusterkv_paper": kvjax.clusterkv(
        20,
        sinks=2,
        recent=8,
        cluster_tokens=4,
        every=8,
        chunk_clusters=2,
        period=8,
        select="query_head",
        residual=False,
    ),
    "quest": kvjax.quest(20, period=8),
}


# One variant of every system runs in the quick tests, the others in `make test-all`.
VARIANTS = (
    "streaming_llm_reindexed",
    "clustergen_paper",
    "subgen_paper",
    "balancekv_reference",
    "balancekv_paper",
    "h2o_average",
    "chelsea_paper",
    "chelsea_drop",
    "clusterkv_paper",
)


def each(names, quick=None):
    """Test parameters: those of `quick` in the quick tests (by default all but `VARIANTS`), the others heavy."""
    quick = set(names) - set(VARIANTS) if quick is None else quick
    return [name if name in quick else pytest.param(name, marks=pytest.mark.heavy) for name in names]


every_policy = pytest.mark.parametrize("name", each(POLICIES))
# For what states of few kinds tell apart.
few_policies = pytest.mark.parametrize("name", each(POLICIES, quick=("exact", "uniform", "subgen_mean_value")))

# Compiling takes most of the tests' time; the programs are small enough to run unoptimised.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Stream(NamedTuple):
    keys: np.ndarray  # [B, N, H_kv, D]
    values: np.ndarray  # [B, N, H_kv, D], one-hot: value i is 1 at dimension i, so attention's output names tokens
    queries: np.ndarray  # [B, N, H_q, D]; those of odd heads are zero and so read every entry by its weight alone

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
    """The rows' first tokens, left-aligned; what follows them is noise that nothing may depend on."""
    rng = np.random.default_rng(1000 + garbage)
    inside = np.arange(padded)[None, :, None, None] < np.asarray(lengths)[:, None, None, None]

    def part(tokens):
        tokens = tokens[:, :padded]
        tokens = np.pad(tokens, ((0, 0), (0, padded - tokens.shape[1]), (0, 0), (0, 0)))
        return np.where(inside, tokens, 10 * rng.normal(size=tokens.shape)).astype(np.float32)

    return part(stream.keys), part(stream.values), part(stream.queries)


def after(stream, lengths, count=NEW, skip=0):
    """The `count` tokens of every row that come after its first `lengths + skip`."""
    rows = np.arange(len(stream.keys))[:, None]
    place = np.asarray(lengths)[:, None] + skip + np.arange(count)
    return Stream(*(part[rows, place] for part in stream))


def row_keys(batch=BATCH, seed=0):
    return jax.random.split(jax.random.key(seed), batch)


@functools.partial(jax.jit, static_argnames=("policy", "spec"), compiler_options=QUICKLY)
def begin(policy, spec, keys_of_rows, keys, values, queries, lengths):
    """The state after a prompt; of its queries the policy is shown the last ones that it asks for."""
    lengths = jnp.asarray(lengths, jnp.int32)
    tail = queries.shape[1] if policy.query_tail == kvjax.ALL_QUERIES else min(policy.query_tail, queries.shape[1])
    place = jnp.maximum(lengths[:, None] - tail + jnp.arange(tail), 0)
    shown = jnp.take_along_axis(jnp.asarray(queries), place[..., None, None], axis=1) if tail else None
    return policy.prefill(policy.init(spec, keys_of_rows), keys, values, lengths, shown)[0]


def go(policy, state, stream, block=1, compact_every=None):
    """Appends the stream's tokens, block by block, and compacts whenever `compact_every` more have come.

    Returns:
        The state, and for every token the attention output to its queries [B, N, H_q, D] and the weights at which each
        kv head reads all tokens [B, N, H_kv, D]: what a query of zeros gathers of the one-hot values.
    """
    state, outputs, weights = _go(policy, block, state, stream, compact_every or policy.period)
    return state, np.asarray(outputs), np.asarray(weights)


@functools.partial(jax.jit, static_argnames=("policy", "block"), compiler_options=QUICKLY)
def _go(policy, block, state, stream, every):
    batch, tokens = stream.keys.shape[:2]
    split = lambda part: jnp.moveaxis(jnp.reshape(part, (batch, -1, block, *part.shape[2:])), 1, 0)  # noqa: E731
    blocks = jax.tree.map(split, stream)

    def step(state, item):
        number, (keys, values, queries) = item
        state = policy.extend(state, keys, values)
        partials, state = policy.attend(state, queries, causal=True)
        weights = (partials.num * jnp.exp(partials.max)[..., None])[:, :, 1::2]
        state = jax.lax.cond((number + 1) * block % every == 0, policy.compact, lambda same: same, state)
        return state, (kvjax.output(partials), weights)

    state, (outputs, weights) = jax.lax.scan(step, state, (jnp.arange(tokens // block), blocks))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, tokens, *x.shape[3:])  # noqa: E731
    return state, join(outputs), join(weights)


@functools.cache
def whole_run(name, block=1):
    """Prompt and decoding of the standard stream, ragged."""
    stream = make_stream()
    state = begin(POLICIES[name], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    return go(POLICIES[name], state, after(stream, LENGTHS), block)


@functools.partial(jax.jit, static_argnames=("policy",))
def read_weights(policy, state):
    """The weight [B, H_kv, D] at which every token (by its one-hot value) is read now."""
    batch, kv_heads, _, head_dim = state.window.keys.shape
    read, _ = policy.attend(state, jnp.zeros((batch, 1, kv_heads, head_dim)))
    return (read.num * jnp.exp(read.max)[..., None])[:, 0]


def softmax_attention(query, keys, values, log_weight=0.0):
    """float64 attention of one query [D] over one head's tokens [N, D]."""
    logits = keys.astype(np.float64) @ query.astype(np.float64) / np.sqrt(query.shape[-1]) + log_weight
    weights = np.exp(logits - logits.max())
    return weights @ values.astype(np.float64) / weights.sum()
