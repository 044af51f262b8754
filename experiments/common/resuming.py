"""Long runs in units that a second start does not repeat."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.common.results import Row, from_flat


class Finished:
    """The units of a run that are done, one JSON object per line of a file: what was run, and its rows.

    A unit is known by everything that its rows depend on; a stop in the middle of a line loses that unit alone.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._rows: dict[str, list[Row]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    done = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the last line of a run that was stopped
                self._rows[_key(done["unit"])] = [from_flat(row) for row in done["rows"]]

    def rows(self, unit: Mapping[str, Any], run: Callable[[], Sequence[Row]]) -> list[Row]:
        """The rows of a unit: from the file, or run now and added to it."""
        key = _key(unit)
        if key not in self._rows:
            self._rows[key] = list(run())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
            with self.path.open("a", encoding="utf-8") as file:
                line = json.dumps({"unit": dict(unit), "rows": [row.flat() for row in self._rows[key]]})
                file.write(("" if whole else "\n") + line + "\n")
        return self._rows[key]

    def __contains__(self, unit: Mapping[str, Any]) -> bool:
        return _key(unit) in self._rows


def _key(unit: Mapping[str, Any]) -> str:
    return json.dumps(unit, sort_keys=True)
