"""Trains the shipped line-retrieval Llama.

    python -m experiments.training.lines --preset=cpu --output_dir=build/train/cpu

A curriculum over length: records of two lines first, twice as many whenever the model answers nine questions in ten,
up to the preset's longest. Every sequence asks many questions and only answers carry loss. A run that was killed goes
on where its last checkpoint stands when it is started again with `--resume`, to the same parameters bit for bit:
the data of a step follow from the seed and the step alone.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from experiments.common import results
from experiments.common.tasks import line_retrieval, line_tokenizer
from experiments.training import answer_loss, induction, measuring, running
from kvjax_models import llama
from kvjax_models import tokenizer as tokenizers


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


@dataclasses.dataclass(frozen=True)
class Progress(running.Progress):
    """Where the curriculum stands."""

    stage: int = 0
    stage_steps: int = 0
    accuracy: float = 0.0  # exponential mean over the steps of this stage, from zero


def after_step(plan: Curriculum, progress: Progress, accuracy: float | None) -> Progress:
    """Progress after a step with this share of right answers; None after a rehearsal, which counts for no stage."""
    progress = dataclasses.replace(progress, stage_steps=progress.stage_steps + 1)
    if accuracy is None:
        return progress
    progress = dataclasses.replace(progress, accuracy=0.9 * progress.accuracy + 0.1 * accuracy)
    if progress.accuracy > plan.advance_accuracy and progress.stage < len(plan.lines) - 1:
        return dataclasses.replace(progress, stage=progress.stage + 1, stage_steps=0, accuracy=0.0)
    return progress


def finished(plan: Curriculum, progress: Progress) -> bool:
    """Whether the last stage had its steps, or all stages together theirs."""
    polished = progress.stage == len(plan.lines) - 1 and progress.stage_steps >= plan.final_steps
    return polished or progress.step >= plan.most_steps


def learning_rate(plan: Curriculum, progress: Progress) -> float:
    """Linear warm-up, constant through the curriculum, a cosine to zero over the last stage."""
    rate = running.warm_up(plan.warmup_steps)(progress.step)
    if progress.stage == len(plan.lines) - 1:
        rate *= optax.cosine_decay_schedule(1.0, plan.final_steps)(progress.stage_steps)
    return plan.learning_rate * float(rate)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    Args:
        name: of the directory that a finished run writes.
        lengths: tokens of the problems that the model is evaluated on.
        most_questions: per sequence; shorter records get as many questions as they have lines.
        batch_tokens: tokens of a step, as near as whole sequences come to it.
        induction_start: whether parameters start as `induction` makes them.
    """

    name: str
    model: llama.LlamaConfig
    lengths: tuple[int, ...]
    most_questions: int
    batch_tokens: int
    curriculum: Curriculum
    checkpoint_steps: int = 100
    induction_start: bool = True


# Dimensions that compare names must hardly turn over the whole context; at RoPE's usual 10,000 none of them would.
_config = functools.partial(llama.LlamaConfig, vocab_size=8927, layers=2, rope_theta=1e7, tied_embeddings=True)

PRESETS = {
    "cpu": Preset(
        name="line-retrieval-2l-4k",
        model=_config(width=128, mlp_width=256, query_heads=4, kv_heads=2, head_dim=64, max_length=5378),
        lengths=(512, 1024, 2048, 4096),
        most_questions=128,
        batch_tokens=2048,
        curriculum=Curriculum(longest_lines=640, final_steps=500, most_steps=2500),
    ),
    "h200": Preset(
        name="line-retrieval-2l-16k",
        model=_config(width=256, mlp_width=512, query_heads=8, kv_heads=4, head_dim=64, max_length=21506),
        lengths=(2048, 4096, 8192, 16384),
        most_questions=512,
        batch_tokens=65536,
        curriculum=Curriculum(longest_lines=2560, final_steps=1000, most_steps=5000),
    ),
    "tiny": Preset(
        name="tiny",
        model=_config(width=16, mlp_width=16, query_heads=2, kv_heads=1, head_dim=8, max_length=44),
        lengths=(32,),
        most_questions=2,
        batch_tokens=128,
        curriculum=Curriculum(longest_lines=4, final_steps=6, most_steps=6, advance_accuracy=-1.0),
        checkpoint_steps=2,
        induction_start=False,
    ),
}

# First entry of the seeds of training data; those of evaluation start from `line_retrieval.EVALUATION_SEED`.
TRAINING_STREAM = 0
EVALUATION_DOCUMENTS = 500


class Shape(NamedTuple):
    """The static shape of a batch of records of up to `lines` lines."""

    lines: int
    questions: int
    rows: int

    @property
    def tokens(self) -> int:
        record = line_tokenizer.TOKENS_OF_HEADER + line_tokenizer.TOKENS_PER_LINE * self.lines
        return record + line_tokenizer.TOKENS_PER_QUESTION * self.questions


