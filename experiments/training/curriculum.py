"""A curriculum over length: start with the shortest sequences, double whenever the model has learnt the present ones.

Everything here is a pure function of `Progress`, so that a run resumed from a checkpoint goes the same way.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """How lengths and the learning rate go.

    Args:
        longest_lines: lines of a record in the last stage; the stages before it have 2, 4, 8, ...
        final_steps: length of the last stage, over which the learning rate falls to zero.
        most_steps: where a run ends that does not get that far.
        advance_accuracy: a stage ends when the smoothed accuracy passes this.
        rehearsal: share of steps that go to an earlier stage, drawn uniformly, so that short records are not forgotten.
    """

    longest_lines: int
    final_steps: int
    most_steps: int
    learning_rate: float = 1.5e-3
    warmup_steps: int = 100
    advance_accuracy: float = 0.9
    rehearsal: float = 0.25

    @property
    def lines(self) -> tuple[int, ...]:
        """Most lines of a record, stage by stage."""
        doublings = math.ceil(math.log2(self.longest_lines)) - 1
        return (*(2 << doubling for doubling in range(doublings)), self.longest_lines)

    @property
    def last_stage(self) -> int:
        return len(self.lines) - 1


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where training stands: what a checkpoint needs beside the arrays."""

    step: int = 0
    stage: int = 0
    stage_steps: int = 0
    accuracy: float = 0.0  # exponential mean over the steps of this stage, from zero
    seconds: float = 0.0


def advance(curriculum: Curriculum, progress: Progress, accuracy: float | None) -> Progress:
    """Progress after a step with this share of right answers; None after a rehearsal, which counts for no stage."""
    progress = dataclasses.replace(progress, step=progress.step + 1, stage_steps=progress.stage_steps + 1)
    if accuracy is None:
        return progress
    progress = dataclasses.replace(progress, accuracy=0.9 * progress.accuracy + 0.1 * accuracy)
    if progress.accuracy > curriculum.advance_accuracy and progress.stage < curriculum.last_stage:
        return dataclasses.replace(progress, stage=progress.stage + 1, stage_steps=0, accuracy=0.0)
    return progress


def finished(curriculum: Curriculum, progress: Progress) -> bool:
    """Whether the last stage had its steps, or all stages together theirs."""
    polished = progress.stage == curriculum.last_stage and progress.stage_steps >= curriculum.final_steps
    return polished or progress.step >= curriculum.most_steps


def learning_rate(curriculum: Curriculum, progress: Progress) -> float:
    """Linear warm-up, constant through the curriculum, a cosine to zero over the last stage."""
    rate = curriculum.learning_rate * min(1.0, (progress.step + 1) / curriculum.warmup_steps)
    if progress.stage < curriculum.last_stage:
        return rate
    return rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress.stage_steps / curriculum.final_steps)))
