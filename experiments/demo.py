"""Asks twelve questions about one text through compressed KV caches.

    make demo          # or: kvjax download smollm2-135m; python -m experiments.demo

The text is documentation of Python's standard library with twelve inserted facts. Every method reads and compresses it
once (`CachedModel.read`), before any question is known. The questions are then asked as one batch (`Document.ask`),
whose rows share the compressed text. All output fits 80 columns.
"""

import cmd
import copy
import dataclasses
import heapq
import inspect
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvjax
from experiments.common import plots
from experiments.common.console import print_table
from experiments.common.flags import Flags, run_command
from experiments.tasks.facts import ANSWER_TOKENS, FACTS, make_answers
from kvjax.budget import format_bytes
from kvjax_models import LanguageModel, load

WIDTH = 80  # columns of the output
CAPACITY = 128  # tokens of a question and its answer
WRONG = "x "  # before a wrong answer


class DemoMethod(NamedTuple):
    """A row of the demo's table.

    Attributes:
        name: name in tables, the paper's if there is one.
        policy: its policy.
        budget: share of a full bfloat16 cache, or the tokens that a query head reads.
        kv_dtype: quantization of keys and values.
        note: description, and differences from the paper.
    """

    name: str
    policy: str
    budget: str | None = "25%"
    kv_dtype: Any = None
    note: str = ""


DEMO = (
    DemoMethod("full cache", "exact", None, "bfloat16", "all keys and values in bfloat16"),
    DemoMethod("auto, 25%", "auto", note="all tokens in 16 of 90 heads, KVzap in the others, 8 bits"),
    DemoMethod("auto, 12.5%", "auto", "12.5%", note="the same in 4 bits and an eighth of the bytes"),
    DemoMethod("ClusterKV", "clusterkv", "256", "bfloat16", "keeps everything, a query head reads 256 tokens"),
)


@dataclasses.dataclass(frozen=True)
class Demo(Flags):
    """One text, twelve questions, several compressed caches."""

    model: str = "smollm2-135m"  # A name of `kvjax models`, a GGUF file or a Hugging Face directory.
    seed: int = 0  # Seed of the numbers in the facts.
    output_dir: str = "build/demo"  # Directory of the picture.


@dataclasses.dataclass
class Outcome:
    """Answers, sizes and times of one method."""

    method: DemoMethod
    answers: list[str]
    cache_bytes: int = 0  # of the compressed text
    read_bytes: int = 0  # of the text, per step of all rows
    full_bytes: int = 0  # of a full bfloat16 cache of the text
    read_seconds: float = 0.0
    step_seconds: float = 0.0

    def right(self, expected: list[str]) -> list[bool]:
        """Returns for every answer whether it contains the expected value as a word."""
        return [value in re.findall(r"[\w-]+", answer) for answer, value in zip(self.answers, expected, strict=True)]


def main(options: Demo) -> None:
    """Answers the questions with every method, prints the tables and draws the picture."""
    begin = time.perf_counter()
    try:
        llm = load(options.model)
    except FileNotFoundError as error:
        sys.exit(f"{error}")
    expected = make_answers(np.random.default_rng(options.seed))
    text = make_text(expected)
    print(f"{options.model} reads a text and answers {len(FACTS)} questions with every method.")
    outcomes = []
    for method in DEMO:
        outcomes.append(answer(llm, method, text))
        print(f"{method.name}: {sum(outcomes[-1].right(expected))} of {len(expected)} answers are right", flush=True)
    Console(width=WIDTH).print(answer_table(outcomes, expected))
    show(outcomes, expected)
    path = pathlib.Path(options.output_dir) / "demo.png"
    draw(path, outcomes, expected)
    print(f"\nPicture: {path}")
    print(f"Total time: {time.perf_counter() - begin:.0f} s. Later runs reuse compiled programs.")
    print(f"Next: kvjax chat --model {options.model} --policy auto --budget 25%")


def make_text(answers: list[str]) -> str:
    """Returns paragraphs of documentation with the facts at equal distances."""
    sources = (heapq.__about__, copy.__doc__, cmd.Cmd.__doc__)
    blocks = "\n\n".join(inspect.cleandoc(source or "") for source in sources).split("\n\n")
    paragraphs = [" ".join(block.split()) for block in blocks]
    paragraphs = [text for text in paragraphs if len(text) >= 80 and not text[0].isdigit()]
    for number, ((_, sentence, _), value) in enumerate(zip(FACTS, answers, strict=True)):
        paragraphs[int((number + 0.5) * len(paragraphs) / len(FACTS))] += f" {sentence} {value}."
    return "\n\n".join(paragraphs)


