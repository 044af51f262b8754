"""BalanceKV's released code (Han et al. 2025): the prompt is halved once; tokens that come later are all kept."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, Requirements, check_above, check_budget
from kvjax.segment import SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import state, static
from kvjax.stores import window as windows
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures.balance import reference_halving
from kvjax.structures.needles import needle_marks
from kvjax.structures.per_head import per_head, stream_keys


@state
class BalanceKVReferenceState:
    """In the window's selected slots stand needles, halved tokens, later ones."""

    window: Window
    log_num: Float[Array, "B H_kv S"]  # float32, of the whole window
    log_den: Float[Array, "B H_kv S"] | None  # None: the same
    later: Int[Array, "B"]  # int32, tokens that left the window while decoding
    unkept: Int[Array, "B H_kv"]  # int32, of the marked tokens those for which there was no slot
    row_keys: Key[Array, "B"]
    halvings: int = static()
    halved_slots: int = static()
    finds_needles: bool = static()  # on layer 1 alone: all other layers are one program


@dataclasses.dataclass(frozen=True)
class BalanceKVReference(Policy[BalanceKVReferenceState]):
    """Keeps sinks, recent tokens, a prompt halved as often as the budget asks for by `spec.max_prompt_tokens`, and every later
    token in slots beside the budget.

    Needles differ from the released code's on purpose: there marked tokens take slots of the budget, so that not all of
    them need survive, and exact halving is given up for all heads once any head has one. Here they take slots of their
    own, head by head, and the walk goes on without them.

    Attributes:
        budget: slots per head of the prompt, sinks and recent tokens included.
        sinks, recent: tokens always kept.
        block_size: tokens halved together (the code's block_size).
        gamma, temperature: of the walk (the code's gamma and temp); its defaults.
        decode: "weights": log w in both sums. "scaled": log w in the numerator, halvings x log 2 in the denominator, as
            the released LongBench path does.
        needles: slots for tokens that the needle augmentation marks: on layer 1 those whose key has a negative mean
            inner product with its block's keys, and 25 on either side, per kv head; later layers keep the same
            positions. None: no augmentation.
        needles_inside: needle slots are taken out of the budget; otherwise they come beside it.
        compact_every: tokens between compactions. It changes no result.

    Reference:
        BalanceKV, section 4, and the code released with it.
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    block_size: int = 128
    gamma: float = 4.0
    temperature: float = 1.0
    decode: Literal["weights", "scaled"] = "weights"
    needles: int | None = None
    needles_inside: bool = False
    compact_every: int = 64

    requires = Requirements(entire_prompt=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="halved tokens")
        check_above(0, gamma=self.gamma, temperature=self.temperature)
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size}; it must be at least 2 tokens")
        if (self.needles or 0) < 0 or self.most_halved < 1:
            raise ValueError(f"needles={self.needles} leave no slot for halved tokens")

    @property
    def most_halved(self) -> int:
        """Slots of halved tokens."""
        slots = self.budget - self.sinks - self.recent
        return slots - ((self.needles or 0) if self.needles_inside else 0)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> BalanceKVReferenceState:
        first = self.recent + self.sinks  # of the selected slots
        candidates = max(spec.max_prompt_tokens - first, 1)
        halvings = next(number for number in range(64) if candidates >> number <= self.most_halved)
        selected = (self.needles or 0) + (candidates >> halvings) + spec.max_new_tokens
        window = init_window(spec, self.sinks, self.recent, selected)
        weights = jnp.full(window.keys.shape[:3], -jnp.inf).at[:, :, :first].set(0.0)
        return BalanceKVReferenceState(
            window=window,
            log_num=weights,
            log_den=weights + 0 if self.decode == "scaled" else None,
            later=jnp.zeros(spec.batch, jnp.int32),
            unkept=jnp.zeros((spec.batch, spec.kv_heads), jnp.int32),
            row_keys=row_keys,
            halvings=halvings,
            halved_slots=candidates >> halvings,
            finds_needles=self.needles is not None and spec.layer == 1,
        )

    def layer_carry(self, state: BalanceKVReferenceState, prompt: Prompt):
        """Which tokens are needles [B, H_kv, M], from layer 1 to those after it."""
        if not state.finds_needles:
            return prompt.layer_carry
        keys = windows.after_sinks(prompt.keys, self.sinks)
        tokens = prompt.keys.shape[2]
        inside = windows.middle_mask(dataclasses.replace(state.window, total=prompt.lengths), tokens)
        marks = functools.partial(needle_marks, block_size=self.block_size)
        return per_head(marks, 0, None)(keys, inside[:, tokens - keys.shape[2] :])

    def prefill(self, state: BalanceKVReferenceState, prompt: Prompt) -> BalanceKVReferenceState:
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)
        keys, values = windows.after_sinks(prompt.keys, self.sinks), windows.after_sinks(prompt.values, self.sinks)
        layer_carry = prompt.layer_carry if self.needles is not None else None
        marks = jnp.zeros(keys.shape[:3], bool) if layer_carry is None else layer_carry
        rngs = stream_keys(state.row_keys, keys.shape[1])
        choose = functools.partial(self._choose, state)
        kept, log_needle, log_halved, unkept = per_head(choose, 0, 0, 0, 0, None)(rngs, keys, values, marks, middle)
        slot = jnp.broadcast_to(jnp.arange(kept.shape[2]), kept.shape)
        log_num = jnp.concatenate([log_needle, log_halved], axis=2)

        def put(buffer: Array, x: Array) -> Array:
            return windows.put_aligned(window, slot, buffer, x, slot)

        log_den = state.log_den
        if log_den is not None:
            same = jnp.where(jnp.isneginf(log_halved), -jnp.inf, state.halvings * math.log(2))
            log_den = put(log_den, jnp.concatenate([log_needle, same], axis=2))
        return dataclasses.replace(
            state,
            window=windows.write_selected(window, slot, keys, values, kept),
            log_num=put(state.log_num, log_num),
            log_den=log_den,
            unkept=unkept,
        )

    def segments(
        self, state: BalanceKVReferenceState, num_visible_staged: Int[Array, "B #T"]
    ) -> tuple[SegmentLike, ...]:
        _, _, middle = windows.occupancy(state.window)
        selected = jnp.where(middle > 0, (self.needles or 0) + state.halved_slots + state.later, 0)
        (segment,) = windows.window_segments(state.window, selected, state.log_num)
        return (dataclasses.replace(segment, log_den=state.log_den),)

    def compact(self, state: BalanceKVReferenceState, new: Tokens) -> BalanceKVReferenceState:
        window, left = windows.slide(state.window, new)
        place = jnp.arange(left.keys.shape[2])
        slot = (self.needles or 0) + state.halved_slots + state.later[:, None] + place
        slot = jnp.where(left.present, slot, window.keys.shape[2])
        slot, source = (jnp.broadcast_to(x[:, None] if x.ndim == 2 else x, left.keys.shape[:3]) for x in (slot, place))
        weigh = lambda buffer: windows.put_aligned(window, slot, buffer, jnp.zeros(left.keys.shape[:3]), source)  # noqa: E731
        return dataclasses.replace(
            state,
            window=windows.write_selected(window, slot, left.keys, left.values, source),
            log_num=weigh(state.log_num),
            log_den=None if state.log_den is None else weigh(state.log_den),
            later=state.later + left.count,
        )

    def _choose(self, state: BalanceKVReferenceState, rng: Key[Array, ""], keys, values, marked, middle):
        """One head's needles and halved tokens: their numbers, log-weights, and marks without a slot."""
        needles = self.needles or 0
        inside = jnp.arange(keys.shape[0]) < middle
        marked &= inside
        kept_marks = marked & (jnp.cumsum(marked) <= needles)
        needle = jnp.nonzero(kept_marks, size=needles, fill_value=0)[0]
        needle_weight = jnp.where(jnp.arange(needles) < jnp.sum(kept_marks), 1.0, 0.0)
        rest = inside & ~kept_marks
        index, count = jnp.argsort(~rest, stable=True), jnp.sum(rest, dtype=jnp.int32)
        weight = jnp.where(jnp.arange(keys.shape[0]) < count, 1.0, 0.0)
        for halving in range(state.halvings):
            blocks = -(-index.shape[0] // self.block_size)
            uniforms = jax.random.uniform(jax.random.fold_in(rng, halving), (blocks, self.block_size))
            kept, weight = reference_halving(
                uniforms, keys[index], values[index], weight, count, gamma=self.gamma, temperature=self.temperature
            )
            index, count = index[kept], count // 2
        fit = lambda x: jnp.pad(x[: state.halved_slots], (0, max(state.halved_slots - x.shape[0], 0)))  # noqa: E731
        unkept = jnp.sum(marked & ~kept_marks, dtype=jnp.int32)
        return jnp.concatenate([needle, fit(index)]), jnp.log(needle_weight), jnp.log(fit(weight)), unkept
