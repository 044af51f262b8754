"""Files of results that are truncated, damaged or on a full disk."""

import dataclasses

import pytest

from experiments.common.rows import Row, RowFile, read_rows
from tests.models.support import limit_file_size

LABELS = {"budget": None, "kv_dtype": None, "question": "seen", "tokens": 9, "seed": 0, "item": 0}
ROWS = [Row("m", task, "exact", document=name, score=0.5, answer="é\n", **LABELS) for task in "ab" for name in "xyz"]


@pytest.fixture
def path(tmp_path):
    with RowFile(tmp_path / "rows.jsonl") as rows:
        rows.append(ROWS[:3])
        rows.append(ROWS[3:])
    return tmp_path / "rows.jsonl"


def test_rows_are_read_as_written(path):
    assert read_rows([path]) == ROWS
    with RowFile(path) as rows:
        changed = dataclasses.replace(ROWS[0], score=1.0)
        rows.append([changed])
        assert ROWS[0].key in rows and dataclasses.replace(ROWS[0], seed=1).key not in rows
    assert read_rows([path]) == [changed, *ROWS[1:]]


def test_a_score_replaces_a_failure(path):
    failed = dataclasses.replace(ROWS[0], seed=1, score=None, error="a fault")
    with RowFile(path) as rows:
        rows.append([failed])
        assert failed.key not in rows
        rows.append([dataclasses.replace(failed, score=0.5, error=None)])
    with RowFile(path) as rows:
        assert failed.key in rows
    assert [row.error for row in read_rows([path])] == [None] * 7


def test_a_truncated_line_is_written_again(path):
    data = path.read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    for end in range(last, len(data), 20):
        path.write_bytes(data[:end])
        assert read_rows([path]) == ROWS[:-1]
        with RowFile(path) as rows:
            rows.append(ROWS[-1:])
        assert read_rows([path]) == ROWS


@pytest.mark.parametrize("line", [b"\xff\xfe", b'"\\ud8', b"{"])
def test_damaged_lines_are_skipped_with_a_warning(line, path, caplog):
    path.write_bytes(line + b"\n" + path.read_bytes())
    assert read_rows([path]) == ROWS and f"{path}, line 1 is incomplete" in caplog.text


def test_a_full_disk_preserves_previous_rows(path):
    data = path.read_bytes()
    with limit_file_size(len(data) + 20), RowFile(path) as rows, pytest.raises(OSError):
        rows.append(ROWS)
    assert path.read_bytes() == data
