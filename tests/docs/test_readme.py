"""README's programs run as they stand, from the checkout's root."""

import pathlib
import re

import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_a_newcomer_can_read_it_in_a_minute():
    assert len(TEXT.encode()) <= 7 * 1024


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(compile(PROGRAMS[number], f"README.md, program {number}", "exec"), names)
    if "attended" in names:
        assert names["attended"].shape == (2, 1, 8, 64) and bool(jnp.isfinite(names["attended"]).all())
    else:
        assert capsys.readouterr().out.count(" 7302915") == 2  # generated, and streamed


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []
