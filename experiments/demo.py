"""What compression is for, in two minutes: one text, many questions about it, through exact attention and compressed
caches, with memory, speed and right answers side by side.

    python -m experiments.demo          # or: make demo

Every text hides so many facts; it is read once, compressed before anyone asks, and all facts are asked for together,
each question a row of one batch that continues the same cache. Policies write in turns, so that what else the machine
does is in all of their times.
"""

import bisect
import dataclasses
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

import kvjax
from experiments.common import plots, results, settings, suites
from experiments.common.options import LANGUAGE_CHECKPOINT, command
from experiments.common.tasks import ruler
from experiments.common.tasks.problem import Problem
from kvjax.budget import format_bytes
from kvjax_models import language_model
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.state import GenerationState


@dataclasses.dataclass(frozen=True)
class Demo:
    """One text, many questions: memory, speed and right answers of compressed caches beside exact attention."""

    model: str = LANGUAGE_CHECKPOINT  # A Hugging Face directory, or the name of a shipped checkpoint.
    budget: str = "25%"  # What compressed caches may hold of exact's bytes.
    texts: int = 3  # Texts to read.
    facts: int = 16  # Facts in each, which are all asked for.
    tokens: int = 2500  # Of each text.
    answer_tokens: int = 16  # Written at a policy's turn; an answer is two turns long.
    seed: int = 60  # Decides texts. Settings were chosen on others.
    output_dir: str = "build/demo"  # Where the picture goes.


class Asked(NamedTuple):
    """A text's questions, as tokens."""

    context: list[int]
    questions: list[list[int]]
    problems: list[Problem]


@dataclasses.dataclass
class Tried:
    """What came of one policy."""

    name: str
    alone: Generator  # reads a text
    together: Generator  # answers all questions about it
    held: int = 0  # bytes of the caches of all rows
    read: list[float] = dataclasses.field(default_factory=list)  # seconds per text
    turns: list[float] = dataclasses.field(default_factory=list)  # seconds per step, all rows
    answers: list[str] = dataclasses.field(default_factory=list)


def main(given: Demo) -> None:
    llm = language_model.load(settings.model_directory(given.model))
    texts = [make_text(given, llm, given.seed + number) for number in range(given.texts)]
    print(
        f"{given.texts} texts of about {given.tokens:,} tokens, {given.facts} questions about each at once; caches of "
        f"{given.budget} of exact's bytes."
    )
    tried = run(given, llm, texts)
    show(given, texts, tried)
    path = pathlib.Path(given.output_dir) / "demo.png"
    draw(path, given, texts, tried)
    print(f"\nThe same as a picture: {path}")
    print("Next: kvjax generate --model DIRECTORY --prompt_file FILE --policy subgen --budget 25%")


def make_text(given: Demo, llm: language_model.LanguageModel, seed: int) -> Asked:
    """Facts hidden in prose, and a question for each.

    Raises:
        ValueError: where the facts alone are longer than the text may be.
    """
    needles = ruler.Needles("essay", keys=given.facts)

    def problems(words: int) -> list[Problem]:
        # The same draws for every size, so that a size decides nothing but how much text there is.
        hidden = ruler.hide(needles, np.random.default_rng(ruler.EVALUATION_SEED + seed), words)
        return [hidden.ask([number]) for number in range(given.facts)]

    def context(words: int) -> list[int]:
        return llm.tokenizer.encode(problems(words)[0].context)

    # As long as fits, so that all texts find the same compiled programs.
    words = bisect.bisect_right(range(1, given.tokens), given.tokens, key=lambda words: len(context(words)))
    if not words:
        raise ValueError(f"--tokens={given.tokens} are too few for --facts={given.facts}")
    found = problems(words)
    questions = [llm.tokenizer.encode(problem.question, add_bos=False) for problem in found]
    return Asked(context(words), questions, found)


