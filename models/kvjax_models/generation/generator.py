"""Generation through KV caches: exact or streaming prefill, then compiled blocks of decode steps."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.budget import row_bytes, row_read_bytes
from kvjax.cache import layer_policy
from kvjax.combinators.combined import CombinedPolicies
from kvjax.messages import format_bytes, shorten
from kvjax.policy import Policy
from kvjax.quantization import KVDtype
from kvjax.spec import check_integer
from kvjax_models import compile_cache
from kvjax_models.generation import decode as decode_lib
from kvjax_models.generation import prefill as prefill_lib
from kvjax_models.generation import state as state_lib
from kvjax_models.generation.decode import SplitModel, Texts, append_block, score_block, split_model
from kvjax_models.generation.prefill import PrefilledLayer
from kvjax_models.generation.prefill_together import prefill_for, prefill_together
from kvjax_models.generation.rows import pad_prompts, trim_rows
from kvjax_models.generation.sampling import GREEDY, Sampling
from kvjax_models.generation.sequence_parallel import chunk_size
from kvjax_models.generation.state import GenerationState, check_faults, commit_to_device, compact_layers
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import mesh_of, replicate


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Generator:
    """A model with cache policies and fixed sizes, which creates and continues generation states.

    A `GenerationState` is a pytree that can be forked, saved and continued with further prompts. States that a
    generator returns are settled: no tokens are staged between blocks.

    Attributes:
        model: the decoder, whose parameters may not be replaced after the first step. If they are sharded on a mesh
            (`sharding.shard_model`), so are the caches.
        policy: cache policy of all layers, or one per layer. Layers with a sliding window cache exactly their window
            instead. Layers of hybrid models without attention have no cache and do not count.
        batch: number of batch rows.
        max_prompt_tokens: maximum length of the first prompt.
        max_new_tokens: maximum number of tokens after it, generated tokens and later prompts together.
        eos: tokens that finish a sequence.
        prefill_chunk: tokens per chunk of exact prefill; prompts are padded to a multiple of it.
        streaming: whether the first prompt is appended in blocks like later ones, each attending to the compressed
            cache. Memory is then independent of the prompt's length.
        allow_beyond_context: whether sequences may exceed the model's context length, with a warning; otherwise they
            are refused.
        kv_dtype: quantization format of the caches (`kvjax.CacheSpec.kv_dtype`).
        scorer: coefficients of predicted scores (`profile.Profile.scorer`), for policies that require them
            (`kvjax.KVzap`); ignored for others. Its shape suffices for a generator that is only lowered.
        context_tokens: maximum number of tokens of a sequence, also outside the caches; by default their capacity.
        continues_texts: whether rows continue frozen texts, which the methods then take as `texts`. The caches hold
            the up to `max_new_tokens` tokens after the texts, which have up to `max_prompt_tokens` tokens.
        is_short: whether the share of a budget was less than the smallest cache of its policy, so that the caches hold
            more.

    Raises:
        ValueError: if an argument is invalid, a policy does not support streaming, or a policy requires predicted
            scores and there is no scorer.
    """

    model: Llama
    policy: Policy | Sequence[Policy]
    _: dataclasses.KW_ONLY
    batch: int
    max_prompt_tokens: int
    max_new_tokens: int
    eos: tuple[int, ...] = ()
    prefill_chunk: int = 256
    streaming: bool = False
    allow_beyond_context: bool = False
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None
    scorer: Float[Array | np.ndarray, "L W+2 H_kv"] | None = None
    context_tokens: int = 0
    continues_texts: bool = False
    is_short: bool = False
    policies: tuple[Policy, ...] = dataclasses.field(init=False)  # of every layer
    specs: tuple[kvjax.CacheSpec, ...] = dataclasses.field(init=False)  # of every layer
    block_size: int = dataclasses.field(init=False)  # tokens between two compactions of all layers

    def __post_init__(self) -> None:
        def set_field(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("streaming", "allow_beyond_context", "continues_texts"):
            if not isinstance(flag := getattr(self, name), bool):
                raise ValueError(f"{name}={shorten(flag)} must be True or False")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={self.prefill_chunk} must be at least 1 token")
        layers, policy = len(self.config.attention_layers), self.policy
        if not isinstance(policy, Policy) and len(policy) != layers:
            raise ValueError(f"policy must be one policy, or one for each of {layers} layers, got {len(policy)}")
        for name, minimum in (("batch", 1), ("max_prompt_tokens", 1), ("max_new_tokens", 0)):
            set_field(name, check_integer(name, getattr(self, name), minimum))
        set_field("eos", tuple(self.eos))
        set_field("context_tokens", self.context_tokens or self.max_prompt_tokens + self.max_new_tokens)
        specs = state_lib.cache_specs(
            self.model,
            batch=self.batch,
            max_prompt_tokens=1 if self.continues_texts else self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            streaming=self.streaming,
            kv_dtype=self.kv_dtype,
            context_tokens=self.context_tokens,
        )
        policies = (policy,) * layers if isinstance(policy, Policy) else tuple(policy)
        set_field("policies", tuple(layer_policy(*layer) for layer in zip(policies, specs, strict=True)))
        if self.streaming and (unsupported := [one for one in self.policies if one.requires.entire_prompt]):
            raise ValueError(f"{unsupported[0]} compresses entire prompts; set streaming=False")
        set_field("scorer", self._check_scorer(self.scorer))
        set_field("block_size", min(specs[0].max_new_tokens, *(one.compact_every for one in self.policies)))
        set_field("specs", tuple(dataclasses.replace(spec, staging_slots=self.block_size) for spec in specs))

    @property
    def config(self) -> LlamaConfig:
        """Sizes of the model."""
        return self.model.config

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """The mesh of the model; None for a single device."""
        return mesh_of(self.model)

    @functools.cached_property
    def split_model(self) -> SplitModel:
        """The model as `decode_block` takes it."""
        return split_model(self.model, self.scorer, self.context_tokens)

    def _check_scorer(self, scorer: Any) -> Float[Array, "L W+2 H_kv"] | None:
        """Returns the scorer on the model's devices; None if no policy requires predicted scores."""
        scoring = [policy for policy in self.policies if policy.requires.predicted_scores]
        if not scoring:
            return None
        if scorer is None:
            raise ValueError(
                f"{scoring[0]} requires predicted scores, and the model has no scorer; run `kvjax calibrate`, and pass "
                "the scorer of the profile to Generator"
            )
        shape = (len(self.config.attention_layers), self.config.width + 2, self.config.kv_heads)
        if scorer.shape != shape:
            raise ValueError(f"scorer has shape {scorer.shape}, expected [L, W+2, H_kv] = {shape}")
        is_abstract = isinstance(scorer, jax.ShapeDtypeStruct)  # of a generator that is only lowered
        return scorer if is_abstract else replicate(np.asarray(scorer, np.float32), self.mesh)

    def with_batch(self, batch: int) -> "Generator":
        """Returns a copy with another batch size; rows of its states can be inserted into states of this generator."""
        return dataclasses.replace(self, batch=batch)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Device bytes of the caches and recurrent states of one batch row, over all layers."""
        caches = sum(row_bytes(policy, spec) for policy, spec in zip(self.policies, self.specs, strict=True))
        return caches + self.recurrent_row_bytes

    @functools.cached_property
    def recurrent_row_bytes(self) -> int:
        """Bytes of the recurrent states of one batch row; 0 for models that are not hybrid."""
        dtype = self.model.embedding.param_dtype
        return kvjax.cache_bytes(jax.eval_shape(lambda: state_lib.init_recurrent(self.config, 1, dtype))).device

    def cache_sizes(self, state: GenerationState) -> dict[str, int]:
        """Returns the bytes of the caches of all rows, from shapes and dtypes; recurrent states count in all of them.

        Args:
            state: a state.

        Returns:
            `cache_bytes` on the device, `host_bytes` in host memory, `read_bytes` of one decode step, and
            `full_cache_bytes` of full bfloat16 caches of the same capacity.
        """
        held, recurrent = kvjax.cache_bytes(state.layers), self.batch * self.recurrent_row_bytes
        full = self.batch * sum(spec.full_cache_bytes(spec.capacity) for spec in self.specs)
        return {
            "cache_bytes": held.device + recurrent,
            "host_bytes": held.host,
            "read_bytes": self._read_bytes + recurrent,
            "full_cache_bytes": full + recurrent,
        }

    def describe_share(self, sizes: Mapping[str, int], tokens: int | None = None) -> str:
        """Describes how much of a full cache is held.

        Args:
            sizes: bytes, as `cache_sizes` returns them.
            tokens: length of the text; by default the capacity.

        Returns:
            The share of a full bfloat16 cache, or the bytes of that cache if it is the smaller one. For a short text,
            which has more slots than its budget's share, the share of the tokens that have a slot.
        """
        if self.is_short:
            policies = [policy for policy, spec in zip(self.policies, self.specs, strict=True) if spec.window is None]
            tokens = self.specs[0].capacity if tokens is None else tokens
            held = sum(_held_tokens(policy, tokens) for policy in policies) / (len(policies) * tokens)
            return f"holds {int(100 * held)}%: the text is short"
        share = sizes["cache_bytes"] / sizes["full_cache_bytes"]
        if share > 1:
            return f"a full bfloat16 cache takes {format_bytes(sizes['full_cache_bytes'])}"
        return f"{share:.1%} of a full bfloat16 cache"

    @functools.cached_property
    def _read_bytes(self) -> int:
        """Bytes of the caches that one decode step reads."""
        layers = zip(self.policies, self.specs, strict=True)
        return self.batch * sum(row_read_bytes(policy, spec) for policy, spec in layers)

    def init_state(self, seed: int = 0, sampling: Sampling | Sequence[Sampling] = GREEDY) -> GenerationState:
        """Returns a state with empty caches.

        Args:
            seed: seed of sampling and of the policies; the random numbers of a row depend on the seed and its index.
            sampling: parameters of sampling of all rows, or of each; greedy by default.

        Returns:
            The state.

        Raises:
            ValueError: if the seed is invalid, or there is not one value of `sampling` per row.
        """
        samplings = [sampling] * self.batch if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != self.batch:
            raise ValueError(f"sampling must have one value per row, got {len(samplings)} for {self.batch} rows")
        state = state_lib.init_state(
            self.policies,
            self.specs,
            self.config.vocab_size,
            self.mesh,
            state_lib.check_seed(seed),
            samplings,
            self.context_tokens,
            state_lib.init_recurrent(self.config, self.batch, self.model.embedding.param_dtype, self.mesh),
        )
        return state if self.mesh is None else state_lib.shard_on_mesh(state, self.mesh)

    def reseed(self, state: GenerationState, seed: int) -> GenerationState:
        """Returns a state whose sampling continues as if it had been created with another seed.

        Args:
            state: a state, which may come from a generator with another batch size.
            seed: the seed. The randomness of the caches does not change.
        """
        keys = state_lib.row_keys(self.batch, state_lib.check_seed(seed))[1]
        key_data = replicate(np.asarray(jax.random.key_data(keys)), self.mesh)
        return dataclasses.replace(state, sampling_keys=jax.random.wrap_key_data(key_data))

    def prefill(self, state: GenerationState, prompts: Sequence[Sequence[int]], texts: Texts = None) -> GenerationState:
        """Processes one prompt per row.

        The first prompts are processed with exact attention, and each layer's cache is compressed before the next layer
        is computed, unless the generator is streaming. Later prompts are appended in blocks, which attend to the
        compressed cache. Prompts that are empty, too long or contain unknown tokens raise a ValueError.

        Args:
            state: state before the prompts; its buffers are donated.
            prompts: token ids of each row.
            texts: the frozen texts that the rows continue, if `continues_texts`.

        Returns:
            The state after the prompts.
        """
        *_, new_state = self.prefill_steps(state, prompts, texts)
        assert new_state is not None
        return new_state

    def prefill_steps(
        self,
        state: GenerationState,
        prompts: Sequence[Sequence[int]],
        texts: Texts = None,
        *,
        shared_lengths: bool = False,
    ) -> Iterator[GenerationState | None]:
        """Processes prompts like `prefill` in steps, between which the caller can do other work.

        Args:
            state: state before the prompts; its buffers are donated.
            prompts: token ids of each row.
            texts: as for `prefill`.
            shared_lengths: whether exact prefill pads prompts to lengths of `compile_cache.length_bucket`, so that all
                lengths need few compiled programs.

        Yields:
            None after every step, which is a layer of exact prefill or an appended block; finally the state.
        """
        compile_cache.free_compiled_programs(_PROGRAMS)
        if not (self.streaming or self.continues_texts or np.asarray(state.positions).any()):
            for states in prefill_together([self], [state], prompts, shared_lengths=shared_lengths):
                yield None if states is None else states[0]
            return
        tokens, lengths = self._pad_to_blocks(state, prompts)
        state = commit_to_device(state, self.mesh)
        for block, count in self._blocks(tokens, lengths):
            state = compact_layers(append_block(self.split_model, self.mesh, state, block, count, texts))
            yield None
        check_faults(state, self.mesh)
        yield state

    def prefilled_layers(
        self, prompts: Sequence[Sequence[int]], *, shared_lengths: bool = False
    ) -> tuple[Iterator[PrefilledLayer], Int[Array, "B N"], Int[Array, "B"]]:
        """Computes first prompts layer by layer with exact attention; see `prefill_together.prefill_for`."""
        return prefill_for([self], prompts, shared_lengths=shared_lengths)

    def score(
        self, state: GenerationState, prompts: Sequence[Sequence[int]], texts: Texts = None
    ) -> tuple[GenerationState, list[Float[np.ndarray, "T"]]]:
        """Appends one text per row like a later prompt and scores its tokens; see `score_greedy`.

        Args:
            state: state before the prompts; its buffers are donated.
            prompts: token ids of each row.
            texts: as for `prefill`.

        Returns:
            The state after the prompts, and the natural log-probability of each token, float32.
        """
        state, log_probs, _ = self.score_greedy(state, prompts, texts)
        return state, log_probs

    def score_greedy(
        self, state: GenerationState, prompts: Sequence[Sequence[int]], texts: Texts = None
    ) -> tuple[GenerationState, list[Float[np.ndarray, "T"]], list[Bool[np.ndarray, "T"]]]:
        """Scores prompts like `score`, and compares them with greedy decoding.

        Args:
            state: state before the prompts; its buffers are donated. If it is empty, the first token has no context
                and is scored under uniform logits.
            prompts: token ids of each row.
            texts: as for `prefill`.

        Returns:
            The state after the prompts, the log-probability of each token, and whether it was the most likely one.

        Raises:
            ValueError: if the state is empty and the generator is not streaming.
        """
        if not (self.streaming or self.continues_texts or np.asarray(state.positions).any()):
            raise ValueError(
                "scoring appends to a cache; prefill a prompt first, or create the generator with streaming"
            )
        tokens, lengths = self._pad_to_blocks(state, prompts)
        state = commit_to_device(state, self.mesh)
        blocks = []
        for block, count in self._blocks(tokens, lengths):
            state, *scores = score_block(self.split_model, self.mesh, state, block, count, texts)
            blocks.append(scores)
            state = compact_layers(state)
        check_faults(state, self.mesh)
        log_probs, is_greedy = (
            np.concatenate([np.asarray(block) for block in parts], axis=1) for parts in zip(*blocks, strict=True)
        )
        return state, trim_rows(log_probs, lengths), trim_rows(is_greedy, lengths)

    def padding_multiple(self, longest: int) -> int:
        """Returns what exact prefill pads prompts to a multiple of, given the length of the longest one."""
        return chunk_size(self.model, self.mesh, self.batch, longest, self.prefill_chunk)

    def check_capacity(self, positions: Int[np.ndarray, "B"], new_tokens: Int[np.ndarray, "B"]) -> None:
        """Checks that the caches have capacity for more tokens.

        Args:
            positions: number of tokens of each row.
            new_tokens: number of tokens to append to each row.

        Raises:
            ValueError: if they have not.
        """
        needed = int((positions + new_tokens).max())
        if needed > self.max_prompt_tokens + self.max_new_tokens:
            raise ValueError(
                f"a sequence of {needed} tokens exceeds max_prompt_tokens + max_new_tokens = "
                f"{self.max_prompt_tokens} + {self.max_new_tokens}"
            )
        self.check_context(needed)

    def check_context(self, tokens: int) -> None:
        """Checks a sequence against the model's context length, beyond which its output is meaningless.

        Raises:
            ValueError: if the sequence is longer and that is not allowed.
        """
        if tokens <= self.config.max_length:
            return
        problem = f"a sequence of {tokens} tokens exceeds the model's context length of {self.config.max_length}"
        if not self.allow_beyond_context:
            raise ValueError(
                f"{problem} (max_position_embeddings); shorten the prompt, generate fewer tokens, or set "
                "allow_beyond_context"
            )
        logging.log_first_n(logging.WARNING, "%s: the output may be meaningless", 1, problem)

    def pad(self, prompts: Sequence[Sequence[int]], multiple: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads prompts on the right to one array; see `pad_prompts`.

        Args:
            prompts: token ids of each row.
            multiple: the padded length is a multiple of it.

        Returns:
            The padded tokens and the lengths of the prompts, int32.
        """
        return pad_prompts(prompts, self.batch, multiple, self.config.vocab_size)

    def _pad_to_blocks(self, state: GenerationState, texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Returns padded texts and their lengths, checked against the capacity of the caches."""
        tokens, lengths = self.pad(texts, self.block_size)
        self.check_capacity(np.asarray(state.positions), lengths)
        return tokens, lengths

    def _blocks(self, tokens: Int[np.ndarray, "B N"], lengths: Int[np.ndarray, "B"]) -> Iterator[tuple[Array, Array]]:
        """Splits padded texts into blocks; the last one has half the width if that suffices.

        Yields:
            Each block and the number of its tokens per row.
        """
        for start in range(0, tokens.shape[1], self.block_size):
            count = np.clip(lengths - start, 0, self.block_size)
            # Two widths, because each is a program.
            width = self.block_size // 2 if np.max(count) <= self.block_size // 2 else self.block_size
            yield replicate(tokens[:, start : start + width], self.mesh), replicate(count, self.mesh)


def _held_tokens(policy: Policy, tokens: int) -> float:
    """Returns the number of tokens for which a KV head has slots, on average over the heads of a layer."""
    if isinstance(policy, CombinedPolicies):
        return sum(_held_tokens(one, tokens) for one in policy.policies) / len(policy.policies)
    if policy.is_retrieval or not hasattr(policy, "budget"):
        inner = getattr(policy, "policy", None)
        return tokens if policy.is_retrieval or inner is None else _held_tokens(inner, tokens)
    return min(policy.budget, tokens)


_PROGRAMS = (*state_lib.PROGRAMS, *decode_lib.PROGRAMS, *prefill_lib.PROGRAMS)
