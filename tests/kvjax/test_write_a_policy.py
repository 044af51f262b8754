"""The policy that `docs/write_a_policy.md` writes, run as it stands there."""

import functools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

ROOT = pathlib.Path(__file__).parents[2]
BATCH, PROMPT, NEW, KV_HEADS, GROUP, HEAD_DIM, BUDGET = 2, 20, 12, 2, 2, 16, 9


def blocks(path):
    """The Python blocks of a page."""
    return re.findall(r"```(?:python|{code-cell} ipython3)\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)


@functools.cache
def page():
    """A module made of the page's blocks, in order."""
    module = types.ModuleType("written_policy")
    for block in blocks("docs/write_a_policy.md"):
        exec(compile(block, "docs/write_a_policy.md", "exec"), module.__dict__)
    return module


def test_the_policy_is_short():
    # From the first import to the last line, without blank lines: what a newcomer has to write.
    written = [line for line in blocks("docs/write_a_policy.md")[0].splitlines() if line.strip()]
    assert len(written) <= 70


def test_the_written_policy_is_tova_token_by_token():
    rng = np.random.default_rng(0)
    tokens = PROMPT + NEW
    keys, values = rng.normal(size=(2, BATCH, tokens, KV_HEADS, HEAD_DIM)).astype(np.float32)
    queries = 2 * rng.normal(size=(BATCH, tokens, KV_HEADS * GROUP, HEAD_DIM)).astype(np.float32)
    lengths = np.array([PROMPT, 7])
    spec = kvjax.CacheSpec(
        batch=BATCH,
        query_heads=KV_HEADS * GROUP,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_prompt_tokens=PROMPT,
        max_new_tokens=NEW,
    )
    policy = page().TOVA(BUDGET, compact_every=1)

    @jax.jit
    def run(prompt, last, fresh):
        cache = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), BATCH))
        cache, _ = kvjax.prefill(cache, *prompt, jnp.asarray(lengths), last)

        def step(cache, item):
            attended, cache = kvjax.step(cache, *(x[:, None] for x in item))
            return cache, attended[:, 0]

        return jnp.moveaxis(jax.lax.scan(step, cache, fresh)[1], 0, 1)

    rows, place = np.arange(BATCH)[:, None], lengths[:, None] + np.arange(NEW)
    fresh = tuple(np.moveaxis(x[rows, place], 1, 0) for x in (queries, keys, values))
    last = queries[np.arange(BATCH), lengths - 1][:, None]
    attended = np.asarray(run((keys[:, :PROMPT], values[:, :PROMPT]), last, fresh))

    for row in range(BATCH):
        for head in range(KV_HEADS):
            group = slice(head * GROUP, (head + 1) * GROUP)

            def look(held, now, row=row, head=head, group=group):
                logits = queries[row, now, group].astype(np.float64) @ keys[row, held, head].T / np.sqrt(HEAD_DIM)
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                return weights.sum(axis=0), weights @ values[row, held, head]

            held = list(range(lengths[row]))
            drawn, _ = look(held, lengths[row] - 1)
            held = sorted(np.argsort(-drawn, kind="stable")[:BUDGET].tolist())
            for number in range(NEW):
                now = lengths[row] + number
                held.append(now)
                drawn, expected = look(held, now)
                np.testing.assert_allclose(attended[row, number, group], expected, atol=2e-6)
                if len(held) > BUDGET:
                    held.pop(int(np.argmin(drawn)))
