"""Files of results that are damaged, cut off, or of other weights."""

import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from experiments.common import results, settings, sweeping
from experiments.common.results import Row
from experiments.common.resuming import Finished
from kvjax.registry import PolicyChoice
from kvjax_models import fingerprint

UNITS = [{"task": name, "seed": seed} for name in "abc" for seed in (0, 1)]
VALUES = {(unit["task"], unit["seed"]): {"scores": [0.25, unit["seed"]], "note": "é\n"} for unit in UNITS}


def written(path):
    finished = Finished(path)
    for unit in UNITS:
        finished.add(unit, VALUES[unit["task"], unit["seed"]])
    return path.read_bytes()


def read(path):
    """The values of the units that a file has, and how many it has."""
    finished = Finished(path)
    found = {(unit["task"], unit["seed"]): finished[unit] for unit in UNITS if unit in finished}
    assert len(found) == len(finished._values)  # no unit that there was not
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_of_flipped_files_no_value_is_taken_in_silence(seed, tmp_path, caplog):
    """Four hundred flips: a value is as it was written, or its line is named and left out."""
    path, rng = tmp_path / "done.jsonl", random.Random(seed)
    data = written(path)
    for _ in range(400):
        flipped = bytearray(data)
        place = rng.randrange(len(data))
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        caplog.clear()
        found = read(path)
        assert all(VALUES[unit] == value for unit, value in found.items())
        line = data[:place].count(b"\n") + 1
        # A flip in the last end of a line makes it one that was cut off.
        assert f"done.jsonl, line {line} is left out, and its unit runs again" in caplog.text or place == len(data) - 1
        assert len(found) >= len(UNITS) - 2


@pytest.mark.parametrize("line", [b"null", b"\xff\xfe", b"[]", b'{"unit": {}, "value": 1}', b"7", b'"\\ud800"'])
def test_a_line_that_is_none_stops_no_later_start(line, tmp_path, caplog):
    path = tmp_path / "done.jsonl"
    path.write_bytes(line + b"\n" + written(path))
    assert read(path) == VALUES
    assert f"{path}, line 1 is left out" in caplog.text
    again = Finished(path)
    again.add({"task": "d", "seed": 0}, 1)
    assert {"task": "d", "seed": 0} in Finished(path)


def test_a_line_that_was_cut_off_anywhere_is_run_again(tmp_path, caplog):
    path = tmp_path / "done.jsonl"
    data = written(path)
    last = data[: len(data) - 1].rindex(b"\n") + 1
    for end in range(last, len(data)):
        path.write_bytes(data[:end])
        assert len(read(path)) == (len(UNITS) if end == len(data) - 1 else len(UNITS) - 1)
        Finished(path).add(UNITS[-1], VALUES["c", 1])
        assert read(path) == VALUES


def test_a_full_disk_leaves_the_units_before(tmp_path):
    path = tmp_path / "done.jsonl"
    data = written(path)
    finished = Finished(path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) + 20, limit[1]))
        with pytest.raises(OSError):
            finished.add({"task": "d", "seed": 0}, "x" * 100)
        with pytest.raises(OSError):
            results.write_rows(path, [Row("e", "m", "exact", "accuracy", 0.5)] * 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == data and read(path) == VALUES


HOLDS = """
    import pathlib, sys
    from experiments.common.resuming import Finished
    finished = Finished(pathlib.Path(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_two_runs_do_not_write_to_one_file(tmp_path):
    path, root = tmp_path / "done.jsonl", pathlib.Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "models"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(HOLDS), str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}, **pipes)
    try:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(OSError, match="another process is writing to"):
            Finished(path)
        Finished(tmp_path / "another.jsonl").add({}, 1)
    finally:
        other.kill()
        other.communicate()
    Finished(path).add({}, 1)


def test_units_of_other_weights_under_the_same_name_run_again(tmp_path):
    """The path, the options and the output are the same; the model's content is not."""
    shutil.copytree(settings.CHECKPOINTS / "line-retrieval-2l-4k", tmp_path / "model")
    options = sweeping.Settings(model=str(tmp_path / "model"), output_dir=str(tmp_path))
    setting, runs = PolicyChoice.parse("exact"), []

    def run(chosen):
        runs.append(chosen)
        return {setting: {"value": len(runs)} for setting in chosen}

    def value():
        found = sweeping.every_setting(options, Finished(tmp_path / "done.jsonl"), [setting], {"task": "t"}, run)
        return found[setting]["value"]

    assert (value(), value()) == (1, 1)
    for number, name in enumerate(["model.safetensors", "config.json", "tokenizer.json"], start=2):
        path = tmp_path / "model" / name
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
        assert (value(), value()) == (number, number)
    (tmp_path / "model").rename(tmp_path / "moved")
    options = sweeping.Settings(model=str(tmp_path / "moved"), output_dir=str(tmp_path))
    assert value() == 4  # wherever it lies


def test_a_directory_is_known_by_what_a_model_is_loaded_from(tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    found = {fingerprint.directory_fingerprint(tmp_path)}
    (tmp_path / "README.md").write_text("of no matter")
    (tmp_path / "accuracy.json").write_text(json.dumps([]))
    found.add(fingerprint.directory_fingerprint(tmp_path))
    assert len(found) == 1
    for name in ("chat_template.jinja", "generation_config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("more")
        found.add(fingerprint.directory_fingerprint(tmp_path))
    assert len(found) == 4
