"""The site's pages: their Python runs, every policy stands on one with its settings and a picture, and it builds."""

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
from flax import nnx
from kvjax_models.generate import Generator
from kvjax_models.llama import Llama, LlamaConfig

import kvjax
from kvjax.registry import POLICIES

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted(
    path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name not in ("papers", "adapters")
)
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
# The notebook is run by tests/kvjax/test_write_a_policy.py, and by every build; pages of adapters by tests/adapters,
# beside the packages that they are for.
WITH_PYTHON = [page for page in PAGES if BLOCK.search((DOCS / page).read_text())]


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def quickstart():
    return {
        "keys": draw(2, 300, 2, 64), "values": draw(2, 300, 2, 64), "lengths": jnp.array([300, 200]), "new_tokens": 3,
        "query": draw(2, 1, 8, 64), "key": draw(2, 1, 2, 64), "value": draw(2, 1, 2, 64),
    }  # fmt: skip


def long_prompts():
    document = "".join(f"line {number}: the code is {1000 + number}\n" for number in range(8))
    return {"document": document, "question": "Which code is in line 3?"}


def saved_states(directory):
    config = LlamaConfig(
        vocab_size=32, width=32, mlp_width=64, layers=2, query_heads=4, kv_heads=2, head_dim=16, max_length=128
    )
    model, policy = Llama(config, rngs=nnx.Rngs(0)), kvjax.Uniform(32, recent=8, compact_every=8)
    one, many = (Generator(model, policy, batch=batch, max_prompt=64, max_new=32) for batch in (1, 2))
    state = one.read(one.start(), [list(range(20))])
    return {"generator": one, "many": many, "state": state, "questions": [[1, 2], [3]], "directory": directory}


def given(page, directory):
    """What a page's blocks take for granted."""
    if page == "saved_states.md":
        return saved_states(directory)
    return {"quickstart.md": quickstart, "long_prompts.md": long_prompts}.get(page, dict)()


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = given(page, tmp_path / "run")
    for block in BLOCK.findall((DOCS / page).read_text()):
        if block in README:  # test_readme.py runs it
            continue
        exec(compile(block, page, "exec"), names)
    if page == "quickstart.md":
        assert np.isfinite(names["attended"]).all() and names["attended"].shape == (2, 1, 8, 64)
        np.testing.assert_array_equal(kvjax.tokens(names["cache"]), [303, 203])
    if page == "saved_states.md":
        assert names["notes"] == {"text": "a long one"} and names["state"].positions.tolist() == [22, 21]


def test_every_policy_has_a_page_with_settings_and_a_picture():
    text = "".join((DOCS / page).read_text() for page in PAGES if page.startswith("policies/"))
    for name in POLICIES:
        assert text.count(f"```{{policy-settings}} {name}\n") == 1, name
        assert (DOCS / "images" / f"{name}.png").exists(), name


@pytest.fixture
def extensions(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    monkeypatch.syspath_prepend(str(DOCS))


def test_tables_have_every_setting_once_with_its_meaning(extensions):
    import policy_settings

    for name, kind in policy_settings.CLASSES.items():
        told = [setting for setting, _ in policy_settings.settings(kind)]
        assert sorted(told) == sorted(field.name for field in dataclasses.fields(kind)), name
        assert all(meaning for _, meaning in policy_settings.settings(kind)), name
    rows = policy_settings.table(kvjax.SubGen)
    assert "| `recent` | `64` | int | tokens always kept. |" in rows
    assert any(row.startswith("| `budget` | `None` | int or None | slots per head") for row in rows)


def test_docstrings_become_rest(extensions):
    from house_docstrings import as_rest

    assert as_rest(["`Segment`s by |v|, *N and x_."]) == [r"`Segment`\ s by \|v\|, \*N and x\_."]
    assert as_rest(["So:", "", "    a | b", "", "Then."]) == ["So:", "", "::", "", "    a | b", "", "Then."]
    assert as_rest(["Args:", "    x: |x|"]) == ["Args:", r"    x: \|x\|"]


def test_pictures_show_what_is_kept(extensions):
    import pictures

    read = pictures.text()
    count = lambda name: pictures.kept(pictures.filled(pictures.policy_of(name), read), read.question)  # noqa: E731
    tokens = pictures.TOKENS - 8  # the others are staged
    # A window slides by what is staged, too; a sample's weights sum to the tokens.
    assert np.flatnonzero(count("streaming_llm").shares.sum(axis=0)).tolist() == [0, 1, 2, 3, *range(92, tokens)]
    sampled = count("uniform")
    assert sampled.shares.max(axis=1).min() == 1 and len(sampled.weight) == 40
    assert sampled.weight.sum() == pytest.approx(tokens)
    # Means hold every token, each as often as it was.
    merged = count("clustergen")
    np.testing.assert_allclose(merged.weight @ merged.shares, np.arange(pictures.TOKENS) < tokens, atol=1e-5)
    jax.clear_caches()


@pytest.mark.heavy
def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx")
    places = os.pathsep.join((str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "write_a_policy.html").read_text()
    assert "uniform" in page and "tova" in page
    assert "Float[Array" in (tmp_path / "api" / "caches.html").read_text().replace("</span>", "").replace(
        '<span class="p">', ""
    ).replace('<span class="pre">', "")
