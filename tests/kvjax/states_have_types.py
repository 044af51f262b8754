"""What a type checker must know: of a cache, its policy's own state. `make types` reads this file; nothing runs it."""

import typing

import jax
from jaxtyping import Array
from kvjax.combinators.quantized import Narrow

import kvjax
from kvjax.policies.streaming_llm import StreamingLLMState
from kvjax.policies.subgen import SubGenState
from kvjax.top_k_policy import TopKStore


def states(spec: kvjax.CacheSpec, row_keys: Array, fresh: Array) -> None:
    cache = kvjax.init(kvjax.SubGen(1024), spec, row_keys)
    typing.assert_type(cache.state, SubGenState)
    attended, cache = kvjax.step(cache, fresh, fresh, fresh)
    typing.assert_type(attended, jax.Array)
    typing.assert_type(cache.state, SubGenState)
    cache, _ = kvjax.prefill(cache, fresh, fresh, fresh)
    typing.assert_type(kvjax.compact(cache).state, SubGenState)
    typing.assert_type(kvjax.init(kvjax.KVzip(1024), spec, row_keys).state, TopKStore)
    typing.assert_type(
        kvjax.init(kvjax.StreamingLLM(64), spec, row_keys).policy.init(spec, row_keys), StreamingLLMState
    )
    typing.assert_type(kvjax.init(kvjax.Quantized(kvjax.Exact()), spec, row_keys).state, Narrow)
