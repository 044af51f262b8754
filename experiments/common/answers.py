"""What settings answered to the prompts of a task, and the rows of it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.common import footprint
from experiments.common.results import Estimate, Row, paired_difference, score_interval
from experiments.common.results import row as make_row
from kvjax.registry import PolicyChoice
from kvjax_models.model.llama import Llama, parameter_bytes


@dataclasses.dataclass
class Result:
    """What one setting did over all prompts of a task, in their order."""

    setting: PolicyChoice
    streaming: bool
    question_seen: bool
    batch: int
    answers: list[str]
    uses: dict[int, footprint.CacheUse] = dataclasses.field(default_factory=dict)  # by the prompt's number
    scores: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # by metric, from 0 to 1
    decode_seconds: float = 0.0  # of all batches but the first of a size, which compiles
    decode_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """All but the setting and how prompts were read."""
        uses = [self.uses[number] for number in range(len(self.answers))]
        kept = ("answers", "scores", "decode_seconds", "decode_steps")
        return {"uses": uses, **{name: getattr(self, name) for name in kept}}

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], setting: PolicyChoice, streaming: bool, question_seen: bool, batch: int
    ) -> "Result":
        """The result that `to_json` gave."""
        uses = {number: footprint.CacheUse(*use) for number, use in enumerate(value["uses"])}
        return cls(setting, streaming, question_seen, batch, **{**value, "uses": uses})

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per decoding step of a whole batch."""
        return 1e3 * self.decode_seconds / max(self.decode_steps, 1)


def part(results: Sequence[Result], numbers: Sequence[int]) -> list[Result]:
    """The results over some of a task's prompts alone, without times."""
    return [
        dataclasses.replace(
            result,
            answers=[result.answers[number] for number in numbers],
            uses={place: result.uses[number] for place, number in enumerate(numbers)},
            scores={metric: [scores[number] for number in numbers] for metric, scores in result.scores.items()},
            decode_seconds=0.0,
            decode_steps=0,
        )
        for result in results
    ]


def rows(
    results: Sequence[Result],
    model: Llama,
    *,
    experiment: str,
    model_name: str,
    task: str,
    context_tokens: int,
    seed: int,
    **extra: Any,
) -> list[Row]:
    """The rows of all settings of a task: each metric's mean, its difference to exact's answers to the same prompts
    (where `exact` is among the settings), and decoding time.

    Args:
        extra: whatever else identifies the run.
    """
    exact = next((result for result in results if str(result.setting) == "exact"), None)
    rows = []
    for result in results:
        fields = {
            "task": task,
            "context_tokens": context_tokens,
            "batch": result.batch,
            "question_seen": result.question_seen,
            "n": len(result.answers),
            "seed": seed,
            "parameter_bytes": parameter_bytes(model),
            "prefill": "streaming" if result.streaming else "exact",
            "recalls": result.uses[0].recalls,
            **footprint.row_fields(list(result.uses.values())),
            **extra,
        }
        row = functools.partial(make_row, experiment, model_name, setting=result.setting, **fields)
        for metric, scores in result.scores.items():
            found = Estimate(float(np.mean(scores)), *score_interval(scores))
            rows.append(row(metric=metric, found=found, first_answer=result.answers[0]))
            if exact is not None and result is not exact:
                difference = paired_difference(scores, exact.scores[metric])
                rows.append(row(metric=f"{metric}_difference", found=difference))
        if result.decode_steps:
            rows.append(row(metric="ms_per_token", found=result.ms_per_token))
    return rows
