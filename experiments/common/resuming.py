"""Long runs in units that a second start does not repeat."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import filelock
from absl import logging

from experiments.common.results import Row, from_flat
from kvjax_models import atomic_io, devices

K = TypeVar("K")
_DIGEST = ', "sha256": "'  # what stands in a line between its content and the digest of that


class Finished:
    """The units of a run that are done, one JSON object per line of a file: what was run, what came of it, and the
    SHA-256 of both.

    A unit is known by everything that its value depends on but the code, a model by its content. A line that is not as
    it was written is said and left out, and its unit runs again; so does that of a line that a stop cut off. One run at
    a time may write to a file.

    Args:
        fresh: begin anew, whatever the file holds.

    Raises:
        OSError: where another process has the file.
    """

    def __init__(self, path: pathlib.Path, *, fresh: bool = False) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        self._lock: filelock.BaseFileLock | None = None  # held as long as this is
        atomic_io.run_on_first_process(functools.partial(self._begin, fresh))
        if path.exists():
            self._read()
        # Before the first of them writes on, all processes must have read: they run the same units.
        devices.check_agreement(str(path), json.dumps(sorted(self._values)))

    def _begin(self, fresh: bool) -> None:
        self._lock = atomic_io.lock_directory(self.path.parent, f".{self.path.name}.lock")
        if fresh:
            self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                unit, value = _checked(line)
                self._values[_key(unit)] = value
            except ValueError as error:
                # What follows the last line's end is what a stop cut off.
                if line and number < len(lines) and devices.is_first_process():
                    logging.warning("%s, line %d is left out, and its unit runs again: %s", self.path, number, error)

    def __contains__(self, unit: Mapping[str, Any]) -> bool:
        return _key(unit) in self._values

    def __getitem__(self, unit: Mapping[str, Any]) -> Any:
        return self._values[_key(unit)]

    def add(self, unit: Mapping[str, Any], value: Any) -> None:
        """Adds a unit with its value, as JSON has it, to the file."""
        line = json.dumps({"unit": dict(unit), "value": value})
        self._values[_key(unit)] = json.loads(line)["value"]
        if devices.is_first_process():
            atomic_io.append_line(self.path, f'{line[:-1]}{_DIGEST}{atomic_io.sha256_of_bytes(line.encode())}"}}')

    def rows(self, unit: Mapping[str, Any], run: Callable[[], Sequence[Row]]) -> list[Row]:
        """The rows of a unit: from the file, or run now and added to it."""
        if unit not in self:
            self.add(unit, [row.flat() for row in run()])
        return [from_flat(row) for row in self[unit]]

    def of_each(
        self,
        keys: Sequence[K],
        unit_of: Callable[[K], Mapping[str, Any]],
        run: Callable[[list[K]], Mapping[K, Any]],
        together: int,
    ) -> dict[K, Any]:
        """The values of many units. Those that are not in the file are run now, so many together, and added to it."""
        left = [key for key in keys if unit_of(key) not in self]
        for begin in range(0, len(left), together):
            for key, value in run(left[begin : begin + together]).items():
                self.add(unit_of(key), value)
        return {key: self[unit_of(key)] for key in keys}


def _checked(line: bytes) -> tuple[Any, Any]:
    """The unit and the value of a line.

    Raises:
        ValueError: for a line that is not as it was written.
    """
    content, marker, digest = line.partition(_DIGEST.encode())
    if not marker:
        raise ValueError("it has no SHA-256")
    content += b"}"
    if digest != f'{atomic_io.sha256_of_bytes(content)}"}}'.encode():
        raise ValueError("its SHA-256 is not the one that it was written with")
    done = json.loads(content)
    return done["unit"], done["value"]


def _key(unit: Mapping[str, Any]) -> str:
    return json.dumps(unit, sort_keys=True)
