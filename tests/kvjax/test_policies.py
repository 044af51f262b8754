"""Laws of all policies, bytes, and the policies StreamingLLM, Uniform and ClusterGen."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import kvjax
from kvjax.budget import abstract_cache, format_bytes, row_bytes
from kvjax.cache import _segments
from kvjax.combinators.head_budgets import retrieving_heads
from kvjax.methods.clustergen.k_center import greedy_k_center
from kvjax.quantization import FORMATS
from kvjax.registry import POLICIES as REGISTERED
from kvjax.registry import resolve_policy
from kvjax.segment import BlockStoreRead, Segment
from kvjax.state import CacheBytes
from pallas_kernels import hopper, weighted_decode
from tests.kvjax.support import (
    BATCH,
    FREQUENCIES,
    HEAD_DIM,
    LENGTHS,
    NEW,
    POLICIES,
    ROOMY,
    SCORED,
    VARIANTS,
    Stream,
    after,
    begin,
    decoded,
    each,
    every_policy,
    few_policies,
    go,
    make_spec,
    make_stream,
    prefilled,
    prompt_of,
    read_weights,
    row_keys,
    softmax_attention,
    whole_run,
    with_integer_keys,
)

KV_HEADS, VALUE_DIM = 2, 48


# --- laws of every policy ---

# In another order, with other prompts, lengths and padding in the other rows (batches of one size share programs), and
# each row alone.
ORDER = (2, 0, 1)
ALONE = [(row,) for row in range(BATCH)]
ROWS = [(name, rows, None) for name in POLICIES for rows in (ORDER, *ALONE)]
QUICK_ROWS = [case for case in ROWS if case[0] == "uniform" or (case[0] not in VARIANTS and case[1] == ORDER)]
QUANTIZED_ROWS = [("chelsea", rows, "int8") for rows in ALONE]


@pytest.mark.parametrize("name, rows, kv_dtype", [*each(ROWS, QUICK_ROWS), *QUANTIZED_ROWS])
def test_rows_do_not_depend_on_other_rows(name, rows, kv_dtype):
    stream = Stream(*(part[list(rows)] for part in make_stream()))
    lengths = tuple(LENGTHS[row] for row in rows)
    spec, keys = make_spec(batch=len(rows), kv_dtype=kv_dtype), row_keys()[jnp.array(rows)]
    state = begin(POLICIES[name], spec, keys, *prompt_of(stream, lengths, garbage=1), lengths)
    outputs, weights, *_ = go(*state, after(stream, lengths))
    expected, expected_weights = (x[list(rows)] for x in whole_run(name, kv_dtype=kv_dtype)[:2])
    np.testing.assert_array_equal(weights > 1e-6, expected_weights > 1e-6)  # the tokens kept
    np.testing.assert_allclose(weights, expected_weights, atol=1e-5)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["uniform", "balancekv", "subgen"])
def test_rows_and_heads_draw_different_tokens(name):
    # The same stream in every row and head.
    stream = make_stream().row(0)
    stream = Stream(*(np.repeat(part, BATCH, axis=0) for part in stream))
    keys = np.broadcast_to(stream.keys[:, :, :1], stream.keys.shape)
    cache, counters = prefilled(POLICIES[name], stream._replace(keys=keys), lengths=(37,) * BATCH)
    kept = np.asarray(read_weights(cache, counters)).reshape(-1, HEAD_DIM) > 0
    assert len(np.unique(kept, axis=0)) == len(kept)


def present_tokens():
    """Returns which tokens [B, N, 1, D] have been appended at every step of `whole_run`."""
    length = np.array(LENGTHS)[:, None] + 1 + np.arange(NEW)
    return (np.arange(HEAD_DIM) < length[..., None])[:, :, None]


@pytest.mark.parametrize("kv_dtype, tolerance", [(None, 2e-5), ("bfloat16", 5e-3)])
@pytest.mark.parametrize("name", ["chelsea", "subgen_mean"])
def test_means_read_every_token_once(name, kv_dtype, tolerance):
    # A query of zeros reads the sum of sizes times mean values, at every step and through all compactions.
    _, weights, *_ = whole_run(name, kv_dtype=kv_dtype)
    np.testing.assert_allclose(weights, np.broadcast_to(present_tokens(), weights.shape), atol=tolerance)


@every_policy
def test_appending_a_block_equals_appending_its_tokens(name):
    outputs, weights, *state = whole_run(name)
    block_outputs, block_weights, *block_state = whole_run(name, block=8)
    np.testing.assert_allclose(outputs, block_outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weights, block_weights, atol=1e-5)
    chex.assert_trees_all_close(with_integer_keys(state), with_integer_keys(block_state), atol=1e-5)


def products(jaxpr):
    """Yields the products of matrices in a program and in the programs that it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
        for called in inner:
            if hasattr(called, "eqns"):
                yield from products(called)


