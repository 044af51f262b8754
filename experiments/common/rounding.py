"""Compares an answer of a batch with the answer to the same request alone.

Products of more rows round differently, so that the token with the second largest logit may be chosen if it is near.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax_models import CachedModel
from kvjax_models.engine import Output
from kvjax_models.runner.sampling import Sampling

NEAR = 0.05  # difference of two logits, of which rounding may choose either


def answer_alone(cache: CachedModel, sampling: Sampling, **request: Any) -> list[Output]:
    """Returns the outputs of a request that is alone in an engine, with log-probabilities.

    Args:
        cache: the model with its cache.
        sampling: parameters of sampling.
        **request: further arguments of `Engine.add`.
    """
    engine = cache.engine(rows=1)
    engine.add(sampling=dataclasses.replace(sampling, logprobs=2), **request)
    return [*engine.run()]


def gap_at(outputs: Sequence[Output], sampling: Sampling, place: int) -> float:
    """Returns the difference of the two largest logits of a token, at which another answer differs.

    Samples depend on all logits, so that any of their differences may be rounding: the result is 0.

    Args:
        outputs: outputs of `answer_alone`.
        sampling: parameters of sampling.
        place: number of the token.
    """
    if sampling.temperature:
        return 0.0
    logprobs = [one for output in outputs for one in output.logprobs or ()][place]
    return logprobs.top[0][1] - logprobs.top[1][1]
