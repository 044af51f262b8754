"""Keys and values of norms from 1e-15 to 1e15: policies keep the laws that they keep at norms of about one."""

import numpy as np
import pytest

import kvjax
from tests.kvjax.support import (
    LENGTHS,
    NEW,
    POLICIES,
    Stream,
    after,
    begin,
    each,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
)
from tests.kvjax.support import ON_A_MESH as ANY_VALUES

# Of keys and values; make_stream's have norms of 8 and 1.
EDGES = [(1e-16, 1.0), (1e14, 1.0), (1.0, 1e-15), (1.0, 1e15), (1e14, 1e15), (1e-16, 1e-15)]
# BalanceKV's own form sorts values into buckets, by norms that it is told: others are a fault that it names.
BOUNDED = {"balancekv_paper"}


def through(name, key_size, value_size):
    """What attention gives behind a prompt and new tokens, and each token's weight, both in units of the values."""
    stream = make_stream()
    stream = Stream(stream.keys * np.float32(key_size), stream.values * np.float32(value_size), stream.queries)
    prompt = prompt_of(stream, LENGTHS)
    cache = begin(ANY_VALUES.get(name, POLICIES[name]), make_spec(), row_keys(), *prompt, LENGTHS)
    cache, outputs, weights = go(cache, after(stream, LENGTHS))
    kvjax.raise_faults(cache)
    return outputs / value_size, weights / value_size


@pytest.mark.parametrize("name", each([name for name in POLICIES if name not in BOUNDED], quick=["subgen_mean_value"]))
def test_policies_keep_their_laws_at_keys_and_values_of_any_size(name):
    """Whatever is read is a number, and no further from the values than at norms of about one; where the weights of
    what is kept sum to the tokens, they do at every size."""
    outputs, weights = through(name, 1.0, 1.0)
    tokens = np.array(LENGTHS)[:, None, None] + 1 + np.arange(NEW)[:, None]
    conserves = np.allclose(weights.sum(-1), tokens, rtol=1e-5)
    for key_size, value_size in EDGES:
        found, weighing = through(name, key_size, value_size)
        assert np.isfinite(found).all(), (key_size, value_size)
        assert -0.3 + outputs.min() < found.min() and found.max() < max(1, outputs.max()) + 0.3
        if conserves:
            np.testing.assert_allclose(weighing.sum(-1), np.broadcast_to(tokens, weighing.shape[:-1]), rtol=1e-4)
