"""Generation through KV caches: exact or streaming prefill, then compiled blocks of decode steps."""

import copy
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
from kvjax.messages import format_bytes, shorten
from kvjax.policy import Policy
from kvjax.quantization import KVDtype
from kvjax.spec import check_integer
from kvjax_models import compile_cache
from kvjax_models.generation import decode as decode_lib
from kvjax_models.generation import prefill as prefill_lib
from kvjax_models.generation import state as state_lib
from kvjax_models.generation.decode import SplitModel, Texts, append_block, decode_block, score_block, split_model
from kvjax_models.generation.plan import Plan
from kvjax_models.generation.prefill import PrefilledLayer
from kvjax_models.generation.prefill_together import prefill_for, prefill_together
from kvjax_models.generation.rows import extend_rows, pad_prompts, trim_rows
from kvjax_models.generation.sampling import GREEDY, Sampling
from kvjax_models.generation.sequence_parallel import chunk_size
from kvjax_models.generation.state import GenerationState, check_faults, check_finite, commit_to_device, compact_layers
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import mesh_of, replicate


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Generator:
    """A model with the plan of its caches and a batch size, which creates and continues generation states.

    A `GenerationState` is a pytree that can be forked, saved and continued with further prompts. States that a
    generator returns are settled: no tokens are staged between blocks.

    Attributes:
        model: the decoder, whose parameters may not be replaced after the first step. If they are sharded on a mesh
            (`sharding.shard_model`), so are the caches.
        plan: policies and sizes of the caches. A generator has its values as attributes, too; its `specs` have the
            batch size.
        batch: number of batch rows.
        eos: tokens that finish a sequence.
        prefill_chunk: tokens per chunk of exact prefill; prompts are padded to a multiple of it.
        allow_beyond_context: whether sequences may exceed the model's context length, with a warning; otherwise they
            are refused.
        scorer: coefficients of predicted scores (`profile.Profile.scorer`), for policies that require them
            (`kvjax.KVzap`); ignored for others. Its shape suffices for a generator that is only lowered.
    """

    model: Llama
    plan: Plan
    batch: int
    eos: tuple[int, ...]
    prefill_chunk: int
    allow_beyond_context: bool
    scorer: Float[Array | np.ndarray, "L W+2 H_kv"] | None
    policies: tuple[Policy, ...] = dataclasses.field(init=False)
    specs: tuple[kvjax.CacheSpec, ...] = dataclasses.field(init=False)
    max_prompt_tokens: int = dataclasses.field(init=False)
    max_new_tokens: int = dataclasses.field(init=False)
    context_tokens: int = dataclasses.field(init=False)
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = dataclasses.field(init=False)
    streaming: bool = dataclasses.field(init=False)
    continues_texts: bool = dataclasses.field(init=False)
    is_short: bool = dataclasses.field(init=False)
    block_size: int = dataclasses.field(init=False)

    def __init__(
        self,
        model: Llama,
        plan: Plan | Policy | Sequence[Policy],
        *,
        batch: int,
        eos: Sequence[int] = (),
        prefill_chunk: int = 256,
        allow_beyond_context: bool = False,
        scorer: Float[Array | np.ndarray, "L W+2 H_kv"] | None = None,
        **lengths: Any,
    ) -> None:
        """Creates a generator.

        Args:
            model: see the attributes, as for the other arguments.
            plan: a plan, or the policies of one, which is made for `lengths`.
            batch: number of batch rows.
            eos: tokens that finish a sequence.
            prefill_chunk: tokens per chunk of exact prefill.
            allow_beyond_context: whether sequences may exceed the model's context length.
            scorer: coefficients of predicted scores.
            **lengths: arguments of `Plan`.

        Raises:
            ValueError: if an argument is invalid, or a policy requires predicted scores and there is no scorer.
            TypeError: if there are a plan and lengths.
        """
        if not isinstance(allow_beyond_context, bool):
            raise ValueError(f"allow_beyond_context={shorten(allow_beyond_context)} must be True or False")
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk} must be at least 1 token")
        if not isinstance(plan, Plan):
            plan = Plan(model, plan, **lengths)
        elif lengths:
            raise TypeError(f"{', '.join(lengths)} belong to the plan; make another plan with them")
        values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        values |= {"model": model, "plan": plan, "eos": tuple(eos), "prefill_chunk": prefill_chunk}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "allow_beyond_context", allow_beyond_context)
        object.__setattr__(self, "scorer", self._check_scorer(scorer))
        self._set_batch(batch)

    def _set_batch(self, batch: int) -> None:
        """Sets the number of batch rows."""
        object.__setattr__(self, "batch", check_integer("batch", batch, 1))
        specs = tuple(dataclasses.replace(spec, batch=self.batch) for spec in self.plan.specs)
        object.__setattr__(self, "specs", specs)

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
        if (policy := self.plan.scoring_policy) is None:
            return None
        if scorer is None:
            raise ValueError(
                f"{policy} requires predicted scores, and the model has no scorer; run `kvjax calibrate`, and pass "
                "the scorer of the profile to Generator"
            )
        shape = (len(self.config.attention_layers), self.config.width + 2, self.config.kv_heads)
        if scorer.shape != shape:
            raise ValueError(f"scorer has shape {scorer.shape}, expected [L, W+2, H_kv] = {shape}")
        is_abstract = isinstance(scorer, jax.ShapeDtypeStruct)  # of a generator that is only lowered
        return scorer if is_abstract else replicate(np.asarray(scorer, np.float32), self.mesh)

    def with_batch(self, batch: int) -> "Generator":
        """Returns a copy with another batch size; rows of its states can be inserted into states of this generator."""
        other = copy.copy(self)
        other._set_batch(batch)
        return other

    @property
    def row_bytes(self) -> int:
        """Device bytes of the caches and recurrent states of one batch row, over all layers."""
        return self.plan.row_bytes + self.recurrent_row_bytes

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
            "read_bytes": self.batch * self.plan.row_read_bytes + recurrent,
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
            held = self.plan.held_share(self.specs[0].capacity if tokens is None else tokens)
            return f"holds {int(100 * held)}%: the text is short"
        share = sizes["cache_bytes"] / sizes["full_cache_bytes"]
        if share > 1:
            return f"a full bfloat16 cache takes {format_bytes(sizes['full_cache_bytes'])}"
        return f"{share:.1%} of a full bfloat16 cache"

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

    def decode(
        self,
        state: GenerationState,
        max_tokens: int,
        stream_interval: int | None = None,
        *,
        compact_last: bool = True,
        texts: Texts = None,
    ) -> Iterator[tuple[GenerationState, np.ndarray]]:
        """Generates up to `max_tokens` tokens per row, block by block.

        End-of-text tokens are yielded and appended to the cache like all others. Generation ends early when all
        sequences are finished.

        Args:
            state: state after a prompt; its buffers are donated.
            max_tokens: maximum number of new tokens per row.
            stream_interval: number of tokens after which an unfinished block is yielded, too. The tokens are the same,
                but states are settled only at the end of a block.
            compact_last: whether to compact the tokens of the last block. False saves time, often that of compiling
                the compaction, if the last state is not used any more.
            texts: as for `prefill`.

        Yields:
            The state and the new tokens, int32 [B, n], with `NO_TOKEN` after the end of a sequence. Only the newest
            state may be used.

        Raises:
            ValueError: if a number is not an integer or too small, or the caches have no capacity for the tokens.
        """
        max_tokens = check_integer("max_tokens", max_tokens, minimum=0)
        if stream_interval is not None:
            stream_interval = check_integer("stream_interval", stream_interval, minimum=1)
        self.check_capacity(np.asarray(state.positions), np.where(np.asarray(state.done), 0, max_tokens))
        state = commit_to_device(state, self.mesh)
        total = in_block = 0
        while total < max_tokens and not np.asarray(state.done).all():
            steps = min(stream_interval or self.block_size, self.block_size - in_block, max_tokens - total)
            state, sampled = decode_block(self.split_model, self.mesh, self.eos, self.block_size, state, steps, texts)
            total, in_block = total + steps, in_block + steps
            check_finite(state)
            is_last = total == max_tokens or bool(np.asarray(state.done).all())
            if is_last and not compact_last:
                check_faults(state, self.mesh)
            elif is_last or in_block == self.block_size:
                state, in_block = compact_layers(state), 0
                check_faults(state, self.mesh)
            yield state, np.asarray(sampled.token)

    def decode_all(
        self, state: GenerationState, max_tokens: int, *, compact_last: bool = True, texts: Texts = None
    ) -> tuple[list[list[int]], GenerationState]:
        """Generates like `decode` to the end.

        Args:
            state: state after a prompt; its buffers are donated.
            max_tokens: maximum number of new tokens per row.
            compact_last: as for `decode`.
            texts: as for `prefill`.

        Returns:
            The new tokens of each row, including an end-of-text token, and the state after them.
        """
        rows: list[list[int]] = [[] for _ in range(self.batch)]
        for new_state, tokens in self.decode(state, max_tokens, compact_last=compact_last, texts=texts):
            state = new_state
            extend_rows(rows, tokens)
        kvjax.raise_faults(state)
        return rows, state

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


def generate(
    model: Llama,
    policy: Policy | Sequence[Policy],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int = 0,
    sampling: Sampling = GREEDY,
    **options: Any,
) -> tuple[list[list[int]], GenerationState]:
    """Continues prompts with a new `Generator`, whose compiled programs prompts of similar length share.

    Args:
        model: the decoder.
        policy: cache policy of all layers, or one per layer.
        prompts: token ids of each row.
        max_new_tokens: maximum number of new tokens per row.
        seed: seed of sampling and of the policy's randomness.
        sampling: parameters of sampling; greedy by default.
        **options: further arguments of `Generator`.

    Returns:
        The new tokens of each row, including an end-of-text token, and the state after them.
    """
    generator = Generator(
        model,
        policy,
        batch=len(prompts),
        max_prompt_tokens=compile_cache.length_bucket(max(map(len, prompts), default=0))[-1],
        max_new_tokens=max_new_tokens,
        **options,
    )
    return generator.decode_all(generator.prefill(generator.init_state(seed, sampling), prompts), max_new_tokens)


_PROGRAMS = (*state_lib.PROGRAMS, *decode_lib.PROGRAMS, *prefill_lib.PROGRAMS)
