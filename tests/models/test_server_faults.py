"""Faults of the process and of the disk never give a wrong answer or a lost document."""

import concurrent.futures
import random
import shutil
import subprocess

import pytest

from kvjax_models.server.conversations import Conversations
from kvjax_models.server.documents import Documents
from kvjax_models.server.errors import RequestError
from kvjax_models.server.settings import Settings
from tests.models import tiny
from tests.models.serving import Server, run_command, wait_until
from tests.models.support import damage_bytes

TEXT = "A long text about ships. " * 6


def answer(server, name):
    """Returns the status and the text of an answer about a document."""
    status, values = server.complete("Which ships?", document=name, temperature=0, max_tokens=12)
    return status, values["choices"][0]["text"] if status == 200 else values["error"]["message"]


@pytest.mark.heavy
def test_documents_survive_kill_9(tmp_path):
    directory, rng = tmp_path / "documents", random.Random(0)
    options = [f"--model={tiny.directory()}", f"--documents_dir={directory}", "--policy=exact"]
    options += ["--max_prompt_tokens=256", "--max_new_tokens=64"]
    complete, expected = ["first"], None
    for run in range(4):
        with run_command(*options) as (client, process):
            if run == 0:
                assert client.post("/v1/documents", id="first", text=TEXT)[0] == 200
            for name in complete:  # all that was confirmed is there
                status, text = answer(client, name)
                expected = text if expected is None else expected
                assert (status, text) == (200, expected), name
            assert not [*directory.glob(".partial-*")]
            if run == 3:
                break
            name, posted = f"killed-{run}", concurrent.futures.ThreadPoolExecutor(1)
            confirmed = posted.submit(client.post, "/v1/documents", id=name, text=TEXT)
            wait_until(lambda: [*directory.glob(".partial-*")] or confirmed.done())  # noqa: B023
            process.kill()
            process.wait()
            is_confirmed = confirmed.exception(60) is None
            # The rename is the moment from which the document exists.
            assert (directory / name).exists() or not is_confirmed
            if (directory / name).exists():
                complete.append(name)
            if run == 1:  # a file of an incomplete document is damaged, too
                damage_one_file(next(directory.glob(".partial-*"), tmp_path / "none"), rng)
            if run == 2:
                (directory / ".partial-other").mkdir(exist_ok=True)
    output = "".join(process.communicate())
    assert "'other' was not complete" in output


def damage_one_file(directory, rng):
    """Damages a file of a directory, if it has one; returns its path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return None
    path = rng.choice(files)
    path.write_bytes(damage_bytes(path.read_bytes(), rng)[0])
    return path


@pytest.mark.heavy
def test_a_full_disk_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a disk can be mounted by root only")
    try:
        with Server(tiny.make_llm(tiny.TEMPLATE).cache(), {"documents_dir": str(disk)}) as server:
            assert server.post("/v1/documents", id="before", text=TEXT)[0] == 200
            expected = answer(server, "before")
            for free in (0, 10_000, 60_000):
                with (disk / "other").open("wb") as file:
                    size = shutil.disk_usage(disk).free - free
                    file.write(bytes(size))
                before = sorted(path.name for path in disk.iterdir())
                status, error = server.post("/v1/documents", id="full", text=TEXT)
                assert status == 507 and str(disk) not in error["error"]["message"]
                assert sorted(path.name for path in disk.iterdir()) == before
                assert server.request("GET", "/v1/documents/full")[0] == 404 and answer(server, "before") == expected
                (disk / "other").unlink()
            assert server.post("/v1/documents", id="full", text=TEXT)[0] == 200
            assert answer(server, "full") == expected
        with Server(tiny.make_llm(tiny.TEMPLATE).cache(), {"documents_dir": str(disk)}) as server:
            assert answer(server, "before") == answer(server, "full") == expected
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.heavy
def test_damaged_files_give_errors_or_the_same_document(tmp_path):
    llm, rng = tiny.make_llm(tiny.TEMPLATE), random.Random(0)
    cache = llm.cache("streaming_llm", "50%")
    original = cache.read(TEXT, max_new_tokens=64)
    original.save(tmp_path / "original")
    expected = original.ask("Which ships?", max_new_tokens=12)
    settings = Settings(documents_dir=str(tmp_path / "documents"))
    documents, outcomes = Documents(cache, settings, Conversations(0, lambda: 0), lambda: 0, lambda _: iter(())), []
    for number in range(60):
        directory = tmp_path / "documents" / f"d{number}"
        shutil.copytree(tmp_path / "original", directory)
        path = damage_one_file(directory, rng)
        if number % 10 == 9:
            path.unlink()
        try:
            assert documents.get(f"d{number}").ask("Which ships?", max_new_tokens=12) == expected, path
            outcomes.append(True)
        except RequestError as error:
            assert error.code == "document_damaged" and f"d{number}" in error.message
            outcomes.append(False)
        assert documents.delete(f"d{number}")["deleted"]
    assert outcomes.count(False) >= 30
    documents.close()