def run(given: Demo, llm: language_model.LanguageModel, texts: list[Asked]) -> list[Tried]:
    """Every policy on every text."""
    longest = max(len(text.context) for text in texts)
    room = max(len(question) for text in texts for question in text.questions) + 2 * given.answer_tokens
    tried = []
    for name, policy in suites.NAMED.items():
        # A little past the positions that the model was trained on, where it still answers.
        sizes: dict[str, Any] = {"max_prompt_tokens": longest, "max_new_tokens": room, "allow_beyond_context": True}
        alone = llm.generator(policy, given.budget, **sizes)
        together = Generator(llm.model, alone.policies, batch=given.facts, **sizes)
        tried.append(Tried(name, alone, together))
    with tqdm(total=len(texts) * len(tried), desc="texts read and asked about", leave=False) as bar:
        for number, text in enumerate(texts):
            states = []
            for one in tried:
                if number == 0:
                    ask(one, text)  # compiles
                states.append(ask(one, text))
                bar.update()
            answer(given, llm, tried, states, compiles=number == 0)
    return tried


def ask(one: Tried, text: Asked) -> GenerationState:
    """Reads a text, compresses it, and reads all questions behind it."""
    begin = time.perf_counter()
    state = one.alone.prefill(one.alone.init_state(), [text.context])
    state.logits.block_until_ready()
    one.read.append(time.perf_counter() - begin)
    return one.together.prefill(kvjax.repeat_rows(state, len(text.questions)), text.questions)


def answer(
    given: Demo, llm: language_model.LanguageModel, tried: list[Tried], states: list[GenerationState], compiles: bool
) -> None:
    """Lets the policies write their answers in turns; the first of all compiles."""
    rows: list[list[list[int]]] = [[[] for _ in range(given.facts)] for _ in tried]
    for turn in range(2):
        for number, one in enumerate(tried):
            begin = time.perf_counter()
            for newest, tokens in one.together.decode(states[number], given.answer_tokens):
                states[number] = newest
                extend_rows(rows[number], tokens)
            states[number].logits.block_until_ready()
            if turn or not compiles:
                one.turns.append((time.perf_counter() - begin) / given.answer_tokens)
    for one, state, of_policy in zip(tried, states, rows, strict=True):
        kvjax.raise_faults(state)
        one.held = kvjax.cache_bytes(state.layers).device
        one.answers += map(llm.tokenizer.decode, of_policy)


def right(texts: list[Asked], one: Tried) -> int:
    """How many answers name the fact that was asked for."""
    problems = [problem for text in texts for problem in text.problems]
    return sum(ruler.score(found, problem.answers) == 1 for found, problem in zip(one.answers, problems, strict=True))


def show(given: Demo, texts: list[Asked], tried: list[Tried]) -> None:
    """The table, and one question with all answers."""
    exact = tried[0]
    lines = [
        (
            one.name,
            f"{format_bytes(one.held)} ({one.held / exact.held:.0%})",
            f"{1000 * statistics.median(one.turns):.1f} ms",
            f"{statistics.median(theirs / own for theirs, own in zip(exact.turns, one.turns, strict=True)):.1f}",
            f"{statistics.median(one.read[1:]):.2f} s",
            f"{right(texts, one)} of {given.texts * given.facts}",
        )
        for one in tried
    ]
    columns = ("", "cache", "per step", "times as fast", "to read a text", "right answers")
    results.print_table(f"{given.facts} answers at once", columns, lines)
    print("ClusterKV holds everything, and reads as much of it as the others hold.")
    problem = texts[0].problems[0]
    print(f"\n{problem.question.strip()} ... ({problem.answers[0]})")
    for one in tried:
        print(f"  {one.name:<15} {one.answers[0].strip()!r}")


def draw(path: pathlib.Path, given: Demo, texts: list[Asked], tried: list[Tried]) -> None:
    """Memory, time and right answers, a bar each."""
    asked = given.texts * given.facts
    panels: tuple[tuple[str, list[float], str], ...] = (
        ("cache, MiB", [one.held / 2**20 for one in tried], "{:.0f}"),
        ("milliseconds per step", [1000 * statistics.median(one.turns) for one in tried], "{:.0f}"),
        (f"right answers of {asked}", [right(texts, one) for one in tried], "{:.0f}"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 3), sharey=True)
    for axis, (title, values, form) in zip(axes, panels, strict=True):
        bars = axis.barh([one.name for one in tried], values, color=["0.6", *["C0"] * (len(tried) - 2), "C1"])
        axis.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlim(0, 1.18 * max(values))
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].invert_yaxis()
    plots.save(figure, path)


if __name__ == "__main__":
    command(main, Demo)