# Scores of the others are attention of the prompt, which has the precision of the model's attention.
WITHOUT_PROMPT_ATTENTION = [
    name for name in POLICIES if not name.startswith(("h2o", "snap", "pyramid", "compact", "tova"))
]


@pytest.mark.parametrize("name", each(WITHOUT_PROMPT_ATTENTION))
def test_choices_are_computed_in_full_precision(name):
    """Accelerators round float32 factors by default, so that exponents of products of long keys are wrong by tens."""
    stream = make_stream()
    new = after(stream, LENGTHS, 8)

    def run():
        cache, counters = prefilled(POLICIES[name], stream)
        cache, counters = kvjax.compact(*kvjax.append(cache, counters, new.keys, new.values))
        reads = [read for read in _segments(cache, counters, 1) if isinstance(read, BlockStoreRead)]
        return cache, [read.select(jnp.asarray(new.queries[:, :1])) for read in reads]

    for product in products(jax.make_jaxpr(run)().jaxpr):
        is_rounded = any(x.aval.dtype == jnp.float32 for x in product.invars) and product.params["precision"] is None
        assert not is_rounded, product


@every_policy
def test_the_cache_keeps_its_shapes_and_dtypes(name):
    """With all options of a layer: a scale, a cap, attention sinks and values of another dimension."""
    stream, sinks = make_stream(), jnp.arange(4.0)
    stream = stream._replace(values=stream.values[..., :VALUE_DIM])
    spec = make_spec(dtype=jnp.bfloat16, value_dim=VALUE_DIM, scale=0.6, logit_cap=1.5)
    new = after(stream, LENGTHS, 3)

    def run():
        state = prefilled(POLICIES[name], stream, spec)
        appended = kvjax.append(*state, new.keys, new.values)
        attended, *stepped = kvjax.step(*state, new.queries, new.keys, new.values, sink_logits=sinks)
        outputs = attended, kvjax.attend(*state, new.queries[:, :1], sink_logits=sinks)
        return outputs, (state, appended, tuple(stepped), kvjax.compact(*appended))

    abstract, ((attended, partials), states) = abstract_cache(POLICIES[name], spec), jax.eval_shape(run)
    assert partials.numerator.shape[-1] == attended.shape[-1] == VALUE_DIM
    for other in states:
        assert jax.tree.structure(abstract) == jax.tree.structure(other)
        chex.assert_trees_all_equal_shapes_and_dtypes(with_integer_keys(abstract), with_integer_keys(other))

    # Another weak type would be another trace.
    later = jax.eval_shape(lambda state: kvjax.compact(*kvjax.append(*state, new.keys, new.values)), abstract)
    assert [leaf.weak_type for leaf in jax.tree.leaves(later)] == [leaf.weak_type for leaf in jax.tree.leaves(abstract)]
    assert {leaf.dtype for leaf in jax.tree.leaves((partials, attended))} == {jnp.dtype("float32")}
    assert states[0][0].staging.keys.dtype == jnp.bfloat16


@few_policies
def test_one_trace_serves_all_steps_and_any_cache_may_be_donated(name):
    chex.clear_trace_counter()

    def once(function, **donate):
        return jax.jit(chex.assert_max_traces(function, n=1), **donate)

    append = once(lambda *arguments: kvjax.append(*arguments), donate_argnums=(0, 1))
    attend = once(lambda *arguments: kvjax.attend(*arguments))
    compact = once(lambda *arguments: kvjax.compact(*arguments), donate_argnums=(0, 1))
    cache, counters = kvjax.init(POLICIES[name], make_spec(), row_keys())
    steps = 2 * cache.policy.compact_every + 1
    tokens = after(make_stream(), (0,) * BATCH, steps)
    for number in range(steps):
        now = slice(number, number + 1)
        cache, counters = append(cache, counters, tokens.keys[:, now], tokens.values[:, now])
        partials = attend(cache, counters, tokens.queries[:, now])
        if (number + 1) % cache.policy.compact_every == 0:
            cache, counters = compact(cache, counters)
    chex.assert_tree_all_finite(kvjax.normalize(partials))
    np.testing.assert_array_equal(counters.num_tokens, [steps] * BATCH)


