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
import time
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.common import plots
from experiments.common.console import print_table
from experiments.common.flags import Flags, run_command
from experiments.tasks.facts import ANSWER_TOKENS, FACTS, is_word, make_answers
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
        budget: share of a full bfloat16 cache.
        kv_dtype: quantization of keys and values.
        note: description.
    """

    name: str
    policy: str
    budget: str | None = "25%"
    kv_dtype: Any = None
    note: str = ""


DEMO = (
    DemoMethod("full cache", "exact", None, "bfloat16", "all keys and values in bfloat16"),
    DemoMethod("4 bits", "exact", None, "int4", "all keys and values in 4 bits"),
    DemoMethod("auto 25%", "auto", note="all tokens in the heads that retrieve, KVzap in the others, 8 bits"),
    DemoMethod("auto 12.5%", "auto", "12.5%", note="the same in 4 bits and an eighth of the bytes"),
    DemoMethod("Chelsea", "chelsea:heads=auto", "25%", "int8", "the same heads, centroids in the others, 8 bits"),
    DemoMethod("BalanceKV", "balancekv:heads=auto", "25%", "int8", "the same heads, samples in the others, 8 bits"),
)
SHOWN = "auto 12.5%"  # the method whose kept tokens are drawn


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the demo."""

    model: str = "smollm2-135m"  # A name of `kvjax models`, a GGUF file or a Hugging Face directory.
    seed: int = 0  # Seed of the numbers in the facts.
    output_dir: pathlib.Path = pathlib.Path("build/demo")  # Directory of the picture.


@dataclasses.dataclass
class Outcome:
    """Answers, sizes and times of one method."""

    method: DemoMethod
    answers: list[str]
    right: list[bool]  # whether each answer is right
    cache_bytes: int  # of the compressed text
    read_bytes: int  # of the text, per step
    full_bytes: int  # of a full bfloat16 cache of the text
    read_seconds: float
    token_seconds: float  # per token of one sequence
    kept: Any  # share of a slot of every token [layers, KV heads, tokens], of the method `SHOWN`


def main(options: Options) -> None:
    """Answers the questions with every method, prints the tables and draws the picture."""
    begin = time.perf_counter()
    llm = load(options.model)
    expected = make_answers(np.random.default_rng(options.seed))
    text = make_text(expected)
    print(f"{options.model} reads a text and answers {len(FACTS)} questions with every method.")
    outcomes = []
    for method in DEMO:
        outcomes.append(answer(llm, method, text, expected))
        print(f"{method.name}: {sum(outcomes[-1].right)} of {len(expected)} answers are right", flush=True)
    Console(width=WIDTH).print(answer_table(outcomes, expected))
    show(outcomes)
    path = options.output_dir / "demo.png"
    draw(path, next(one for one in outcomes if one.method.name == SHOWN))
    print(f"\nPicture: {path}")
    print(f"Total time: {time.perf_counter() - begin:.0f} s. Later runs reuse compiled programs.")
    print("Next:")
    print(f"  kvjax chat --model {options.model} --policy auto --budget 1024slots")
    print(f"  kvjax generate --model {options.model} --prompt_file FILE --budget 25% ...")
    print(f"  kvjax bench --model {options.model} --context_tokens 4096 --policy auto")


def make_text(answers: list[str]) -> str:
    """Returns paragraphs of documentation with the facts at equal distances."""
    sources = (heapq.__about__, copy.__doc__, cmd.Cmd.__doc__)
    blocks = "\n\n".join(inspect.cleandoc(source or "") for source in sources).split("\n\n")
    paragraphs = [" ".join(block.split()) for block in blocks]
    paragraphs = [text for text in paragraphs if len(text) >= 80 and not text[0].isdigit()]
    for number, ((_, sentence, _), value) in enumerate(zip(FACTS, answers, strict=True)):
        paragraphs[int((number + 0.5) * len(paragraphs) / len(FACTS))] += f" {sentence} {value}."
    return "\n\n".join(paragraphs)


def answer(llm: LanguageModel, method: DemoMethod, text: str, expected: list[str]) -> Outcome:
    """Compresses the text and asks all questions; every answer starts with the sentence of its fact."""
    cache = llm.cache(method.policy, method.budget, kv_dtype=method.kv_dtype)
    begin = time.perf_counter()
    document = cache.read(text, max_new_tokens=CAPACITY, template_options={"continue_final_message": True})
    document.prefix.logits.block_until_ready()
    read_seconds = time.perf_counter() - begin
    questions = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": sentence}]
        for question, sentence, _ in FACTS
    ]
    completions = document.ask(questions, max_new_tokens=ANSWER_TOKENS)
    timed = [document.ask(questions[:1], max_new_tokens=ANSWER_TOKENS, return_details=True) for _ in range(2)]
    [one], usage = timed[-1]  # the first run compiles
    answers = [text.strip().partition("\n")[0] for text in completions]
    return Outcome(
        method,
        answers,
        [is_word(answer, value) for answer, value in zip(answers, expected, strict=True)],
        document.cache_bytes,
        document.prefix.read_bytes,
        document.full_cache_bytes,
        read_seconds,
        usage.decode_seconds / max(len(one.tokens), 1),
        document.kept() if method.name == SHOWN else None,
    )


def answer_table(outcomes: list[Outcome], expected: list[str]) -> Table:
    """Returns the table of answers: right ones as "ok" in green, wrong ones in red after an x."""
    title = f'Answers; "{WRONG.strip()}" marks a wrong one'
    table = Table(title=title, title_justify="left", box=rich.box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("fact", width=8, no_wrap=True)
    for outcome in outcomes:
        table.add_column(outcome.method.name, width=10, no_wrap=True)
    for number, value in enumerate(expected):
        cells = [
            Text("ok", "green") if one.right[number] else Text(f"{WRONG}{one.answers[number][:8]}", "red")
            for one in outcomes
        ]
        table.add_row(value, *cells)
    return table


def show(outcomes: list[Outcome]) -> None:
    """Prints the number of correct answers, memory and times."""
    lines = []
    for one in outcomes:
        held, read = (f"{part / one.full_bytes:.0%}" for part in (one.cache_bytes, one.read_bytes))
        times = f"{one.read_seconds:.1f}", f"{1000 * one.token_seconds:.0f}"
        right, cache = f"{sum(one.right)}/{len(one.right)}", f"{format_bytes(one.cache_bytes)} ({held})"
        lines.append((one.method.name, right, cache, read, *times))
    print_table("Results", ("method", "right", "cache", "read", "compress, s", "ms/token"), lines)
    for outcome in outcomes:
        print(f"{outcome.method.name}: {outcome.method.note}")
    print("Percentages are of a full bfloat16 cache of the text. A step reads the text once")
    print('for all questions. "ms/token" is of one sequence; "compress" and the total time')
    print("include compilation.")
    print("One text, twelve questions: two or three answers more may be chance.")


def draw(path: pathlib.Path, outcome: Outcome) -> None:
    """Draws the tokens that every KV head keeps."""
    layers, heads, tokens = outcome.kept.shape
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    shares = np.sqrt(np.clip(outcome.kept, 0, 1)).reshape(layers * heads, tokens)
    axis.imshow(shares, aspect="auto", cmap="Blues", interpolation="nearest")
    axis.set_title(f"tokens that {outcome.method.name} keeps: a row per KV head", fontsize=9, loc="left")
    axis.set(xlabel="position in the text", ylabel="KV head, by layer")
    plots.save(figure, path)


if __name__ == "__main__":
    run_command(main, Options)