def shapes(preset: Preset) -> tuple[Shape, ...]:
    """The batch of every stage: about `batch_tokens` tokens, at least one row."""
    found = [Shape(lines, min(lines, preset.most_questions), rows=1) for lines in preset.curriculum.lines]
    return tuple(shape._replace(rows=max(1, preset.batch_tokens // shape.tokens)) for shape in found)


def training_batch(encoder: line_tokenizer.LineEncoder, shape: Shape, rng: np.random.Generator) -> answer_loss.Batch:
    """Records of the upper half of the shape's lengths, each with questions about different lines of it."""
    conversations = []
    for _ in range(shape.rows):
        lines = int(rng.integers(max(2, shape.lines // 2), shape.lines, endpoint=True))
        asked = rng.permutation(lines)[: shape.questions]
        conversations.append(encoder.conversation(line_retrieval.draw_lines(rng, lines), asked))
    answer_tokens = line_tokenizer.TOKENS_OF_ANSWER * shape.questions
    return answer_loss.make_batch(conversations, shape.tokens, answer_tokens, encoder.eos)


def initial_model(preset: Preset, seed: int) -> llama.Llama:
    """A model with the seed's starting parameters."""
    model = llama.Llama(preset.model, rngs=nnx.Rngs(seed))
    if preset.induction_start:
        induction.start_with_induction(model, np.random.default_rng(seed))
    return model


def optimizer(rate: float | jax.Array) -> optax.GradientTransformation:
    """Adam. Squared gradients are forgotten faster than usual: their size changes when a stage begins."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.98))


@functools.partial(jax.jit, static_argnames=("graph", "questions"), donate_argnames=("params", "moments"))
def train_step(
    graph: nnx.GraphDef, params: Any, moments: Any, batch: answer_loss.Batch, rate: float, questions: int
) -> tuple[Any, Any, jax.Array, jax.Array]:
    """One optimizer step: new parameters and moments, loss, accuracy."""

    def loss(params):
        return answer_loss.loss_and_accuracy(nnx.merge(graph, params), batch, questions)

    (value, accuracy), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    updates, moments = optimizer(rate).update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, value, accuracy


class Training(NamedTuple):
    """What stays the same from step to step."""

    preset: Preset
    seed: int
    encoder: line_tokenizer.LineEncoder
    graph: nnx.GraphDef

    def advance(self, arrays: running.Arrays, progress: Progress) -> tuple[running.Arrays, Progress, dict[str, Any]]:
        """A step."""
        plan, batch_shapes = self.preset.curriculum, shapes(self.preset)
        rng = np.random.default_rng([TRAINING_STREAM, self.seed, progress.step])
        rehearsal = progress.stage > 0 and rng.random() < plan.rehearsal
        shape = batch_shapes[rng.integers(progress.stage) if rehearsal else progress.stage]
        batch, rate = training_batch(self.encoder, shape, rng), learning_rate(plan, progress)
        *arrays, loss, accuracy = train_step(self.graph, *arrays, batch, rate, shape.questions)
        told = {"lines": shape.lines, "rehearsal": bool(rehearsal), "learning_rate": rate}
        told |= {"loss": float(loss), "accuracy": float(accuracy)}
        return tuple(arrays), after_step(plan, progress, None if rehearsal else float(accuracy)), told


def train(preset: Preset, settings: running.Settings) -> llama.Llama:
    """Runs the curriculum to its end and returns the model; see `running.run`."""
    graph, params = nnx.split(initial_model(preset, settings.seed))
    encoder = line_tokenizer.LineEncoder(line_tokenizer.build())
    params, _ = running.run(
        Training(preset, settings.seed, encoder, graph).advance,
        (params, optimizer(0.0).init(params)),
        Progress(),
        functools.partial(finished, preset.curriculum),
        settings=settings,
        checkpoint_steps=preset.checkpoint_steps,
        decided_by={"preset": dataclasses.asdict(preset), "seed": settings.seed},
    )
    return nnx.merge(graph, params)


def main(settings: running.Settings) -> None:
    preset = PRESETS[settings.preset]
    model = train(preset, settings)
    directory = settings.output_dir / preset.name
    running.write(model, line_tokenizer.build(), directory, settings.output_dir / "train_log.jsonl")
    tokenizer = tokenizers.load(directory)
    rows = [
        measuring.accuracy(model, tokenizer, "line_retrieval", tokens, EVALUATION_DOCUMENTS, preset.name)
        for tokens in preset.lengths
    ]
    results.write_rows(directory / "accuracy.json", rows)
    results.print_table(f"{preset.name}, exact attention", measuring.COLUMNS, map(measuring.table_line, rows))
    print(f"{directory} is complete but for its card")


if __name__ == "__main__":
    running.main(main)
