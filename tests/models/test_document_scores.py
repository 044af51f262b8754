"""Log-probabilities of continuations of a document, against the model without caches."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.models import tiny

TEXT, CONTINUATIONS = (
    "The ship left the harbor at noon. " * 8,
    [" It sank.", " Nobody saw it again, and the storm went on."],
)


def test_scores_equal_the_model_s():
    llm = tiny.make_llm()
    document = llm.cache().read(TEXT, max_new_tokens=48)
    texts = [llm.tokenizer.encode_continuation(text, document.tokens) for text in CONTINUATIONS]
    for tokens, scores in zip(texts, document.score(texts), strict=True):
        whole = [*document.tokens, *tokens]
        log_probs = np.asarray(jax.nn.log_softmax(llm.model(np.array([whole]))[0]))
        places = np.arange(len(document.tokens) - 1, len(whole) - 1)
        np.testing.assert_allclose(scores, log_probs[places, tokens], atol=2e-4)


def test_continuations_have_the_capacity_of_the_document():
    document = tiny.make_llm().cache().read(TEXT, max_new_tokens=16)
    with pytest.raises(ValueError, match="a continuation of 17 tokens exceeds the capacity max_new_tokens=16"):
        document.score([[1], [1] * 17])


def test_budgets_count_another_dtype():
    cache = tiny.make_llm().cache("streaming_llm", "50%")
    narrow = dataclasses.replace(cache, budget_dtype="bfloat16")
    slots, twice = (one.document_generator(512, 16).policies[0].budget for one in (cache, narrow))
    assert twice == pytest.approx(2 * slots, abs=24)
