"""Keys and values with norms from 1e-15 to 1e15: policies keep their laws as with norms of about one."""

import numpy as np
import pytest

import kvjax
from tests.kvjax import support
from tests.kvjax.support import LENGTHS, NEW, POLICIES
from tests.kvjax.support import ON_A_MESH as ANY_VALUES

# Scales of keys and of values, which have norms of 8 and 1.
SCALES = [(1e-16, 1.0), (1e14, 1.0), (1.0, 1e-15), (1.0, 1e15), (1e14, 1e15), (1e-16, 1e-15)]


def run_policy(name, key_scale, value_scale):
    """Returns outputs after a prompt and new tokens, and the weight of each token, relative to the values' scale."""
    stream = support.make_stream()
    stream = support.Stream(
        stream.keys * np.float32(key_scale), stream.values * np.float32(value_scale), stream.queries
    )
    prompt = support.prompt_of(stream, LENGTHS)
    policy = ANY_VALUES.get(name, POLICIES[name])
    cache, counters = support.begin(policy, support.make_spec(), support.row_keys(), *prompt, LENGTHS)
    outputs, weights, cache, counters = support.go(cache, counters, support.after(stream, LENGTHS))
    kvjax.raise_faults((cache, counters))
    return outputs / value_scale, weights / value_scale


@pytest.mark.parametrize("name", support.each(POLICIES, quick=["subgen_mean"]))
def test_laws_hold_for_all_norms(name):
    """Outputs are finite and in the range of the values; weights that sum to the number of tokens do so always."""
    outputs, weights = run_policy(name, 1.0, 1.0)
    tokens = np.array(LENGTHS)[:, None, None] + 1 + np.arange(NEW)[:, None]
    conserves_weight = np.allclose(weights.sum(-1), tokens, rtol=1e-5)
    for scales in SCALES:
        scaled_outputs, scaled_weights = run_policy(name, *scales)
        assert np.isfinite(scaled_outputs).all(), scales
        assert outputs.min() - 0.3 < scaled_outputs.min() and scaled_outputs.max() < max(1, outputs.max()) + 0.3
        if conserves_weight:
            sums = scaled_weights.sum(-1)
            np.testing.assert_allclose(sums, np.broadcast_to(tokens, sums.shape), rtol=1e-4)