@pytest.mark.parametrize("name", each(POLICIES, quick=("uniform",)))
def test_a_step_equals_append_and_attend_and_compacts_a_full_staging_buffer(name):
    # In blocks of three tokens a staging buffer of 8 is compacted when it holds six.
    stream = make_stream()
    state = by_hand = prefilled(POLICIES[name], stream)
    step, append, attend = jax.jit(kvjax.step), jax.jit(kvjax.append), jax.jit(kvjax.attend)
    full_or_not = jax.jit(functools.partial(kvjax.step, compact_when_full=False))
    for number in range(6):
        new = after(stream, LENGTHS, 3, 3 * number)
        attended, *state = step(*state, new.queries, new.keys, new.values)
        if number in (2, 4):
            by_hand = kvjax.compact(*by_hand)
        if state[0].policy.requires.attention_stats:  # which `attend` does not update
            last, *by_hand = full_or_not(*by_hand, new.queries, new.keys, new.values)
        else:
            by_hand = append(*by_hand, new.keys, new.values)
            # Only the last query attends to all tokens.
            last = kvjax.normalize(attend(*by_hand, new.queries[:, -1:]))
        assert int(state[1].offset) == int(by_hand[1].offset) == 3 * (number % 2 + 1)
        np.testing.assert_allclose(attended[:, -last.shape[1] :], last, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state[1].num_tokens, np.array(LENGTHS) + 18)
    kvjax.raise_faults(state)


UNCHANGED = [(name, None) for name in POLICIES if name not in VARIANTS] + [("exact", kv_dtype) for kv_dtype in FORMATS]


@pytest.mark.parametrize("name, kv_dtype", each(itertools.product(POLICIES, (None, *FORMATS)), UNCHANGED))
def test_a_compaction_without_staged_tokens_changes_nothing(name, kv_dtype):
    # Finished sequences are compacted together with the others.
    compact = jax.jit(kvjax.compact)
    states = [prefilled(POLICIES[name], spec=make_spec(kv_dtype=kv_dtype)), whole_run(name, kv_dtype=kv_dtype)[2:]]
    for settled in states:
        chex.assert_trees_all_equal(with_integer_keys(compact(*settled)), with_integer_keys(tuple(settled)))


