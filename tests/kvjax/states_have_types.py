"""Types that a checker must infer: a cache has the state type of its policy. `make types` checks this file."""

import typing

import jax
from jaxtyping import Array

import kvjax
from kvjax.methods.streaming_llm import StreamingLLMState
from kvjax.methods.subgen.subgen import SubGenState
from kvjax.methods.top_k.top_k_store import TopKStore


def states(spec: kvjax.CacheSpec, row_keys: Array, tokens: Array) -> None:
    """Contains assertions of inferred types; it is not called."""
    cache = kvjax.init(kvjax.SubGen(1024), spec, row_keys)
    typing.assert_type(cache.state, SubGenState)
    output, cache = kvjax.step(cache, tokens, tokens, tokens)
    typing.assert_type(output, jax.Array)
    typing.assert_type(cache.state, SubGenState)
    cache, _ = kvjax.prefill(cache, tokens, tokens, tokens)
    typing.assert_type(kvjax.compact(cache).state, SubGenState)
    typing.assert_type(kvjax.init(kvjax.KVzip(1024), spec, row_keys).state, TopKStore)
    typing.assert_type(
        kvjax.init(kvjax.StreamingLLM(64), spec, row_keys).policy.init(spec, row_keys), StreamingLLMState
    )
