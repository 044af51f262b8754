"""The policies of `docs/write_a_policy.md` run as printed there, and its TOVA is TOVA token by token."""

import pathlib
import re
import types

import numpy as np
import pytest

import kvjax
from kvjax import registry
from tests.kvjax.support import Stream, after, begin, go, make_spec, row_keys

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "write_a_policy.md"
BATCH, PROMPT, NEW, KV_HEADS, GROUP, HEAD_DIM, BUDGET = 2, 20, 12, 2, 2, 16, 9


@pytest.fixture(scope="module")
def page():
    """Returns a module made of the page's code blocks, in order."""
    registered = dict(registry.POLICIES)
    module = types.ModuleType("written_policy")
    for block in re.findall(r"```{code-cell} ipython3\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), module.__dict__)
    yield module
    registry.POLICIES.clear()
    registry.POLICIES.update(registered)


def run(policy, lengths, **options):
    """Returns queries, keys and values, and the attention output of NEW tokens after prompts of `lengths` tokens."""
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, BATCH, PROMPT + NEW, KV_HEADS, HEAD_DIM)).astype(np.float32)
    queries = 2 * rng.normal(size=(BATCH, PROMPT + NEW, KV_HEADS * GROUP, HEAD_DIM)).astype(np.float32)
    stream = Stream(keys, values, queries)
    spec = make_spec(BATCH, PROMPT, NEW, head_dim=HEAD_DIM, rope_frequencies=None, **options)
    cache, counters = begin(policy, spec, row_keys(BATCH), *(part[:, :PROMPT] for part in stream), lengths)
    outputs, _, cache, counters = go(cache, counters, after(stream, lengths, NEW))
    kvjax.raise_faults((cache, counters))
    assert counters.num_tokens.tolist() == (lengths + NEW).tolist()
    return queries, keys, values, outputs


def test_a_registered_policy_works_in_policy_strings(page):
    choice = kvjax.PolicyChoice.parse("mine:sinks=2,recent=8@64 slots")
    assert choice.make() == page.LargeValues(64, sinks=2, recent=8)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LargeValues", {"sinks": 0, "compact_every": 1}),
        ("RecentAndLargeValues", {"recent": 4, "compact_every": 4}),
        ("TOVA", {"compact_every": 4}),
    ],
)
def test_policies_decode(page, name, settings):
    policy = getattr(page, name)(BUDGET, **settings)
    assert np.isfinite(run(policy, np.array([PROMPT, 7]), kv_dtype="int4")[-1]).all()


def test_the_written_policy_is_tova_token_by_token(page):
    lengths = np.array([PROMPT, 7])
    queries, keys, values, attended = run(page.TOVA(BUDGET, compact_every=1), lengths)
    for row in range(BATCH):
        for head in range(KV_HEADS):
            group = slice(head * GROUP, (head + 1) * GROUP)

            def attend(held, now, row=row, head=head, group=group):
                logits = queries[row, now, group].astype(np.float64) @ keys[row, held, head].T / np.sqrt(HEAD_DIM)
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                return weights.sum(axis=0), weights @ values[row, held, head]

            held = list(range(lengths[row]))
            received, _ = attend(held, lengths[row] - 1)
            held = sorted(np.argsort(-received, kind="stable")[:BUDGET].tolist())
            for number in range(NEW):
                now = lengths[row] + number
                held.append(now)
                received, expected = attend(held, now)
                np.testing.assert_allclose(attended[row, number, group], expected, atol=2e-6)
                if len(held) > BUDGET:
                    held.pop(int(np.argmin(received)))
