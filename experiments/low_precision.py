"""What bfloat16 changes: the same model, prompt and policy in it and in float32, and how far apart they find the tokens
that follow.

    python -m experiments.low_precision

For each policy, over tokens of held-out texts that are read through its cache: the mean and the largest difference of a
token's log-likelihood (nats), and the mean log-likelihood in either type. A choice between two tokens that are nearer
to each other than that may fall otherwise.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from experiments.common import results, settings
from experiments.common.options import LANGUAGE_CHECKPOINT, Experiment, Policies, each
from experiments.common.results import Row
from experiments.common.suites import SUITES
from experiments.common.tasks import long_texts
from kvjax.registry import PolicyChoice
from kvjax_models import generate, language_model

NAME = "low_precision"
TYPES = (jnp.float32, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Options(Policies):
    """Options of this experiment."""

    model: str = LANGUAGE_CHECKPOINT
    policy: tuple[str, ...] = each(*SUITES["low precision"].policies)
    budget: tuple[str, ...] = each(*SUITES["low precision"].budgets)
    documents: int = 4  # texts, read side by side
    context_tokens: int = 1024  # of each, that are read exactly
    next_tokens: int = 512  # that are read through the cache

    QUICK: ClassVar[dict[str, Any]] = {"policy": ("exact", "uniform"), "context_tokens": 256, "next_tokens": 64}


def run(options: Options) -> list[Row]:
    """The rows of every setting."""
    directory = settings.model_directory(options.model)
    llms = [language_model.load(directory, dtype) for dtype in TYPES]
    tokens = options.context_tokens + options.next_tokens
    texts = long_texts.held_out(llms[0].tokenizer, tokens, options.documents, options.seed)
    rows: list[Row] = []
    for setting in tqdm(settings.settings(options.policy, options.budget), desc=NAME, leave=False):
        wide, narrow = (likelihoods(llm, setting, texts, options) for llm in llms)
        apart = np.abs(wide - narrow)
        found: dict[str, float | results.Estimate] = {
            "mean_difference": results.mean_interval(apart.mean(axis=1)),
            "largest_difference": float(apart.max()),
            "float32": results.mean_interval(wide.mean(axis=1)),
            "bfloat16": results.mean_interval(narrow.mean(axis=1)),
        }
        shared: dict[str, Any] = {"context_tokens": tokens, "batch": len(texts), "seed": options.seed}
        rows += [results.row(NAME, options.model, metric, one, setting, **shared) for metric, one in found.items()]
    title = f"Log-likelihood of {options.next_tokens} tokens behind {options.context_tokens}, bfloat16 beside float32"
    results.print_rows(title, rows, results.setting_label)
    return rows


def likelihoods(
    llm: language_model.LanguageModel, setting: PolicyChoice, texts: list[list[int]], options: Options
) -> Float[np.ndarray, "B T"]:
    """Natural log-probabilities of the tokens behind each prompt but the first, which the exact reading predicts."""
    made: dict[str, Any] = {"batch": len(texts), "max_prompt": options.context_tokens, "max_new": options.next_tokens}
    spec = generate.cache_specs(llm.model, **made)[0]
    policy = settings.fitted(setting, spec, options.context_tokens + options.next_tokens)
    generator = generate.Generator(llm.model, policy, **made)
    state = generator.read(generator.start(options.seed), [text[: options.context_tokens] for text in texts])
    _, scored = generator.score(state, [text[options.context_tokens :] for text in texts])
    return np.stack(scored)[:, 1:]


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
