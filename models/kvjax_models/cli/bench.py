"""`kvjax bench`: memory and speed of policies beside exact attention, on this machine, in one run."""

import dataclasses
import statistics
import time

import numpy as np

import kvjax
from kvjax.budget import format_bytes
from kvjax.registry import PolicyChoice
from kvjax_models.cli.options import ModelOptions, read_text, repeatable, write_output
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState
from kvjax_models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Bench(ModelOptions):
    """Memory and speed of policies beside exact attention, taken in turns in one run."""

    policy: list[str] = repeatable("POLICY")  # As `generate` takes it; repeatable. By default streaming_llm and subgen.
    budget: str = "25%"  # Slots per head (1024), a share of exact's bytes (25%) or bytes (64MiB).
    context_tokens: int = 4096  # Tokens of the prompt.
    prompt_file: str | None = None  # A text to fill it with, over and over; random tokens without.
    batch: int = 1  # Rows.
    tokens: int = 16  # Tokens that a policy writes at its turn.
    turns: int = 7  # Of each policy; times are their medians.

    def run(self) -> None:
        if min(self.context_tokens, self.batch, self.tokens, self.turns) < 1:
            raise ValueError("--context_tokens, --batch, --tokens and --turns must be at least 1")
        choices = [PolicyChoice.parse("exact")]
        choices += [self.parse_policy(text, self.budget) for text in self.policy or ("streaming_llm", "subgen")]
        write_output(_table(self, measure(self, self.load(), list(dict.fromkeys(choices)))))


@dataclasses.dataclass
class Measured:
    """One policy's state, and its times in seconds."""

    choice: PolicyChoice
    generator: Generator
    state: GenerationState
    prefill: float
    turns: list[float]

    @property
    def per_token(self) -> float:
        """Seconds per step of decoding, all rows."""
        return statistics.median(self.turns)


def measure(given: Bench, llm: LanguageModel, choices: list[PolicyChoice]) -> list[Measured]:
    """Reads one prompt through every policy, and lets them write in turns."""
    prompt = _prompt(given, llm)
    room = (given.turns + 1) * given.tokens  # the first turn compiles
    found = []
    for choice in choices:
        generator = llm.generator(
            choice,
            batch=given.batch,
            max_prompt_tokens=len(prompt),
            max_new_tokens=room,
            allow_beyond_context=True,
            kv_dtype=given.kv_formats,
        )
        generator.eos = ()  # a row that ended would cost nothing
        _read(generator, prompt, given.seed)  # compiles
        begin = time.perf_counter()
        state = _read(generator, prompt, given.seed)
        found.append(Measured(choice, generator, state, time.perf_counter() - begin, []))
    for turn in range(given.turns + 1):
        for one in found:
            begin = time.perf_counter()
            for newest, _ in one.generator.decode(one.state, given.tokens):
                one.state = newest
            one.state.logits.block_until_ready()
            if turn:
                one.turns.append((time.perf_counter() - begin) / given.tokens)
    for one in found:
        kvjax.raise_faults(one.state)
    return found


def _read(generator: Generator, prompt: list[int], seed: int) -> GenerationState:
    state = generator.prefill(generator.init_state(seed), [prompt] * generator.batch)
    state.logits.block_until_ready()
    return state


def _prompt(given: Bench, llm: LanguageModel) -> list[int]:
    """So many tokens."""
    if given.prompt_file is None:
        random = np.random.default_rng(given.seed)
        return random.integers(0, llm.tokenizer.vocab_size, given.context_tokens).tolist()
    tokens = llm.encode(read_text(given.prompt_file))
    return (tokens * -(-given.context_tokens // len(tokens)))[: given.context_tokens]


def _table(given: Bench, found: list[Measured]) -> str:
    """A line per policy, beside exact, which is the first."""
    exact = found[0]
    lines = [("policy", "cache", "of exact's", "first token", "per token", "times as fast", "tokens/s")]
    for one in found:
        held, whole = (kvjax.cache_bytes(each.state.layers).device for each in (one, exact))
        # Ratios of turns that stood next to each other: what else the machine does is in both.
        faster = statistics.median(theirs / own for theirs, own in zip(exact.turns, one.turns, strict=True))
        lines.append(
            (
                str(one.choice),
                format_bytes(held),
                f"{held / whole:.0%}",
                f"{one.prefill:.2f} s",
                f"{1000 * one.per_token:.2f} ms",
                f"{faster:.2f}",
                f"{given.batch / one.per_token:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return f"{given.context_tokens} tokens, batch {given.batch}\n" + "\n".join(rows) + "\n"
