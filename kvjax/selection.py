"""Policies that keep, of a prompt, the tokens of highest score: a score, a budget and one store for all of them.

The store's slots lie in the order of rank, best first. What comes later fills empty slots and then takes those of the
lowest rank, one after the other, so that a new token needs neither a score nor a slot that was kept free for it.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.per_head import per_head
from kvjax.policy import Policy, Prompt, check_settings
from kvjax.segment import Segment
from kvjax.spec import CacheSpec
from kvjax.state import entries, state, static

# TPUs lay out stores of another number of slots as no kernel reads them, and copy them at every step.
TILE = 8


@state
class Ranked:
    """The kept tokens of every head: a prompt's by rank, in slots [0, ranked), and later ones as `places` says."""

    keys: Float[Array, "B H_kv S D"] = entries(first="first")
    values: Float[Array, "B H_kv S D_v"] = entries(first="first")
    ranked: Int[Array, "B"]  # int32
    later: Int[Array, "B"]  # int32, tokens taken in after the prompt
    first: int = static(default=0)  # slots that are always kept, of sinks and recent tokens


@dataclasses.dataclass(frozen=True)
class Selection(Policy[Ranked]):
    """Keeps the first tokens of a prompt, its last ones, and those of highest `score` between them, head by head; a
    later token takes the place of the one of lowest rank. When all that may go has gone, the oldest later one goes.

    A policy of this kind is a dataclass with one method, `score`. `AdaKV` shares the budget among the heads of a layer.

    Attributes:
        budget: slots per head, of the prompt and of what comes later.
        sinks: first tokens, which are never dropped.
        recent: last tokens of the prompt, which rank right behind the sinks.
        beside: (what published selections count) later tokens stand beside the budget, in `spec.max_new` more slots
            (up to seven more than that, see `TILE`), all counted as bytes.
        shares: of every layer, how many times the budget it has, in whole tiles, but no less than `least_budget`: as
            many slots in all where their mean is 1, but for that. None: all have the same. What layers need differs far
            more than what texts of one kind do (`experiments.calibrate_layers` shows it).
        compact_every: tokens between compactions. It changes no result but that until then new tokens are read beside
            all kept ones.
    """

    budget: int
    sinks: int = 4
    recent: int = 0
    beside: bool = False
    shares: tuple[float, ...] | None = None
    compact_every: int = 16

    streams = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.budget, self.sinks, self.recent, self.compact_every)
        if self.shares is not None and not (self.shares and min(self.shares) >= 0 < max(self.shares)):
            raise ValueError(f"shares={self.shares}; none may be below 0, nor all 0")
        if self.budget < self.least_budget:
            raise ValueError(
                f"budget={self.budget} slots cannot hold sinks={self.sinks} and the compact_every={self.compact_every} "
                f"tokens of a compaction; it must be at least {self.sinks + self.compact_every}, or those smaller"
            )

    @property
    def least_budget(self) -> int:
        """Slots of what is never dropped, and of a compaction, where later tokens have no slots of their own."""
        return max(self.sinks + max(self.recent, 0 if self.beside else self.compact_every), 1)

    def at(self, spec):
        if self.shares is None:
            return self
        if len(self.shares) != spec.layers:
            raise ValueError(f"shares={self.shares} are {len(self.shares)}; the model has {spec.layers} layers")
        budget = max(TILE * round(self.budget * self.shares[spec.layer] / TILE), self.least_budget)
        # No layer has more slots than tokens can come: what is left to it is the other layers', when bytes are fitted.
        budget = min(budget, spec.capacity)
        return dataclasses.replace(self, budget=budget, shares=None)

    @abc.abstractmethod
    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """How much the tokens of a prompt matter to each kv head, float32; what lies past a row's length is ignored."""

    def rank(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """The scores with what is always kept above all of them: sinks first, then recent tokens, the last one
        first; -inf where there is no token."""
        tokens = prompt.keys.shape[2]
        position, length = jnp.arange(tokens), prompt.lengths[:, None, None]
        score = jnp.where(position >= length - self.recent, _ABOVE * (1 + position / tokens), self.score(prompt))
        score = jnp.where(position < self.sinks, jnp.inf, score)
        return jnp.where(position < length, score, -jnp.inf)

    def slots(self, spec: CacheSpec) -> int:
        """Slots per head; whole tiles, where it is later tokens that have them."""
        return -(-(self.budget + spec.max_new) // TILE) * TILE if self.beside else self.budget

    def init(self, spec, row_keys) -> Ranked:
        first = min(self.sinks + self.recent, self.slots(spec))
        return dataclasses.replace(init_ranked(spec, self.slots(spec)), first=first)

    def prefill(self, state, prompt):
        room = min(self.budget, prompt.keys.shape[2])
        _, best = jax.lax.top_k(self.rank(prompt), room)
        put = lambda slots, x: slots.at[:, :, :room].set(  # noqa: E731
            jnp.take_along_axis(x, best[..., None], axis=2).astype(slots.dtype)
        )
        keys, values = put(state.keys, prompt.keys), put(state.values, prompt.values)
        return dataclasses.replace(state, keys=keys, values=values, ranked=jnp.minimum(prompt.lengths, room))

    def read(self, state, newer):
        stop = jnp.minimum(state.ranked + state.later, state.keys.shape[2])
        return Segment(state.keys, state.values, stop=stop[:, None])

    def compact(self, state, new):
        slots = state.keys.shape[2]
        number = state.later[:, None] + jnp.arange(new.keys.shape[2])
        place = places(number, state.ranked, slots - state.ranked, self.sinks)
        place = jnp.broadcast_to(jnp.where(new.present, place, slots)[:, None], new.keys.shape[:3])
        return dataclasses.replace(
            state,
            keys=per_head(_put)(state.keys, place, new.keys),
            values=per_head(_put)(state.values, place, new.values),
            later=state.later + new.count,
        )


_ABOVE = 1e30  # any score that a policy gives


def init_ranked(spec: CacheSpec, slots: int) -> Ranked:
    """An empty store."""
    shape, none = (spec.batch, spec.kv_heads, slots), lambda: jnp.zeros(spec.batch, jnp.int32)
    keys, values = jnp.zeros((*shape, spec.head_dim), spec.dtype), jnp.zeros((*shape, spec.value_width), spec.dtype)
    return Ranked(keys, values, none(), none())


def places(
    number: Int[Array, "... P"], ranked: Int[Array, "..."], empty: Int[Array, "..."], sinks: int
) -> Int[Array, "... P"]:
    """In which slot later tokens go, by their numbers from 0 on: in the empty ones behind the `ranked` first, then in
    those of the lowest rank, upwards until only sinks are left, and then the same round again."""
    ranked, empty = ranked[..., None], empty[..., None]
    size = ranked + empty
    # A prompt shorter than the sinks leaves the rest of them to the first tokens that follow.
    missing = jnp.maximum(sinks - ranked, 0)
    turn = jnp.where(number < missing, number, missing + (number - missing) % jnp.maximum(size - sinks, 1))
    return jnp.where(turn < empty, ranked + turn, size - 1 - turn)


def _put(slots: Float[Array, "S D"], place: Int[Array, "P"], new: Float[Array, "P D"]) -> Float[Array, "S D"]:
    return slots.at[place].set(new.astype(slots.dtype), mode="drop")


def prompt_mask(prompt: Prompt) -> Bool[Array, "B 1 T"]:
    """Where a prompt has tokens, over all heads."""
    return (jnp.arange(prompt.keys.shape[2]) < prompt.lengths[:, None])[:, None]
