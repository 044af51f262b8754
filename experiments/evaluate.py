"""Measures the answers of a pretrained model through compressed caches.

    kvjax download smollm2-135m
    python -m experiments.evaluate --model smollm2-135m --task niah_single_2:docs --policy exact --policy snapkv \
        --budget 25% --documents 20 --output build/rows.jsonl
    python -m experiments.summarize --rows build/rows.jsonl

With `--question unseen`, a text is compressed once (`CachedModel.read`), before its questions are known, and each
question continues it. With `--question seen`, the compressed prompt includes the question (`CachedModel.generate`), and
the rest of a passage (perplexity_books:1024) is compressed while it is processed. Settings share the prefill of a text.

Tasks: RULER's 13 ("ruler" for all), lines, longeval_lines:200, longeval_topics:5, needle, facts, squad, hotpotqa,
musique, nq, quality, tpo, coursera, scientific_qa, multidoc_qa, gov_report, shortdep_qa, longdep_qa, shortdep_cloze,
kv_retrieval, babi:1, gsm8k, gsm8k_chat, humaneval:run, gsm8k_trace, humaneval_trace, perplexity_books,
perplexity_wikitext2, stream_books, stream_wikitext2, longbench:NAME, longbench_e:NAME. Most of them read published
files from `--data_dir`; an error names the file and its source.

Rows are JSON Lines. A second start with the same output continues an interrupted run. A budget in percent is a share of
the text's full bfloat16 cache; with `--question seen`, of prompt and answer. In budgets, arrays without quantization
count as bfloat16, also in float32 runs.
"""

import dataclasses
import pathlib
from typing import Any

import jax
from absl import logging

from experiments import tasks
from experiments.common import caches
from experiments.common.evaluator import Evaluator
from experiments.common.flags import Flags, one_of, repeatable, run_command
from experiments.common.rows import RowFile
from experiments.tasks.task import Request
from kvjax_models import LanguageModel, load


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of an evaluation."""

    model: str = "smollm2-135m"  # Name of `kvjax models`, GGUF file or Hugging Face directory.
    task: tuple[str, ...] = repeatable("niah_single_2:docs")  # Tasks; repeatable.
    policy: tuple[str, ...] = repeatable("exact", "snapkv")  # NAME[:setting=value,...][@budget][+format]; repeatable.
    budget: tuple[str, ...] = repeatable("25%")  # Share of the text's full bfloat16 cache, slots or bytes; repeatable.
    kv_dtype: tuple[str, ...] = repeatable("none")  # Quantization formats (int8, int4, "int4,int2"); repeatable.
    question: tuple[str, ...] = repeatable("unseen", choices=("unseen", "seen"))  # Repeatable.
    tokens: int = 2048  # Maximum number of tokens of prompt and answer.
    documents: int = 10  # Documents per task and seed.
    seed: tuple[int, ...] = repeatable(0)  # Seeds of documents and policies; repeatable.
    data_dir: pathlib.Path | None = None  # Directory of published files.
    truncate: bool = False  # Cut documents that are too long in the middle; otherwise they are left out.
    batch: int = 16  # Questions that are answered at a time, of one text if the question is unseen.
    group: int | None = None  # Settings that share a prefill; by default as many as hold a quarter of the memory.
    dtype: str | None = one_of(None, ("float32", "bfloat16"))  # Default: float32 on CPUs, otherwise bfloat16.
    output: pathlib.Path = pathlib.Path("build/rows.jsonl")  # File of the rows.


def main(options: Options) -> None:
    """Runs all tasks, questions and seeds; all tasks are made before the first measurement."""
    names = tasks.expand(options.task)
    settings = caches.parse_settings(options.policy, options.budget, options.kv_dtype)
    llm = load_model(options.model, options.dtype)
    requests = [
        Request(llm.tokenizer, options.tokens, options.documents, seed, options.data_dir, options.truncate)
        for seed in options.seed
    ]
    made = [(request.seed, tasks.make_task(name, request)) for request in requests for name in names]
    with RowFile(options.output) as rows:
        for seed, task in made:
            for question in ("unseen",) if task.kind in ("stream", "trace") else options.question:
                logging.info("%s, question %s, seed %d", task.name, question, seed)
                sizes: dict[str, Any] = {"tokens": options.tokens, "batch": options.batch, "group": options.group}
                name = pathlib.PurePath(options.model).name
                Evaluator(llm, name, task, question_seen=question == "seen", seed=seed, **sizes).run(settings, rows)
        print(f"{len(rows.rows)} rows: {options.output}")


def load_model(name: str, dtype: str | None) -> LanguageModel:
    """Loads a model.

    Args:
        name: name, GGUF file or directory.
        dtype: dtype of the model; by default float32 on CPUs and bfloat16 elsewhere.

    Returns:
        The model.
    """
    return load(name, dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))


if __name__ == "__main__":
    run_command(main, Options)
