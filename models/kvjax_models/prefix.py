"""Processed tokens with their caches, from which sequences continue.

A prefix is the settled state of one row: no token is staged. It is used in one of two ways:

- A *frozen* prefix is shared by any number of rows. Its entries are held once, never change, and are read once per step
  for all rows; each row holds the tokens after it, its suffix, in a separate cache. Documents are frozen prefixes.
- Any other prefix is copied into a row, whose caches have capacity for further tokens: a conversation whose next turn
  continues, or a prompt with several answers.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.messages import shorten
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import GREEDY, Sampling, row_sampling
from kvjax_models.runner.state import GenerationState
from kvjax_models.saves import Save, describe_difference
from kvjax_models.sharding import replicate


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prefix:
    """Tokens with their caches.

    Attributes:
        generator: sizes and policies of the caches, with one row.
        tokens: token ids, without the ones of `after`, which precede them.
        state: state of the row after the tokens; the layers of a frozen prefix are `kvjax.FrozenCache`s.
        after: the frozen prefix that the tokens follow, if there is one.
        num_first: how many tokens were the first prompt; the others count as new tokens in the capacity of a row.
    """

    generator: Generator
    tokens: tuple[int, ...]
    state: GenerationState
    after: "Prefix | None" = None
    num_first: int = 0

    @property
    def is_frozen(self) -> bool:
        """Whether rows share the prefix; otherwise a row gets a copy."""
        return all(isinstance(layer, kvjax.FrozenCache) for layer in self.state.layers)

    def freeze(self) -> "Prefix":
        """Returns the prefix for rows that share it, without staging buffers; the entries are not copied."""
        layers = tuple(kvjax.freeze(cache, self.state.counters) for cache in self.state.layers)
        return dataclasses.replace(self, state=dataclasses.replace(self.state, layers=layers))

    @property
    def entries(self) -> tuple[kvjax.FrozenCache, ...]:
        """The entries of a frozen prefix, of every layer with attention."""
        return self.state.layers

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the ones of `after`."""
        return len(self.tokens) + (0 if self.after is None else self.after.num_tokens)

    @property
    def max_suffix_tokens(self) -> int:
        """Maximum number of tokens of a row after a frozen prefix."""
        return self.generator.context_tokens - self.generator.max_prompt_tokens

    def start_rows(self, generator: Generator, seed: int = 0, sampling: Sampling = GREEDY) -> GenerationState:
        """Returns the state of rows before their first token after a frozen prefix.

        Args:
            generator: sizes and policies of the suffixes.
            seed: seed of sampling and of the suffixes' policy.
            sampling: parameters of sampling.
        """
        state = generator.init_state(seed, sampling)
        in_prompt = np.zeros(state.sampling.in_prompt.shape, bool)
        in_prompt[:, list(self.tokens)] = True
        return dataclasses.replace(
            state,
            logits=_copy_to_rows(self.state.logits, state.logits),
            recurrent=jax.tree.map(_copy_to_rows, self.state.recurrent, state.recurrent),
            positions=replicate(np.full(generator.batch, self.num_tokens, np.int32), generator.mesh),
            sampling=dataclasses.replace(state.sampling, in_prompt=replicate(in_prompt, generator.mesh)),
        )

    def copy_row(self, seed: int = 0, sampling: Sampling = GREEDY) -> GenerationState:
        """Returns a copy of the state of a prefix that is not frozen, with which a row continues.

        Args:
            seed: seed of sampling.
            sampling: parameters of sampling; all tokens of the prefix count as tokens of the prompt.
        """
        old, mesh = self.state.sampling, self.generator.mesh
        rows = row_sampling([sampling], self.generator.config.vocab_size, mesh)
        rows = dataclasses.replace(rows, in_prompt=old.in_prompt | (old.counts > 0))
        state = dataclasses.replace(self.state, sampling=rows, done=replicate(np.zeros(1, bool), mesh))
        return self.generator.reseed(jax.tree.map(jnp.copy, state), seed)

    def score(self, generator: Generator, suffixes: Sequence[Sequence[int]]) -> list[Float[np.ndarray, "T"]]:
        """Scores suffixes of a frozen prefix, as one batch.

        Args:
            generator: sizes and policies of the suffixes, with a row for each.
            suffixes: token ids.

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
        return kvjax.cache_bytes(self.state.layers).device + self.generator.recurrent_row_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return kvjax.cache_bytes(self.state.layers).host

    @property
    def held_bytes(self) -> int:
        """Bytes on the device and in host memory."""
        return self.cache_bytes + self.host_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that one decode step reads; rows read copies of recurrent states."""
        return sum(map(kvjax.read_bytes, self.state.layers))

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
        """Saves a frozen prefix, without the model's weights.

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
        """Returns a frozen prefix with the arrays of a save."""
        arrays = save.restore(self._arrays())
        layers, logits, recurrent = arrays["texts"], arrays["logits"], arrays["recurrent"]
        state = dataclasses.replace(self.state, layers=layers, logits=logits, recurrent=recurrent)
        return dataclasses.replace(self, state=state)

    def _arrays(self) -> dict[str, Any]:
        """Returns the arrays of a save by the names in it."""
        return {"texts": self.entries, "logits": self.state.logits, "recurrent": self.state.recurrent}


def open_save(directory: str | os.PathLike, manifest: Mapping[str, Any]) -> Save:
    """Opens the save of a prefix.

    Args:
        directory: directory of the save.
        manifest: values that must be equal.

    Returns:
        The save.

    Raises:
        FileNotFoundError: if the directory has no save.
        ValueError: if the save is damaged, or its manifest differs, with the first difference.
    """
    save = Save(directory)
    save.check()
    if difference := describe_difference(manifest, save.manifest):
        raise ValueError(f"the document in {save.directory} belongs to another model: {difference}")
    return save


def check_frozen(prefix: Prefix, expected: Generator, suffixes: Generator) -> None:
    """Checks that rows can share a frozen prefix.

    Args:
        prefix: the prefix.
        expected: sizes and policies of the prefixes that the rows share.
        suffixes: sizes and policies of the rows.

    Raises:
        ValueError: if policy, format or sizes differ, with the first difference.
    """
    if suffixes.max_new_tokens > prefix.max_suffix_tokens:
        raise ValueError(
            f"{suffixes.max_new_tokens} tokens of question and answer exceed the capacity "
            f"max_new_tokens={prefix.max_suffix_tokens} that the document was read with"
        )
    ours = prefix.generator
    if ours.model is not expected.model:
        raise ValueError("the document does not fit into the engine: it belongs to another model")
    names = ("max_prompt_tokens", "kv_dtype", "streaming", "context_tokens")
    options = [(name, getattr(ours, name), getattr(expected, name)) for name in names]
    options += [("policy", *layer) for layer in zip(ours.policies, expected.policies, strict=True)]
    for name, value, other in options:
        if value != other:
            raise ValueError(
                f"the document does not fit into the engine: it has {name}={shorten(value)}, the engine "
                f"{shorten(other)}; read it with the engine's cache, max_text_tokens and max_new_tokens"
            )


def _copy_to_rows(x: Array, rows: Array) -> Array:
    """Returns a copy of an array of one row for as many rows as another one has."""
    return jnp.copy(jnp.broadcast_to(x, rows.shape))
