"""Asking questions about long texts through compressed caches: what every retrieval and question-answering experiment
does with its documents."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

import kvjax
from experiments.common import results, settings
from models import generate
from models.llama import Llama
from models.tokenizer import Tokenizer


class Asked(Protocol):
    """A text and a question about it; the prompt is one behind the other."""

    @property
    def context(self) -> str: ...
    @property
    def question(self) -> str: ...


A = TypeVar("A", bound=Asked)


@dataclasses.dataclass
class Outcome:
    """What one setting did over all documents."""

    setting: settings.Setting
    streaming: bool
    question_seen: bool
    batch: int
    scores: list[float] = dataclasses.field(default_factory=list)  # from 0 to 1
    answers: list[str] = dataclasses.field(default_factory=list)
    device_bytes: int = 0  # per sequence, all layers
    host_bytes: int = 0
    read_bytes: int = 0  # per sequence and generated token, all layers
    decode_seconds: float = 0.0  # of all batches but the first, which compiles
    decode_steps: int = 0
    recalls: bool = False
    fraction: float = 0.0  # of exact's bytes: of those held, or of those read for a policy that recalls

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.scores))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the accuracy."""
        return results.score_interval(self.scores)

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per decoding step of a whole batch."""
        return 1e3 * self.decode_seconds / max(self.decode_steps, 1)


def ask(
    model: Llama,
    tokenizer: Tokenizer,
    documents: Sequence[A],
    chosen: Sequence[settings.Setting],
    score: Callable[[A, str], float],
    *,
    task: str,
    streaming: bool,
    question_seen: bool,
    batch: int,
    answer_tokens: int,
    seed: int,
) -> list[Outcome]:
    """Asks every document's question through every setting. Each batch is read exactly once for all settings, or
    streamed through each setting's cache.

    Args:
        score: of a document and an answer, from 0 to 1.
        task: what progress is called.
        streaming: read prompts through the cache.
        question_seen: read the question as part of what is compressed.
        batch: documents decoded together.
    """
    contexts = [tokenizer.encode(document.context) for document in documents]
    questions = [tokenizer.encode(document.question, add_bos=False) for document in documents]
    if question_seen:
        contexts = [context + question for context, question in zip(contexts, questions, strict=True)]
    max_prompt = max(map(len, contexts))
    max_new = answer_tokens + (0 if question_seen else max(map(len, questions)))
    sizes: dict[str, Any] = {"batch": batch, "max_prompt": max_prompt, "max_new": max_new, "streaming": streaming}
    spec = generate.cache_specs(model, **sizes)[0]
    generators = []
    outcomes = [Outcome(setting, streaming, question_seen, batch) for setting in chosen]
    for setting in chosen:
        policy = setting.build(spec, max_prompt + max_new)
        generators.append(generate.Generator(model, policy, **sizes, eos=tokenizer.eos_ids))
    label = f"question {'seen' if question_seen else 'unseen'}{', streaming' if streaming else ''}"
    progress = tqdm(total=len(documents) * len(chosen), desc=f"{task}, {label}", unit="answer", leave=False)
    for begin in range(0, len(documents), batch):
        # The last batch may be short: it is filled up with repetitions, which are not counted.
        rows = [min(begin + row, len(documents) - 1) for row in range(batch)]
        counted = min(batch, len(documents) - begin)
        starts = [generator.start(seed + begin) for generator in generators]
        prompts = [contexts[row] for row in rows]
        if streaming:
            states = [one.read(state, prompts) for one, state in zip(generators, starts, strict=True)]
        else:
            states = generate.prefill_together(generators, starts, prompts)
        for generator, outcome in zip(generators, outcomes, strict=True):
            state = states.pop(0)
            _measure_bytes(outcome, generator, state, spec, max_prompt + max_new)
            if not question_seen:
                state = generator.read(state, [questions[row] for row in rows])
            answers: list[list[int]] = [[] for _ in rows]
            jax.block_until_ready(state.logits)
            clock = time.perf_counter()
            steps = 0
            for _, tokens in generator.write(state, answer_tokens):
                generate.collect(answers, tokens)
                steps += tokens.shape[1]
            if begin:
                outcome.decode_seconds += time.perf_counter() - clock
                outcome.decode_steps += steps
            for row, answer in list(zip(rows, answers, strict=True))[:counted]:
                text = tokenizer.decode(answer)
                outcome.answers.append(text)
                outcome.scores.append(float(score(documents[row], text)))
            progress.update(counted)
    progress.close()
    return outcomes


def _measure_bytes(
    outcome: Outcome, generator: generate.Generator, state: generate.GenerationState, spec: kvjax.CacheSpec, tokens: int
) -> None:
    held = kvjax.cache_bytes(state.layers)
    outcome.device_bytes = held.device // generator.batch
    outcome.host_bytes = held.host // generator.batch
    read = sum(policy.read_bytes(layer) for policy, layer in zip(generator.policies, state.layers, strict=True))
    outcome.read_bytes = read // generator.batch
    outcome.recalls = any(policy.recalls for policy in generator.policies)
    counted = outcome.read_bytes if outcome.recalls else outcome.device_bytes
    outcome.fraction = counted / (spec.exact_bytes(tokens) * len(generator.policies))


def rows(
    outcome: Outcome, model: Llama, *, experiment: str, task: str, context_tokens: int, seed: int, **extra: Any
) -> list[results.Row]:
    """The rows of one setting: its accuracy and its decoding time.

    Args:
        extra: whatever else identifies the setting.
    """
    low, high = outcome.interval
    shared = {
        "experiment": experiment,
        "model": flags.FLAGS.model,
        "task": task,
        "policy": outcome.setting.choice.name,
        "variant": outcome.setting.choice.variant,
        "budget_fraction": outcome.fraction,
        "context_tokens": context_tokens,
        "batch": outcome.batch,
        "question_seen": outcome.question_seen,
        "n": len(outcome.scores),
        "seed": seed,
        "device_bytes": outcome.device_bytes,
        "host_bytes": outcome.host_bytes,
        "read_bytes_per_token": outcome.read_bytes,
        "weight_bytes": generate.weight_bytes(model),
        "extra": {
            "budget": str(outcome.setting.budget) if outcome.setting.budget else None,
            "prefill": "streaming" if outcome.streaming else "exact",
            **extra,
        },
    }
    found = [results.Row(**shared, metric="accuracy", value=outcome.accuracy, ci95_low=low, ci95_high=high)]
    if outcome.decode_steps:
        found.append(results.Row(**shared, metric="ms_per_token", value=outcome.ms_per_token))
    return found


COLUMNS = ("policy", "prefill", "question", "held", "read per token", "of exact's", "accuracy [95%]", "ms per step")


def table_line(one: Outcome) -> tuple[str, ...]:
    """The setting's line of a table with `COLUMNS`."""
    low, high = one.interval
    return (
        str(one.setting),
        "streaming" if one.streaming else "exact",
        "seen" if one.question_seen else "unseen",
        results.readable_bytes(one.device_bytes)
        + (f" + {results.readable_bytes(one.host_bytes)} in the host" if one.host_bytes else ""),
        results.readable_bytes(one.read_bytes),
        f"{one.fraction:.1%}" + (" read" if one.recalls else ""),
        f"{one.accuracy:.2f} [{low:.2f}, {high:.2f}]",
        f"{one.ms_per_token:.2f}" if one.decode_steps else "-",
    )
