"""The cache of compiled programs on disk, in processes that a user's environment starts."""

import json
import os
import subprocess
import sys
import time

import filelock
import pytest

from experiments.common import settings
from experiments.common.options import LINES_CHECKPOINT
from kvjax_models import compile_cache

PROGRAM = f"""
import collections, json, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
jax.jit(lambda x: x + 1)(1.0)  # JAX is in use before a model is loaded
from kvjax_models import load
llm = load({str(settings.model_directory(LINES_CHECKPOINT))!r})
text = llm.generate("Read the record.", max_new_tokens=4)
names = {{key: events[f"/jax/compilation_cache/cache_{{key}}"] for key in ("hits", "misses")}}
print(json.dumps(names | {{"text": text, "directory": jax.config.jax_compilation_cache_dir}}))
"""


def run(tmp_path, **variables):
    """What a process reports that loads a model and generates."""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "KVJAX_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing_again(tmp_path):
    first = run(tmp_path)
    assert first["directory"] == str(tmp_path / "cache" / "jax") and first["misses"] > 3
    entries = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "jax").glob("*-cache")}
    second = run(tmp_path)
    assert second["text"] == first["text"] and second["misses"] == 0 and second["hits"] >= first["misses"]
    again = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "jax").glob("*-cache")}
    assert entries and again == entries


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Options of JAX as a new process has them; collects the changes."""
    changes = {}
    monkeypatch.setattr(compile_cache.jax.config, "update", changes.__setitem__)
    monkeypatch.setattr(compile_cache, "_configured_directory", lambda: None)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    return changes


def test_size_and_threshold_are_bounded(configured, monkeypatch, tmp_path):
    compile_cache.enable_persistent_cache()
    assert configured == {
        "jax_compilation_cache_max_size": 2**31,
        "jax_persistent_cache_min_compile_time_secs": 0.5,
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
    }
    configured.clear()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "1000")
    compile_cache.enable_persistent_cache()
    assert "jax_compilation_cache_max_size" not in configured


def test_users_settings_have_precedence(configured, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_COMPILATION_CACHE", "off")
    compile_cache.enable_persistent_cache()
    monkeypatch.delenv("KVJAX_COMPILATION_CACHE")
    monkeypatch.setattr(compile_cache, "_configured_directory", lambda: "elsewhere")
    compile_cache.enable_persistent_cache()
    assert configured == {} and list(tmp_path.iterdir()) == []


def test_an_unusable_directory_is_no_error(configured, monkeypatch, tmp_path):
    (tmp_path / "jax").write_text("a file")
    compile_cache.enable_persistent_cache()
    assert configured == {}


def test_incomplete_programs_are_removed_unless_they_are_being_written(configured, tmp_path):
    directory = tmp_path / "jax"
    directory.mkdir()
    for name in ("a-cache", "a-atime", "b-cache"):
        (directory / name).write_bytes(b"")
    with filelock.FileLock(directory / ".lockfile"):
        begin = time.perf_counter()
        compile_cache.enable_persistent_cache()
        assert time.perf_counter() - begin < 5 and (directory / "b-cache").exists()
    compile_cache.enable_persistent_cache()
    assert {path.name for path in directory.iterdir()} - {".lockfile"} == {"a-cache", "a-atime"}
