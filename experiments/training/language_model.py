"""Trains the language model.

    python -m experiments.training.language_model --preset=cpu --output_dir=build/train_lm/cpu

Half of what it reads is natural text, with loss on every token, half are long texts with questions about them, with
loss on the answers (`training.mixture`). Sequences grow from stage to stage. A run that was killed goes on where its
last checkpoint stands when it is started again with `--resume`, to the same parameters bit for bit: the data of a step
follow from the seed and the step alone, and the tokenizer and the tokens of natural text stay in the run's directory.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.common import results, sources
from experiments.common.tasks import line_tokenizer
from experiments.training import answer_loss, byte_pairs, circuits, measuring, mixture, running
from experiments.training.language_presets import PRESETS, Preset
from kvjax_models import durable, identity, llama
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer import load as load_tokenizer

# First entries of the seeds of training data.
TRAINING_STREAM, TOKENIZER_STREAM = 0, 1
# What a finished run says of itself.
CARD = pathlib.Path(__file__).with_name("card.md")


class Data(NamedTuple):
    """What batches are drawn from: the tokenizer, and all packages' tokens one behind the other."""

    tokenizer: Tokenizer
    natural: np.ndarray


class Batch(NamedTuple):
    """Sequences of a step; `natural` has one token more than a sequence, so that every position has a next one."""

    natural: jax.Array
    tasks: answer_loss.Batch


def load_data(preset: Preset, directory: pathlib.Path) -> Data:
    """The data of a run, made when the run first starts and read from its directory from then on."""
    directory, natural_path = directory / "tokenizer", directory / "natural.npy"
    if not natural_path.exists():
        texts = [sources.as_in_repository(file) for package in preset.packages for file in sources.files(package)]
        # Pairs are counted in an eighth of the files, which takes seconds.
        learnt = byte_pairs.train(
            [*texts[::8], *mixture.contexts(preset.tasks, TOKENIZER_STREAM)], preset.model.vocab_size
        )
        directory.mkdir(parents=True, exist_ok=True)
        line_tokenizer.save(learnt, directory, preset.model.max_length)
        encoded = learnt.encode_batch(texts, add_special_tokens=False)
        with durable.replacing(natural_path) as partial, partial.open("wb") as file:
            np.save(file, np.concatenate([np.array(encoding.ids, np.uint16) for encoding in encoded]))
    return Data(load_tokenizer(directory), np.load(natural_path, mmap_mode="r"))


def training_batch(preset: Preset, data: Data, seed: int, step: int) -> tuple[Batch, tuple[str, ...]]:
    """The batch of a step, and the task of every row of `tasks`."""
    rng = np.random.default_rng([TRAINING_STREAM, seed, step])
    stage = preset.stage(step)
    begins = rng.integers(len(data.natural) - stage.tokens, size=stage.natural_rows)
    windows = np.stack([data.natural[begin : begin + stage.tokens] for begin in begins]).astype(np.int32)
    natural = np.pad(windows, ((0, 0), (1, 0)), constant_values=data.tokenizer.prefix[0])
    fitting = [task for task in preset.tasks if mixture.TASKS[task].fewest_tokens <= stage.tokens]
    shares = np.array([mixture.TASKS[task].share for task in fitting])
    tasks = tuple(str(task) for task in rng.choice(fitting, stage.task_rows, p=shares / shares.sum()))
    conversations = [mixture.conversation(task, data.tokenizer, rng, stage.tokens) for task in tasks]
    answer_tokens = mixture.most_answer_tokens(stage.tokens)
    asked = answer_loss.make_batch(conversations, stage.tokens, answer_tokens, data.tokenizer.eos_ids[0])
    return Batch(jnp.asarray(natural), asked), tasks


def initial_model(preset: Preset, seed: int) -> llama.Llama:
    """A model with the seed's starting parameters, in float32."""
    model = llama.Llama(preset.model, rngs=nnx.Rngs(seed))
    circuits.start_with_lookup(model, np.random.default_rng(seed))
    return model


def learning_rate(preset: Preset) -> optax.Schedule:
    """A linear warm-up times a cosine that ends at a twentieth, from step 0 and anew, at half the rate, from every
    restart (Loshchilov and Hutter 2017)."""
    cycles = []
    for number, (begin, end) in enumerate(itertools.pairwise((0, *preset.restarts, preset.steps))):
        cosine = optax.cosine_decay_schedule(preset.learning_rate / 2**number, end - begin, alpha=0.05)
        cycles.append(functools.partial(_product, running.warm_up(preset.warmup_steps), cosine))
    return optax.join_schedules(cycles, preset.restarts)


def _product(one: optax.Schedule, other: optax.Schedule, step: jax.Array) -> jax.Array:
    return one(step) * other(step)


