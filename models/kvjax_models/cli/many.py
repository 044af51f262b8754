"""`kvjax generate --prompts_file`: completes a file of prompts by continuous batching.

    kvjax generate --model DIR --prompts_file IN.jsonl --output OUT.jsonl --batch_size 8 --policy auto --budget 25%

Each line of the file is a text, or an object with `prompt` or `messages` and optionally `max_new_tokens`, `seed` and
`id`. Completions are appended to the output as they finish, and sorted when all of them are complete. An interrupted
run can be resumed with --resume; `OUT.jsonl.run.json` contains the settings of the run.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from tqdm import tqdm

import kvjax
from kvjax.budget import format_bytes
from kvjax_models import atomic_io, devices
from kvjax_models.cache import CachedModel, parse_rows
from kvjax_models.cli.options import GenerationOptions, read_text
from kvjax_models.cli.progress import is_terminal
from kvjax_models.engine import seed_of_prompt
from kvjax_models.fingerprint import describe_model, tokenizer_fingerprint
from kvjax_models.language_model import LanguageModel
from kvjax_models.runner.state import check_seed
from kvjax_models.saves import describe_difference

FORMAT = 6  # of OUT.jsonl.run.json
_KEYS = {"prompt", "messages", "max_new_tokens", "seed", "id"}


class PromptLine(NamedTuple):
    """A line of a file of prompts."""

    tokens: list[int]
    max_new_tokens: int
    seed: int
    id: Any  # None if the line has none


def complete_file(
    options: GenerationOptions,
    llm: LanguageModel,
    prompts_file: str,
    output_file: str,
    *,
    stop: list[str],
    batch_size: str,
    resume: bool,
) -> None:
    """Completes every prompt of a file.

    Invalid lines raise a ValueError with their number. So does output that exists without `resume` or belongs to
    another run. If another process writes the output, an OSError is raised.

    Args:
        options: options of the command.
        stop: strings that finish a completion.
        batch_size: maximum number of batch rows, or bytes for the caches of all rows ("2GiB").
        resume: whether to continue an interrupted run.
    """
    lines = _read_lines(options, llm, prompts_file)
    cache, (rows, max_bytes) = options.cache(llm), parse_rows(batch_size)
    engine = cache.engine(rows=rows, max_bytes=max_bytes)
    manifest = _manifest(options, stop, llm, cache, lines)
    output = Output(pathlib.Path(output_file), manifest, len(lines), resume=resume)
    numbers: dict[int, int] = {}  # of the lines, by request
    for number, line in enumerate(lines):
        if number not in output.rows:
            request = engine.add(
                line.tokens,
                sampling=options.sampling,
                stop=stop,
                max_new_tokens=line.max_new_tokens,
                seed=line.seed,
            )
            numbers[request] = number
    is_quiet = options.quiet or not is_terminal() or not devices.is_first_process()
    with tqdm(total=len(lines), initial=len(output.rows), unit="prompt", disable=is_quiet) as progress:
        for completion in engine.completions(numbers):
            line = lines[completion.number]
            row = {"number": completion.number} | ({} if line.id is None else {"id": line.id})
            row |= {"text": completion.text, "finish_reason": completion.finish_reason}
            row |= {"prompt_tokens": len(line.tokens), "new_tokens": len(completion.tokens)}
            output.add(row)
            progress.update()
    output.finish()
    cache_bytes = format_bytes(engine.usage.cache_bytes)
    options.write_summary(f"{len(numbers)} prompts, whose caches took up to {cache_bytes} at a time")


class Output:
    """A file of completions, one JSON object per line, with a manifest in a second file."""

    def __init__(self, path: pathlib.Path, manifest: dict[str, Any], count: int, *, resume: bool):
        """Creates or resumes a file.

        If another process writes the file, an OSError is raised.

        Args:
            path: the file.
            manifest: all values that determine the completions; a resumed file must have the same.
            count: number of completions.
            resume: whether to continue an existing file.

        Raises:
            ValueError: if the file exists without `resume`, or belongs to another run.
        """
        self.path, self.count = path, count
        self.rows: dict[int, dict[str, Any]] = {}
        manifest_path = path.with_name(f"{path.name}.run.json")

        def begin() -> None:
            self._lock = atomic_io.lock_directory(path.parent, f".{path.name}.lock")  # held as long as this object
            if path.exists() and not resume:
                raise ValueError(f"{path} exists; continue it with --resume or use another --output")
            if not path.exists():
                atomic_io.write_text(manifest_path, json.dumps(manifest, indent=1) + "\n")

        atomic_io.run_on_first_process(begin)
        try:
            saved_manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{manifest_path}, the manifest of {path}, cannot be read: {error}") from error
        if difference := describe_difference(manifest, saved_manifest):
            raise ValueError(f"{path} belongs to another run: {difference}")
        if path.exists():
            self._read()
        devices.check_agreement(str(path), json.dumps(sorted(self.rows)))

    def _read(self) -> None:
        """Reads the completions of an interrupted run."""
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if not 0 <= row["number"] < self.count:
                    raise ValueError(f"prompt {row['number']} does not exist")
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                # A truncated last line is expected after an interruption.
                if line and number < len(lines) and devices.is_first_process():
                    logging.warning("%s, line %d is ignored and its prompt runs again: %s", self.path, number, error)
            else:
                self.rows[row["number"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Appends a completion, which is on disk when this returns.

        Args:
            row: the completion as a JSON object; `row["number"]` is the number of its prompt.
        """
        self.rows[row["number"]] = row
        line = _row_line(row)
        atomic_io.run_on_first_process(lambda: atomic_io.append_line(self.path, line))

    def finish(self) -> None:
        """Sorts all completions in the order of their prompts."""
        lines = [_row_line(self.rows[number]) + "\n" for number in range(self.count)]
        atomic_io.run_on_first_process(lambda: atomic_io.write_text(self.path, "".join(lines)))


