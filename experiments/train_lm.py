"""Trains the language model: `python -m experiments.train_lm --preset=cpu --output_dir=build/train_lm/cpu`.

Half of what it reads is natural text, with loss on every token, half are long texts with questions about them, with
loss on the answers (`training.mixture`). Sequences grow from stage to stage. A run that was killed goes on where its
last checkpoint stands when it is started again with `--resume`, to the same parameters bit for bit: the data of a step
follow from the seed and the step alone, and the tokenizer and the tokens of natural text stay in the run's directory.
"""

import bisect
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import app, flags, logging
from flax import nnx
from kvjax_models import llama
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer import load as load_tokenizer

from experiments.common import results, sources
from experiments.common.tasks import line_tokenizer
from experiments.training import answer_loss, byte_pairs, circuits, export, language, mixture, saving


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
        vocabulary: tokens of the tokenizer.
        tasks: names of `mixture.TASKS`; a stage takes those that its length has room for.
        packages: natural text.
        dtype: what products are computed in; parameters and moments are float32.
        restarts: steps at which the learning rate begins anew, at half of what it began at before.
    """

    name: str
    vocabulary: int
    width: int
    mlp_width: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    stages: tuple[Stage, ...]
    tasks: tuple[str, ...] = tuple(mixture.TASKS)
    packages: tuple[str, ...] = sources.TRAINING
    dtype: str = "float32"
    rope_theta: float = 1e6
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

    @property
    def longest(self) -> int:
        """Tokens of the longest sequences: the context that the model is made for."""
        return max(stage.tokens for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """The stage of a step."""
        for stage, end in zip(self.stages, itertools.accumulate(stage.steps for stage in self.stages), strict=True):
            if step < end:
                return stage
        raise ValueError(f"step={step} is past the last of {self.steps}")


PRESETS = {
    "cpu": Preset(
        name="kvjax-lm-2k",
        vocabulary=4096,
        width=256,
        mlp_width=512,
        layers=4,
        query_heads=4,
        kv_heads=2,
        head_dim=64,
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
        vocabulary=8192,
        width=512,
        mlp_width=1280,
        layers=8,
        query_heads=8,
        kv_heads=4,
        head_dim=64,
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
        vocabulary=2048,
        width=64,
        mlp_width=32,
        layers=3,
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        stages=(Stage(384, 1, 1, 3), Stage(512, 1, 1, 3)),
        tasks=("line_retrieval", "niah_single_1"),
        packages=("absl",),
        warmup_steps=2,
        checkpoint_steps=2,
        evaluation_windows=2,
        evaluation_problems=2,
    ),
}

# First entries of the seeds of training data.
TRAINING_STREAM, TOKENIZER_STREAM = 0, 1


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
        learnt = byte_pairs.train([*texts[::8], *mixture.contexts(preset.tasks, TOKENIZER_STREAM)], preset.vocabulary)
        directory.mkdir(exist_ok=True)
        line_tokenizer.save(learnt, directory, preset.longest)
        encoded = learnt.encode_batch(texts, add_special_tokens=False)
        np.save(natural_path, np.concatenate([np.array(encoding.ids, np.uint16) for encoding in encoded]))
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
    config = llama.LlamaConfig(
        vocab_size=preset.vocabulary,
        width=preset.width,
        mlp_width=preset.mlp_width,
        layers=preset.layers,
        query_heads=preset.query_heads,
        kv_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        max_length=preset.longest,
        rope_theta=preset.rope_theta,
    )
    model = llama.Llama(config, rngs=nnx.Rngs(seed))
    circuits.start_with_lookup(model, np.random.default_rng(seed))
    return model


def learning_rate(preset: Preset, step: int) -> float:
    """Linear warm-up, then a cosine that ends at a twentieth, from the beginning or the last restart to the next one or
    the end."""
    edges = (0, *preset.restarts, preset.steps)
    cycle = bisect.bisect_right(preset.restarts, step)
    begin, end = edges[cycle : cycle + 2]
    warm = min(1.0, (step - begin + 1) / preset.warmup_steps)
    peak = preset.learning_rate / 2**cycle
    return peak * warm * (0.525 + 0.475 * math.cos(math.pi * (step - begin) / (end - begin)))


def optimizer(preset: Preset) -> optax.GradientTransformation:
    """AdamW without its learning rate, which is applied in `train_step`; vectors do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(preset.weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    )


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
    graph: nnx.GraphDef, preset: Preset, params: Any, moments: Any, batch: Batch, rate: float, answer_weight: float
) -> tuple[Any, Any, Step]:
    """One optimizer step on the loss of natural text plus a multiple of that of answers: new parameters and moments."""

    def loss(params):
        model = nnx.merge(graph, cast(params, preset.dtype))
        of_text = answer_loss.text_losses(model, batch.natural).mean()
        of_answers, right, asked = answer_loss.rows_alike(model, batch.tasks, mixture.MOST_TURNS)
        return of_text + answer_weight * of_answers, Step(of_text, of_answers, right, asked)

    gradients, told = jax.grad(loss, has_aux=True)(params)
    updates, moments = optimizer(preset).update(gradients, moments, params)
    params = optax.apply_updates(params, jax.tree.map(lambda update: -rate * update, updates))
    return params, moments, told