def optimizer(preset: Preset) -> optax.GradientTransformation:
    """AdamW; vectors do not decay."""
    adamw = optax.adamw(learning_rate(preset), b2=0.98, weight_decay=preset.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def cast(params: Any, dtype: str) -> Any:
    """Parameters in another dtype."""
    return jax.tree.map(lambda param: param.astype(dtype), params)


class Step(NamedTuple):
    """What a step tells: mean losses, and which questions of which rows were answered right (`[B, Q]`)."""

    natural_loss: jax.Array
    answer_loss: jax.Array
    right: jax.Array
    asked: jax.Array


@functools.partial(jax.jit, static_argnames=("graph", "preset"), donate_argnames=("params", "moments"))
def train_step(
    graph: nnx.GraphDef, preset: Preset, params: Any, moments: Any, batch: Batch, answer_weight: float
) -> tuple[Any, Any, Step]:
    """One optimizer step on the loss of natural text plus a multiple of that of answers: new parameters and moments."""

    def loss(params):
        model = nnx.merge(graph, cast(params, preset.dtype))
        of_text = answer_loss.text_losses(model, batch.natural).mean()
        of_answers, right, asked = answer_loss.rows_alike(model, batch.tasks, mixture.MOST_TURNS)
        return of_text + answer_weight * of_answers, Step(of_text, of_answers, right, asked)

    gradients, told = jax.grad(loss, has_aux=True)(params)
    updates, moments = optimizer(preset).update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, told


class Training(NamedTuple):
    """What stays the same from step to step."""

    preset: Preset
    seed: int
    data: Data
    graph: nnx.GraphDef

    def advance(
        self, arrays: running.Arrays, progress: running.Progress
    ) -> tuple[running.Arrays, running.Progress, dict[str, Any]]:
        """A step."""
        stage = self.preset.stage(progress.step)
        batch, tasks = training_batch(self.preset, self.data, self.seed, progress.step)
        *arrays, told = train_step(self.graph, self.preset, *arrays, batch, stage.answer_weight)
        rate = float(learning_rate(self.preset)(progress.step))
        return tuple(arrays), progress, {"tokens": stage.tokens, "learning_rate": rate} | summary(told, tasks)


def train(preset: Preset, settings: running.Settings) -> tuple[llama.Llama, Tokenizer]:
    """Runs all stages and returns the model, in the preset's dtype, and its tokenizer; see `running.run`."""
    data = load_data(preset, settings.output_dir)
    graph, params = nnx.split(initial_model(preset, settings.seed))
    params, _ = running.run(
        Training(preset, settings.seed, data, graph).advance,
        (params, optimizer(preset).init(params)),
        running.Progress(),
        lambda progress: progress.step >= preset.steps,
        settings=settings,
        checkpoint_steps=preset.checkpoint_steps,
        decided_by={
            "preset": dataclasses.asdict(preset),
            "seed": settings.seed,
            "tokenizer": identity.of_tokenizer(data.tokenizer),
            "natural": identity.of_arrays(data.natural),
        },
        steps=preset.steps,
    )
    return nnx.merge(graph, cast(params, preset.dtype)), data.tokenizer


def summary(told: Step, tasks: Sequence[str]) -> dict[str, Any]:
    """A step as the log holds it: its losses, and of every task the questions answered right and asked."""
    right, asked = np.asarray(told.right).sum(axis=1), np.asarray(told.asked).sum(axis=1)
    answered: dict[str, list[int]] = {}
    for task, *counts in zip(tasks, right.tolist(), asked.tolist(), strict=True):
        answered[task] = np.add(answered.get(task, [0, 0]), counts).tolist()
    losses = {"natural_loss": float(told.natural_loss), "answer_loss": float(told.answer_loss)}
    return losses | {"answered": answered}


def card(preset: Preset, settings: running.Settings, model: llama.Llama, rows: Sequence[results.Row]) -> str:
    """The README of a finished run's directory."""
    seconds = json.loads((settings.output_dir / "train_log.jsonl").read_text().splitlines()[-1])["seconds"]
    stages = (
        f"{stage.steps} steps of {stage.natural_rows} windows and {stage.task_rows} tasks of {stage.tokens} tokens"
        + (f", with {stage.answer_weight:g} times the loss on answers" if stage.answer_weight != 1 else "")
        for stage in preset.stages
    )
    return CARD.read_text(encoding="utf-8").format(
        preset=preset,
        settings=settings,
        table=measuring.markdown_table(rows),
        held_out=", ".join(sources.packages(held_out=True)),
        packages=", ".join(preset.packages),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) / 1e6,
        hours=seconds / 3600,
        device=f"{jax.device_count()} {jax.devices()[0].device_kind}",
        stages="; ".join(stages),
        restarted="".join(f", anew at half the rate after {step} steps" for step in preset.restarts),
    )


def main(settings: running.Settings) -> None:
    preset = PRESETS[settings.preset]
    model, tokenizer = train(preset, settings)
    directory, log = settings.output_dir / preset.name, settings.output_dir / "train_log.jsonl"
    running.write(model, tokenizer.backend, directory, log)
    tokens = preset.model.max_length
    rows = measuring.perplexities(model, tokenizer, tokens, preset.evaluation_windows, preset.name)
    for task in preset.tasks:
        rows.append(measuring.accuracy(model, tokenizer, task, tokens, preset.evaluation_problems, preset.name))
    results.write_rows(directory / "accuracy.json", rows)
    measuring.plot_training(log, directory / "training.png")
    (directory / "README.md").write_text(card(preset, settings, model, rows), encoding="utf-8")
    results.print_table(f"{preset.name}, exact attention", measuring.COLUMNS, map(measuring.table_line, rows))
    print(f"{directory} is complete")


if __name__ == "__main__":
    running.main(main)
