"""Rows of results, in JSON Lines files that an interrupted run continues."""

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import filelock
from absl import logging

import kvjax
from kvjax_models import atomic_io

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Row:
    """The score of one question through one cache.

    Attributes:
        model: name of the model.
        task: name of the task, with its argument.
        policy: cache policy, as in policy strings.
        budget: budget as on the command line, of slots without the unit; None for the full cache.
        kv_dtype: quantization format of the cache; None if it is not quantized.
        question: whether the compressed prompt includes the question: "seen" or "unseen".
        tokens: maximum number of tokens of the task's prompts.
        seed: seed of documents and policies.
        document: name of the document.
        item: index of the question in its document.
        score: the score; None if the policy failed.
        metric: name of the score: "score" (larger is better) or "nll" (nats per token, smaller is better).
        dtype: dtype of the model and of unquantized caches in this run.
        answer: the generated answer.
        answer_tokens: its number of tokens, with the one that ends it; None in older rows.
        error: message of a failed policy.
        prompt_tokens: tokens of the compressed prompt.
        device_bytes: resident bytes of the cache in this run's dtypes, on the device; of the text if it is continued.
        host_bytes: resident bytes in host memory.
        read_bytes: bytes that a decode step reads.
        cache_fraction: resident bytes relative to a full bfloat16 cache of the text, with the policy's unquantized
            arrays in bfloat16 and without the bytes of question and answer.
        read_fraction: bytes read per decode step, relative to the same.
        tail_fraction: bytes that question and answer take, relative to the same; None with the question seen and in
            rows of version 0.3.0 and earlier, whose fractions include question and answer on both sides.
        settings: settings of the policy after the budget is resolved.
        chance: expected score of a random answer.
        kl: Kullback-Leibler divergence from the full cache's next-token distributions, in nats per token.
        version: version of kvjax.
    """

    model: str
    task: str
    policy: str
    budget: str | None
    kv_dtype: str | None
    question: str
    tokens: int
    seed: int
    document: str
    item: int
    score: float | None
    metric: str = "score"
    dtype: str = "float32"
    answer: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    read_bytes: int = 0
    cache_fraction: float = 0.0
    read_fraction: float = 0.0
    tail_fraction: float | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    chance: float = 0.0
    answer_tokens: int | None = None
    kl: float | None = None
    version: str = kvjax.__version__

    @property
    def setting(self) -> str:
        """Policy, budget and quantization, as tables show them."""
        budget = f" @ {self.budget}" if self.budget else ""
        return self.policy + budget + (f", {self.kv_dtype}" if self.kv_dtype else "")

    @property
    def key(self) -> tuple[Any, ...]:
        """The values that identify the measurement; a later row with the same key replaces an earlier one."""
        labels = self.model, self.task, self.setting, self.question, self.tokens, self.seed, self.dtype
        return (*labels, self.document, self.item)

    @property
    def is_of_text(self) -> bool:
        """Whether budget and shares are of the text alone, without question and answer."""
        return self.tail_fraction is not None


def group_by(key: Callable[[T], K], rows: Iterable[T]) -> dict[K, list[T]]:
    """Returns the rows of every value of a key, in the order of their first rows."""
    groups: dict[K, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def read_rows(paths: Iterable[pathlib.Path]) -> list[Row]:
    """Reads rows; lines that an interrupted run left incomplete are skipped, and repeated keys keep the last row.

    Rows of budgets of the text do not replace older ones (`Row.is_of_text`); any row with a score replaces a failure.

    Args:
        paths: JSON Lines files, compressed if their names end in .gz.

    Returns:
        The rows.

    Raises:
        ValueError: if a complete line is not a row.
    """
    rows: dict[tuple[Any, ...], Row] = {}  # by key and kind of budget
    for path in paths:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                row = Row(**json.loads(line))
            except (ValueError, TypeError) as error:
                if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                    logging.warning("%s, line %d is incomplete and is skipped", path, number)
                    continue
                raise ValueError(f"{path}, line {number} is not a row: {error}") from error
            earlier = rows.get((True, *row.key))
            if row.error is None and earlier is not None and earlier.error is not None:
                del rows[True, *row.key]
            rows[row.is_of_text or row.error is not None, *row.key] = row
    return list(rows.values())


class RowFile:
    """A JSON Lines file that one run appends rows to.

    Attributes:
        path: the file.
    """

    def __init__(self, path: pathlib.Path):
        """Opens a file and reads the rows that it has.

        Args:
            path: the file, which is created if it does not exist.

        Raises:
            ValueError: if another process writes to the file.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), blocking=False)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise ValueError(f"another process writes to {path}; pass another --output") from None
        self.rows = {row.key: row for row in read_rows([path] if path.exists() else [])}

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self.rows and self.rows[key].error is None  # failed settings are tried again

    def append(self, rows: Sequence[Row]) -> None:
        """Appends rows, which are on disk when this returns."""
        if rows:
            atomic_io.append_line(self.path, "\n".join(json.dumps(dataclasses.asdict(row)) for row in rows))
        self.rows |= {row.key: row for row in rows}

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())
