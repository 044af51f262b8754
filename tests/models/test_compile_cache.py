"""The persistent compilation cache and the time of compilation, with the environment variables of users."""

import itertools
import json
import os
import time

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


def test_a_second_process_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))

    def run():
        """Returns the cache hits, misses, text and directory of a process."""
        process = start_python(PROGRAM)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        return json.loads(output.splitlines()[-1])

    first = run()
    assert first["directory"] == str(tmp_path / "programs") and first["misses"] > 3
    programs = sorted((tmp_path / "programs").glob("*-cache"))
    programs[0].write_bytes(b"damaged")
    second = run()
    assert second["text"] == first["text"] and second["misses"] <= 1 and second["hits"] >= first["misses"] - 1


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Simulates a process without cache settings; collects the options of JAX that are changed."""
    changes = {}
    monkeypatch.setattr(compile_cache.jax.config, "update", changes.__setitem__)
    monkeypatch.setattr(compile_cache, "_configured_directory", lambda: None)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    return changes


def test_programs_that_were_used_longest_ago_are_removed(configured, monkeypatch, tmp_path):
    directory = tmp_path / "programs"
    directory.mkdir()
    for age, name in enumerate("dcba"):
        path = directory / f"{name}-cache"
        path.write_bytes(bytes(80))
        os.utime(path, (1000.0 - age, 1000.0 - age))
    monkeypatch.setattr(compile_cache, "_MAX_BYTES", 200)
    compile_cache.enable_persistent_cache()
    assert sorted(path.name for path in directory.iterdir()) == ["c-cache", "d-cache"]


def test_all_programs_are_stored_unless_the_user_decides(configured, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_COMPILATION_CACHE", "off")
    compile_cache.enable_persistent_cache()
    monkeypatch.delenv("KVJAX_COMPILATION_CACHE")
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "_configured_directory", lambda: "elsewhere")
        compile_cache.enable_persistent_cache()
    assert configured == {} and list(tmp_path.iterdir()) == []
    compile_cache.enable_persistent_cache()
    directory = {"jax_compilation_cache_dir": str(tmp_path / "programs")}
    assert configured == directory | {"jax_persistent_cache_min_compile_time_secs": 0.0}
    configured.clear()
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    compile_cache.enable_persistent_cache()
    assert configured == directory


def test_an_unusable_directory_disables_the_cache(configured, monkeypatch, tmp_path):
    (tmp_path / "programs").write_text("a file")
    compile_cache.enable_persistent_cache()
    monkeypatch.setenv("KVJAX_CACHE", "~no_such_user/kvjax")
    compile_cache.enable_persistent_cache()
    assert configured == {}
    with pytest.raises(FileNotFoundError, match="KVJAX_CACHE='~no_such_user/kvjax' names a user without a home"):
        user_cache_directory()


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
