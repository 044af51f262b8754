"""README and pages of the site: Python runs and prints the shown output, links and images exist, the site builds."""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax.registry import POLICIES
from kvjax_models import known_models, profile
from tests.kvjax.support import each
from tests.models import tiny

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
# tests/adapters run the pages of adapters, with the packages that they are for.
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "adapters")
CODE = re.compile(r"^```(?:python|{code-cell} ipython3)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
# A program and, if it prints, its output. The programs of a page continue each other.
PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.DOTALL | re.MULTILINE)
WITH_PYTHON = [page for page in ("../README.md", *PAGES) if PROGRAM.search((DOCS / page).read_text())]
WITH_OUTPUT = ("../README.md", "quickstart.md", "documents.md", "control.md", "models.md", "which_policy.md")


TEXTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
TEXTS += [ROOT / "experiments" / "README.md", ROOT / "experiments" / "results" / "README.md", *DOCS.rglob("*.md")]


def test_links_and_images():
    text = ""
    for path in TEXTS:
        code = r"```.*?```|`[^`]*`"
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(code, "", path.read_text(), flags=re.DOTALL))
        assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == [], path
        text += path.read_text()
    assert [path.name for path in (DOCS / "images").iterdir() if f"images/{path.name}" not in text] == []


def test_the_readme_is_short_and_code_has_88_columns():
    assert len(README.splitlines()) <= 90
    for page in ("../README.md", *PAGES):
        lines = [line for block in CODE.findall((DOCS / page).read_text()) for line in block.splitlines()]
        assert [line for line in lines if len(line) > 88] == [], page


@pytest.mark.parametrize("page", each(WITH_PYTHON, quick={*WITH_PYTHON} - {"documents.md", "which_policy.md"}))
def test_python_runs(page, tmp_path, monkeypatch, capsys):
    """A tiny random chat model replaces the known model, so that output is compared only for programs without one."""
    monkeypatch.chdir(tmp_path)
    # `auto` keeps every token in a head of the tiny model, as in models with more heads.
    monkeypatch.setattr(profile, "MIN_HEADS", 1)
    # Most characters are tokens of the tiny model.
    paragraphs = (ROOT / "LICENSE").read_text().split("\n\n")
    (tmp_path / "LICENSE").write_text("\n\n".join(paragraph[:80] for paragraph in paragraphs))
    names = {}
    for program, output in PROGRAM.findall((DOCS / page).read_text()):
        exec(compile(program.replace("smollm2-135m", str(tiny.directory(tiny.TEMPLATE))), page, "exec"), names)
        printed = capsys.readouterr().out
        if output and not re.search(r"\b(llm|document|engine)\b", program):
            assert printed == output
        assert bool(printed) == bool(output) or page not in WITH_OUTPUT


@pytest.mark.heavy
@pytest.mark.parametrize("page", WITH_OUTPUT)
def test_programs_print_what_the_page_shows(page, tmp_path):
    """Runs the programs of a page as a user does: in a new process, without the flags of tests/conftest.py."""
    try:
        known_models.find_model("smollm2-135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    shutil.copy(ROOT / "LICENSE", tmp_path)
    programs, outputs = zip(*PROGRAM.findall((DOCS / page).read_text()), strict=True)
    end = "--- end of a program ---\n"
    command = [sys.executable, "-c", f"\nprint({end!r}, end='')\n".join((*programs, ""))]
    completed = subprocess.run(
        command, cwd=tmp_path, env=environment(XLA_FLAGS=""), capture_output=True, text=True, timeout=1800, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split(end)[:-1] == list(outputs)


def environment(**changes):
    """Returns the environment of a process that imports this checkout."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")))
    return os.environ | {"PYTHONPATH": path} | changes


def test_every_policy_has_a_section_with_settings():
    text = "".join((DOCS / page).read_text() for page in PAGES if page.startswith("policies/"))
    for name in POLICIES:
        assert text.count(f"```{{policy-settings}} {name}\n") == 1, name


@pytest.fixture
def extensions(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    monkeypatch.syspath_prepend(str(DOCS))


def test_tables_have_every_setting_with_its_meaning(extensions):
    import policy_settings

    for name, policy_class in policy_settings.CLASSES.items():
        meanings = policy_settings.meanings_of(policy_class)
        assert sorted(meanings) == sorted(field.name for field in dataclasses.fields(policy_class)), name
        assert all(meanings.values()), (name, meanings)
    rows = policy_settings.settings_table(kvjax.TopKPolicy)
    assert "| `sinks` | `4` | int | first tokens, which are never dropped. |" in rows


def test_docstrings_become_restructured_text(extensions):
    from plain_docstrings import escape

    assert escape(["`Segment`s by |v|, *N and x_."]) == [r"`Segment`\ s by \|v\|, \*N and x\_."]
    assert escape(["Code:", "", "    a | b", "", "Text."]) == ["Code:", "", "::", "", "    a | b", "", "Text."]
    assert escape(["Args:", "    x: |x|"]) == ["Args:", r"    x: \|x\|"]
    assert escape(["Text `a", "b`."]) == ["Text `a b`."]


@pytest.mark.heavy
def test_pictures_show_the_entries_of_policies(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import pictures

    text = pictures.make_text()

    def entries_of(name):
        return pictures.read_entries(*pictures.fill_cache(pictures.make_policy(name), text), text.question)

    tokens = pictures.TOKENS - 8  # the others are staged
    # A sliding window slides by the staged tokens, too.
    kept = np.flatnonzero(entries_of("streaming_llm").shares.sum(axis=0))
    assert kept.tolist() == [0, 1, 2, 3, *range(92, tokens)]
    # The weights of a sample sum to the number of tokens.
    sample = entries_of("uniform")
    assert sample.shares.max(axis=1).min() == 1 and len(sample.weight) == 40
    assert sample.weight.sum() == pytest.approx(tokens)
    # Means hold every token once.
    means = entries_of("subgen_mean")
    np.testing.assert_allclose(means.weight @ means.shares, np.arange(pictures.TOKENS) < tokens, atol=1e-5)
    jax.clear_caches()


@pytest.mark.heavy
def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    completed = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert completed.returncode == 0, completed.stderr
    page = (tmp_path / "write_a_policy.html").read_text()
    assert "Uniform" in page and "TOVA" in page
    assert "Float[Array" in re.sub("<[^>]*>", "", (tmp_path / "api" / "caches.html").read_text())
