"""A training run: steps with a log, checkpoints that it goes on from bit for bit, and the directory that it ends in."""

import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import optax
import tokenizers
import tqdm
from absl import logging
from flax import nnx
from jax import tree

from experiments.common import options
from experiments.common.tasks import line_tokenizer
from kvjax_models import checkpoint, durable, identity, llama
from kvjax_models.numbered_saves import NumberedSaves
from kvjax_models.saved_states import differing

FORMAT = 1  # of checkpoints: raised with every change of what arrays or progress mean


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of a run."""

    preset: Literal["cpu", "h200", "tiny"] = "cpu"  # model and training length
    output_dir: pathlib.Path = pathlib.Path("build/train")  # where checkpoints, the log and the model go
    resume: bool = False  # go on from the newest checkpoint in --output_dir
    seed: int = 0  # decides initial parameters and training documents


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where training stands: what a checkpoint needs beside the arrays."""

    step: int = 0
    seconds: float = 0.0


def warm_up(steps: int) -> optax.Schedule:
    """From 1 / steps to 1, which it reaches in the last of them."""
    return optax.linear_schedule(1 / steps, 1.0, steps - 1)


P = TypeVar("P", bound=Progress)
Arrays = tuple[Any, Any]  # parameters (an `nnx.State`), and the optimizer's moments


def main(function: Callable[[Settings], None]) -> None:
    """The command of a module."""
    logging.set_verbosity(logging.WARNING)  # orbax reports every step of every save
    options.command(function, Settings)


def run(
    advance: Callable[[Arrays, P], tuple[Arrays, P, dict[str, Any]]],
    arrays: Arrays,
    progress: P,
    finished: Callable[[P], bool],
    *,
    settings: Settings,
    checkpoint_steps: int,
    decided_by: Mapping[str, Any],
    steps: int | None = None,
) -> Arrays:
    """Steps until the run is finished, from its newest checkpoint on. Checkpoints, of which two are kept, and
    `train_log.jsonl` go to the run's directory.

    Args:
        advance: a step, which also gives what the log tells of it.
        decided_by: all that parameters follow from but the code, in terms of JSON: what a run that goes on must share.
        steps: how many there will be, where that is known.

    Raises:
        ValueError: there are checkpoints and `settings.resume` is not set; or they are of another run, with what
            differs.
        OSError: where another process trains in the directory.
    """
    directory = settings.output_dir
    directory.mkdir(parents=True, exist_ok=True)
    saves = NumberedSaves(directory / "checkpoints")
    saves.claim()
    belongs = {"format": FORMAT, "run": json.loads(identity.as_json(dict(decided_by)))}
    if saves.steps():
        if not settings.resume:
            raise ValueError(f"output_dir={directory} holds checkpoints: give --resume or another directory")
        arrays, restored = _restore(saves, arrays, belongs)
        progress = dataclasses.replace(progress, **restored)
    log_path = directory / "train_log.jsonl"
    # Lines of steps that were lost with a kill go: the steps will be done again.
    lines = log_path.read_text().splitlines(keepends=True) if log_path.exists() else []
    durable.write_text(log_path, "".join(lines[: progress.step]))
    started = time.perf_counter() - progress.seconds
    with log_path.open("a", buffering=1) as log, tqdm.tqdm(initial=progress.step, total=steps, unit="step") as bar:
        while not finished(progress):
            arrays, after, told = advance(arrays, progress)
            row = {"step": progress.step} | {name: _rounded(value) for name, value in told.items()}
            progress = dataclasses.replace(after, step=progress.step + 1, seconds=time.perf_counter() - started)
            log.write(json.dumps(row | {"seconds": round(progress.seconds, 1)}) + "\n")
            bar.update()
            bar.set_postfix({name: value for name, value in told.items() if isinstance(value, int | float)})
            if progress.step % checkpoint_steps == 0 or finished(progress):
                saves.save(progress.step, _pure(arrays), belongs, dataclasses.asdict(progress))
    return arrays


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _pure(arrays: Arrays) -> dict[str, Any]:
    params, moments = arrays
    return {"params": nnx.to_pure_dict(params), "moments": tree.leaves(moments)}


def _restore(saves: NumberedSaves, arrays: Arrays, belongs: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """The newest checkpoint, in the structure of these arrays, and its progress."""
    step = saves.newest()
    if differences := differing(belongs, saves.belongs(step)):
        raise ValueError(f"the checkpoint of step {step} in {saves.directory} is not of this run: {differences}")
    like = tree.map(np.asarray, _pure(arrays))  # on the host, from where the next step takes them as it took the first
    restored = saves.arrays(step, like)
    params, moments = arrays
    nnx.replace_by_pure_dict(params, restored["params"])
    return (params, tree.unflatten(tree.structure(moments), restored["moments"])), saves.notes(step)


def write(model: llama.Llama, tokenizer: tokenizers.Tokenizer, directory: pathlib.Path, log: pathlib.Path) -> None:
    """Writes model, tokenizer and training log as one Hugging Face directory."""
    bos, eos = tokenizer.token_to_id(line_tokenizer.BOS), line_tokenizer.end_of_text(tokenizer)
    checkpoint.save(directory, model, bos_token_id=bos, eos_token_id=eos)
    line_tokenizer.save(tokenizer, directory, model.config.max_length)
    generation = {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False}
    durable.write_text(directory / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    shutil.copy(log, directory / "train_log.jsonl")
