"""Files of results that are damaged, truncated, written concurrently, or belong to other weights."""

import random
import shutil
import subprocess

import pytest

from experiments.common import results, sweeping
from experiments.common.results import Row
from experiments.common.resuming import Finished
from kvjax.registry import PolicyChoice
from kvjax_models.fingerprint import directory_fingerprint
from tests.models.support import CHECKPOINTS, limit_file_size, start_python

UNITS = [{"task": name, "seed": seed} for name in "abc" for seed in (0, 1)]
VALUES = {(unit["task"], unit["seed"]): {"scores": [0.25, unit["seed"]], "note": "é\n"} for unit in UNITS}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "done.jsonl"


def write(path):
    """Writes all units and returns the file's content."""
    finished = Finished(path)
    for unit in UNITS:
        finished.add(unit, VALUES[unit["task"], unit["seed"]])
    return path.read_bytes()


def read(path):
    """Returns the values of the units in a file."""
    finished = Finished(path)
    values = {(unit["task"], unit["seed"]): finished[unit] for unit in UNITS if unit in finished}
    assert len(values) == len(finished._values)  # no other units
    return values


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_values_of_damaged_lines_are_never_used(seed, path, caplog):
    """For 400 flipped bits, every value is the original one or a warning names its line."""
    rng, data = random.Random(seed), write(path)
    for _ in range(400):
        damaged, index = bytearray(data), rng.randrange(len(data))
        damaged[index] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        caplog.clear()
        values = read(path)
        assert all(VALUES[unit] == value for unit, value in values.items())
        line = data[:index].count(b"\n") + 1
        # A flipped last newline makes the last line a truncated one.
        warning = f"done.jsonl, line {line} is left out, and its unit runs again"
        assert warning in caplog.text or index == len(data) - 1
        assert len(values) >= len(UNITS) - 2


@pytest.mark.parametrize("line", [b"null", b"\xff\xfe", b"[]", b'{"unit": {}, "value": 1}', b"7", b'"\\ud800"'])
def test_invalid_lines_are_ignored(line, path, caplog):
    path.write_bytes(line + b"\n" + write(path))
    assert read(path) == VALUES
    assert f"{path}, line 1 is left out" in caplog.text
    unit = {"task": "d", "seed": 0}
    Finished(path).add(unit, 1)
    assert unit in Finished(path)


def test_a_truncated_line_is_written_again(path):
    data = write(path)
    last = data[:-1].rindex(b"\n") + 1
    for end in range(last, len(data)):
        path.write_bytes(data[:end])
        assert len(read(path)) == (len(UNITS) if end == len(data) - 1 else len(UNITS) - 1)
        Finished(path).add(UNITS[-1], VALUES["c", 1])
        assert read(path) == VALUES


def test_a_full_disk_preserves_previous_units(path):
    data = write(path)
    finished = Finished(path)
    with limit_file_size(len(data) + 20):
        with pytest.raises(OSError):
            finished.add({"task": "d", "seed": 0}, "x" * 100)
        with pytest.raises(OSError):
            results.write_rows(path, [Row("e", "m", "exact", "accuracy", 0.5)] * 20)
    assert path.read_bytes() == data and read(path) == VALUES


HOLD_FILE = """
    import pathlib, sys
    from experiments.common.resuming import Finished
    finished = Finished(pathlib.Path(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_two_runs_cannot_write_to_one_file(path):
    process = start_python(HOLD_FILE, path, stdin=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(OSError, match="another process is writing to"):
            Finished(path)
        Finished(path.with_name("another.jsonl")).add({}, 1)
    finally:
        process.kill()
        process.communicate()
    Finished(path).add({}, 1)


def test_units_of_changed_weights_run_again(path, tmp_path):
    """Path, options and output are the same; the model's files are not."""
    shutil.copytree(CHECKPOINTS / "line-retrieval-2l-4k", tmp_path / "model")
    choice, num_runs = PolicyChoice.parse("exact"), 0

    def run(choices):
        nonlocal num_runs
        num_runs += 1
        return {choice: {"value": num_runs} for choice in choices}

    def value(model="model"):
        options = sweeping.Settings(model=str(tmp_path / model), output_dir=str(tmp_path))
        return sweeping.every_setting(options, Finished(path), [choice], {"task": "t"}, run)[choice]["value"]

    assert (value(), value()) == (1, 1)
    for number, name in enumerate(["model.safetensors", "config.json", "tokenizer.json"], start=2):
        data = bytearray((tmp_path / "model" / name).read_bytes())
        data[-9] ^= 1
        (tmp_path / "model" / name).write_bytes(data)
        assert (value(), value()) == (number, number)
    (tmp_path / "model").rename(tmp_path / "moved")
    assert value("moved") == 4  # does not depend on the path


def test_directory_fingerprint_depends_on_the_files_of_a_model(tmp_path):
    def fingerprint(*names):
        for name in names:
            (tmp_path / name).write_text(name)
        return directory_fingerprint(tmp_path)

    fingerprints = {fingerprint("config.json", "tokenizer.json", "model.safetensors")}
    assert fingerprint("README.md", "accuracy.json") in fingerprints
    names = ("chat_template.jinja", "generation_config.json", "model-00001-of-00002.safetensors")
    assert len(fingerprints | {fingerprint(name) for name in names}) == 4
