"""The layers of `docs/your_model.md` work with every registered policy."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from tests.adapters.pages import POLICIES
from tests.kvjax.support import each

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "your_model.md"
BATCH, PROMPT, NEW, WIDTH, LENGTHS = 2, 40, 12, 32, (40, 25)
QUICK = ("clusterkv", "h2o", "snapkv", "subgen")


@pytest.fixture(scope="module")
def page():
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


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
    policy = POLICIES[name]
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
