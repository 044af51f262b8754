"""`kvjax bench`: compares memory and speed of policies with the full cache on this machine."""

import dataclasses
import statistics
import time

import numpy as np

from kvjax.budget import format_bytes
from kvjax_models.cache import MAX_ROWS
from kvjax_models.cli.options import ModelOptions, read_text, repeatable
from kvjax_models.cli.output import format_table, write_output
from kvjax_models.engine import Engine
from kvjax_models.language_model import LanguageModel
from kvjax_models.runner.auto_policy import NamedPolicy
from kvjax_models.runner.state import check_seed


@dataclasses.dataclass(frozen=True)
class Bench(ModelOptions):
    """Compares memory and speed of policies with the full cache, interleaved in one run."""

    policy: list[str] = repeatable("POLICY")  # As for `generate`; repeatable. By default auto.
    budget: str | None = None  # As for `generate`.
    context_tokens: int = 4096  # Tokens of the prompt.
    prompt_file: str | None = None  # A text for the prompt, repeated as needed; random tokens by default.
    batch: int = 1  # Batch rows.
    tokens: int = 16  # Tokens per turn.
    turns: int = 7  # Turns per policy; times are medians.

    def run(self) -> None:
        """Runs the command.

        Raises:
            ValueError: if a number is invalid, or no policy takes the budget.
        """
        if min(self.context_tokens, self.batch, self.tokens, self.turns) < 1:
            raise ValueError("--context_tokens, --batch, --tokens and --turns must be at least 1")
        if self.batch > MAX_ROWS:
            raise ValueError(f"--batch={self.batch} must be at most {MAX_ROWS} rows")
        check_seed(self.seed)
        choices = [NamedPolicy.parse("exact"), *map(self._parse, self.policy or ["auto"])]
        write_output(_table(self, measure(self, self.load(), list(dict.fromkeys(choices)))))

    def _parse(self, text: str) -> NamedPolicy:
        """Returns a policy with the budget, unless it takes none and other policies do."""
        ignores_budget = "@" in text or not self.parse_policy(text, None).takes_budget
        return self.parse_policy(text, None if ignores_budget and len(self.policy) > 1 else self.budget)


@dataclasses.dataclass
class Measurement:
    """The engine of one policy and its times.

    Attributes:
        choice: the policy.
        engine: an engine whose rows have the same prompt.
        prefill: seconds of prefill of one row.
        turns: seconds per decode step in every turn.
    """

    choice: NamedPolicy
    engine: Engine
    prefill: float
    turns: list[float]

    @property
    def per_token(self) -> float:
        """Median seconds per decode step of all rows."""
        return statistics.median(self.turns)


def measure(options: Bench, llm: LanguageModel, choices: list[NamedPolicy]) -> list[Measurement]:
    """Prefills one prompt with every policy, then decodes with the policies in turns.

    Args:
        options: sizes of the benchmark.
        llm: the model.
        choices: the policies.

    Returns:
        One measurement per policy.
    """
    prompt = _prompt(options, llm)
    max_new_tokens = (options.turns + 1) * options.tokens  # the first turn compiles
    measurements = []
    for choice in choices:
        cache = llm.cache(choice, kv_dtype=options.kv_formats, allow_beyond_context=True)
        generator = cache.generator(max_prompt_tokens=len(prompt), max_new_tokens=max_new_tokens)
        sizes = (dataclasses.replace(generator, eos=()),)  # finished sequences would take no time
        engine = Engine(
            llm.model, llm.tokenizer, lambda *_, sizes=sizes: sizes, rows=options.batch, stream_interval=options.tokens
        )
        for _ in range(options.batch):  # the rows share one prefill
            engine.add(prompt, max_new_tokens=max_new_tokens, seed=options.seed)
        _decode(engine, options.tokens)
        measurements.append(Measurement(choice, engine, engine.prefill_seconds, []))
    for _ in range(options.turns):
        for one in measurements:
            begin = time.perf_counter()
            _decode(one.engine, options.tokens)
            one.turns.append((time.perf_counter() - begin) / options.tokens)
    return measurements


def _decode(engine: Engine, tokens: int) -> None:
    """Decodes `tokens` tokens in every row.

    Raises:
        ValueError: if a row has a fault.
    """
    num_decoded = 0
    while num_decoded < tokens:
        outputs = engine.step()
        if error := next((output.error for output in outputs if output.error is not None), None):
            raise ValueError(error)
        num_decoded += len(outputs[0].tokens)


def _prompt(options: Bench, llm: LanguageModel) -> list[int]:
    """Returns the tokens of the prompt."""
    if options.prompt_file is None:
        random = np.random.default_rng(options.seed)
        return random.integers(0, llm.tokenizer.vocab_size, options.context_tokens).tolist()
    tokens = llm.encode(read_text(options.prompt_file))
    return (tokens * -(-options.context_tokens // len(tokens)))[: options.context_tokens]


def _table(options: Bench, measurements: list[Measurement]) -> str:
    """Returns a table with one line per policy; the first one is the full cache."""
    full = measurements[0]
    lines = [("policy", "cache", "of full bfloat16", "first token", "per token", "speedup", "tokens/s")]
    for one in measurements:
        usage = one.engine.usage
        # The median of ratios of simultaneous turns is insensitive to other load on the machine.
        speedup = statistics.median(theirs / ours for theirs, ours in zip(full.turns, one.turns, strict=True))
        lines.append(
            (
                str(one.choice),
                format_bytes(usage.cache_bytes),
                f"{usage.cache_bytes / usage.full_cache_bytes:.1%}",
                f"{one.prefill:.2f} s",
                f"{1000 * one.per_token:.2f} ms",
                f"{speedup:.2f}",
                f"{options.batch / one.per_token:.1f}",
            )
        )
    return f"{options.context_tokens} tokens, batch {options.batch}\n{format_table(lines)}"
