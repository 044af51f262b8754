"""Checkpoints of a training run: parameters, the optimizer's moments and where the run stands, bit for bit."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import flags
from flax import nnx


def define_flags(presets: Mapping[str, Any]) -> None:
    """The flags of training runs. Not at import, so that tests may import several of them."""
    flags.DEFINE_enum("preset", "cpu", sorted(presets), "Model and training length.")
    flags.DEFINE_string("output_dir", "build/train", "Where checkpoints, the log and the model go.")
    flags.DEFINE_bool("resume", False, "Go on from the newest checkpoint in --output_dir.")
    flags.DEFINE_integer("seed", 0, "Decides initial parameters and training documents.")


def checkpoints(output_dir: pathlib.Path, resume: bool) -> ocp.CheckpointManager:
    """The run's checkpoints, of which the newest two are kept.

    Raises:
        ValueError: there are some and `resume` is not set.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    manager = ocp.CheckpointManager((output_dir / "checkpoints").absolute(), options=options)
    if manager.latest_step() is not None and not resume:
        manager.close()
        raise ValueError(f"output_dir={output_dir} holds checkpoints: give --resume or another directory")
    return manager


def save(manager: ocp.CheckpointManager, params: Any, moments: Any, progress: Mapping[str, Any]) -> None:
    """A checkpoint that `restore` reads back bit for bit; `progress["step"]` numbers it."""
    arrays = ocp.args.StandardSave({"params": nnx.to_pure_dict(params), "moments": jax.tree.leaves(moments)})
    items = {"arrays": arrays, "progress": ocp.args.JsonSave(dict(progress))}
    manager.save(progress["step"], args=ocp.args.Composite(**items))


def restore(manager: ocp.CheckpointManager, params: Any, moments: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The newest checkpoint, in the structure of `params` and `moments`."""
    like = {"params": nnx.to_pure_dict(params), "moments": jax.tree.leaves(moments)}
    items = {"arrays": ocp.args.StandardRestore(like), "progress": ocp.args.JsonRestore()}
    restored = manager.restore(manager.latest_step(), args=ocp.args.Composite(**items))
    nnx.replace_by_pure_dict(params, restored.arrays["params"])
    moments = jax.tree.unflatten(jax.tree.structure(moments), restored.arrays["moments"])
    return params, moments, restored.progress


def drop_after(log_path: pathlib.Path, step: int) -> None:
    """Drops the log lines of steps that were lost with a kill and will be done again."""
    lines = log_path.read_text().splitlines() if log_path.exists() else []
    log_path.write_text("".join(f"{line}\n" for line in lines[:step]))
