"""`kvjax generate --prompts_file`: a file of prompts through a fixed number of rows, into a file of texts.

    kvjax generate --model DIR --prompts_file IN.jsonl --output OUT.jsonl --batch_size 8 --policy subgen --budget 25%

A line of the file is a text, or an object with `prompt` or `messages`, and maybe `max_new_tokens`, `seed` and an `id`.
Texts are written as they end, a line each, and put in the file's order when all are there; a run that was stopped goes
on with --resume. Beside the output stands what it belongs to (`OUT.jsonl.run.json`).
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import logging
from tqdm import tqdm

from kvjax.budget import format_bytes
from kvjax_models import atomic_io, devices, fingerprint
from kvjax_models.cli.options import GenerationOptions, read_text, write_status
from kvjax_models.generation.batching import Request
from kvjax_models.generation.completions import generate_completions
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.saved_states import describe_differences, describe_generator
from kvjax_models.language_model import LanguageModel

FORMAT = 2  # of what stands beside the output
_KNOWN = {"prompt", "messages", "max_new_tokens", "seed", "id"}


class Asked(NamedTuple):
    """A line of a file of prompts."""

    request: Request
    id: Any  # None where the line has none


def write_file(
    given: GenerationOptions,
    llm: LanguageModel,
    source: str,
    output: str,
    batch_size: str,
    stop: Sequence[str],
    resume: bool,
) -> None:
    """Writes what follows every prompt of a file.

    Raises:
        ValueError: for a line that is no prompt, with its number; output that is there and is not to be gone on with,
            or that is of another run, with what differs.
        OSError: where another process writes it.
    """
    asked = _read(given, llm, source)
    longest = max(len(one.request.prompt) for one in asked)
    room = max(one.request.max_new_tokens for one in asked)
    generator = llm.batch_generator(
        given.choice, None, batch_size, longest, room, given.sampling, given.allow_beyond_context, given.kv_formats
    )
    belongs = _belonging(llm, generator, asked, stop)
    written = Output(pathlib.Path(output), belongs, len(asked), resume=resume)
    left = [one.request for one in asked if one.request.number not in written.rows]
    with tqdm(
        total=len(asked), initial=len(written.rows), unit="prompt", disable=not devices.is_first_process()
    ) as bar:
        for found in generate_completions(llm.tokenizer, generator, left, stop=stop):
            one = asked[found.number]
            row = {"number": found.number} | ({} if one.id is None else {"id": one.id})
            row |= {"text": found.text, "finish_reason": found.finish_reason}
            row |= {"prompt_tokens": len(one.request.prompt), "new_tokens": len(found.tokens)}
            written.add(row)
            bar.update()
    written.finish()
    held = format_bytes(generator.batch * generator.row_bytes)
    write_status(f"[{given.choice}: {len(left)} prompts through {generator.batch} rows, whose caches take {held}]")


class Output:
    """A file of texts that is being written, one JSON object per line, and what it belongs to in a file beside it.

    Args:
        belongs: what decides the texts.
        count: how many there will be.
        resume: go on with what is there.

    Raises:
        ValueError, OSError: as `write_file`.
    """

    def __init__(self, path: pathlib.Path, belongs: dict[str, Any], count: int, *, resume: bool):
        self.path, self.count = path, count
        self.rows: dict[int, dict[str, Any]] = {}
        beside = path.with_name(f"{path.name}.run.json")

        def begin() -> None:
            self._lock = atomic_io.lock_directory(path.parent, f".{path.name}.lock")  # held as long as this is
            if path.exists() and not resume:
                raise ValueError(f"{path} is there already: go on with --resume, or give another --output")
            if not path.exists():
                atomic_io.write_text(beside, json.dumps(belongs, indent=1) + "\n")

        atomic_io.run_on_first_process(begin)
        try:
            found = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{beside}, which says what {path} belongs to, cannot be read: {error}") from error
        if differences := describe_differences(belongs, found):
            raise ValueError(f"{path} is not of this run: {differences}")
        if path.exists():
            self._read()
        devices.check_agreement(str(path), json.dumps(sorted(self.rows)))

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if not 0 <= row["number"] < self.count:
                    raise ValueError(f"there is no prompt {row['number']}")
            except (ValueError, TypeError, KeyError) as error:
                # What follows the last line's end is what a stop cut off.
                if line and number < len(lines) and devices.is_first_process():
                    logging.warning("%s, line %d is left out, and its prompt runs again: %s", self.path, number, error)
            else:
                self.rows[row["number"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Adds a text, which is on the disk when this returns."""
        self.rows[row["number"]] = row
        atomic_io.run_on_first_process(lambda: atomic_io.append_line(self.path, json.dumps(row, ensure_ascii=False)))

    def finish(self) -> None:
        """Puts all texts in the order of their prompts."""
        lines = [json.dumps(self.rows[number], ensure_ascii=False) + "\n" for number in range(self.count)]
        atomic_io.run_on_first_process(lambda: atomic_io.write_text(self.path, "".join(lines)))


def _read(given: GenerationOptions, llm: LanguageModel, source: str) -> list[Asked]:
    """The prompts of a file; empty lines are none."""
    found: list[Asked] = []
    for number, line in enumerate(read_text(source).split("\n"), start=1):
        if line.strip():
            try:
                found.append(_asked(given, llm, json.loads(line), len(found)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{source}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{source} holds no prompt")
    return found


def _asked(given: GenerationOptions, llm: LanguageModel, line: Any, number: int) -> Asked:
    values = {"prompt": line} if isinstance(line, str) else line
    if not isinstance(values, dict) or ("prompt" in values) == ("messages" in values):
        raise ValueError("it must be a text, or an object with either prompt or messages")
    if unknown := values.keys() - _KNOWN:
        raise ValueError(f"{', '.join(sorted(unknown))}: not known; known are {', '.join(sorted(_KNOWN))}")
    for name in ("max_new_tokens", "seed"):
        if type(values.get(name, 1)) is not int:
            raise ValueError(f"{name}={values[name]!r}; it must be a whole number")
    prompt = values["prompt"] if "prompt" in values else values["messages"]
    if not isinstance(prompt, str if "prompt" in values else list):
        raise ValueError("prompt must be a text, messages a list of objects with role and content")
    request = Request(
        llm.encode(prompt),
        values.get("max_new_tokens", given.max_new_tokens),
        seed=values.get("seed", given.seed + number),
        number=number,
    )
    if not request.prompt or request.max_new_tokens < 1:
        raise ValueError(
            f"a prompt of {len(request.prompt)} tokens, {request.max_new_tokens} to write: at least 1 each"
        )
    return Asked(request, values.get("id"))


def _belonging(llm: LanguageModel, generator: Generator, asked: Sequence[Asked], stop: Sequence[str]) -> dict[str, Any]:
    """What texts follow from; the number of rows is not among it."""
    prompts = [(list(one.request.prompt), one.request.max_new_tokens, one.request.seed, one.id) for one in asked]
    return {
        "format": FORMAT,
        **describe_generator(generator.with_batch(1)),
        "tokenizer": fingerprint.tokenizer_fingerprint(llm.tokenizer),
        "sampling": dataclasses.asdict(generator.sampling),
        "stop": list(stop),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }
