"""Natural text: whole packages, the held-out ones apart."""

import importlib.util

import pytest

from experiments.common import sources


def test_a_package_is_its_files_behind_their_paths():
    files = sources.files("absl")
    assert [file.path for file in files] == sorted(file.path for file in files)
    assert "absl/flags/__init__.py" in {file.path for file in files}
    text = sources.repository("absl")
    for file in files:
        assert f"# Path: {file.path}\n{file.text.strip()[:100]}" in text.replace("\n\n# Path", "\n# Path")
    assert text.count("# Path: absl/") == len(files)


def test_training_and_held_out_packages_are_apart():
    training, held_out = sources.packages(held_out=False), sources.packages(held_out=True)
    assert not set(training) & set(held_out)
    of_held_out = sources.documents(held_out=True)
    assert {file.path.split("/")[0] for file in of_held_out} == set(held_out)
    seen = {file.text for file in sources.documents(held_out=False)}
    # Empty modules with a licence on top are alike everywhere.
    assert not [file.path for file in of_held_out if len(file.text) > 1000 and file.text in seen]


def test_the_standard_library_comes_without_tests_and_installed_packages():
    paths = {file.path for file in sources.files(sources.STANDARD_LIBRARY)}
    assert {"python/argparse.py", "python/asyncio/events.py"} <= paths
    assert not [path for path in paths if "/test/" in path or "site-packages" in path]


def test_tables_and_tests_are_left_out():
    paths = {file.path for package in ("matplotlib", "optax", "rich") for file in sources.files(package)}
    assert {"matplotlib/colors.py", "optax/_src/alias.py", "rich/emoji.py"} <= paths
    tables = {"matplotlib/_cm_listed.py", "rich/_emoji_codes.py", "optax/_src/alias_test.py"}
    assert not tables & paths


def test_a_package_that_is_unknown_or_missing_is_named(monkeypatch):
    with pytest.raises(ValueError, match="'torch' is not known"):
        sources.files("torch")
    sources.files.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'optax' is not installed: pip install"):
        sources.files("optax")
