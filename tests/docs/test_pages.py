"""README and pages of the site: Python runs, links and images exist, code fits its columns, the site builds."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.registry import POLICIES
from tests.models import tiny

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
# tests/adapters run the pages of adapters, with the packages that they are for.
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "adapters")
CODE = re.compile(r"^```(?:python|{code-cell} ipython3)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
WITH_PYTHON = [page for page in PAGES if BLOCK.search((DOCS / page).read_text())]


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def names_of(page, directory):
    """Returns the names that a page's programs expect to be defined."""
    if page == "quickstart.md":
        return {
            "keys": draw(2, 300, 2, 64), "values": draw(2, 300, 2, 64), "lengths": jnp.array([300, 200]),
            "query": draw(2, 1, 8, 64), "key": draw(2, 1, 2, 64), "value": draw(2, 1, 2, 64), "new_tokens": 3,
        }  # fmt: skip
    if page == "documents.md":
        return {"directory": directory}
    return {}


def run_block(block, page, names):
    """Runs a program from the root of the checkout. A tiny random chat model replaces the known model."""
    exec(compile(block.replace('"smollm2-135m"', repr(str(tiny.directory(tiny.TEMPLATE)))), page, "exec"), names)


@pytest.mark.parametrize("block", BLOCK.findall(README), ids=lambda block: block.partition("\n")[0])
def test_programs_of_the_readme_run(block, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    run_block(block, "README.md", {})
    assert capsys.readouterr().out.strip()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 80


TEXTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
TEXTS += [ROOT / "experiments" / "README.md", ROOT / "experiments" / "results" / "README.md", *DOCS.rglob("*.md")]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_targets(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_every_image_is_shown():
    text = "".join(path.read_text() for path in TEXTS)
    assert [path.name for path in (DOCS / "images").iterdir() if f"images/{path.name}" not in text] == []


@pytest.mark.parametrize("page", ["../README.md", *PAGES])
def test_code_fits_88_columns(page):
    blocks = CODE.findall((DOCS / page).read_text())
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = names_of(page, tmp_path / "run")
    for block in BLOCK.findall((DOCS / page).read_text()):
        if block not in README:
            run_block(block, page, names)
    if page == "quickstart.md":
        assert np.isfinite(names["attended"]).all() and names["attended"].shape == (2, 1, 8, 64)
        np.testing.assert_array_equal(kvjax.num_tokens(names["cache"]), [303, 203])
    if page == "documents.md":
        assert names["notes"] == {"text": "codes"} and len(names["forks"].positions) == 2


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


def test_pictures_show_the_entries_of_policies(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import pictures

    text = pictures.make_text()

    def entries_of(name):
        return pictures.read_entries(pictures.fill_cache(pictures.make_policy(name), text), text.question)

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
    path = os.pathsep.join((str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    completed = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stderr
    page = (tmp_path / "write_a_policy.html").read_text()
    assert "Uniform" in page and "TOVA" in page
    assert "Float[Array" in re.sub("<[^>]*>", "", (tmp_path / "api" / "caches.html").read_text())