def _row_line(row: dict[str, Any]) -> str:
    """Returns a completion as a line."""
    return json.dumps(row, ensure_ascii=False)


def _read_lines(options: GenerationOptions, llm: LanguageModel, path: str) -> list[PromptLine]:
    """Reads the prompts of a file; empty lines are skipped.

    Returns:
        The prompts.

    Raises:
        ValueError: if a line is invalid or the file has no prompts.
    """
    lines: list[PromptLine] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                value = json.loads(line)
                json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair could not be written
                lines.append(_parse_line(options, llm, value, len(lines)))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise ValueError(f"{path} contains no prompts")
    return lines


def _parse_line(options: GenerationOptions, llm: LanguageModel, line: Any, number: int) -> PromptLine:
    """Returns a prompt from its JSON value.

    Raises:
        ValueError: if the value is invalid.
    """
    values = {"prompt": line} if isinstance(line, str) else line
    if not isinstance(values, dict) or ("prompt" in values) == ("messages" in values):
        raise ValueError("a line must be a text, or an object with either prompt or messages")
    if unknown := values.keys() - _KEYS:
        raise ValueError(f"unknown keys {', '.join(sorted(unknown))}; allowed: {', '.join(sorted(_KEYS))}")
    for name in ("max_new_tokens", "seed"):
        if type(values.get(name, 1)) is not int:
            raise ValueError(f"{name}={values[name]!r} must be an integer")
    prompt = values["prompt"] if "prompt" in values else values["messages"]
    if not isinstance(prompt, str if "prompt" in values else list):
        raise ValueError("prompt must be a text, and messages a list of objects with role and content")
    tokens = llm.encode(prompt, options.chat_options)
    max_new_tokens = values.get("max_new_tokens", options.max_new_tokens)
    if not tokens or max_new_tokens < 1:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens and max_new_tokens={max_new_tokens}; both must be at least 1"
        )
    seed = values.get("seed", seed_of_prompt(options.seed, number))
    return PromptLine(tokens, max_new_tokens, int(check_seed(seed)), values.get("id"))


def _manifest(
    options: GenerationOptions, stop: list[str], llm: LanguageModel, cache: CachedModel, lines: Sequence[PromptLine]
) -> dict[str, Any]:
    """Returns all values that determine the completions; the number of batch rows does not."""
    lengths = max(len(line.tokens) for line in lines), max(line.max_new_tokens for line in lines)
    generator = cache.rows(*lengths)[-1]  # of the longest line
    state = jax.tree_util.tree_leaves_with_path(jax.eval_shape(generator.init_state))
    budget = None if cache.budget is None else dataclasses.asdict(cache.budget) | {"text": None}
    names = ("batch", "max_prompt_tokens", "max_new_tokens", "streaming")
    return {  # the decisive values first
        "format": FORMAT,
        "model": describe_model(generator.model),
        "budget": budget,  # shorter lines may differ where the longest one has an equal policy
        "sizes": {name: getattr(generator, name) for name in names},
        "policy": [kvjax.describe(policy) for policy in generator.policies],
        "arrays": {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in state},
        "tokenizer": tokenizer_fingerprint(llm.tokenizer),
        "sampling": dataclasses.asdict(options.sampling),
        "stop": stop,
        "prompts": hashlib.sha256(json.dumps(lines).encode()).hexdigest(),
    }
