"""Runs kvpress's presses on the documents of `experiments.evaluate`, at equal bytes.

    python -m experiments.peers --kvpress_python PYTHON --model smollm2-135m --task niah_single_2:docs --press SnapKV
    KVzip

PYTHON is an interpreter with torch and kvpress (`make parity` installs them). The rows have the form of
`experiments.evaluate`, so `experiments.summarize` compares both. The budget has two conventions:

- `25%`: share of a full cache of prompt, question and answer. A press keeps all tokens after the prompt, so it keeps
  fewer tokens of the prompt.
- `25% of the prompt`: kvpress's convention, share of the prompt's tokens, as `experiments.evaluate` counts the text's.

Some presses mask tokens that they drop; their rows count these tokens as freed, and `host_bytes` is 0. With
`--question seen`, a press compresses the prompt except its last token.
"""

import dataclasses
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from experiments import evaluate, tasks
from experiments.common import presses
from experiments.common.flags import Flags, one_of, repeatable, run_command
from experiments.common.rows import Row, RowFile
from experiments.common.units import Unit, make_units
from experiments.tasks.task import Request, Task
from kvjax.budget import Budget
from kvjax_models import LanguageModel
from kvjax_models.formats import gguf_checkpoint
from kvjax_models.formats.gguf_file import read_gguf
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.language_model import resolve_path

