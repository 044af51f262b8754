"""Sampling: distributions, penalties, log-probabilities, independence of rows, refusals."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_models.runner.sampling import (
    MAX_LOGPROBS,
    Sampling,
    _keep_most_likely,
    is_finite,
    row_sampling,
    sample,
    with_answer,
    with_prompt,
)

PROBABILITIES = np.array([0.05, 0.4, 0.25, 0.2, 0.1])
LOGITS = np.log(PROBABILITIES).astype(np.float32)
DRAWS = 20_000
PROMPT, ANSWER = [3, 3, 7], [7, 9, 9, 9]  # tokens that penalties refer to

sample = jax.jit(sample)


def make_rows(*samplings, vocab_size=LOGITS.size, prompt=(), answer=()):
    """Returns the parameters of rows after the same prompt and answer."""
    rows, batch = jax.tree.map(jnp.asarray, row_sampling(samplings, vocab_size)), len(samplings)
    if prompt:
        # The padding holds a token that does not occur.
        tokens = jnp.tile(jnp.array([*prompt, 0, 0]), (batch, 1))
        rows = with_prompt(rows, tokens, jnp.full(batch, len(prompt)))
    for token in answer:
        rows = with_answer(rows, jnp.full(batch, token), jnp.ones(batch, bool))
    return rows


def distribution(logits, options, prompt=(), answer=()):
    """Returns the probabilities of the next token, float64, by the definitions of the parameters."""
    logits = np.asarray(logits, np.float64).copy()
    for token in {*prompt, *answer}:
        logits[token] *= 1 / options.repetition_penalty if logits[token] > 0 else options.repetition_penalty
    for token in set(answer):
        logits[token] -= options.presence_penalty + options.frequency_penalty * answer.count(token)
    if options.temperature == 0:
        return np.eye(logits.size)[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / options.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: options.top_k]
    if options.top_p is not None:
        shares = weights[kept] / weights[kept].sum()
        kept = kept[np.cumsum(shares) - shares < options.top_p]  # the token that crosses p is kept
    if options.min_p is not None:
        kept = kept[weights[kept] >= options.min_p * weights.max()]
    probabilities = np.zeros_like(weights)
    probabilities[kept] = weights[kept]
    return probabilities / probabilities.sum()


def frequencies(options, logits=LOGITS, **tokens):
    """Returns how often each token is drawn, all rows at once."""
    row = make_rows(options, vocab_size=logits.size, **tokens)
    rows = jax.tree.map(lambda x: jnp.repeat(x, DRAWS, axis=0), row)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = sample(jnp.tile(jnp.asarray(logits), (DRAWS, 1)), keys, rows).token
    return np.bincount(np.asarray(drawn), minlength=logits.size) / DRAWS


def assert_follows(observed, expected):
    assert (observed[expected == 0] == 0).all(), (observed, expected)
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(observed - expected) <= 4.5 * deviation + 1e-9).all(), (observed, expected)


@pytest.mark.parametrize(
    "options, kept",
    [
        (Sampling(0.5), [0, 1, 2, 3, 4]),
        (Sampling(2.0, top_k=2), [1, 2]),
        (Sampling(1.0, top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_p=0.39), [1]),
        (Sampling(1.0, top_p=0.41), [1, 2]),  # the token that crosses p is kept
        (Sampling(1.0, top_p=0.84), [1, 2, 3]),
        (Sampling(1.0, top_p=1.0), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_p=1e-6), [1]),
        # The largest of three tokens has .47 of their probability; without top_k, two tokens would be needed.
        (Sampling(1.0, top_k=3, top_p=0.45), [1]),
        # A temperature of .5 increases the first token's probability to .58 before top_p applies.
        (Sampling(0.5, top_p=0.5), [1]),
        (Sampling(1.0, min_p=0.49), [1, 2, 3]),
        (Sampling(1.0, min_p=1.0), [1]),
        (Sampling(0.5, min_p=0.3), [1, 2]),  # the shares are squared
        (Sampling(1.0, top_k=4, top_p=0.8, min_p=0.6), [1, 2]),
    ],
    ids=str,
)
def test_samples_follow_the_distribution(options, kept):
    expected = distribution(LOGITS, options)
    assert np.flatnonzero(expected).tolist() == kept
    assert_follows(frequencies(options), expected)


PENALTIES = (
    Sampling(1.0, repetition_penalty=1.8),
    Sampling(1.0, repetition_penalty=0.6),
    Sampling(1.0, presence_penalty=1.5),
    Sampling(1.0, frequency_penalty=0.7),
    Sampling(0.7, 8, 0.9, 0.05, 1.3, -0.5, -0.4),
)


@pytest.mark.parametrize("options", PENALTIES, ids=str)
def test_penalties_follow_the_distribution(options):
    """A repetition penalty refers to prompt and answer, the others to the answer, each token once or by its count."""
    logits = np.random.default_rng(0).normal(size=12).astype(np.float32)
    expected = distribution(logits, options, PROMPT, ANSWER)
    assert_follows(frequencies(options, logits, prompt=PROMPT, answer=ANSWER), expected)


def test_penalties_apply_to_greedy_tokens_and_running_rows_only():
    logits = jnp.tile(jnp.array([0.0, 2.0, 1.5, -1.0]), (3, 1))
    rows = make_rows(*[Sampling(frequency_penalty=0.4)] * 3, vocab_size=4)
    keys, tokens = jax.random.split(jax.random.key(0), 3), []
    for _ in range(4):
        token = sample(logits, keys, rows).token
        rows = with_answer(rows, token, jnp.array([True, False, True]))
        tokens.append(token.tolist())
    # 2 -> 1.6, 1.2 and below 1.5
    assert tokens == [[1, 1, 1], [1, 1, 1], [2, 1, 2], [1, 1, 1]]
    assert rows.counts.tolist() == [[0, 3, 1, 0], [0] * 4, [0, 3, 1, 0]]


def test_ties():
    """Greedy selects the first token, and top_k keeps exactly k."""
    logits = jnp.array([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    np.testing.assert_array_equal(sample(logits, keys, make_rows(*[Sampling()] * 2, vocab_size=3)).token, [1, 0])
    observed = frequencies(Sampling(1.0, top_k=2), np.zeros(4, np.float32))
    np.testing.assert_allclose(observed, [0.5, 0.5, 0, 0], atol=0.02)


MIXED = (
    Sampling(),
    Sampling(0.8),
    Sampling(0.8, 10),
    Sampling(1.5, None, 0.9),
    Sampling(1.0, min_p=0.2, logprobs=3),
    Sampling(0.5, 7, 0.8, 0.01, 1.2, 0.5, 0.3, 20),
    Sampling(repetition_penalty=5.0),
)


def test_rows_do_not_depend_on_the_parameters_of_others():
    """One program serves all parameters; each row has the same result alone and with any others."""
    vocab_size, batch = 50, len(MIXED)
    logits = 2 * jax.random.normal(jax.random.key(1), (batch, vocab_size))
    keys = jax.random.split(jax.random.key(2), batch)
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(sample.__wrapped__, n=2))  # of a batch, and of one row

    def run(samplings, numbers):
        rows = make_rows(*samplings, vocab_size=vocab_size, prompt=PROMPT, answer=ANSWER)
        return traced(logits[numbers], keys[numbers], rows)

    together = run(MIXED, np.arange(batch))
    for number, options in enumerate(MIXED):
        alone = run([options], np.array([number]))
        same = run([options] * batch, np.arange(batch))
        for sampled, row in ((alone, 0), (same, number)):
            assert sampled.token[row] == together.token[number]
            if options.logprobs is not None:
                for part in ("logprob", "top_tokens", "top_logprobs"):
                    np.testing.assert_array_equal(getattr(sampled, part)[row], getattr(together, part)[number])
    assert together.token.dtype == jnp.int32


def test_rows_without_restrictions_keep_all_tokens_beside_restricted_rows():
    """In float32 the probabilities of the first tokens may sum to 1 or more before the last ones."""
    logits = 4 * np.random.default_rng(0).normal(size=(16, 5000)).astype(np.float32)
    probabilities = -jnp.sort(-jax.nn.softmax(jnp.asarray(logits)))
    assert (jnp.cumsum(probabilities, axis=1) - probabilities >= 1).any()
    rows = make_rows(*[Sampling(1.0)] * 15, Sampling(1.0, top_k=2), vocab_size=5000)
    kept = jnp.isfinite(jax.jit(_keep_most_likely)(logits, rows)).sum(axis=1)
    assert kept.tolist() == [5000] * 15 + [2]


def test_log_probabilities_are_those_of_the_model():
    """Before penalties, temperature and restrictions."""
    logits = jax.random.normal(jax.random.key(1), (3, 40))
    options = (Sampling(1.5, 2, repetition_penalty=4.0, logprobs=0), Sampling(), Sampling(logprobs=5))
    rows = make_rows(*options, vocab_size=40, prompt=PROMPT)
    sampled = sample(logits, jax.random.split(jax.random.key(2), 3), rows)
    values = np.asarray(logits, np.float64)
    expected = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    for row in (0, 2):
        assert sampled.logprob[row] == pytest.approx(expected[row, sampled.token[row]], abs=1e-5)
        order = np.argsort(-expected[row])[:MAX_LOGPROBS]
        np.testing.assert_array_equal(sampled.top_tokens[row], order)
        np.testing.assert_allclose(sampled.top_logprobs[row], expected[row, order], atol=1e-5)
    none = sample(logits, jax.random.split(jax.random.key(2), 3), make_rows(*[Sampling()] * 3, vocab_size=40))
    assert not np.any(none.logprob) and not np.any(none.top_logprobs)


def test_bfloat16_logits_are_sampled_in_float32():
    logits, keys = jnp.tile(LOGITS, (2, 1)).astype(jnp.bfloat16), jax.random.split(jax.random.key(0), 2)
    rows = make_rows(*[Sampling(0.7, top_p=0.9)] * 2)
    np.testing.assert_array_equal(
        sample(logits, keys, rows).token, sample(logits.astype(jnp.float32), keys, rows).token
    )


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_is_finite_finds_invalid_rows(bad):
    logits = jnp.zeros((3, 4)).at[1, 2].set(bad)
    np.testing.assert_array_equal(is_finite(logits), [True, False, True])


NAN, INFINITY = float("nan"), float("inf")
INVALID = {
    "temperature": [-0.1, 1e-31, NAN, INFINITY, True],
    "top_k": [0, 2.5],
    "top_p": [0.0, 1.1],
    "min_p": [0, NAN],
    "repetition_penalty": [0, INFINITY],
    "presence_penalty": [2.1],
    "frequency_penalty": [NAN],
    "logprobs": [21, True],
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_parameters_are_refused(name):
    for value in INVALID[name]:
        with pytest.raises(ValueError, match=f"{name}={value}"):
            Sampling(**{name: value})


def test_the_reference_equals_transformers():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(0).normal(size=(1, 20)).astype(np.float32)
    for options in (Sampling(0.8, top_p=0.3), Sampling(0.8, 7, 0.8), Sampling(0.8, 9, 0.9, 0.1, 1.3)):
        processors = [
            process.RepetitionPenaltyLogitsProcessor(options.repetition_penalty),
            process.TemperatureLogitsWarper(options.temperature),
            process.TopKLogitsWarper(options.top_k or 20),
            process.TopPLogitsWarper(options.top_p),
            process.MinPLogitsWarper(options.min_p or 0.0),
        ]
        scores = torch.from_numpy(logits)
        for processor in processors:
            scores = processor(torch.tensor([PROMPT + ANSWER]), scores)
        expected = torch.softmax(scores, -1).numpy()[0]
        np.testing.assert_allclose(distribution(logits[0], options, PROMPT, ANSWER), expected, atol=1e-6)
