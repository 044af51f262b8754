"""The persistent compilation cache and the time of compilation, with the environment variables of users."""

import itertools
import json
import time

import filelock
import jax
import jax.numpy as jnp
import pytest

from kvjax_models import compile_cache
from kvjax_models.stopwatch import Stopwatch
from kvjax_models.user_cache import user_cache_directory
from tests.models import tiny
from tests.models.support import start_python

PROGRAM = f"""
import collections, json, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
jax.jit(lambda x: x + 1)(1.0)  # JAX is used before a model is loaded
from kvjax_models import load
llm = load({str(tiny.directory())!r})
text = llm.generate("Read the record.", max_new_tokens=4)
counts = {{key: events[f"/jax/compilation_cache/cache_{{key}}"] for key in ("hits", "misses")}}
print(json.dumps(counts | {{"text": text, "directory": jax.config.jax_compilation_cache_dir}}))
"""


def test_a_second_process_compiles_only_what_is_damaged(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))

    def run():
        """Returns the cache hits, misses, text and directory of a process, and the times of the cache's files."""
        process = start_python(PROGRAM)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        entries = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "jax").glob("*-cache")}
        return json.loads(output.splitlines()[-1]), entries

    first, entries = run()
    assert first["directory"] == str(tmp_path / "jax") and first["misses"] > 3
    damaged = dict.fromkeys(sorted(entries)[::4], b"damaged")
    for name, content in damaged.items():
        (tmp_path / "jax" / name).write_bytes(content)
    second, entries_after = run()
    assert second["text"] == first["text"] and second["misses"] == len(damaged)
    assert second["hits"] >= first["misses"] - len(damaged)
    assert entries and {name for name in entries if entries_after[name] != entries[name]} == set(damaged)
    assert all((tmp_path / "jax" / name).read_bytes() != content for name, content in damaged.items())


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Simulates a process without cache settings; collects the options of JAX that are changed."""
    changes = {}
    monkeypatch.setattr(compile_cache.jax.config, "update", changes.__setitem__)
    monkeypatch.setattr(compile_cache, "_configured_directory", lambda: None)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    return changes


def test_size_and_threshold_are_bounded(configured, monkeypatch, tmp_path):
    compile_cache.enable_persistent_cache()
    assert configured == {
        "jax_compilation_cache_max_size": 2**29,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
    }
    configured.clear()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "1000")
    compile_cache.enable_persistent_cache()
    assert "jax_compilation_cache_max_size" not in configured


def test_a_process_limits_the_size_once(tmp_path):
    """Only the first program that a process writes removes others, also where another directory is in use."""
    script = f"""
import pathlib
from jax._src.lru_cache import LRUCache
from kvjax_models import compile_cache
directory = pathlib.Path({str(tmp_path)!r}) / "programs"
compile_cache._change_store(directory)
for path in (directory, directory.with_name("others")):
    cache = LRUCache(str(path), max_size=200)
    for name in "abcd":
        cache.put(name, bytes(80))
    print(*sorted(file.name for file in path.glob("*-cache")))
    print(len(cache.get("d")))
"""
    output, errors = start_python(script).communicate()
    assert output.splitlines() == ["a-cache b-cache c-cache d-cache", "80", "c-cache d-cache", "80"], errors


def test_users_settings_have_precedence(configured, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_COMPILATION_CACHE", "off")
    compile_cache.enable_persistent_cache()
    monkeypatch.delenv("KVJAX_COMPILATION_CACHE")
    monkeypatch.setattr(compile_cache, "_configured_directory", lambda: "elsewhere")
    compile_cache.enable_persistent_cache()
    assert configured == {} and list(tmp_path.iterdir()) == []


def test_an_unusable_directory_disables_the_cache(configured, monkeypatch, tmp_path):
    (tmp_path / "jax").write_text("a file")
    compile_cache.enable_persistent_cache()
    monkeypatch.setenv("KVJAX_CACHE", "~no_such_user/kvjax")
    compile_cache.enable_persistent_cache()
    assert configured == {}
    with pytest.raises(FileNotFoundError, match="KVJAX_CACHE='~no_such_user/kvjax' names a user without a home"):
        user_cache_directory()


def test_incomplete_entries_are_removed_unless_the_cache_is_locked(configured, tmp_path):
    directory = tmp_path / "jax"
    directory.mkdir()
    for name in ("a-cache", "a-atime", "b-cache"):
        (directory / name).write_bytes(b"")
    with filelock.FileLock(directory / ".lockfile"):
        start = time.perf_counter()
        compile_cache.enable_persistent_cache()
        assert time.perf_counter() - start < 5 and (directory / "b-cache").exists()
    compile_cache.enable_persistent_cache()
    assert {path.name for path in directory.iterdir()} - {".lockfile"} == {"a-cache", "a-atime"}


def test_stopwatch_separates_compilation():
    stopwatch = Stopwatch()
    begin = time.perf_counter()
    inner = jax.jit(lambda x: jnp.sin(x) + 1)
    jax.jit(lambda x: inner(x) * inner(x + 1))(jnp.arange(7.0)).block_until_ready()
    assert 0 < stopwatch.compile_seconds <= time.perf_counter() - begin
    compiled = stopwatch.compile_seconds
    time.sleep(0.05)
    assert stopwatch.compile_seconds == compiled and stopwatch.seconds > 0.05
    timer = stopwatch._timer  # nested events are not counted twice
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(timer._intervals[-20:]))
