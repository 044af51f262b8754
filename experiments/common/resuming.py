"""Long runs in units that a second start does not repeat."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from experiments.common.results import Row, from_flat
from kvjax_models import devices

K = TypeVar("K")


class Finished:
    """The units of a run that are done, one JSON object per line of a file: what was run, and what came of it.

    A unit is known by everything that its value depends on but the code; a stop in the middle of a line loses that unit
    alone.

    Args:
        fresh: begin anew, whatever the file holds.
    """

    def __init__(self, path: pathlib.Path, *, fresh: bool = False) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists():
            for line in path.read_text(encoding="utf-8").split("\n"):
                try:
                    done = json.loads(line)
                    self._values[_key(done["unit"])] = done["value"]
                except (json.JSONDecodeError, KeyError):
                    continue  # the last line of a run that was stopped, or what another version wrote
        # Before the first of them writes on, all processes must have read: they run the same units.
        devices.agree(str(path), json.dumps(sorted(self._values)))

    def __contains__(self, unit: Mapping[str, Any]) -> bool:
        return _key(unit) in self._values

    def __getitem__(self, unit: Mapping[str, Any]) -> Any:
        return self._values[_key(unit)]

    def add(self, unit: Mapping[str, Any], value: Any) -> None:
        """Adds a unit with its value, as JSON has it, to the file."""
        line = json.dumps({"unit": dict(unit), "value": value})
        self._values[_key(unit)] = json.loads(line)["value"]
        if not devices.is_first():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("" if whole else "\n") + line + "\n")

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


def _key(unit: Mapping[str, Any]) -> str:
    return json.dumps(unit, sort_keys=True)
