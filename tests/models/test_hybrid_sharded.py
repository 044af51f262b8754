"""Hybrid models on eight simulated devices; `test_generate_sharded.test_with_eight_devices` runs these tests."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax_models import LanguageModel
from kvjax_models.model.config import AttentionConfig, RecurrenceConfig
from kvjax_models.model.gated_delta import GatedDeltaSizes
from kvjax_models.model.llama import Llama
from kvjax_models.model.short_convolution import ShortConvolutionSizes
from kvjax_models.runner.generator import Generator
from kvjax_models.saves import Save
from kvjax_models.sharding import shard_model
from tests.models import tiny
from tests.models.loops import decode
from tests.models.test_generate_sharded import (
    CONFIG,
    PROMPTS,
    SIZES,
    assert_sharded,
    generate_turns,
    make_mesh,
    needs_devices,
)

POLICY = kvjax.Exact(compact_every=4)
DELTA = GatedDeltaSizes(key_heads=4, value_heads=8, key_dim=8, value_dim=6, kernel_size=3)
HYBRID = {
    "vocab_size": 98,
    "layers": 3,
    "recurrence": RecurrenceConfig((0, 2), DELTA),
    "attention": AttentionConfig(gate=True),
}


@functools.cache
def make_model(**changes):
    return tiny.make_lively_llm(**vars(CONFIG) | HYBRID | changes).model


@needs_devices
@pytest.mark.parametrize("data, tensor", [(1, 8), (2, 4)])
def test_tokens_and_logits_equal_those_of_one_device(data, tensor):
    mesh = make_mesh(data=data, tensor=tensor)
    rows, state = generate_turns(make_model(), POLICY)
    sharded = shard_model(make_model(), mesh)
    sharded_rows, sharded_state = generate_turns(sharded, POLICY)
    assert sharded_rows == rows
    np.testing.assert_allclose(sharded_state.logits, state.logits, atol=1e-4)
    assert_sharded(sharded_state, mesh)
    memory = sharded_state.recurrent[0].memory
    assert memory.addressable_shards[0].data.shape == (4 // data, 1, 2, 8, 6)  # one of four key heads
    kernel = sharded.layers[0].mixer.qkvz.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (CONFIG.width, 1, DELTA.channels + 12)


@needs_devices
def test_a_state_saved_on_one_mesh_continues_on_another(tmp_path):
    meshes = [make_mesh(data=data, tensor=8 // data) for data in (2, 4)]
    first, second = (Generator(shard_model(make_model(), mesh), POLICY, **SIZES) for mesh in meshes)
    blocks = []
    for state, tokens in decode(first, first.prefill(first.init_state(3), PROMPTS), 12):
        if not blocks:
            Save(tmp_path).write(state, {}, {})
        blocks.append(tokens)
    restored = Save(tmp_path).restore(second.init_state())
    assert_sharded(restored, meshes[1])
    continued = [tokens for _, tokens in decode(second, restored, 8)]
    np.testing.assert_array_equal(np.concatenate(continued, axis=1), np.concatenate(blocks[1:], axis=1))


@needs_devices
def test_short_convolutions_are_sharded_along_channels():
    mesh = make_mesh(data=2, tensor=4)
    model = make_model(
        recurrence=RecurrenceConfig((0, 2), ShortConvolutionSizes(channels=CONFIG.width, kernel_size=3, use_bias=True))
    )
    rows, state = generate_turns(model, POLICY)
    sharded_rows, sharded_state = generate_turns(shard_model(model, mesh), POLICY)
    assert sharded_rows == rows
    np.testing.assert_allclose(sharded_state.logits, state.logits, atol=1e-4)
    assert_sharded(sharded_state, mesh)
    assert sharded_state.recurrent[0].inputs.addressable_shards[0].data.shape == (2, 2, CONFIG.width // 4)


@needs_devices
def test_documents_on_a_mesh(tmp_path):
    """A document that one device saved answers on the mesh."""
    tokenizer = tiny.make_llm().tokenizer
    alone = LanguageModel(make_model(), tokenizer)
    document = alone.cache(POLICY).read([i % 30 + 2 for i in range(60)], max_new_tokens=32)
    expected = document.generate(["ab", "c", "def"], max_new_tokens=12)
    document.save(tmp_path)
    mesh = make_mesh(tensor=4, devices=jax.devices()[:4])
    llm = LanguageModel(shard_model(make_model(), mesh), tokenizer)
    read = llm.cache(POLICY).read([i % 30 + 2 for i in range(60)], max_new_tokens=32)
    opened = llm.open(tmp_path)
    for one in (read, opened):
        assert one.generate(["ab", "c", "def"], max_new_tokens=12) == expected
        assert not one.prefix.recurrent[0].memory.sharding.is_fully_replicated


@needs_devices
def test_key_heads_must_be_divided_among_the_devices():
    sizes = dataclasses.replace(DELTA, key_heads=2)
    config = dataclasses.replace(CONFIG, **HYBRID | {"recurrence": RecurrenceConfig((0, 2), sizes)})
    model = shard_model(Llama(config, rngs=tiny.nnx.Rngs(0)), make_mesh(data=2, tensor=4))
    with pytest.raises(ValueError, match="2 along 'H' cannot be divided among 4 devices along 'tensor'"):
        Generator(model, POLICY, **SIZES).init_state()
