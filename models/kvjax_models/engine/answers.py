"""Answers several prompts with an engine, and shapes the result as `generate` and `ask` return it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvjax.spec import check_integer
from kvjax_models.engine.engine import Engine, seed_of_prompt
from kvjax_models.engine.outputs import Collector, Completion, Usage
from kvjax_models.engine.requests import HasPrefix
from kvjax_models.prefix import Prefix
from kvjax_models.runner.sampling import Sampling, SamplingOptions

# One answer, a list of them, or a list of `n` for every prompt; with details, completions and a usage.
Answers = (
    str
    | list[str]
    | list[list[str]]
    | tuple[Completion, Usage]
    | tuple[list[Completion], Usage]
    | tuple[list[list[Completion]], Usage]
)


class AnswerOptions(SamplingOptions, total=False):
    """The options of answers that do not change the type of the result."""

    max_new_tokens: int
    stop: str | Sequence[str]
    seed: int


def answer(
    make_engine: Callable[..., Engine],
    prompts: Sequence[Sequence[int]],
    prefix: Prefix | HasPrefix | None = None,
    *,
    is_single: bool,
    n: int,
    max_new_tokens: int | None,
    stop: str | Sequence[str],
    seed: int,
    return_details: bool,
    sampling: Mapping[str, Any],
) -> Answers:
    """Answers prompts.

    Args:
        make_engine: returns an engine with a number of `rows`.
        prompts: token ids of every prompt; with a prefix, those after it.
        prefix: the prefix that all prompts continue.
        is_single: whether there is one prompt, whose answer is not returned in a list.
        n: answers per prompt, which is processed once.
        max_new_tokens: maximum number of new tokens of each answer; None as for `Engine.add`.
        seed: seed of the first answer; answer i has seed + i, modulo 2**32.
        return_details: whether to return `Completion`s and a `Usage` in place of texts.

    Returns:
        As `CachedModel.generate` returns it.

    Raises:
        ValueError: if an argument is invalid, or an answer failed.
    """
    if sampling.get("logprobs") is not None and not return_details:
        raise ValueError("log-probabilities are part of the details; pass return_details=True")
    engine = make_engine(rows=len(prompts) * check_integer("n", n, minimum=1))
    for number, prompt in enumerate(prompts):
        for i in range(n):
            engine.add(
                prompt,
                prefix,
                sampling=Sampling(**sampling),
                stop=stop,
                max_new_tokens=max_new_tokens,
                seed=seed_of_prompt(seed, number * n + i),
                prompt_seed=seed_of_prompt(seed, number * n),
            )
    completions, usage = engine.complete()
    values: list[Any] = [one if return_details else one.text for one in completions]
    groups = values if n == 1 else [values[first : first + n] for first in range(0, len(values), n)]
    result = groups[0] if is_single else groups
    return (result, usage) if return_details else result


def stream(
    engine: Engine, prompt: Sequence[int], prefix: Prefix | HasPrefix | None = None, **options: Any
) -> Iterator[str]:
    """Answers one prompt.

    Args:
        engine: an engine without requests.
        prompt: token ids; with a prefix, those after it.
        prefix: the prefix that the prompt continues.
        **options: options of `Engine.add`.

    Yields:
        Parts of the new text, in order.

    Raises:
        ValueError: if an argument is invalid, or the answer failed.
    """
    engine.add(prompt, prefix, **options)
    collector = Collector()
    for output in engine.run():
        if output.text:
            yield output.text
        collector.add(output)  # raises the error of a request that failed, after its text