OF_PROMPT = " of the prompt"


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a comparison."""

    model: str = "smollm2-135m"  # Name of `kvjax models`, GGUF file or Hugging Face directory.
    kvpress_python: str = sys.executable  # An interpreter that can import kvpress.
    press: tuple[str, ...] = repeatable("SnapKV", "KVzip", choices=presses.PRESSES)  # Repeatable.
    task: tuple[str, ...] = repeatable("niah_single_2:docs")  # Tasks with generated answers; repeatable.
    budget: tuple[str, ...] = repeatable("25%")  # Shares of a full cache, or of the prompt; repeatable.
    question: tuple[str, ...] = repeatable("unseen", choices=("unseen", "seen"))  # Repeatable.
    tokens: int = 2048  # Maximum number of tokens of prompt and answer.
    documents: int = 10  # Documents per task.
    seed: int = 0  # Seed of the documents.
    data_dir: pathlib.Path | None = None  # Directory of published files.
    dtype: str = one_of("float32", ("float32", "bfloat16"))  # Dtype of the model.
    output: pathlib.Path = pathlib.Path("build/peers.jsonl")  # File of the rows.


def main(options: Options) -> None:
    """Runs all tasks and presses."""
    llm = evaluate.load_model(options.model, "float32")
    request = Request(llm.tokenizer, options.tokens, options.documents, options.seed, options.data_dir)
    with tempfile.TemporaryDirectory() as directory, RowFile(options.output) as rows:
        path = pathlib.Path(options.model)
        if not path.is_dir():  # transformers reads GGUF files slowly or not at all
            path = pathlib.Path(directory)
            save_for_transformers(resolve_path(options.model), llm.tokenizer, path)
        process = presses.Presses(options.kvpress_python, path, options.dtype)
        try:
            for name in tasks.expand(options.task):
                task = tasks.make_task(name, request)
                for question in options.question:
                    run_task(options, llm, process, task, question == "seen", rows)
        finally:
            process.close()
        print(f"{len(rows.rows)} rows: {options.output}")


def save_for_transformers(path: pathlib.Path, tokenizer: Tokenizer, directory: pathlib.Path) -> None:
    """Saves a model and its tokenizer as a directory that transformers reads, in float32.

    Args:
        path: GGUF file of the model.
        tokenizer: the tokenizer.
        directory: the directory.
    """
    values, checkpoint = gguf_checkpoint.read_checkpoint(read_gguf(path))
    values |= {"architectures": [checkpoint.family.architecture], "pad_token_id": None}
    values |= {"bos_token_id": None, "eos_token_id": list(tokenizer.eos_ids) or None}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    tensors = {name: np.ascontiguousarray(tensor.read(), np.float32) for name, tensor in checkpoint.tensors.items()}
    # transformers requires the name of a framework.
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def run_task(
    options: Options, llm: LanguageModel, process: presses.Presses, task: Task, question_seen: bool, rows: RowFile
) -> None:
    """Runs all presses and budgets on one task.

    Args:
        options: the options.
        llm: the model.
        process: process of the presses.
        task: the task.
        question_seen: whether the compressed prompt includes the question.
        rows: file of the rows.

    Raises:
        ValueError: if the task has no generated answers.
    """
    if task.score is None:
        raise ValueError(f"task {task.name} has no generated answers")
    labels: dict[str, Any] = {"model": pathlib.PurePath(options.model).name, "task": task.name, "kv_dtype": None}
    labels |= {"question": "seen" if question_seen else "unseen", "dtype": options.dtype}
    units = make_units(task, llm.tokenizer, question_seen, options.tokens)
    for press, budget, unit in itertools.product(options.press, options.budget, units):
        blank = [
            Row(
                policy=f"kvpress {press}", budget=budget, tokens=options.tokens, seed=options.seed, score=None,
                document=unit.document, item=item.number, **labels,
            )
            for item in unit.items
        ]  # fmt: skip
        if not all(row.key in rows for row in blank):
            rows.append(answer(process, task, press, blank, unit))


def answer(process: presses.Presses, task: Task, press: str, rows: Sequence[Row], unit: Unit) -> list[Row]:
    """Answers all questions about one compressed prompt.

    Args:
        process: process of the presses.
        task: the task.
        press: name of the press.
        rows: the questions' rows without scores.
        unit: one prompt and its questions.

    Returns:
        The completed rows. The tokens that are kept follow from the longest question.
    """
    context, questions = unit.text, [item.tokens for item in unit.items]
    if not questions[0]:
        context, questions = context[:-1], [context[-1:]]
    later = max(map(len, questions)) + task.answer_tokens
    kept = kept_tokens(str(rows[0].budget), len(context), later)
    if kept < 1:
        error = f"budget={rows[0].budget} of {len(context) + later} tokens: {later} tokens after the prompt exceed it"
        return [dataclasses.replace(row, error=error) for row in rows]
    try:
        reply = process.answer(
            press=press, kept=kept, text=context, questions=questions, answer_tokens=task.answer_tokens
        )
    except presses.PressFailed as error:
        return [dataclasses.replace(row, error=str(error)) for row in rows]
    is_of_text = str(rows[0].budget).endswith(OF_PROMPT)
    fraction = reply["kept"] / len(context) if is_of_text else (reply["kept"] + later) / (len(context) + later)
    sizes: dict[str, Any] = {"cache_fraction": fraction, "read_fraction": fraction, "prompt_tokens": len(context)}
    sizes["tail_fraction"] = later / len(context) if is_of_text else None
    sizes["settings"] = {"held_tokens": reply["held"], "kept_tokens": reply["kept"]}
    done = []
    for row, item, text in zip(rows, unit.items, reply["answers"], strict=True):
        score, answer = task.score_answer(text, item.question)
        done.append(dataclasses.replace(row, score=score, answer=answer, **sizes))
    return done


def kept_tokens(budget: str, context: int, later: int) -> int:
    """Returns the number of prompt tokens that a press keeps.

    Args:
        budget: "25%" of all tokens, or "25% of the prompt".
        context: tokens of the prompt.
        later: tokens after it.

    Returns:
        The number, which is not positive if the later tokens exceed the budget.

    Raises:
        ValueError: if the budget is not a percentage.
    """
    share = Budget.parse(budget.removesuffix(OF_PROMPT)).fraction
    if share is None:
        raise ValueError(f"budget={budget} must be a percentage")
    return int(share * context) if budget.endswith(OF_PROMPT) else int(share * (context + later)) - later


if __name__ == "__main__":
    run_command(main, Options)
