"""Trains the shipped line-retrieval Llama: `python -m experiments.train --preset=cpu --output_dir=build/train/cpu`.

A curriculum over length: records of two lines first, twice as many whenever the model answers nine questions in ten,
up to the preset's longest. Every sequence asks many questions and only answers carry loss. A run that was killed goes
on where its last checkpoint stands when it is started again with `--resume`, to the same parameters bit for bit:
the data of a step follow from the seed and the step alone.
"""

import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax
import tqdm
from absl import app, flags, logging
from flax import nnx
from kvjax_models import llama

from experiments.common.tasks import line_retrieval, line_tokenizer
from experiments.training import answer_loss, curriculum, export, induction, saving


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    Args:
        name: of the directory that a finished run writes.
        claimed_tokens: the document length that the model is evaluated at.
        most_questions: per sequence; shorter records get as many questions as they have lines.
        batch_tokens: tokens of a step, as near as whole sequences come to it.
        induction_start: whether parameters start as `induction` makes them.
    """

    name: str
    width: int
    mlp_width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    claimed_tokens: int
    most_questions: int
    batch_tokens: int
    curriculum: curriculum.Curriculum
    # Dimensions that compare names must hardly turn over the whole context; at 10,000 none of them would.
    rope_theta: float = 1e7
    layers: int = 2
    checkpoint_steps: int = 100
    induction_start: bool = True


PRESETS = {
    "cpu": Preset(
        name="line-retrieval-2l-4k",
        width=128,
        mlp_width=256,
        query_heads=4,
        kv_heads=2,
        head_dim=64,
        claimed_tokens=4096,
        most_questions=128,
        batch_tokens=2048,
        curriculum=curriculum.Curriculum(longest_lines=640, final_steps=500, most_steps=2500),
    ),
    "h200": Preset(
        name="line-retrieval-2l-16k",
        width=256,
        mlp_width=512,
        query_heads=8,
        kv_heads=4,
        head_dim=64,
        claimed_tokens=16384,
        most_questions=512,
        batch_tokens=65536,
        curriculum=curriculum.Curriculum(longest_lines=2560, final_steps=1000, most_steps=5000),
    ),
    "tiny": Preset(
        name="tiny",
        width=16,
        mlp_width=16,
        query_heads=2,
        kv_heads=1,
        head_dim=8,
        claimed_tokens=32,
        most_questions=2,
        batch_tokens=128,
        curriculum=curriculum.Curriculum(longest_lines=4, final_steps=6, most_steps=6, advance_accuracy=-1.0),
        checkpoint_steps=2,
        induction_start=False,
    ),
}

# First entry of the seeds of training data; those of evaluation start from `line_retrieval.EVALUATION_SEED`.
TRAINING_STREAM = 0
EVALUATION_DOCUMENTS = 500


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static shape of a batch of records of up to `lines` lines."""

    lines: int
    questions: int
    rows: int

    @property
    def tokens(self) -> int:
        return _sequence_tokens(self.lines, self.questions)


def _sequence_tokens(lines: int, questions: int) -> int:
    return (
        line_tokenizer.TOKENS_OF_HEADER
        + line_tokenizer.TOKENS_PER_LINE * lines
        + line_tokenizer.TOKENS_PER_QUESTION * questions
    )


