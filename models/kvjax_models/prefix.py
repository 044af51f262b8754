"""Processed tokens with their caches, from which sequences continue.

A prefix is used in one of two ways:

- A *shared* prefix is continued by any number of rows. Its entries are held once, never change, and are read once per
  step for all rows; each row holds the tokens after it, its suffix, in a separate cache. Documents are shared prefixes.
- Any other prefix is copied into a row, whose caches have capacity for further tokens: a conversation whose next turn
  continues. Until it is copied, a full cache has slots for its tokens only.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.methods.exact.append_only_store import AppendOnlyStore
from kvjax_models.model.recurrent import RecurrentState
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import GREEDY, Sampling
from kvjax_models.runner.state import GenerationState
from kvjax_models.saves import Save, array_name, describe_difference
from kvjax_models.sharding import replicate


class RowSizes(Protocol):
    """Chooses the sizes of rows."""

    def __call__(self, num_tokens: int, max_new_tokens: int) -> "tuple[Generator, ...]":
        """Returns the sizes that a row has in turn as its sequence grows, each with one row; often a single one.

        Args:
            num_tokens: tokens that the row holds before the answer.
            max_new_tokens: maximum number of tokens of the answer.
        """


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prefix:
    """Tokens with their caches.

    Attributes:
        generator: sizes and policies of the caches, with one row.
        tokens: token ids, without the ones of `after`, which precede them.
        entries: entries of every layer with attention.
        logits: logits of the next token.
        recurrent: states of the other layers of a hybrid model.
        after: the shared prefix that the tokens follow, if there is one.
        num_first: how many tokens were the first prompt; the others count as new tokens in the capacity of a row.
        rows: sizes of the rows that share the prefix; None for a prefix that is copied into a row.
    """

    generator: Generator
    tokens: tuple[int, ...]
    entries: tuple[kvjax.FrozenCache, ...]
    logits: Float[Array, "1 V"]
    recurrent: tuple[RecurrentState, ...] = ()
    after: "Prefix | None" = None
    num_first: int = 0
    rows: RowSizes | None = None

    @classmethod
    def of(cls, generator: Generator, tokens: Sequence[int], state: GenerationState, **fields: Any) -> "Prefix":
        """Returns the prefix of a settled state, in which no token is staged.

        Args:
            generator: sizes and policies of the state, with one row.
            tokens: token ids, without those of a shared prefix.
            state: state of the row; the entries are not copied.
            **fields: further attributes.
        """
        entries = tuple(kvjax.freeze(cache, state.counters) for cache in state.layers)
        if generator.plan.is_resizable and not fields.get("rows"):
            # Sizes are eighths of an octave, or 8 slots, because each is a program.
            step = max(8, 1 << max(len(tokens).bit_length() - 4, 0))
            entries = tuple(_resize(one, max(-(-len(tokens) // step), 1) * step, 0) for one in entries)
        return cls(generator, tuple(tokens), entries, state.logits, state.recurrent, **fields)

    @property
    def is_shared(self) -> bool:
        """Whether rows share the prefix; otherwise a row gets a copy."""
        return self.rows is not None

    @property
    def shared(self) -> "Prefix | None":
        """The prefix that the rows which continue this one share: itself, or the one before it."""
        return self if self.is_shared else self.after

    @property
    def copied_tokens(self) -> tuple[int, ...]:
        """The tokens that a row which continues it holds."""
        return () if self.is_shared else self.tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the ones of `after`."""
        return len(self.tokens) + (0 if self.after is None else self.after.num_tokens)

    @property
    def num_left(self) -> int:
        """Maximum number of tokens that a row with a copy of the prefix may still receive in its size."""
        plan = self.generator.plan
        if plan.is_resizable:
            return plan.capacity - len(self.tokens)
        return self.num_first + plan.max_new_tokens - len(self.tokens)

    @property
    def max_suffix_tokens(self) -> int:
        """Maximum number of tokens of a row after a shared prefix."""
        return self.generator.context_tokens - self.generator.max_prompt_tokens

    def start_rows(
        self, generator: Generator, seed: int | Sequence[int] = 0, sampling: Sampling | Sequence[Sampling] = GREEDY
    ) -> GenerationState:
        """Returns the state of rows before their first token after a shared prefix.

        Args:
            generator: sizes and policies of the suffixes.
            seed: seed of sampling and of the suffixes' policy, as for `Generator.init_state`.
        """
        return self._with_tokens(generator, generator.init_state(seed, sampling))

    def copy_row(self, generator: Generator, seed: int = 0, sampling: Sampling = GREEDY) -> GenerationState:
        """Returns a copy of a prefix that is not shared, with which a row continues.

        Args:
            generator: sizes and policies of the row; those of the prefix, or of a full cache of another size.
            sampling: parameters of sampling; all tokens of the prefix count as tokens of the prompt.
        """
        lengths = replicate(np.array([len(self.tokens)], np.int32), generator.mesh)
        layers = [
            _thaw(entries, lengths, spec.max_prompt_tokens, spec.max_new_tokens)
            for entries, spec in zip(self.entries, generator.specs, strict=True)
        ]
        state = generator.init_state(seed, sampling, layers)
        return self._with_tokens(generator, state)

    def _with_tokens(self, generator: Generator, state: GenerationState) -> GenerationState:
        """Returns a state of rows with everything after the tokens of the prefix but caches."""
        in_prompt = np.zeros(state.sampling.in_prompt.shape, bool)
        in_prompt[:, list(self.tokens if self.after is None else (*self.after.tokens, *self.tokens))] = True
        return dataclasses.replace(
            state,
            logits=_copy_to_rows(self.logits, state.logits),
            recurrent=jax.tree.map(_copy_to_rows, self.recurrent, state.recurrent),
            positions=replicate(np.full(generator.batch, self.num_tokens, np.int32), generator.mesh),
            sampling=dataclasses.replace(state.sampling, in_prompt=replicate(in_prompt, generator.mesh)),
        )

    def score(self, generator: Generator, suffixes: Sequence[Sequence[int]]) -> list[Float[np.ndarray, "T"]]:
        """Scores suffixes of a shared prefix, as one batch.

        Args:
            generator: sizes and policies of the suffixes, with a row for each.

        Returns:
            The natural log-probability of each token, float32, for every suffix.
        """
        return generator.score(self.start_rows(generator), suffixes, self.entries)[1]

    # --- sizes ---

    @property
    def cache_bytes(self) -> int:
        """Bytes on the device; entries without quantization have the dtype of the model.

        A hybrid model's recurrent states count, here and in `full_cache_bytes`; budgets do not include them.
        """
        return kvjax.cache_bytes(self.entries).device + self.generator.recurrent_row_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return kvjax.cache_bytes(self.entries).host

    @property
    def held_bytes(self) -> int:
        """Bytes on the device and in host memory."""
        return self.cache_bytes + self.host_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that one decode step reads; rows read copies of recurrent states."""
        return sum(map(kvjax.read_bytes, self.entries))

    @property
    def full_cache_bytes(self) -> int:
        """Bytes of a full bfloat16 cache of the tokens."""
        tokens = len(self.tokens)
        caches = sum(spec.full_cache_bytes(min(tokens, spec.window or tokens)) for spec in self.generator.specs)
        return caches + self.generator.recurrent_row_bytes

    def describe_share(self) -> str:
        """Describes how much of a full cache is held; see `Generator.describe_share`."""
        sizes = {"cache_bytes": self.cache_bytes, "full_cache_bytes": self.full_cache_bytes}
        return self.generator.describe_share(sizes, len(self.tokens))

    # --- saves ---

    def save(self, directory: str | os.PathLike, manifest: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        """Saves a shared prefix, without the model's weights.

        Args:
            directory: a directory without saves.
            manifest: values that must be equal when the prefix is opened, as JSON.
            notes: further values, as JSON.

        Raises:
            ValueError: if the directory has a save.
            OSError: if it cannot be written.
        """
        save = Save(directory)
        save.lock()
        distinct, generator = list(dict.fromkeys(self.generator.policies)), self.generator
        sizes = {
            "policies": [kvjax.describe(policy) for policy in distinct],
            "layers": [distinct.index(policy) for policy in generator.policies],
            "kv_dtype": generator.kv_dtype,
            "max_prompt_tokens": generator.max_prompt_tokens,
            "context_tokens": generator.context_tokens,
            "streaming": generator.streaming,
            "is_short": generator.is_short,
            "tokens": self.tokens,
        }
        save.write(self._arrays(), manifest, {**notes, **sizes})

    def restore(self, save: Save) -> "Prefix":
        """Returns a shared prefix with the arrays of a save.

        The number of slots of a full cache depends on the devices that share them; slots after the tokens are empty.
        """
        like = self._arrays()
        arrays = save.restore(like, _full_stores(like))
        entries, logits, recurrent = arrays["texts"], arrays["logits"], arrays["recurrent"]
        return dataclasses.replace(self, entries=entries, logits=logits, recurrent=recurrent)

    def _arrays(self) -> dict[str, Any]:
        """Returns the arrays of a save by the names in it."""
        return {"texts": self.entries, "logits": self.logits, "recurrent": self.recurrent}


class OtherModelError(ValueError):
    """A save belongs to another model, tokenizer or dtype; `difference` names the first value that differs."""

    def __init__(self, directory: object, difference: str) -> None:
        super().__init__(f"the document in {directory} belongs to another model: {difference}")
        self.difference = difference


def open_save(directory: str | os.PathLike, manifest: Mapping[str, Any]) -> Save:
    """Opens the save of a prefix.

    Args:
        manifest: values that must be equal.

    Returns:
        The save.

    Raises:
        FileNotFoundError: if the directory has no save.
        ValueError: if the save is damaged.
        OtherModelError: if its manifest differs.
    """
    save = Save(directory)
    save.check()
    if difference := describe_difference(manifest, save.manifest):
        raise OtherModelError(save.directory, difference)
    return save


@functools.partial(jax.jit, static_argnames=("max_prompt_tokens", "max_new_tokens"))
def _thaw(
    entries: kvjax.FrozenCache, lengths: Int[Array, "1"], max_prompt_tokens: int, max_new_tokens: int
) -> tuple[kvjax.Cache, kvjax.Counters]:
    """Returns a copy of entries as a cache of a capacity."""
    spec = entries.spec
    if (spec.max_prompt_tokens, spec.max_new_tokens) != (max_prompt_tokens, max_new_tokens):
        entries = kvjax.resize(entries, max_prompt_tokens, max_new_tokens)
    return jax.tree.map(jnp.copy, kvjax.thaw(entries, lengths))


def _full_stores(arrays: Any) -> set[str]:
    """Returns the names of the keys and values of full caches."""

    def is_store(x: Any) -> bool:
        return isinstance(x, AppendOnlyStore)

    return {
        array_name((*path, *inner))
        for path, store in jax.tree_util.tree_leaves_with_path(arrays, is_leaf=is_store)
        if is_store(store)
        for inner, _ in jax.tree_util.tree_leaves_with_path(store)
        if inner[0].name in ("keys", "values")
    }


_resize = jax.jit(kvjax.resize, static_argnames=("max_prompt_tokens", "max_new_tokens"))


def _copy_to_rows(x: Array, rows: Array) -> Array:
    """Returns a copy of an array of one row for as many rows as another one has."""
    return jnp.copy(jnp.broadcast_to(x, rows.shape))