def answer(llm: LanguageModel, method: DemoMethod, text: str) -> Outcome:
    """Compresses the text and asks all questions; every answer starts with the sentence of its fact."""
    cache = llm.cache(method.policy, method.budget, kv_dtype=method.kv_dtype)
    begin = time.perf_counter()
    document = cache.read(text, max_new_tokens=CAPACITY, template_options={"continue_final_message": True})
    document.logits.block_until_ready()
    read_seconds = time.perf_counter() - begin
    questions = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": sentence}]
        for question, sentence, _ in FACTS
    ]
    completions, usage = document.ask(questions, max_new_tokens=ANSWER_TOKENS, return_details=True)
    return Outcome(
        method,
        [one.text.strip().partition("\n")[0] for one in completions],
        document.cache_bytes,
        sum(map(kvjax.read_bytes, document.texts)),
        document.full_cache_bytes,
        read_seconds,
        usage.decode_seconds / max(len(one.tokens) for one in completions),
    )


def answer_table(outcomes: list[Outcome], expected: list[str]) -> Table:
    """Returns the table of answers, with correct ones in green, and wrong ones in red after an x."""
    title = f'Answers; "{WRONG.strip()}" marks a wrong one'
    table = Table(title=title, title_justify="left", box=rich.box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("question and fact", width=28)
    for outcome in outcomes:
        table.add_column(outcome.method.name, width=11, overflow="fold")
    columns = [zip(outcome.answers, outcome.right(expected), strict=True) for outcome in outcomes]
    cells = [[_cell(answer, right) for answer, right in column] for column in columns]
    for number, ((question, _, _), value) in enumerate(zip(FACTS, expected, strict=True)):
        table.add_row(f"{question} {value}", *(column[number] for column in cells))
    return table


def _cell(answer: str, right: bool) -> Text:
    """Returns an answer, marked if it is wrong."""
    shown = answer if len(answer) <= 20 else f"{answer[:19]}…"
    return Text(shown, "green") if right else Text(f"{WRONG}{shown}", "red")


def show(outcomes: list[Outcome], expected: list[str]) -> None:
    """Prints the number of correct answers, memory and times."""
    lines = [
        (
            outcome.method.name,
            f"{sum(outcome.right(expected))}/{len(expected)}",
            f"{format_bytes(outcome.cache_bytes)} ({outcome.cache_bytes / outcome.full_bytes:.0%})",
            f"{outcome.read_bytes / outcome.full_bytes:.0%}",
            f"{outcome.read_seconds:.1f}",
            f"{1000 * outcome.step_seconds:.0f}",
        )
        for outcome in outcomes
    ]
    columns = (
        "method",
        "right",
        "cache",
        "read",
        "compress, s",
        f"ms per {len(expected)}",
    )
    print_table("Results", columns, lines)
    for outcome in outcomes:
        print(f"{outcome.method.name}: {outcome.method.note}")
    print(f'"read" and "ms" are per step of {len(expected)} rows. "compress" includes compilation.')
    print("Percentages are of a full bfloat16 cache of the text.")
    print("One text, twelve questions: two or three answers more may be chance.")


def draw(path: pathlib.Path, outcomes: list[Outcome], expected: list[str]) -> None:
    """Draws answers, memory and time, one bar per method."""
    panels = (
        (f"right answers of {len(expected)}", [float(sum(outcome.right(expected))) for outcome in outcomes]),
        ("cache in MiB", [outcome.cache_bytes / 2**20 for outcome in outcomes]),
        (f"ms per {len(expected)} tokens", [1000 * one.step_seconds for one in outcomes]),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3), sharey=True)
    for axis, (title, values) in zip(axes, panels, strict=True):
        bars = axis.barh([outcome.method.name for outcome in outcomes], values, color=["0.6"] + ["C0"] * len(values))
        axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlim(0, 1.18 * max(*values, 1))
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].invert_yaxis()
    plots.save(figure, path)


if __name__ == "__main__":
    run_command(main, Demo)
