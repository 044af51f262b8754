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
    cache, counters = kvjax.init(kvjax.SubGen(1024), spec, row_keys)
    typing.assert_type(cache.state, SubGenState)
    output, cache, counters = kvjax.step(cache, counters, tokens, tokens, tokens)
    typing.assert_type(output, jax.Array)
    typing.assert_type(cache.state, SubGenState)
    cache, counters, _ = kvjax.prefill(cache, counters, tokens, tokens, tokens)
    typing.assert_type(counters, kvjax.Counters)
    typing.assert_type(kvjax.compact(cache, counters)[0].state, SubGenState)
    typing.assert_type(kvjax.init(kvjax.KVzip(1024), spec, row_keys)[0].state, TopKStore)
    streaming_llm, _ = kvjax.init(kvjax.StreamingLLM(64), spec, row_keys)
    typing.assert_type(streaming_llm.policy.init(spec, row_keys), StreamingLLMState)
