"""Asks twelve questions about one text through compressed KV caches.

    make demo          # or: kvjax download smollm2-135m; python -m experiments.demo

The text is documentation of Python's standard library with twelve inserted facts. Every method reads and compresses it
once, before any question is known. The cache is then forked: each question is a row of one batch. All output fits
80 columns. In a terminal of this width the table of answers fills as the model writes.
"""

import cmd
import contextlib
import copy
import dataclasses
import heapq
import inspect
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import rich.box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import kvjax
from experiments.common import caches, plots
from experiments.common.console import print_table
from experiments.common.flags import Flags, run_command
from experiments.tasks.facts import ANSWER_TOKENS, FACTS, make_answers
from kvjax.budget import format_bytes
from kvjax_models import LanguageModel, load

WIDTH = 80  # columns of the output
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
    cache_bytes: int = 0  # of the compressed text, with capacity for one question and answer
    read_bytes: int = 0  # per generated token
    full_bytes: int = 0  # of a full bfloat16 cache
    prefill_seconds: float = 0.0
    step_seconds: list[float] = dataclasses.field(default_factory=list)

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
    context, questions = encode(llm, make_text(expected))
    print(f"{options.model} reads {len(context):,} tokens and answers {len(questions)} questions with every method.")
    outcomes: list[Outcome] = []
    console = Console()
    is_live = console.is_terminal and console.width >= WIDTH
    live = Live(console=Console(width=WIDTH), refresh_per_second=8) if is_live else None
    with live or contextlib.nullcontext():
        for method in DEMO:
            outcomes.append(Outcome(method, [""] * len(questions)))
            for _ in answer(llm, outcomes[-1], context, questions):
                if live is not None:
                    live.update(answer_table(outcomes, expected))
            if live is None:
                print(f"{method.name}: {sum(outcomes[-1].right(expected))} of {len(expected)} answers are right")
    if live is None:
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


def encode(llm: LanguageModel, text: str) -> tuple[list[int], list[list[int]]]:
    """Returns the tokens of the text, and of each question up to the start of its answer, in chat format."""
    chat = llm.tokenizer.render_chat([{"role": "user", "content": f"{text}\0"}])
    before, after = chat.split("\0")
    questions = [f"\n\n{question}{after}{sentence}" for question, sentence, _ in FACTS]
    context = llm.tokenizer.encode_continuation(before, context=())
    return context, [llm.tokenizer.encode_continuation(one, context) for one in questions]


def answer(llm: LanguageModel, outcome: Outcome, context: list[int], questions: list[list[int]]) -> Iterator[None]:
    """Compresses the text, forks the cache and answers all questions; yields after every token of the answers."""
    method = outcome.method
    generator = llm.generator(
        method.policy,
        method.budget,
        max_prompt_tokens=len(context),
        max_new_tokens=max(map(len, questions)) + ANSWER_TOKENS,
        kv_dtype=method.kv_dtype,
    )
    begin = time.perf_counter()
    state = generator.prefill(generator.init_state(), [context])
    state.logits.block_until_ready()
    outcome.prefill_seconds = time.perf_counter() - begin
    outcome.cache_bytes = kvjax.cache_bytes(state.layers).device
    outcome.read_bytes = sum(map(kvjax.read_bytes, state.layers))
    outcome.full_bytes = caches.full_bytes(generator, generator.specs[0].capacity)
    yield
    batch = generator.with_batch(len(questions))
    state = batch.prefill(kvjax.repeat_rows(state, len(questions)), questions)
    state.logits.block_until_ready()
    tokens: list[list[int]] = [[] for _ in questions]
    begin = time.perf_counter()
    for new_state, block in batch.decode(state, ANSWER_TOKENS, stream_interval=1):
        state = new_state
        outcome.step_seconds.append(time.perf_counter() - begin)
        for row, new in zip(tokens, block.tolist(), strict=True):
            row += [token for token in new if token >= 0]  # negative after the end of an answer
        pairs = zip(tokens, questions, strict=True)
        outcome.answers = [llm.tokenizer.decode_continuation(*pair).strip().partition("\n")[0] for pair in pairs]
        yield
        begin = time.perf_counter()
    kvjax.raise_faults(state)


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
    """Returns an answer, marked if it is wrong; nothing before its first token."""
    shown = answer if len(answer) <= 20 else f"{answer[:19]}…"
    return Text(shown, "green") if right else Text(f"{WRONG}{shown}" if answer else "", "red")


def show(outcomes: list[Outcome], expected: list[str]) -> None:
    """Prints the number of correct answers, memory and times."""
    lines = [
        (
            outcome.method.name,
            f"{sum(outcome.right(expected))}/{len(expected)}",
            f"{format_bytes(outcome.cache_bytes)} ({outcome.cache_bytes / outcome.full_bytes:.0%})",
            f"{outcome.read_bytes / outcome.full_bytes:.0%}",
            f"{outcome.prefill_seconds:.1f}",
            f"{1000 * statistics.median(outcome.step_seconds[1:]):.0f}",
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
    print(f'"read" is per token, "ms" per step of {len(expected)} rows. Seconds include compilation.')
    print("Percentages are of a full bfloat16 cache with one question and answer.")
    print("One text, twelve questions: two or three answers more may be chance.")


def draw(path: pathlib.Path, outcomes: list[Outcome], expected: list[str]) -> None:
    """Draws answers, memory and time, one bar per method."""
    panels = (
        (f"right answers of {len(expected)}", [float(sum(outcome.right(expected))) for outcome in outcomes]),
        ("cache in MiB", [outcome.cache_bytes / 2**20 for outcome in outcomes]),
        (f"ms per {len(expected)} tokens", [1000 * statistics.median(one.step_seconds[1:]) for one in outcomes]),
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
