"""BalanceKV in practice (Kochetkova et al. 2025): the prompt is halved after prefill, and all later tokens are kept.

A set of tokens is divided into two halves that give nearly equal attention outputs for any query, and one half is kept
with twice the weight. Per KV head:

1. After the prompt has been read exactly, sinks and recent tokens are kept with weight 1.
2. The tokens between them are cut into blocks of `block_size`.
3. In a block, a self-balancing walk gives every token a sign, in order. The sign is random, but tilted against the sum
   of the earlier signs, in which token j counts by its similarity to token i: exp of their keys' product times the
   product of their values. Tokens of either sign then represent the block.
4. `balance.exact_halving` keeps exactly half of the block, mostly tokens of one sign, with twice the weight.
5. Steps 2 to 4 repeat until the tokens fit into the budget.

A random half also represents the block on average; the walk reduces its error. While decoding every later token is
kept, in slots beyond the budget. The selection depends on keys and values only, so that any question can follow.

`BalanceKVTheory` is Algorithm 1 with its error bound.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from kvjax.methods.balancekv.balance import reference_halving
from kvjax.methods.balancekv.needles import needle_marks
from kvjax.policy import Policy, Prompt, Requirements, check_above, check_budget, check_min
from kvjax.segment import SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.per_head import per_head, stream_keys
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state, static


@state
class BalanceKVState:
    """A window whose selected slots hold needles, halved tokens of the prompt and later tokens, in this order."""

    window: Window
    log_num: Float[Array, "B H_kv S"]  # float32, of all slots of the window
    log_den: Float[Array, "B H_kv S"] | None  # None for the same as log_num
    later: Int[Array, "B"]  # int32, tokens that left the recent window while decoding
    unkept: Int[Array, "B H_kv"]  # int32, needles without a slot
    row_keys: Key[Array, "B"]
    halvings: int = static()
    halved_slots: int = static()
    finds_needles: bool = static()  # true on layer 1 only, so that the other layers share one program


@dataclasses.dataclass(frozen=True)
class BalanceKV(Policy[BalanceKVState]):
    """Keeps sinks, recent tokens, a weighted selection of the prompt's other tokens, and every later token.

    The other tokens of the prompt are halved a number of times (`itrs` of the released code), after exact prefill. A
    halving divides every block into two halves with similar attention outputs by a self-balancing walk, and keeps one
    of them with about twice the weight. Later tokens take slots in addition to the budget, as the paper counts.

    Attributes:
        budget: slots per KV head for the prompt, sinks and recent tokens included. The prompt is halved as often as a
            prompt of `spec.max_prompt_tokens` needs. The paper's rate of 1/4, two halvings, has slots for a quarter of
            the tokens between sinks and recent ones.
        sinks: first tokens that are always kept (32 on LongBench in the released code, 256 in its single-layer study).
        recent: newest tokens of the prompt that are always kept (32 and 256 as well).
        block_size: tokens that are halved together (`block_size` of the released code; 256 in its single-layer study).
        gamma: strength of the walk (`gamma` of the released code).
        temperature: factor of the kernel's exponent (`temp` of the released code; 0.1 in its single-layer study).
        decode: "weights" for log w in numerator and denominator, as the released needle path does. "scaled" for log w
            in the numerator and halvings x log 2 in the denominator, as the released LongBench path does.
        needles: slots for needles (section 4.3): on layer 1 tokens whose key has a negative mean inner product with the
            keys of its block, and 25 tokens on either side, per KV head; later layers keep the same positions. None
            for none, as outside the needle test. In the released code needles take slots of the budget, so that some
            can be dropped, and exact halving is off for all heads if any head has a needle. Here needles have separate
            slots per head, in addition to the budget, and halving continues without them.
        compact_every: tokens between compactions (kvjax's staging; it changes no result).

    Reference:
        BalanceKV, section 4, and the released code.
    """

    budget: int
    sinks: int = 32
    recent: int = 32
    block_size: int = 128
    gamma: float = 4.0
    temperature: float = 1.0
    decode: Literal["weights", "scaled"] = "weights"
    needles: int | None = None
    compact_every: int = 64

    requires = Requirements(entire_prompt=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="halved tokens")
        check_above(0, gamma=self.gamma, temperature=self.temperature)
        check_min(2, block_size=self.block_size)
        check_min(0, needles=self.needles)

    def halvings(self, candidates: int) -> int:
        """Returns how often `candidates` tokens between sinks and recent ones are halved."""
        slots = self.budget - self.sinks - self.recent
        return next(number for number in range(64) if candidates >> number <= slots)

    @property
    def _needle_slots(self) -> int:
        return self.needles or 0

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> BalanceKVState:
        """Returns an empty window for `spec`."""
        fixed = self.recent + self.sinks
        candidates = max(spec.max_prompt_tokens - fixed, 1)
        halvings = self.halvings(candidates)
        selected = self._needle_slots + (candidates >> halvings) + spec.max_new_tokens
        window = init_window(spec, self.sinks, self.recent, selected)
        weights = jnp.full(window.keys.shape[:3], -jnp.inf).at[:, :, :fixed].set(0.0)
        return BalanceKVState(
            window=window,
            log_num=weights,
            log_den=jnp.copy(weights) if self.decode == "scaled" else None,
            later=jnp.zeros(spec.batch, jnp.int32),
            unkept=jnp.zeros((spec.batch, spec.kv_heads), jnp.int32),
            row_keys=row_keys,
            halvings=halvings,
            halved_slots=candidates >> halvings,
            finds_needles=self.needles is not None and spec.layer == 1,
        )

    def layer_carry(self, state: BalanceKVState, prompt: Prompt) -> Shaped[Array, "B H_kv *N"] | None:
        """Returns the needles [B, H_kv, M] of the prompt, which layer 1 computes for the layers after it."""
        if not state.finds_needles:
            return prompt.layer_carry
        keys = windows.after_sinks(prompt.keys, self.sinks)
        tokens = prompt.keys.shape[2]
        inside = windows.middle_mask(dataclasses.replace(state.window, total=prompt.lengths), tokens)
        marks = functools.partial(needle_marks, block_size=self.block_size)
        return per_head(marks, 0, None)(keys, inside[:, tokens - keys.shape[2] :])

    def prefill(self, state: BalanceKVState, prompt: Prompt) -> BalanceKVState:
        """Fills the window and halves the prompt's tokens between sinks and recent ones, except needles."""
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)
        keys, values = windows.after_sinks(prompt.keys, self.sinks), windows.after_sinks(prompt.values, self.sinks)
        has_needles = self.needles is not None and prompt.layer_carry is not None
        marks = prompt.layer_carry if has_needles else jnp.zeros(keys.shape[:3], bool)
        rngs = stream_keys(state.row_keys, keys.shape[1])
        select = per_head(functools.partial(self._select_head, state), 0, 0, 0, 0, None)
        source, log_needle, log_halved, unkept = select(rngs, keys, values, marks, middle)
        slot = jnp.broadcast_to(jnp.arange(source.shape[2]), source.shape)

        def put(buffer: Float[Array, "B H S"], *weights: Float[Array, "B H n"]) -> Float[Array, "B H S"]:
            return windows.put_aligned(window, slot, buffer, jnp.concatenate(weights, axis=2), slot)

        is_used = jnp.concatenate([log_needle, log_halved], axis=2) > -jnp.inf
        target = jnp.where(is_used, slot, window.selected)
        log_den = state.log_den
        if log_den is not None:
            same = jnp.where(jnp.isneginf(log_halved), -jnp.inf, state.halvings * math.log(2))
            log_den = put(log_den, log_needle, same)
        return dataclasses.replace(
            state,
            window=windows.write_selected(window, target, keys, values, source),
            log_num=put(state.log_num, log_needle, log_halved),
            log_den=log_den,
            unkept=unkept,
        )

    def segments(self, state: BalanceKVState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window of a state."""
        _, _, middle = windows.occupancy(state.window)
        selected = jnp.where(middle > 0, self._needle_slots + state.halved_slots + state.later, 0)
        (segment,) = windows.window_segments(state.window, selected, state.log_num)
        return (dataclasses.replace(segment, log_den=state.log_den),)

    def compact(self, state: BalanceKVState, new: Tokens) -> BalanceKVState:
        """Slides the window over new tokens; tokens that leave it take further slots."""
        window, left = windows.slide(state.window, new)
        shape = left.keys.shape[:3]
        index = jnp.arange(shape[2])
        slot = self._needle_slots + state.halved_slots + state.later[:, None] + index
        slot = jnp.broadcast_to(jnp.where(left.present, slot, window.selected)[:, None], shape)
        source = jnp.broadcast_to(index, shape)

        def put(buffer: Float[Array, "B H S"]) -> Float[Array, "B H S"]:
            return windows.put_aligned(window, slot, buffer, jnp.zeros(shape), source)

        return dataclasses.replace(
            state,
            window=windows.write_selected(window, slot, left.keys, left.values, source),
            log_num=put(state.log_num),
            log_den=None if state.log_den is None else put(state.log_den),
            later=state.later + left.count,
        )

    def _select_head(
        self,
        state: BalanceKVState,
        rng: Key[Array, ""],
        keys: Float[Array, "T D"],
        values: Float[Array, "T D_v"],
        marked: Bool[Array, "T"],
        middle: Int[Array, ""],
    ) -> tuple[Int[Array, "n"], Float[Array, "needles"], Float[Array, "halved"], Int[Array, ""]]:
        """Selects one head's needles and halved tokens.

        Returns:
            The tokens, the log-weights of needles and of halved tokens, and the number of needles without a slot.
        """
        inside = jnp.arange(keys.shape[0]) < middle
        marked &= inside
        is_needle = marked & (jnp.cumsum(marked) <= self._needle_slots)
        needle = jnp.nonzero(is_needle, size=self._needle_slots, fill_value=0)[0]
        needle_weight = jnp.where(jnp.arange(self._needle_slots) < jnp.sum(is_needle), 1.0, 0.0)
        candidate = inside & ~is_needle
        index, count = jnp.argsort(~candidate, stable=True), jnp.sum(candidate, dtype=jnp.int32)
        weight = jnp.where(jnp.arange(keys.shape[0]) < count, 1.0, 0.0)
        for halving in range(state.halvings):
            blocks = -(-index.shape[0] // self.block_size)
            uniforms = jax.random.uniform(jax.random.fold_in(rng, halving), (blocks, self.block_size))
            half, weight = reference_halving(
                uniforms, keys[index], values[index], weight, count, gamma=self.gamma, temperature=self.temperature
            )
            index, count = index[half], count // 2
        missing = max(state.halved_slots - index.shape[0], 0)
        index, weight = (jnp.pad(x[: state.halved_slots], (0, missing)) for x in (index, weight))
        unkept = jnp.sum(marked & ~is_needle, dtype=jnp.int32)
        return jnp.concatenate([needle, index]), jnp.log(needle_weight), jnp.log(weight), unkept
