"""The layers of `docs/your_model.md` work with every registered policy."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.registry import POLICIES
from tests.kvjax.support import each

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "your_model.md"
BATCH, PROMPT, NEW, WIDTH, LENGTHS = 2, 40, 12, 32, (40, 25)
# Settings for a short prompt; every policy gets the ones that it has.
SETTINGS = {
    "budget": 24, "sinks": 2, "recent": 4, "compact_every": 8, "chunk": 8, "cluster_tokens": 4, "chunk_tokens": 8,
    "chunk_clusters": 2, "lag_size": 8, "merged": 4, "kernel_size": 3, "window_size": 6,
}  # fmt: skip
SETTINGS_BY_POLICY = {
    "balancekv_theory": {"budget": 60},
    "snapkv": {"recent": 0},
    "pyramidkv": {"recent": 0},
}
QUICK = ("clusterkv", "h2o", "snapkv", "subgen")


@pytest.fixture(scope="module")
def page():
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def make_policy(name):
    fields = {field.name for field in dataclasses.fields(POLICIES[name])}
    settings = {key: value for key, value in SETTINGS.items() if key in fields}
    return POLICIES[name](**settings | SETTINGS_BY_POLICY.get(name, {}))


def make_spec():
    return kvjax.CacheSpec(
        batch=BATCH, query_heads=4, kv_heads=2, head_dim=16, max_prompt_tokens=PROMPT, max_new_tokens=NEW,
        rope_frequencies=(0.0,) * 8, layers=2,
    )  # fmt: skip


def run_linen(page, policy, prompt, tokens):
    layer, lengths = page["CompressedAttention"](make_spec(), policy), jnp.array(LENGTHS)
    variables = layer.init(jax.random.key(2), prompt, lengths)
    _, updated = jax.jit(lambda *args: layer.apply(*args, mutable="cache"))(variables, prompt, lengths)
    step = jax.jit(lambda *args: layer.apply(*args, mutable="cache"))
    for token in tokens:
        output, updated = step({**variables, **updated}, token)
    return output, updated["cache"]["kv"]


def run_nnx(page, policy, prompt, tokens):
    layer = page["Attention"](make_spec(), policy, WIDTH, nnx.Rngs(0))
    nnx.jit(lambda layer, x: layer.prefill(x, jnp.array(LENGTHS)))(layer, prompt)
    step = nnx.jit(lambda layer, x: layer.step(x))
    for token in tokens:
        output = step(layer, token)
    return output, layer.cache.get_value()


@pytest.mark.parametrize("run", [run_linen, run_nnx])
@pytest.mark.parametrize("name", each(POLICIES, QUICK))
def test_every_policy_works_in_the_layers_of_the_page(page, run, name):
    policy = make_policy(name)
    prompt = jax.random.normal(jax.random.key(1), (BATCH, PROMPT, WIDTH))
    tokens = jax.random.normal(jax.random.key(3), (NEW, BATCH, 1, WIDTH))
    if policy.requires.repetition is not None:  # a layer cannot repeat the prompt; see "Policies that need more"
        with pytest.raises(ValueError, match="repe"):
            run(page, policy, prompt, tokens)
        return
    output, cache = run(page, policy, prompt, tokens)
    kvjax.raise_faults(cache)
    assert np.isfinite(output).all()
    assert kvjax.num_tokens(cache).tolist() == [length + NEW for length in LENGTHS]
