"""Language models, and how they are trained."""

import dataclasses
import functools
import itertools

from experiments.common import sources
from experiments.training import mixture
from kvjax_models import llama


@dataclasses.dataclass(frozen=True)
class Stage:
    """So many steps of sequences of `tokens` tokens: rows of natural text, and rows of tasks, whose loss is added to
    that of natural text `answer_weight` times."""

    tokens: int
    natural_rows: int
    task_rows: int
    steps: int
    answer_weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    Args:
        name: of the directory that a finished run writes.
        model: its vocabulary is the tokenizer's, its longest text that of the stages.
        tasks: names of `mixture.TASKS`; a stage takes those that its length has room for.
        packages: natural text.
        dtype: what products are computed in; parameters and moments are float32.
        restarts: steps at which the learning rate begins anew, at half of what it began at before.
    """

    name: str
    model: llama.LlamaConfig
    stages: tuple[Stage, ...]
    tasks: tuple[str, ...] = tuple(mixture.TASKS)
    packages: tuple[str, ...] = sources.TRAINING
    dtype: str = "float32"
    learning_rate: float = 8e-4
    restarts: tuple[int, ...] = ()
    warmup_steps: int = 50
    weight_decay: float = 0.01
    checkpoint_steps: int = 50
    evaluation_windows: int = 64
    evaluation_problems: int = 100

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """The stage of a step."""
        for stage, end in zip(self.stages, itertools.accumulate(stage.steps for stage in self.stages), strict=True):
            if step < end:
                return stage
        raise ValueError(f"step={step} is past the last of {self.steps}")


_config = functools.partial(llama.LlamaConfig, rope_theta=1e6, query_heads=4, kv_heads=2)

PRESETS = {
    "cpu": Preset(
        name="kvjax-lm-2k",
        model=_config(vocab_size=4096, width=256, mlp_width=512, layers=4, head_dim=64, max_length=2048),
        stages=(
            Stage(256, 8, 8, 400),
            Stage(512, 4, 8, 800),
            Stage(640, 2, 10, 400),
            Stage(1024, 2, 4, 400),
            Stage(2048, 1, 2, 250),
            Stage(640, 2, 10, 550),
            Stage(640, 2, 10, 200, answer_weight=10.0),
            Stage(2048, 1, 2, 250, answer_weight=10.0),
            Stage(2048, 1, 4, 350, answer_weight=10.0),
        ),
        restarts=(2250, 3250),
    ),
    "h200": Preset(
        name="kvjax-lm-8k",
        model=_config(
            vocab_size=8192,
            width=512,
            mlp_width=1280,
            layers=8,
            query_heads=8,
            kv_heads=4,
            head_dim=64,
            max_length=8192,
        ),
        stages=(Stage(256, 64, 64, 500), Stage(512, 32, 32, 1500), Stage(2048, 16, 16, 2000), Stage(8192, 4, 4, 2000)),
        dtype="bfloat16",
        learning_rate=6e-4,
        warmup_steps=200,
        checkpoint_steps=250,
        evaluation_windows=256,
        evaluation_problems=200,
    ),
    "tiny": Preset(
        name="tiny",
        model=_config(vocab_size=2048, width=64, mlp_width=32, layers=3, head_dim=16, max_length=512),
        stages=(Stage(384, 1, 1, 3), Stage(512, 1, 1, 3)),
        tasks=("line_retrieval", "niah_single_1"),
        packages=("absl",),
        warmup_steps=2,
        checkpoint_steps=2,
        evaluation_windows=2,
        evaluation_problems=2,
    ),
}