@every_policy
def test_compaction_may_come_early(name):
    # It does not change which tokens a window or a full cache keeps, and causes no fault in any cache.
    stream = make_stream()
    cache, counters = prefilled(POLICIES[name], stream)
    outputs, weights, cache, counters = go(cache, counters, after(stream, LENGTHS), 1, 3)
    kvjax.raise_faults((cache, counters))
    if name.startswith(("exact", "streaming_llm")):
        np.testing.assert_allclose(outputs, whole_run(name)[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(weights, whole_run(name)[1], atol=1e-5)
    if name in ("uniform", "chelsea", "subgen_mean", "clusterkv_residual"):  # the weights sum to the tokens
        total = weights[:, -1].sum(-1)
        np.testing.assert_allclose(total, np.array(LENGTHS)[:, None] + NEW + np.zeros(KV_HEADS), rtol=1e-5)


@pytest.mark.parametrize("name", each(ROOMY))
def test_a_budget_of_all_tokens_gives_exact_attention(name):
    outputs, weights, *_ = decoded(ROOMY[name])
    np.testing.assert_allclose(outputs, whole_run("exact")[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weights, whole_run("exact")[1], atol=1e-5)


# --- bytes ---


# Bytes of a row in float32 and in bfloat16, and bytes that a decode step reads of a bfloat16 row. For "uniform" in
# bfloat16: keys and values of 2 heads x (20 + 8 staging) slots x 64 dimensions x 2 bytes, 20 log-weights and 10
# priorities of 4 bytes per head, a PRNG key of 8 bytes, a byte per staging slot and nine int32 counters. A step reads
# the keys and values, log-weights of all slots and three bounds.
BYTES = {
    "exact": (73776, 36912, 36936),
    "streaming_llm": (24620, 12332, 12364),
    "streaming_llm_reindexed": (24748, 12460, 16596),
    "uniform": (33092, 16708, 16652),
    "clustergen": (32816, 16432, 16460),
    "subgen": (41300, 21876, 18700),
    "subgen_mean": (41308, 25052, 20684),
    "balancekv": (57792, 29120, 29132),
    "balancekv_theory": (70340, 35524, 35468),
    "h2o": (33036, 16652, 16684),
    "h2o_average": (33196, 16812, 16684),
    "cam": (33044, 16660, 16684),
    "infinigen": (86576, 46640, 18580),
    "chelsea": (41264, 25008, 20688),
    "clusterkv": (113464, 57144, 35308),
    "clusterkv_residual": (338504, 170568, 62540),
    "quest": (103000, 51800, 68460),
    "ada_kv": (32836, 16452, 16468),
    "attention_matching": (33008, 16528, 16648),
    **dict.fromkeys(("snapkv", "pyramidkv"), (57392, 28720, 28744)),
    **dict.fromkeys(("leverage_scores", *SCORED), (32816, 16432, 16456)),
}


@every_policy
def test_bytes_of_a_row(name):
    policy, specs = POLICIES[name], [make_spec(dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    sizes = [row_bytes(policy, spec) for spec in specs]
    assert (*sizes, kvjax.read_bytes(abstract_cache(policy, specs[1])[0]) / BATCH) == BYTES[name]
    state = jax.jit(kvjax.init, static_argnums=(0, 1))(policy, dataclasses.replace(specs[1], batch=1), row_keys(1))
    assert kvjax.cache_bytes(state) == CacheBytes(sizes[1], 0)


# --- sizes of stores ---


def odd_policies(budget):
    """Returns every registered policy and combinators for three layers, with sizes that 8 does not divide."""
    full, snapkv = kvjax.Exact(50), kvjax.SnapKV(budget)
    heads = retrieving_heads(3, KV_HEADS, [(1, 0)])
    return [
        *(policy() if name == "exact" else policy(budget) for name, policy in REGISTERED.items()),
        kvjax.StreamingLLM(budget, reindex=True),
        kvjax.SnapKV(budget, reserve_decode_slots=True),
        kvjax.AdaKV(snapkv),
        kvjax.HeadBudgets(kvjax.AdaKV(snapkv), ((0.5, 0.5), (1.37, 1.37), (1.13, 1.13))),
        kvjax.ByHead((kvjax.H2O(budget), kvjax.Quest(budget))),
        kvjax.HeadBudgets(kvjax.Uniform(budget + 1500), heads),
        *(kvjax.HostMemory(one(budget)) for one in (kvjax.ClusterKV, kvjax.InfiniGen)),
        kvjax.FirstLayers(1, kvjax.SubGen(budget, compact_every=13, per_cluster=3), full),
    ]


@pytest.mark.parametrize("kv_dtype, budget", [(None, 1013), ("int8", 507), ("int4", 1001)])
def test_attention_reads_stores_of_a_multiple_of_8_slots(kv_dtype, budget):
    spec = make_spec(1, 4001, 50, layer=1, layers=3, kv_dtype=kv_dtype)

    def slots(cache, counters):
        """Returns the number of slots of everything that attention reads as entries."""
        segments, counts = list(_segments(cache, counters, 1)), []
        for read in (one for one in segments if isinstance(one, BlockStoreRead)):
            heads = KV_HEADS if read.kv_heads is None else len(read.kv_heads)
            selection = read.select(jnp.zeros((1, 1, 2 * heads, HEAD_DIM)))
            segments += selection.residual
            if read.block_cache is not None:
                counts.append(selection.block_indices.shape[2] * read.store.entries.shape[3])
        return counts + [one.keys.shape[2] for one in segments if isinstance(one, Segment)]

    for policy in odd_policies(budget):
        state, counts = abstract_cache(policy, spec), []
        jax.eval_shape(lambda state, counts=counts: counts.extend(slots(*state)), state)
        assert counts and not any(count % 8 for count in counts), f"{policy} has stores of {counts} slots"


@pytest.mark.heavy
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="lowers copies that start inside a tile of slots")
@pytest.mark.parametrize("kv_dtype, budget", [(None, 1013), ("int8", 507), ("int4", 507)])
def test_decode_steps_lower_for_a_hopper_gpu_without_xla(kv_dtype, budget, monkeypatch):
    spec, refused = make_spec(1, 4001, 50, layer=1, layers=3, kv_dtype=kv_dtype, dtype=jnp.bfloat16), []
    check = weighted_decode.mosaic_gpu.check

    def recorded_check(*arguments, **options):
        try:
            check(*arguments, **options)
        except NotImplementedError as reason:
            refused.append(str(reason))
            raise

    monkeypatch.setattr(hopper, "check_device", lambda: None)  # lowering needs no GPU and no CUDA compiler
    monkeypatch.setattr(weighted_decode.mosaic_gpu, "check", recorded_check)
    query, new = (jax.ShapeDtypeStruct((1, 1, heads, HEAD_DIM), spec.dtype) for heads in (2 * KV_HEADS, KV_HEADS))
    scores = jax.ShapeDtypeStruct((1, KV_HEADS, 1), jnp.float32)

    @jax.jit
    def step(cache, counters, query, keys, values, scores):
        return kvjax.step(cache, counters, query, keys, values, predicted_scores=scores, compact_when_full=False)

    lowered = []
    for policy in odd_policies(budget):
        cache, counters = abstract_cache(policy, spec)
        program = (type(cache.policy).segments, cache.state)  # which most top-k policies share
        if program not in lowered:
            predicted = scores if cache.policy.requires.predicted_scores else None
            traced = step.trace(cache, counters, query, new, new, predicted)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert "@mosaic_gpu" in text and not refused, policy
            lowered.append(program)


@pytest.mark.parametrize("name", sorted(REGISTERED.keys() - {"exact"}))
def test_a_budget_in_bytes_may_exceed_the_full_cache(name):
    # 32 MiB per layer are more than 2**24 bytes, the largest budget in slots.
    spec = make_spec(layers=32)
    policy = resolve_policy(name, "1GiB", spec, spec.capacity)
    assert row_bytes(policy, spec) < 2**20


@pytest.mark.parametrize(
    "make, limit, message",
    [
        (kvjax.StreamingLLM, 3000, r"limit=3000 .*budget=5 already takes"),
        (kvjax.Uniform, 60, r"limit=60 .*budget=69 already takes"),
        (
            lambda budget: kvjax.HeadBudgets(kvjax.SnapKV(budget), ((1.0, 1.0),)),
            3000,
            "max_new_tokens, set reserve_decode",
        ),
        (lambda budget: kvjax.Exact(), 10**6, "does not grow with its budget"),
    ],
)
def test_errors_of_fit_bytes_explain_why_no_budget_fits(make, limit, message):
    with pytest.raises(ValueError, match=message):
        kvjax.fit_bytes(make, make_spec(), limit)
    assert [format_bytes(n) for n in (10, 1536, 3 * 2**20, 5 * 2**30)] == ["10 B", "1.5 KiB", "3.0 MiB", "5.00 GiB"]


# --- windows ---

# Policies, windows of layers, sinks, and tokens per step. A sliding window is used whatever the policy.
WINDOWS = [
    *(
        (kvjax.StreamingLLM(budget, sinks=sinks, compact_every=every), None, sinks, 1)
        for budget, sinks, every in [(8, 2, 1), (8, 2, 6), (8, 2, 64), (9, 4, 5), (30, 0, 8)]
    ),
    *((POLICIES["quest"], 5, 0, 1), (POLICIES["uniform"], 6, 0, 3), (POLICIES["exact"], 1, 0, 1)),
    (POLICIES["h2o"], 30, 0, 8),
]


@pytest.mark.parametrize("policy, window, sinks, block", WINDOWS)
def test_windows_read_sinks_and_recent_tokens_at_every_step(policy, window, sinks, block):
    stream, spec = make_stream(), make_spec(window=window, logit_cap=20.0)
    outputs, weights, *state = go(*prefilled(policy, stream, spec), after(stream, LENGTHS), block)
    position = np.arange(HEAD_DIM)
    for row, step in itertools.product(range(BATCH), range(NEW)):
        end = LENGTHS[row] + step + 1
        kept = (position < end) & ((position < sinks) | (position >= end - ((window or policy.budget) - sinks)))
        for head in range(KV_HEADS):
            np.testing.assert_array_equal(weights[row, step, head], kept, err_msg=f"{row=} {step=}")
            tokens, query = position[kept], stream.queries[row, end - 1, 2 * head]
            keys, values = stream.keys[row, tokens, head], stream.values[row, tokens, head]
            expected = softmax_attention(query, keys, values, logit_cap=20.0)
            np.testing.assert_allclose(outputs[row, step, 2 * head], expected, atol=1e-5)
    kvjax.raise_faults(state)


@pytest.mark.parametrize("block", [1, 8])
def test_reindexed_streaming_llm_rotates_at_positions_inside_the_cache(block):
    # As in the paper, the reference stores unrotated keys and rotates them by their position in the cache.
    stream, budget, sinks = make_stream(), 16, 2
    rotated = Stream(_rotated(stream.keys), stream.values, _rotated(stream.queries))
    reindexed = POLICIES["streaming_llm_reindexed"]
    outputs, *_ = go(*prefilled(reindexed, rotated), after(rotated, LENGTHS), block)
    for row, step, head in itertools.product(range(BATCH), range(NEW), (0, 2)):
        end = LENGTHS[row] + step + 1
        tokens = [position for position in range(end) if position < sinks or position >= end - (budget - sinks)]
        keys = _rotated(stream.keys[row, tokens, head // 2][None, :, None])[0, :, 0]
        query = _rotated(stream.queries[row, end - 1, head][None, None, None], [len(tokens) - 1])[0, 0, 0]
        expected = softmax_attention(query, keys, stream.values[row, tokens, 0])
        np.testing.assert_allclose(outputs[row, step, head], expected, atol=2e-5)
    unmoved, *_ = go(*prefilled(POLICIES["streaming_llm"], rotated), after(rotated, LENGTHS), block)
    assert np.abs(outputs - unmoved)[0].max() > 1e-3  # reindexing changes outputs


def _rotated(x, positions=None):
    """Applies RoPE to x [B, T, H, D] at the given positions, by default 0, 1, ..."""
    positions = np.arange(x.shape[1]) if positions is None else np.asarray(positions)
    return np.asarray(kvjax.rope.rotate(x, *kvjax.rope.rotation(positions[None], jnp.array(FREQUENCIES))))


# --- uniform ---


def middles(policy_sinks, policy_recent, end):
    position = np.arange(HEAD_DIM)
    return (position >= policy_sinks) & (position < end - policy_recent)


def test_uniform_samples_without_replacement_with_weights_that_sum_to_the_tokens():
    _, weights, *_ = whole_run("uniform")
    sinks, recent, size, every = 2, 8, 10, 8
    for row, step, head in itertools.product(range(BATCH), range(NEW), range(KV_HEADS)):
        read = weights[row, step, head]
        # Tokens that left the window after the last compaction are still staged.
        compacted = LENGTHS[row] + step // every * every
        between = middles(sinks, recent, compacted)
        expected_weight = max(1.0, between.sum() / size)
        assert np.count_nonzero(read[between]) == min(size, between.sum())
        np.testing.assert_allclose(read[between & (read > 0)], expected_weight, rtol=1e-5)
        np.testing.assert_array_equal(read[~between], present_tokens()[row, step, 0][~between])
        np.testing.assert_allclose(read.sum(), LENGTHS[row] + step + 1, rtol=1e-5)


def test_uniform_samples_do_not_depend_on_blocks():
    stream, finals = make_stream(), []
    for length, count, block, every in [(40, 24, 1, 8), (40, 24, 1, 1), (40, 24, 4, 4), (16, 48, 8, 8)]:
        lengths = (length,) * BATCH
        start = prefilled(POLICIES["uniform"], stream, make_spec(new=48), lengths)
        finals.append(read_weights(*go(*start, after(stream, lengths, count), block, every)[2:]))
    for final in finals[1:]:
        np.testing.assert_allclose(final, finals[0], atol=1e-5)


@pytest.mark.parametrize("num_decoded", [0, 16])
def test_uniform_includes_every_token_equally_often(num_decoded):
    batch, size = 400, 6
    policy, spec = kvjax.Uniform(12, sinks=2, recent=4, compact_every=8), make_spec(batch, 48 - num_decoded, 16)
    stream = Stream(*(np.repeat(part, batch, axis=0) for part in make_stream(batch=1, tokens=48)))
    lengths = np.full(batch, 48 - num_decoded)
    state = begin(policy, spec, row_keys(batch, seed=3), *prompt_of(stream, lengths, 48 - num_decoded), lengths)
    append, compact = jax.jit(kvjax.append), jax.jit(kvjax.compact)
    for first in range(0, num_decoded, 8):
        part = after(stream, lengths, 8, first)
        state = compact(*append(*state, part.keys, part.values))
    between = middles(2, 4, 48)
    included = (np.asarray(read_weights(*state)) > 0)[:, :, between].sum(axis=(0, 1))
    tokens, draws = int(between.sum()), batch * KV_HEADS
    expected = draws * size / tokens
    # Counts of samples without replacement are negatively correlated, which lowers the statistic by this factor.
    statistic = np.sum((included - expected) ** 2) / (expected * (1 - size / tokens)) * (tokens - 1) / tokens
    assert included.sum() == draws * size
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], tokens - 1)
    assert low < statistic < high


# --- clustergen ---


@pytest.mark.parametrize("keys_are", ["random", "duplicated", "tied"])
def test_clustergen_keeps_farthest_first_centers_of_the_prompt_and_the_window(keys_are):
    stream = make_stream(5)
    rng = np.random.default_rng(0)
    if keys_are == "duplicated":  # fewer distinct keys than centers
        stream = stream._replace(keys=stream.keys[:, rng.integers(0, 5, stream.keys.shape[1])])
    if keys_are == "tied":  # small integers: many distances are equal
        stream = stream._replace(keys=rng.integers(-1, 2, stream.keys.shape).astype(np.float32) * (np.arange(64) < 3))
    lengths = (37, 15, 5)
    state = prefilled(POLICIES["clustergen"], stream, lengths=lengths)
    start = read_weights(*state)
    _, weights, *_ = go(*state, after(stream, lengths))
    position = np.arange(HEAD_DIM)
    for row, head in itertools.product(range(BATCH), range(KV_HEADS)):
        valid = middles(2, 8, lengths[row])
        # `test_k_center` compares the traversal with brute force.
        centers = greedy_k_center(jnp.asarray(stream.keys[row, :, head]), valid, 10).index[: valid.sum()]
        fixed = np.isin(position, centers) | (position < 2)
        for step, read in enumerate([start[row, head], *weights[row, :, head]]):
            end = lengths[row] + step
            np.testing.assert_array_equal(read, (position < end) & (fixed | (position >= end - 8)))


# --- errors ---


@pytest.mark.parametrize(
    "name, shapes, functions",
    [
        ("keys", [(2, 5, 2, 64), (3, 5, 1, 64), (3, 5, 2, 1)], ("step", "append", "prefill")),
        ("values", [(3, 4, 2, 64), (3, 5, 1, 64), (3, 5, 2, 1)], ("step", "append", "prefill")),
        ("queries", [(2, 5, 4, 64), (3, 5, 2, 64), (3, 5, 8, 64), (3, 5, 4, 32), (3, 4, 64)], ("step", "attend")),
        ("queries", [(3, 2, 4, 64)], ("step",)),  # `attend` accepts any number of queries
    ],
)
def test_arrays_of_invalid_shape_are_refused(name, shapes, functions):
    state = kvjax.init(POLICIES["uniform"], make_spec(), row_keys())
    valid = {"queries": (3, 5, 4, 64), "keys": (3, 5, 2, 64), "values": (3, 5, 2, 64)}
    for shape, function in itertools.product(shapes, functions):
        queries, keys, values = (jnp.zeros(shape) for shape in (valid | {name: shape}).values())
        arguments = {"step": (queries, keys, values), "append": (keys, values), "attend": (queries,)}
        arguments["prefill"] = keys, values, jnp.ones(3, int)
        with pytest.raises(ValueError, match=f"{name} have shape"):
            getattr(kvjax, function)(*state, *arguments[function])