def train(preset: Preset, output_dir: pathlib.Path, seed: int, resume: bool) -> tuple[llama.Llama, Tokenizer]:
    """Runs all stages and returns the model, in the preset's dtype, and its tokenizer; checkpoints and
    `train_log.jsonl` go to `output_dir`.

    Raises:
        ValueError: there are checkpoints and `resume` is not set.
    """
    with saving.checkpoints(output_dir, resume) as manager:
        data = load_data(preset, output_dir)
        graph, params = nnx.split(initial_model(preset, seed))
        moments = optimizer(preset).init(params)
        first, seconds = 0, 0.0
        if manager.latest_step() is not None:
            params, moments, progress = saving.restore(manager, params, moments)
            first, seconds = progress["step"], progress["seconds"]
        log_path = output_dir / "train_log.jsonl"
        saving.drop_after(log_path, first)
        started = time.perf_counter() - seconds
        steps = tqdm.tqdm(range(first, preset.steps), initial=first, total=preset.steps, smoothing=0.05)
        with log_path.open("a", buffering=1) as log:
            for step in steps:
                batch, tasks = training_batch(preset, data, seed, step)
                stage, rate = preset.stage(step), learning_rate(preset, step)
                params, moments, told = train_step(graph, preset, params, moments, batch, rate, stage.answer_weight)
                row: dict[str, Any] = {"step": step, "tokens": stage.tokens}
                row |= {"learning_rate": round(rate, 7), **summary(told, tasks)}
                seconds = time.perf_counter() - started
                log.write(json.dumps(row | {"seconds": round(seconds, 1)}) + "\n")
                steps.set_postfix({name: row[name] for name in ("tokens", "natural_loss", "answer_loss")})
                if (step + 1) % preset.checkpoint_steps == 0 or step + 1 == preset.steps:
                    saving.save(manager, params, moments, {"step": step + 1, "seconds": seconds})
    return nnx.merge(graph, cast(params, preset.dtype)), data.tokenizer


def summary(told: Step, tasks: Sequence[str]) -> dict[str, Any]:
    """A step as the log holds it: its losses, and of every task the questions answered right and asked."""
    right, asked = np.asarray(told.right).sum(axis=1), np.asarray(told.asked).sum(axis=1)
    answered: dict[str, list[int]] = {}
    for task, *counts in zip(tasks, right.tolist(), asked.tolist(), strict=True):
        answered[task] = np.add(answered.get(task, [0, 0]), counts).tolist()
    losses = {"natural_loss": round(float(told.natural_loss), 4), "answer_loss": round(float(told.answer_loss), 4)}
    return losses | {"answered": answered}


def card(preset: Preset, model: llama.Llama, rows: Sequence[results.Row], seed: int, log: pathlib.Path) -> str:
    """The README of a finished run's directory."""
    [key] = (key for key, value in PRESETS.items() if value == preset)
    seconds = json.loads(log.read_text().splitlines()[-1])["seconds"]
    stages = (
        f"{stage.steps} steps of {stage.natural_rows} windows and {stage.task_rows} tasks of {stage.tokens} tokens"
        + (f", with {stage.answer_weight:g} times the loss on answers" if stage.answer_weight != 1 else "")
        for stage in preset.stages
    )
    return language.CARD.format(
        **dataclasses.asdict(preset)
        | {
            "preset": key,
            "tokens": preset.longest,
            "table": language.markdown_table(rows),
            "held_out": ", ".join(sources.packages(held_out=True)),
            "packages": ", ".join(preset.packages),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) / 1e6,
            "steps": preset.steps,
            "hours": seconds / 3600,
            "device": f"{jax.device_count()} {jax.devices()[0].device_kind}",
            "stages": "; ".join(stages),
            "seed": seed,
            "restarted": "".join(f", anew at half the rate after {step} steps" for step in preset.restarts),
        }
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # orbax reports every step of every save
    output_dir = pathlib.Path(flags.FLAGS.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    preset = PRESETS[flags.FLAGS.preset]
    model, tokenizer = train(preset, output_dir, flags.FLAGS.seed, flags.FLAGS.resume)
    rows = language.perplexities(model, tokenizer, preset.longest, preset.evaluation_windows, preset.name)
    for task in preset.tasks:
        rows.append(language.accuracy(model, tokenizer, task, preset.longest, preset.evaluation_problems, preset.name))
    directory, log_path = output_dir / preset.name, output_dir / "train_log.jsonl"
    export.write(model, tokenizer.backend, directory, rows, log_path)
    language.plot_training(log_path, directory / "training.png")
    (directory / "README.md").write_text(card(preset, model, rows, flags.FLAGS.seed, log_path))
    title = f"{preset.name}, exact attention, {preset.longest} tokens"
    results.print_table(title, language.COLUMNS, map(language.table_line, rows))
    print(f"{directory} is complete")


if __name__ == "__main__":
    saving.define_flags(PRESETS)
    app.run(main)
