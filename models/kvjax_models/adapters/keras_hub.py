"""Compressed KV caches for keras-hub's `CausalLM` models on the JAX backend.

    causal_lm = keras_hub.models.CausalLM.from_preset("llama3.2_1b")
    compress(causal_lm, "subgen_mean", budget="25%")
    causal_lm.generate("Once upon a time", max_length=1024)

keras-hub computes projections, attention of the prompt, sampling and text. The cache of the generation loop, and the
attention of new tokens to it, are kvjax's.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped
from keras_hub.src.utils.keras_utils import fused_attention_op_available

import kvjax
from kvjax.budget import Budget
from kvjax.cache import layer_policy
from kvjax.policy import Policy, merge_requirements
from kvjax.quantization import KVDtype
from kvjax.registry import AnyPolicy
from kvjax.state import ArrayField, count_row_faults, map_fields, state
from kvjax_models.adapters import layers
from kvjax_models.compile_cache import length_bucket
from kvjax_models.runner.repetition import make_repetitions

_ATTENTION_LAYERS = (
    "LlamaAttention",
    "CachedMistralAttention",
    "QwenAttention",
    "Qwen3Attention",
    "CachedGemmaAttention",
    "CachedGemma3Attention",
)


def compress(
    causal_lm: Any,
    policy: AnyPolicy,
    budget: int | str | Budget | None = None,
    *,
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
    seed: int = 0,
) -> Any:
    """Makes `generate` of a keras-hub model use compressed KV caches.

    `generate` and `compile` work as before, with every sampler. Prompts of similar length share compiled programs.
    Training, scoring and calls of the model do not change. Another call replaces the policy; `restore` removes it.

    Args:
        causal_lm: a `keras_hub.models.CausalLM` of the families Llama, Mistral, Qwen 2, Qwen 3, Gemma, Gemma 2 or
            Gemma 3, on the JAX backend.
        policy: cache policy as for `LanguageModel.generate`, such as "subgen_mean".
        budget: size of the cache of one sequence: a share of a full bfloat16 cache of `max_length` tokens ("25%"),
            bytes ("64MiB") or slots per KV head (1024); None if the policy has a budget or takes none.
        kv_dtype: quantization format of the cache (`kvjax.CacheSpec.kv_dtype`).
        seed: seed of the policy's random numbers.

    Returns:
        The model.

    Raises:
        ValueError: if the backend, the model or the policy is not supported.
    """
    if keras.config.backend() != "jax":
        raise ValueError(
            f"the Keras backend is {keras.config.backend()!r}; set KERAS_BACKEND=jax before keras is imported"
        )
    restore(causal_lm)
    attention_layers = _attention_layers(causal_lm)
    layers.check_policy(policy, budget, attention_layers[0].spec)
    compressed = _CompressedModel(causal_lm, attention_layers, policy, budget, kv_dtype, seed)
    _set(causal_lm, "make_generate_function", compressed.make_generate_function)
    causal_lm.generate_function = None
    return causal_lm


def restore(causal_lm: Any) -> None:
    """Makes `generate` of a model use keras-hub's cache again.

    Args:
        causal_lm: a model, which may be compressed or not.
    """
    if "make_generate_function" in vars(causal_lm):
        object.__delattr__(causal_lm, "make_generate_function")
        causal_lm.generate_function = None


def init_caches(
    causal_lm: Any, batch: int, prompt_tokens: int, max_length: int
) -> tuple[tuple[kvjax.Cache, kvjax.Counters], ...]:
    """Returns the empty caches that `generate` of a compressed model uses, for example to count their bytes.

    Args:
        causal_lm: a compressed model.
        batch: number of batch rows.

    Returns:
        The cache of every layer, with counters.

    Raises:
        ValueError: if the model is not compressed.
    """
    make = vars(causal_lm).get("make_generate_function")
    if make is None:
        raise ValueError("the model is not compressed; call compress first")
    return make.__self__.init_caches(batch, max_length, _cache_sizes(prompt_tokens, prompt_tokens, max_length))


def _cache_sizes(shortest: int, longest: int, max_length: int) -> tuple[int, int]:
    """Returns maximum numbers of prompt tokens and of new tokens, which prompts of similar lengths share."""
    return min(length_bucket(longest)[-1], max_length), max(max_length - length_bucket(shortest)[0], 1)


@state
class _Caches:
    """The caches of all layers, which the sampler's loop carries."""

    layers: tuple[Any, ...]
    counters: kvjax.Counters


