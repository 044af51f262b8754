"""BalanceKV: tokens halved again and again so that sums over them change little.

The stream structures and their guarantees are in `kvjax.balance`, `kvjax.merge_reduce` and `kvjax.value_buckets`.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax import merge_reduce, value_buckets
from kvjax.balance import (
    Halve,
    halve_by_pairs,
    halve_exactly,
    reference_halving,
    softmax_balance,
    walk_constant,
)
from kvjax.merge_reduce import MergeReduceTree, bins_needed, init_merge_reduce
from kvjax.policies.windowed import init_windowed, over_heads, stream_keys, windowed_policy
from kvjax.policy import CachePolicy, CacheSpec, whole_tiles
from kvjax.segment import segment
from kvjax.staging import Block, between, check_budget, check_period, init_window, occupancy, window_segments
from kvjax.state import BATCH, KV_HEADS, SLOTS, array, stacked, state, static
from kvjax.value_buckets import ValueBuckets, init_value_buckets

VARIANTS = ("pairs", "streaming", "reference", "paper")
# The constants of each variant's walk; those of "reference" are the released code's.
WALKS = {"pairs": (4.0, 0.1), "streaming": (4.0, 0.1), "reference": (4.0, 1.0)}
# Of a tree. A stream that comes bit by bit halves two bins at a time: the fewer they are, the more tokens find their
# like; the more, the less weights differ.
FEWEST_BINS = 16
# The arguments that some variants do not have, with their neutral values and the variants that have them.
_OWN_ARGUMENTS: dict[str, tuple[object, tuple[str, ...]]] = {
    "block_size": (None, ("pairs", "streaming", "reference")),
    "bins": (None, ("pairs", "streaming", "paper")),
    "gamma": (None, ("pairs", "streaming", "reference")),
    "temperature": (None, ("pairs", "streaming", "reference")),
    "features": (None, ("streaming",)),
    "decode": ("weights", ("reference",)),
    "needles": (None, ("reference",)),
    "needles_inside": (False, ("reference",)),
    "epsilon": (None, ("paper",)),
    "delta": (0.1, ("paper",)),
    "c": (None, ("paper",)),
    "key_norm": (None, ("paper",)),
    "value_exponents": ((-1, 2), ("paper",)),
}
# Tokens up to which prompts are halved in smaller groups, since exact prefill of them takes so little itself.
SHORT_PROMPT = 4096
# Marks of the needle augmentation reach so many tokens to either side.
NEEDLE_REACH = 25


@state
class Streamed:
    """What "pairs" and "streaming" keep beside the window."""

    tree: MergeReduceTree = stacked(BATCH, KV_HEADS)


@state
class Bounded:
    """What "paper" keeps beside the window."""

    numerator: ValueBuckets = stacked(BATCH, KV_HEADS)
    denominator: MergeReduceTree = stacked(BATCH, KV_HEADS)
    tokens: int = static()  # most that will ever come


@state
class HalvedPrompt:
    """What "reference" keeps beside the window, in whose selection slots stand needles, halved tokens, later ones."""

    log_num: Float[Array, "B H_kv S"] = array(BATCH, KV_HEADS, SLOTS)  # float32, of the whole window
    log_den: Float[Array, "B H_kv S"] | None = array(BATCH, KV_HEADS, SLOTS)  # None: the same
    later: Int[Array, "B"] = array(BATCH)  # int32, tokens that left the window while decoding
    # int32, of the marked tokens those for which there was no slot.
    unkept: Int[Array, "B H_kv"] = array(BATCH, KV_HEADS)
    row_keys: Key[Array, "B"] = array(BATCH)
    halvings: int = static()
    halved_slots: int = static()
    finds_needles: bool = static()  # on layer 1 alone: all other layers are one program


def balancekv(
    budget: int,
    *,
    sinks: int = 4,
    recent: int = 64,
    period: int = 64,
    variant: Literal["pairs", "streaming", "reference", "paper"] = "pairs",
    block_size: int | None = None,
    bins: int | None = None,
    gamma: float | None = None,
    temperature: float | None = None,
    features: int | None = None,
    decode: Literal["weights", "scaled"] = "weights",
    needles: int | None = None,
    needles_inside: bool = False,
    epsilon: float | None = None,
    delta: float = 0.1,
    c: float | None = None,
    key_norm: float | None = None,
    value_exponents: tuple[int, int] = (-1, 2),
) -> CachePolicy:
    """Keeps sinks, recent tokens and a weighted choice of the others, per kv head.

    Args:
        budget: slots per head, sinks and recent tokens included. A slot is a key and a value.
        sinks, recent: tokens always kept. The papers' code keeps 32 + 32, or 256 + 256 in its single-layer study.
        period: tokens between compactions.
        variant:
            "pairs" (default): a merge-and-reduce tree that is as full as its slots allow, halved by pairs of nearest
                neighbours. The weights sum to the tokens they stand for. Heuristic. Its error at equal bytes is a
                quarter to a half of uniform sampling's where keys have norms up to 4; at norms near 15, where one
                token or one cluster takes all attention, the two are alike.
            "streaming": the same tree with the released code's walk and exact halving, weights corrected to that sum.
            "reference": the released code: the prompt is halved once, as often as the budget asks for by
                `spec.max_prompt`; tokens that come later are all kept, in slots of their own beside the budget.
            "paper": Algorithm 1 with its guarantee: trees for the numerator by value norm, one for the denominator.
        block_size: tokens of a prompt halved together ("paper" has none). Larger is better and slower: 512 by default,
            256 for prompts of up to `SHORT_PROMPT` tokens, where 512 would take more than a tenth of the time of exact
            prefill; "reference": 128.
        bins: into how many bins a tree's slots are divided, two of which are halved together as tokens come; by
            default `FEWEST_BINS` or a few more, and for "paper" as few as the length of the stream allows.
        gamma, temperature: of the walk; see `halve_by_pairs` and `reference_halving` for what they mean and `WALKS`
            for the defaults.
        features: "streaming" only; the walk goes on so many random features of the kernel, at a cost that grows with
            the block and not with its square.
        decode: "reference" only; "weights": log w in both sums. "scaled": log w in the numerator, halvings x log 2 in
            the denominator, as the released LongBench path does.
        needles: "reference" only; slots for tokens that the needle augmentation marks: on layer 1 those whose key has
            no positive mean inner product with its block's keys, and 25 on either side, per kv head; later layers
            keep the same positions, which `shared` carries to them. None: no augmentation.
        needles_inside: needle slots are taken out of the budget, those for halved tokens being fewer by as many.
            Otherwise they come beside it.
        epsilon: "paper" only; erases value buckets that are negligible at this error (needs `key_norm`).
        delta, c: "paper" only; chance of failure, and the walk's constant 30 log(n / delta) where c is None.
        key_norm: "paper" only; the bound r on the keys' norms; by default the largest of each block.
        value_exponents: "paper" only; first and last i of the buckets 2^(i - 1) <= |v| <= 2^i.

    Raises:
        ValueError: for a budget too small for the stream, or an argument that the variant does not have.
    """
    given = {name: value for name, value in locals().items() if name in _OWN_ARGUMENTS}
    check_budget(budget, sinks, recent)
    check_period(period)
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r}; it must be one of {', '.join(map(repr, VARIANTS))}")
    for name, value in given.items():
        neutral, variants = _OWN_ARGUMENTS[name]
        if value != neutral and variant not in variants:
            raise ValueError(f"{name}={value!r} means nothing to variant={variant!r}; it is for {', '.join(variants)}")
    slots = budget - sinks - recent
    if slots < 1:
        raise ValueError(f"budget={budget} leaves no slot to choose into; sinks + recent already take {budget}")
    if block_size is not None and block_size < 2:
        raise ValueError(f"block_size={block_size}; it must be at least 2 tokens")
    window = _WindowSizes(sinks, recent, period)
    if variant == "paper":
        constants = _Constants(epsilon, delta, c, key_norm)
        return _paper(slots, window, bins, constants, value_exponents)
    default_gamma, default_temperature = WALKS[variant]
    gamma = default_gamma if gamma is None else gamma
    temperature = default_temperature if temperature is None else temperature
    if variant == "reference":
        if decode not in ("weights", "scaled"):
            raise ValueError(f"decode={decode!r}; it must be 'weights' or 'scaled'")
        return _reference(slots, window, block_size or 128, gamma, temperature, decode, needles, needles_inside)
    function = halve_by_pairs if variant == "pairs" else functools.partial(halve_exactly, features=features)
    halve = functools.partial(function, gamma=gamma, temperature=temperature)
    return _streamed(f"balancekv({variant})", slots, window, block_size, bins, halve)


class _WindowSizes(NamedTuple):
    sinks: int
    recent: int
    period: int

    def init(self, spec: CacheSpec, more_slots: int = 0):
        return init_window(spec, self.sinks + self.recent + more_slots, self.sinks, self.recent, self.period)

    def most(self, spec: CacheSpec) -> int:
        """Most tokens that can ever leave the window."""
        return max(spec.max_prompt + spec.max_new - self.sinks - self.recent, 1)


def bin_sizes(slots: float, tokens: int, bins: int | None, fewest: int = FEWEST_BINS) -> tuple[int, int]:
    """Number of bins and slots in each: the fewest that will do, or a few more that use more of the slots.

    Raises:
        ValueError: where the slots are too few for a stream of so many tokens.
    """
    tried = range(max(1, min(fewest, int(slots))), int(slots) + 1) if bins is None else (bins,)
    sizes = ((count, int(slots // count)) for count in tried)
    fit = [(count, size) for count, size in sizes if size and count >= bins_needed(tokens, size)]
    if not fit:
        raise ValueError(
            f"{slots:g} slots beside sinks and recent tokens, in {bins or 'any number of'} bins, cannot hold a stream "
            f"of {tokens} tokens: log2(tokens / bin slots) bins are needed; give a larger budget"
        )
    few = fit[: max(1, fewest // 2)]
    whole = [sizes for sizes in few if whole_tiles(math.prod(sizes)) == math.prod(sizes)]
    return max(whole or few, key=lambda sizes: math.prod(sizes))


# --- pairs, streaming ---


def _streamed(
    name: str, slots: int, sizes: _WindowSizes, block_size: int | None, bins: int | None, halve: Halve
) -> CachePolicy:
    def init(spec, row_keys):
        count, size = bin_sizes(slots, sizes.most(spec), bins)

        def make(rng):
            return init_merge_reduce(
                rng,
                bins=count,
                bin_slots=size,
                key_dim=spec.head_dim,
                value_dim=spec.head_dim,
                tokens=sizes.most(spec),
                dtype=spec.dtype,
            )

        trees = over_heads(make, 0)(stream_keys(row_keys, spec.kv_heads))
        return init_windowed(spec, sizes.init(spec), Streamed(trees))

    def select(state, keys, values, queries):
        _, _, middle = occupancy(state.window)
        together = max(1, 8 // (keys.shape[0] * keys.shape[2]))
        block = block_size or (256 if state.max_prompt <= SHORT_PROMPT else 512)
        fill = functools.partial(merge_reduce.fill, halve=halve, block=block, together=together)
        trees = over_heads(fill, 0, 0, 0, None)(
            state.selection.tree, _middle(keys, sizes.sinks), _middle(values, sizes.sinks), middle
        )
        return dataclasses.replace(state, selection=Streamed(trees))

    def absorb(state, block: Block):
        insert = functools.partial(merge_reduce.insert, halve=halve)
        trees = over_heads(insert, 0, 0, 0, None)(state.selection.tree, block.keys, block.values, block.present)
        return dataclasses.replace(state, selection=Streamed(trees))

    def segments(state, queries):
        tree = state.selection.tree
        return *window_segments(state.window, queries=queries), segment(tree.keys, tree.values, log_num=tree.log_weight)

    return windowed_policy(name, init=init, select=select, absorb=absorb, segments=segments, period=sizes.period)


def _middle(tokens: Float[Array, "B T H D"], sinks: int) -> Float[Array, "B H M D"]:
    """The tokens after the sinks, of which the first few, by row, are those between sinks and recent ones."""
    # At least one, so that shapes stay positive; none of it counts where a prompt is all sinks.
    return tokens.swapaxes(1, 2)[:, :, min(sinks, tokens.shape[1] - 1) :]


# --- Algorithm 1 ---


class _Constants(NamedTuple):
    epsilon: float | None
    delta: float
    c: float | None
    key_norm: float | None

    def walk(self, tokens: int) -> float:
        return walk_constant(tokens, self.delta) if self.c is None else self.c

    def negligible(self, tokens: int, head_dim: int) -> float:
        """The share of the largest value norm up to which a bucket is erased."""
        if self.epsilon is None or self.key_norm is None:
            return 0.0
        return self.epsilon / (2 * tokens) * math.exp(-(self.key_norm**2) / math.sqrt(head_dim))


def _paper(
    slots: int, sizes: _WindowSizes, bins: int | None, constants: _Constants, exponents: tuple[int, int]
) -> CachePolicy:
    if constants.epsilon is not None and constants.key_norm is None:
        raise ValueError(f"epsilon={constants.epsilon} needs key_norm, the bound on the keys' norms")
    lowest, buckets = exponents[0], exponents[1] - exponents[0] + 1
    if buckets < 1:
        raise ValueError(f"value_exponents={exponents}; the last must not lie below the first")

    def halve_with(tokens: int, value_norm) -> Halve:
        def halve(rng, keys, values, weights):
            norms = jnp.where(weights > 0, jnp.linalg.norm(keys.astype(jnp.float32), axis=1), 0.0)
            norm = jnp.max(norms) if constants.key_norm is None else constants.key_norm
            return softmax_balance(
                rng, keys, values, weights, c=constants.walk(tokens), key_norm=norm, value_norm=value_norm
            )

        return halve

    def init(spec, row_keys):
        tokens = sizes.most(spec)
        # A denominator's entry is a key alone: half a slot.
        count, size = bin_sizes(slots / (buckets + 0.5), tokens, bins, fewest=1)
        make = functools.partial(
            init_merge_reduce,
            bins=count,
            bin_slots=size,
            key_dim=spec.head_dim,
            tokens=tokens,
            dtype=spec.dtype,
            eager=True,
            conserves_mass=False,
        )

        def make_streams(rng):
            numerator_key, denominator_key = jax.random.split(rng)
            numerator = init_value_buckets(
                numerator_key, lowest=lowest, buckets=buckets, tree=functools.partial(make, value_dim=spec.head_dim)
            )
            return Bounded(numerator, make(denominator_key, value_dim=None), tokens)

        streams = over_heads(make_streams, 0)(stream_keys(row_keys, spec.kv_heads))
        return init_windowed(spec, sizes.init(spec), streams)

    def take(state, keys, values, present):
        """Streams [B, H_kv, T, D] through the trees; `present` [B, T]."""
        tokens = state.selection.tokens
        negligible = constants.negligible(tokens, keys.shape[-1])

        def insert(both, keys, values, present):
            numerator = value_buckets.insert(
                both.numerator,
                keys,
                values,
                present,
                halve=functools.partial(halve_with, tokens),
                negligible=negligible,
            )
            denominator = merge_reduce.insert(both.denominator, keys, None, present, halve=halve_with(tokens, 1.0))
            return Bounded(numerator, denominator, tokens)

        streams = over_heads(insert, 0, 0, 0, None)(state.selection, keys, values, present)
        return dataclasses.replace(state, selection=streams)

    def select(state, keys, values, queries):
        _, _, middle = occupancy(state.window)
        keys, values = _middle(keys, sizes.sinks), _middle(values, sizes.sinks)
        return take(state, keys, values, jnp.arange(keys.shape[2]) < middle[:, None])

    def absorb(state, block: Block):
        return take(state, block.keys, block.values, block.present)

    def segments(state, queries):
        trees, denominator = state.selection.numerator.trees, state.selection.denominator
        join = lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])  # noqa: E731
        return (
            *window_segments(state.window, queries=queries),
            segment(join(trees.keys), join(trees.values), log_num=join(trees.log_weight), feeds="numerator"),
            segment(denominator.keys, None, log_den=denominator.log_weight, feeds="denominator"),
        )

    return windowed_policy(
        "balancekv(paper)", init=init, select=select, absorb=absorb, segments=segments, period=sizes.period
    )


# --- the released code ---


def _reference(
    slots: int,
    sizes: _WindowSizes,
    block_size: int,
    gamma: float,
    temperature: float,
    decode: str,
    needles: int | None,
    needles_inside: bool,
) -> CachePolicy:
    needle_slots = needles or 0
    most_halved = slots - (needle_slots if needles_inside else 0)
    if needle_slots < 0 or most_halved < 1:
        raise ValueError(f"needles={needles} leave no slot for halved tokens; {slots} slots are to be divided")
    first = sizes.recent + sizes.sinks  # of the selection's slots

    def init(spec, row_keys):
        candidates = max(spec.max_prompt - first, 1)
        halvings = next(number for number in range(64) if candidates >> number <= most_halved)
        window = sizes.init(spec, needle_slots + (candidates >> halvings) + spec.max_new)
        weights = jnp.full((spec.batch, spec.kv_heads, window.keys.shape[2]), -jnp.inf).at[:, :, :first].set(0.0)
        halved = HalvedPrompt(
            log_num=weights,
            log_den=weights + 0 if decode == "scaled" else None,
            later=jnp.zeros(spec.batch, jnp.int32),
            unkept=jnp.zeros((spec.batch, spec.kv_heads), jnp.int32),
            row_keys=row_keys,
            halvings=halvings,
            halved_slots=candidates >> halvings,
            finds_needles=needles is not None and spec.layer == 1,
        )
        return init_windowed(spec, window, halved)

    def compress(state, keys, values, marks):
        chosen, halved_slots = state.selection, state.selection.halved_slots
        _, _, middle = occupancy(state.window)

        def compress_head(rng, keys, values, marked, middle):
            inside = jnp.arange(keys.shape[0]) < middle
            marked &= inside
            kept_marks = marked & (jnp.cumsum(marked) <= needle_slots)
            needle = jnp.nonzero(kept_marks, size=needle_slots, fill_value=0)[0]
            needle_weight = jnp.where(jnp.arange(needle_slots) < jnp.sum(kept_marks), 1.0, 0.0)
            rest = inside & ~kept_marks
            index, count = jnp.argsort(~rest, stable=True), jnp.sum(rest, dtype=jnp.int32)
            weight = jnp.where(jnp.arange(keys.shape[0]) < count, 1.0, 0.0)
            for halving in range(chosen.halvings):
                blocks = -(-index.shape[0] // block_size)
                uniforms = jax.random.uniform(jax.random.fold_in(rng, halving), (blocks, block_size))
                kept, weight = reference_halving(
                    uniforms, keys[index], values[index], weight, count, gamma=gamma, temperature=temperature
                )
                index, count = index[kept], count // 2
            index, weight = _resize(index, halved_slots), _resize(weight, halved_slots)
            all_kept = jnp.concatenate([needle, index])
            return (
                keys[all_kept],
                values[all_kept],
                jnp.log(needle_weight),
                jnp.log(weight),
                jnp.sum(marked & ~kept_marks, dtype=jnp.int32),
            )

        rngs = stream_keys(chosen.row_keys, keys.shape[2])
        middle_keys, middle_values = _middle(keys, sizes.sinks), _middle(values, sizes.sinks)
        kept_keys, kept_values, log_needle, log_halved, unkept = over_heads(compress_head, 0, 0, 0, 0, None)(
            rngs, middle_keys, middle_values, marks, middle
        )
        put = lambda buffer, x: buffer.at[:, :, first : first + x.shape[2]].set(x.astype(buffer.dtype))  # noqa: E731
        window = dataclasses.replace(
            state.window, keys=put(state.window.keys, kept_keys), values=put(state.window.values, kept_values)
        )
        log_den = chosen.log_den
        if log_den is not None:
            same = jnp.where(jnp.isneginf(log_halved), -jnp.inf, chosen.halvings * math.log(2))
            log_den = put(log_den, jnp.concatenate([log_needle, same], axis=2))
        chosen = dataclasses.replace(
            chosen,
            log_num=put(chosen.log_num, jnp.concatenate([log_needle, log_halved], axis=2)),
            log_den=log_den,
            unkept=unkept,
        )
        return dataclasses.replace(state, window=window, selection=chosen)

    def absorb(state, block: Block):
        chosen, window = state.selection, state.window
        place = jnp.arange(block.keys.shape[2])
        slots = first + needle_slots + chosen.halved_slots + chosen.later[:, None] + place
        slots = jnp.where(block.present, slots, window.keys.shape[2])

        def append(buffer, fresh):
            put = lambda buffer, fresh, slots: buffer.at[:, slots].set(fresh, mode="drop")  # noqa: E731
            return jax.vmap(put)(buffer, fresh, slots)

        nothing = jnp.zeros(block.keys.shape[:3])
        window = dataclasses.replace(
            window, keys=append(window.keys, block.keys), values=append(window.values, block.values)
        )
        chosen = dataclasses.replace(
            chosen,
            log_num=append(chosen.log_num, nothing),
            log_den=None if chosen.log_den is None else append(chosen.log_den, nothing),
            later=chosen.later + block.count,
        )
        return dataclasses.replace(state, window=window, selection=chosen)

    def segments(state, queries):
        chosen = state.selection
        _, _, middle = occupancy(state.window)
        selected = jnp.where(middle > 0, needle_slots + chosen.halved_slots + chosen.later, 0)
        store, staged = window_segments(state.window, selected, chosen.log_num, queries=queries)
        return dataclasses.replace(store, log_den=chosen.log_den), staged

    policy = windowed_policy(
        "balancekv(reference)",
        init=init,
        select=lambda state, keys, values, queries: state,
        absorb=absorb,
        segments=segments,
        period=sizes.period,
        streams=False,
    )

    def prefill(state, keys, values, lengths, query_tail=None, shared=None):
        state, shared = policy.prefill(state, keys, values, lengths, query_tail, shared)
        middle_keys = _middle(keys, sizes.sinks)
        if state.selection.finds_needles:
            inside = between(state.window, keys.shape[1])[:, keys.shape[1] - middle_keys.shape[2] :]
            shared = jax.vmap(jax.vmap(functools.partial(needle_marks, block_size=block_size), (0, None)))(
                middle_keys, inside
            )
        marks = shared if needles is not None and shared is not None else jnp.zeros(middle_keys.shape[:3], bool)
        return compress(state, keys, values, marks), shared

    return policy._replace(prefill=prefill)


def needle_marks(keys: Float[Array, "T D"], inside: Bool[Array, "T"], block_size: int) -> Bool[Array, "T"]:
    """Tokens whose key has mean inner product <= 0 with the keys of its block, and `NEEDLE_REACH` on either side.

    Args:
        inside: which tokens count, from the first on without gaps.

    Source: BalanceKV, section 4.3, and the code released with it.
    """
    tokens = keys.shape[0]
    blocks = -(-tokens // block_size)
    keys = jnp.where(inside[:, None], keys.astype(jnp.float32), 0.0)
    split = jnp.pad(keys, ((0, blocks * block_size - tokens), (0, 0))).reshape(blocks, block_size, -1)
    products = jnp.einsum("btd,bd->bt", split, jnp.sum(split, axis=1)).reshape(-1)[:tokens]
    marked = jnp.cumsum(inside & (products <= 0))
    places = jnp.arange(tokens)
    before = jnp.where(places > NEEDLE_REACH, marked[jnp.maximum(places - NEEDLE_REACH - 1, 0)], 0)
    return inside & (marked[jnp.minimum(places + NEEDLE_REACH, tokens - 1)] > before)


def _resize(x: Float[Array, "n"] | Int[Array, "n"], size: int) -> Float[Array, "m"] | Int[Array, "m"]:
    """The first `size` numbers, followed by zeros where there are fewer."""
    return jnp.pad(x[:size], (0, max(size - x.shape[0], 0)))


# --- the theorem's settings ---


class Settings(NamedTuple):
    """What the theorem asks for, in slots; `vacuous` where that is no fewer than the tokens."""

    batch_size: int  # t of MergeAndReduce
    bins: int  # of t / 2 slots each, of one tree
    c: float  # the walk's constant
    slots: int  # of one tree
    vacuous: bool
    message: str


def balancekv_settings(
    epsilon: float,
    *,
    tokens: int,
    head_dim: int,
    key_norm: float,
    query_norm: float,
    value_dim: int | None = None,
    delta: float = 0.1,
) -> Settings:
    """The batch size with which every query's error is at most epsilon |softmax|_2 |V|_F with probability 1 - delta.

    t = L sqrt(D_v) c exp(2 r^2 / sqrt(D)) / epsilon with L = log2(tokens) levels, c = 30 log(tokens D_v L / delta) and
    r = max(key_norm, query_norm), norms being of keys and queries before the scale of attention. A halving of t tokens
    changes the sum of each of D_v coordinates by at most c exp(r^2 / sqrt(D)) |v|; the errors of a level add up to
    tokens / t of that, and the least denominator is tokens exp(-r^2 / sqrt(D)). The error is relative, so that norms
    of values do not enter.

    Raises:
        ValueError: for epsilon or delta out of (0, 1).

    Source: BalanceKV, Theorems 3.2 and 3.3; the constant of the latter is not stated and is worked out here from the
    proof.
    """
    for name, chance in {"epsilon": epsilon, "delta": delta}.items():
        if not 0 < chance < 1:
            raise ValueError(f"{name}={chance}; it must lie between 0 and 1")
    width = value_dim or head_dim
    levels = max(math.ceil(math.log2(tokens)), 1)
    c = walk_constant(tokens * width * levels, delta)
    exponent = 2 * max(key_norm, query_norm) ** 2 / math.sqrt(head_dim)
    batch_size = 2 * math.ceil(levels * math.sqrt(width) * c * math.exp(min(exponent, 600)) / epsilon / 2)
    bins = bins_needed(tokens, batch_size // 2)
    slots = bins * (batch_size // 2)
    vacuous = slots >= tokens
    verdict = (
        "no fewer than the tokens: at these norms the guarantee is vacuous" if vacuous else "fewer than the tokens"
    )
    message = (
        f"epsilon={epsilon:g} at norms {key_norm:g} (keys) and {query_norm:g} (queries) asks for batches of "
        f"{batch_size:.3g} tokens and {slots:.3g} slots for {tokens}, {verdict}"
    )
    return Settings(batch_size, bins, c, slots, vacuous, message)