def shapes(preset: Preset) -> tuple[Shape, ...]:
    """The batch of every stage: about `batch_tokens` tokens, at least one row."""
    result = []
    for lines in preset.curriculum.lines:
        questions = min(lines, preset.most_questions)
        result.append(Shape(lines, questions, rows=max(1, preset.batch_tokens // _sequence_tokens(lines, questions))))
    return tuple(result)


def training_batch(encoder: line_tokenizer.LineEncoder, shape: Shape, rng: np.random.Generator) -> answer_loss.Batch:
    """Records of the upper half of the shape's lengths, each with questions about different lines of it."""
    conversations = []
    for _ in range(shape.rows):
        lines = int(rng.integers(max(2, shape.lines // 2), shape.lines, endpoint=True))
        asked = rng.permutation(lines)[: shape.questions]
        conversations.append(encoder.conversation(line_retrieval.draw_lines(rng, lines), asked))
    answer_tokens = line_tokenizer.TOKENS_OF_ANSWER * shape.questions
    return answer_loss.make_batch(conversations, shape.tokens, answer_tokens, encoder.eos)


def initial_model(preset: Preset, vocab_size: int, seed: int) -> llama.Llama:
    """A model with the seed's starting parameters."""
    config = llama.LlamaConfig(
        vocab_size=vocab_size,
        width=preset.width,
        mlp_width=preset.mlp_width,
        layers=preset.layers,
        query_heads=preset.query_heads,
        kv_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        max_length=shapes(preset)[-1].tokens,
        rope_theta=preset.rope_theta,
        tied_embeddings=True,
    )
    model = llama.Llama(config, rngs=nnx.Rngs(seed))
    if preset.induction_start:
        induction.start_with_induction(model, np.random.default_rng(seed))
    return model


def optimizer() -> optax.GradientTransformation:
    """Adam without its learning rate, which follows the curriculum and is applied in `train_step`.

    Squared gradients are forgotten faster than usual: their size changes when a stage begins.
    """
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))


@functools.partial(jax.jit, static_argnames=("graph", "questions"), donate_argnames=("params", "moments"))
def train_step(
    graph: nnx.GraphDef, params: Any, moments: Any, batch: answer_loss.Batch, rate: float, questions: int
) -> tuple[Any, Any, jax.Array, jax.Array]:
    """One optimizer step: new parameters and moments, loss, accuracy."""

    def loss(params):
        return answer_loss.loss_and_accuracy(nnx.merge(graph, params), batch, questions)

    (value, accuracy), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    updates, moments = optimizer().update(gradients, moments)
    params = optax.apply_updates(params, jax.tree.map(lambda update: -rate * update, updates))
    return params, moments, value, accuracy


def train(preset: Preset, output_dir: pathlib.Path, seed: int, resume: bool) -> llama.Llama:
    """Runs the curriculum to its end and returns the model; checkpoints and `train_log.jsonl` go to `output_dir`.

    Raises:
        ValueError: there are checkpoints and `resume` is not set.
    """
    tokenizer = line_tokenizer.build()
    encoder = line_tokenizer.LineEncoder(tokenizer)
    plan, batch_shapes = preset.curriculum, shapes(preset)
    graph, params = nnx.split(initial_model(preset, tokenizer.get_vocab_size(), seed))
    moments = optimizer().init(params)
    progress = curriculum.Progress()
    log_path = output_dir / "train_log.jsonl"
    with saving.checkpoints(output_dir, resume) as manager:
        if manager.latest_step() is not None:
            params, moments, restored = saving.restore(manager, params, moments)
            progress = curriculum.Progress(**restored)
        saving.drop_after(log_path, progress.step)
        started = time.perf_counter() - progress.seconds
        with log_path.open("a") as log, tqdm.tqdm(initial=progress.step, unit="step", smoothing=0.05) as bar:
            while not curriculum.finished(plan, progress):
                rng = np.random.default_rng([TRAINING_STREAM, seed, progress.step])
                rehearsal = progress.stage > 0 and rng.random() < plan.rehearsal
                shape = batch_shapes[rng.integers(progress.stage) if rehearsal else progress.stage]
                batch = training_batch(encoder, shape, rng)
                rate = curriculum.learning_rate(plan, progress)
                params, moments, loss, accuracy = train_step(graph, params, moments, batch, rate, shape.questions)
                row: dict[str, Any] = {"step": progress.step, "lines": shape.lines, "rehearsal": bool(rehearsal)}
                row |= {"learning_rate": round(rate, 7), "loss": round(float(loss), 4)}
                row |= {"accuracy": round(float(accuracy), 4), "seconds": round(time.perf_counter() - started, 1)}
                log.write(json.dumps(row) + "\n")
                progress = curriculum.advance(plan, progress, None if rehearsal else float(accuracy))
                progress = dataclasses.replace(progress, seconds=time.perf_counter() - started)
                bar.update()
                bar.set_postfix(lines=plan.lines[progress.stage], loss=row["loss"], accuracy=progress.accuracy)
                if progress.step % preset.checkpoint_steps == 0 or curriculum.finished(plan, progress):
                    log.flush()
                    saving.save(manager, params, moments, dataclasses.asdict(progress))
    return nnx.merge(graph, params)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # orbax reports every step of every save
    output_dir = pathlib.Path(flags.FLAGS.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    preset = PRESETS[flags.FLAGS.preset]
    model = train(preset, output_dir, flags.FLAGS.seed, flags.FLAGS.resume)
    lengths = [preset.claimed_tokens >> halvings for halvings in range(3, -1, -1)]
    rows = [export.accuracy(model, line_tokenizer.build(), n, EVALUATION_DOCUMENTS, preset.name) for n in lengths]
    export.write(model, line_tokenizer.build(), output_dir / preset.name, rows, output_dir / "train_log.jsonl")
    for row in rows:
        print(f"{row.context_tokens} tokens: {row.value:.3f} [{row.ci95_low:.3f}, {row.ci95_high:.3f}] of {row.n}")
    print(f"{output_dir / preset.name} is complete but for its card")


if __name__ == "__main__":
    saving.define_flags(PRESETS)
    app.run(main)