def _compact(caches: _Caches) -> _Caches:
    """Compacts the staged tokens of all layers."""
    compacted = [kvjax.compact(cache, caches.counters) for cache in caches.layers]
    return _Caches(tuple(cache for cache, _ in compacted), compacted[-1][1])


class _ForwardPass:
    """The caches during one forward pass of the model; its methods replace attention of the layers.

    Attributes:
        caches: caches of the layers, with the updates so far.
        counters: counters of all layers before the pass.
        counters_after: counters of all layers after the pass.
    """

    def __init__(
        self,
        caches: Sequence[kvjax.Cache],
        counters: kvjax.Counters,
        lengths: Int[Array, "B"],
        texts: layers.Repetitions | None,
    ):
        """Creates a pass.

        Args:
            lengths: lengths of the prompts for `prefill`, number of new tokens for `step`.
            texts: repetitions of the prompts.
        """
        self.caches, self.lengths, self.texts = list(caches), lengths, texts
        self.prompt_layers = layers.PromptLayers()
        self.counters = self.counters_after = counters

    def prefill(self, layer: "_Layer", query: Array, key: Array, value: Array, mask: Array, **options: Any) -> Array:
        """Attends to the prompt with the model's own attention and fills the layer's cache.

        Args:
            query: queries of the prompts, followed by those of the repetitions.
            **options: further arguments of the model's attention.

        Returns:
            The attention output.
        """
        texts, number = self.texts, layer.spec.layer
        tokens = query.shape[1] - (0 if texts is None else texts.tokens[0].size)
        parts = [(x[:, :tokens], x[:, tokens:]) for x in (query, key, value)]
        (query, text_query), (key, text_key), (value, text_value) = parts
        attended, repeated = layer.attend(query, key, value, mask[:, :tokens, :tokens], **options), None
        query, key, value = layer.arrange(query, key, value)
        if texts is not None:
            text_query, text_key, text_value = layer.arrange(text_query, text_key, text_value)
            positions = jnp.arange(text_query.shape[1])
            offsets = self.lengths[:, None] - tokens - positions + positions % texts.tokens.shape[2]
            frequencies = layer.spec.rope_frequencies or ()
            text_query, text_key = (layers.shift_rope(x, offsets, frequencies) for x in (text_query, text_key))
            text_attended, repeated = layers.attend_to_repetitions(
                self.caches[number],
                text_query,
                (key, value),
                (text_key, text_value),
                self.lengths,
                jnp.asarray(texts.lengths),
            )
            attended = jnp.concatenate([attended, text_attended.astype(attended.dtype)], axis=1)
        self.caches[number], self.counters_after = self.prompt_layers.prefill(
            number, self.caches[number], self.counters, query, key, value, self.lengths, repeated=repeated
        )
        return attended

    def step(self, layer: "_Layer", query: Array, key: Array, value: Array, *args: Any, **options: Any) -> Array:
        """Appends a token per row and attends to the cache.

        Args:
            query: queries of the tokens.
            *args: ignored arguments of the model's attention, which mask its own cache.
            **options: ignored, too.

        Returns:
            The attention output.
        """
        cache, arranged = self.caches[layer.spec.layer], layer.arrange(query, key, value)
        attended, self.caches[layer.spec.layer], self.counters_after = kvjax.step(
            cache, self.counters, *arranged, self.lengths, compact_when_full=False
        )
        return attended.astype(query.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """An attention layer of the model.

    Attributes:
        module: keras-hub's layer.
        attend: its attention function of queries, keys, values and a mask.
        spec: its cache spec, for one row and one token.
    """

    module: Any
    attend: Callable[..., Array]
    spec: kvjax.CacheSpec

    def arrange(self, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values as kvjax expects them: one per KV head, pairs at dimensions i and i + D/2.

        Args:
            key: keys, which some families repeat for every query head, like the values.
        """
        repeats = key.shape[2] // self.spec.kv_heads
        key, value = key[:, :, ::repeats], value[:, :, ::repeats]
        if type(self.module).__name__ == "CachedGemmaAttention":  # RoPE's pairs are at dimensions 2i and 2i + 1
            query, key = (jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1) for x in (query, key))
        return query, key, value


def _attention_layers(causal_lm: Any) -> tuple[_Layer, ...]:
    """Returns the attention layers of a model.

    Raises:
        ValueError: if the model has other attention layers.
    """
    blocks = getattr(causal_lm.backbone, "transformer_layers", ())
    modules: list[Any] = [
        getattr(block, "_self_attention_layer", getattr(block, "attention", None)) for block in blocks
    ]
    names = {type(module).__name__ for module in modules}
    if not modules or names - set(_ATTENTION_LAYERS):
        raise ValueError(
            f"{type(causal_lm).__name__} has attention layers {sorted(names)}, which are not supported; supported: "
            f"{', '.join(_ATTENTION_LAYERS)} (Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3)"
        )
    if any(getattr(module, "use_bidirectional_attention", False) for module in modules):
        raise ValueError("the model attends in both directions and generates no text")
    return tuple(
        _Layer(module, module._compute_attention, _layer_spec(module, number, len(modules)))
        for number, module in enumerate(modules)
    )


def _layer_spec(module: Any, number: int, num_layers: int) -> kvjax.CacheSpec:
    """Returns the cache spec of an attention layer, for one row and one token."""
    first = functools.partial(_first_attribute, module)
    query_heads = first("num_query_heads", "_num_query_heads")
    kv_heads = first("num_key_value_heads", "_num_key_value_heads")
    head_dim = first("query_dense", "_query_dense").kernel.shape[-1]
    rotary = first("rotary_embedding_layer", "rope_layer")
    scale = None
    if not getattr(module, "query_head_dim_normalize", True):
        scale = (module.hidden_dim // query_heads) ** -0.5
    return kvjax.CacheSpec(
        batch=1,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_prompt_tokens=1,
        max_new_tokens=1,
        dtype=jnp.dtype(module.compute_dtype),
        scale=scale,
        logit_cap=getattr(module, "logit_soft_cap", None),
        window=_window(module),
        rope_frequencies=tuple(np.asarray(rotary._get_inverse_freq(head_dim), np.float32).tolist()),
        layer=number,
        layers=num_layers,
    )


def _first_attribute(module: Any, *names: str) -> Any:
    """Returns the first attribute that a module has; families differ in their names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _window(module: Any) -> int | None:
    """Returns the sliding window of an attention layer, if keras-hub applies it."""
    if type(module).__name__ in ("QwenAttention", "Qwen3Attention") and fused_attention_op_available():
        return None  # these families ignore their window in the fused attention of Keras
    if not getattr(module, "use_sliding_window_attention", True):
        return None
    return getattr(module, "sliding_window_size", getattr(module, "_sliding_window", None)) or None


@dataclasses.dataclass(frozen=True, eq=False)
class _CompressedModel:
    """A model with the arguments of `compress`."""

    causal_lm: Any
    attention_layers: tuple[_Layer, ...]
    policy: AnyPolicy
    budget: int | str | Budget | None
    kv_dtype: Any
    seed: int

    def plan(self, batch: int, max_length: int, sizes: tuple[int, int]) -> tuple[Policy, list[kvjax.CacheSpec]]:
        """Returns the policy and the cache specs of all layers.

        Args:
            max_length: length of a sequence, to which a share of the budget refers.
            sizes: maximum numbers of prompt tokens and of new tokens.
        """
        options = {"batch": batch, "max_prompt_tokens": sizes[0], "max_new_tokens": sizes[1], "kv_dtype": self.kv_dtype}
        specs = [dataclasses.replace(layer.spec, **options) for layer in self.attention_layers]
        return layers.fit_policy(self.policy, self.budget, specs[0], max_length), specs

    def init_caches(
        self, batch: int, max_length: int, sizes: tuple[int, int]
    ) -> tuple[tuple[kvjax.Cache, kvjax.Counters], ...]:
        """Returns the empty caches of all layers, with counters; see `plan` for the arguments."""
        return layers.init_caches(*self.plan(batch, max_length, sizes), self.seed)

    def make_generate_function(self) -> Callable[..., dict[str, Array]]:
        """Returns the function that generates a batch; replaces `CausalLM.make_generate_function`."""
        if self.causal_lm.generate_function is None:
            program = jax.jit(self._generate, static_argnames=("stop_token_ids", "sizes"))
            self.causal_lm.generate_function = functools.partial(self._run, program)
        return self.causal_lm.generate_function

    def _run(self, program: Callable[..., Any], inputs: dict[str, Any], stop_token_ids: Any = None) -> dict[str, Array]:
        """Generates a batch with a compiled program and checks the caches for faults.

        Returns:
            The outputs of `CausalLM.generate_step`.

        Raises:
            ValueError: if a prompt is empty or contains an image, or a cache is faulty.
        """
        if np.size(inputs.get("images", ())):
            raise ValueError("prompts with images are not supported")
        tokens, mask = np.asarray(inputs["token_ids"]), np.asarray(inputs["padding_mask"]).astype(bool)
        lengths, max_length = mask.sum(axis=-1), tokens.shape[1]
        if not (lengths > 0).all() or (mask != (np.arange(max_length) < lengths[:, None])).any():
            raise ValueError("prompts must not be empty, and padding must follow them")
        sizes = _cache_sizes(int(lengths.min()), int(lengths.max()), max_length)
        policy, specs = self.plan(1, max_length, sizes)
        repetition = merge_requirements([layer_policy(policy, spec) for spec in specs]).repetition
        texts = None if repetition is None else layers.Repetitions(*make_repetitions(repetition, tokens, lengths))
        variables = self._variables()
        values = [[variable.value for variable in group] for group in variables]
        stop = tuple(stop_token_ids) if stop_token_ids is not None else None
        inputs = {name: keras.ops.convert_to_tensor(x) for name, x in inputs.items() if x is not None}
        outputs, sampler_values, faults = program(inputs, texts, values, stop_token_ids=stop, sizes=sizes)
        if np.any(faults):
            raise ValueError(f"the caches of rows {np.flatnonzero(faults).tolist()} have NaN or infinite entries")
        for variable, value in zip(variables[0], sampler_values, strict=True):
            variable.assign(value)
        return outputs

    def _variables(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the variables of the sampler, and the trainable and other variables of the model."""
        model = self.causal_lm
        return model.sampler.variables, model.trainable_variables, model.non_trainable_variables

    def _generate(
        self,
        inputs: dict[str, Array],
        texts: layers.Repetitions | None,
        values: list[list[Array]],
        *,
        stop_token_ids: tuple[int, ...] | None,
        sizes: tuple[int, int],
    ) -> tuple[dict[str, Array], list[Array], Int[Array, "B"]]:
        """Runs keras-hub's `generate_step` with other caches; returns its outputs, the sampler's values and faults."""
        variables = self._variables()
        pairs = [pair for group in zip(variables, values, strict=True) for pair in zip(*group, strict=True)]
        run = _Generation(self, inputs["padding_mask"].astype(bool), texts, sizes)
        with keras.StatelessScope(state_mapping=pairs) as scope, run.replacing_caches():
            outputs = self.causal_lm.generate_step(inputs, stop_token_ids)
        current = [scope.get_current_value(variable) for variable in variables[0]]
        sampler_values = [old if new is None else new for new, old in zip(current, values[0], strict=True)]
        return {name: x for name, x in outputs.items() if x is not None}, sampler_values, run.faults()


class _Generation:
    """One trace of `generate_step`, in which methods of the model work on caches of kvjax."""

    def __init__(
        self,
        compressed: _CompressedModel,
        padding_mask: Bool[Array, "B N"],
        texts: layers.Repetitions | None,
        sizes: tuple[int, int],
    ):
        """Creates a trace.

        Args:
            compressed: the model.
            padding_mask: tokens of the prompts.
            texts: repetitions of the prompts.
            sizes: maximum numbers of prompt tokens and of new tokens.
        """
        self.compressed, self.texts, self.sizes = compressed, texts, sizes
        self.batch, self.max_length = padding_mask.shape
        self.lengths = jnp.sum(padding_mask, axis=-1, dtype=jnp.int32)
        self.call_with_cache = compressed.causal_lm.call_with_cache
        self.build_cache = compressed.causal_lm._build_cache
        self.run_loop = compressed.causal_lm.sampler.run_loop
        self.final: tuple[Array, ...] = ()

    @contextlib.contextmanager
    def replacing_caches(self) -> Iterator[None]:
        """Replaces the methods of the model and its sampler that handle caches."""
        model = self.compressed.causal_lm
        with (
            _replaced(model, _build_cache=self._build_cache, call_with_cache=self._call_with_cache),
            _replaced(model.sampler, run_loop=self._run_loop),
        ):
            yield

    def faults(self) -> Int[Array, "B"]:
        """Returns the number of faults of every row after the loop."""
        faults = count_row_faults(self._unpack(self.final))
        assert faults is not None  # caches have fault counters
        return faults

    def _build_cache(self, token_ids: Int[Array, "B N"], *args: Any) -> tuple[Array, tuple[Array, ...]]:
        """Processes the prompts; replaces `CausalLM._build_cache`, without the tokens after the longest prompt."""
        tokens = token_ids[:, : self.sizes[0]]
        if self.texts is not None:
            tokens = jnp.concatenate([tokens, self.texts.tokens.reshape(self.batch, -1)], axis=1)
        return self.build_cache(tokens, *(None for _ in args))

    def _call_with_cache(
        self, token_ids: Int[Array, "B T"], cache: Any, cache_update_index: Int[Array, ""] | int, **options: Any
    ) -> tuple[Array, Array, tuple[Array, ...]]:
        """Replaces `CausalLM.call_with_cache`; `_build_cache` calls it for index 0, the sampler for later ones."""
        if isinstance(cache_update_index, int) and cache_update_index == 0:
            return self._prefill(token_ids, cache)
        return self._decode(token_ids, cache, jnp.asarray(cache_update_index))

    def _prefill(self, token_ids: Int[Array, "B T"], empty_cache: Any) -> tuple[Array, Array, tuple[Array, ...]]:
        """Processes the prompts and returns no logits, hidden states [B, N, W] and the packed caches."""
        caches, counters = zip(*self.compressed.init_caches(self.batch, self.max_length, self.sizes), strict=True)
        forward = _ForwardPass(caches, counters[0], self.lengths, self.texts)
        # Keys and values of a single token, which is all that decoding needs of keras-hub's cache.
        self.single_token_cache = jax.tree.map(lambda x: x[:1, ..., :1, :, :], empty_cache)
        with self._attention_replaced(forward.prefill):
            _, hidden, _ = self.call_with_cache(token_ids, empty_cache, 0)
        self.carried = _Caches(tuple(forward.caches), forward.counters_after)
        # Samplers ask for logits from the shortest prompt's last token on.
        self.first_hidden = max(self.max_length - self.sizes[1] - 1, 0)
        self.prompt_hidden = hidden[:, self.first_hidden : self.sizes[0]]
        hidden = jnp.pad(hidden[:, : self.sizes[0]], ((0, 0), (0, self.max_length - self.sizes[0]), (0, 0)))
        return hidden, hidden, self._pack(self.carried)

    def _decode(
        self, token_ids: Int[Array, "B 1"], packed: tuple[Array, ...], index: Int[Array, ""]
    ) -> tuple[Array, Array, tuple[Array, ...]]:
        """Appends a token per row whose prompt ends before it; returns logits, hidden states and the packed caches."""
        carried = self._unpack(packed)
        beams = len(token_ids) // self.batch
        is_new = index >= jnp.repeat(self.lengths, beams)  # the other tokens are in prompts, which the caches hold
        is_full = carried.counters.offset == carried.counters.slots
        carried = jax.lax.cond(is_full, _compact, lambda carried: carried, carried)
        forward = _ForwardPass(carried.layers, carried.counters, is_new.astype(jnp.int32), None)
        single_token_cache = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (len(token_ids), *x.shape[1:])), self.single_token_cache
        )
        with self._attention_replaced(forward.step):
            _, hidden, _ = self.call_with_cache(token_ids, single_token_cache, index)
        prompt_hidden = jax.lax.dynamic_slice_in_dim(self.prompt_hidden, index - self.first_hidden, 1, axis=1)
        hidden = jnp.where(is_new[:, None, None], hidden, jnp.repeat(prompt_hidden, beams, axis=0))
        logits = self.compressed.causal_lm.backbone.token_embedding(hidden, reverse=True)
        # A step without new tokens must not use a staging slot.
        counters = jax.tree.map(
            lambda new, old: jnp.where(jnp.any(is_new), new, old), forward.counters_after, carried.counters
        )
        return logits, hidden, self._pack(_Caches(tuple(forward.caches), counters))

    def _run_loop(self, *args: Any, **options: Any) -> Any:
        """Runs the sampler's loop and stores the caches after it."""
        variables = self.run_loop(*args, **options)
        self.final = variables[1]
        return variables

    @contextlib.contextmanager
    def _attention_replaced(self, attend: Callable[..., Array]) -> Iterator[None]:
        """Replaces the attention function of every layer."""
        with contextlib.ExitStack() as stack:
            for layer in self.compressed.attention_layers:
                stack.enter_context(_replaced(layer.module, _compute_attention=functools.partial(attend, layer)))
            yield

    def _pack(self, carried: _Caches) -> tuple[Array, ...]:
        """Returns the arrays of caches with the batch axis first, as beam search requires."""
        packed: list[Array] = []
        batch = len(carried.counters.count)

        def add(field: ArrayField, leaf: Array) -> Array:
            """Appends one array `leaf` to `packed`; its `field` declares the batch axis."""
            axis = field.batch_axis
            leaf = jnp.broadcast_to(leaf, (batch, *leaf.shape)) if axis is None else jnp.moveaxis(leaf, axis, 0)
            packed.append(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
            return leaf

        map_fields(add, carried)
        return tuple(packed)

    def _unpack(self, packed: tuple[Array, ...]) -> _Caches:
        """Returns the caches whose arrays `_pack` returned."""
        arrays = iter(packed)

        def take(field: ArrayField, leaf: Shaped[Array, "..."]) -> Array:
            """Returns the next array, in the layout of `leaf`; its `field` declares the batch axis."""
            array = next(arrays)
            if _is_key(leaf):
                array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
            return array[0] if field.batch_axis is None else jnp.moveaxis(array, 0, field.batch_axis)

        return map_fields(take, self.carried)


def _is_key(x: Array) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@contextlib.contextmanager
def _replaced(instance: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of an object without Keras's tracking, and removes them on exit."""
    for name, value in attributes.items():
        _set(instance, name, value)
    try:
        yield
    finally:
        for name in attributes:
            object.__delattr__(instance, name)


def _set(instance: Any, name: str, value: Any) -> None:
    object.__setattr__(instance, name, value)
