"""Source files of packages as long texts."""

import importlib.util

import pytest

from experiments.common import sources


def test_a_package_is_its_files_after_their_paths():
    files = sources.files("rich")
    assert [file.path for file in files] == sorted(file.path for file in files)
    assert "rich/_win32_console.py" in {file.path for file in files}
    text = sources.repository("rich")
    for file in files:
        assert f"# Path: {file.path}\n{file.text.strip()[:100]}" in text.replace("\n\n# Path", "\n# Path")
    assert text.count("# Path: rich/") == len(files)


def test_data_and_tests_are_left_out():
    paths = {file.path for package in ("optax", "rich") for file in sources.files(package)}
    assert {"optax/_src/alias.py", "rich/emoji.py"} <= paths
    assert not {"rich/_emoji_codes.py", "optax/_src/alias_test.py"} & paths


def test_an_unknown_or_missing_package_is_named(monkeypatch):
    with pytest.raises(ValueError, match="'torch' is not known"):
        sources.files("torch")
    sources.files.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'optax' is not installed: pip install"):
        sources.files("optax")
