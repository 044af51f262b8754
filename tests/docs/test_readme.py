"""The README's programs run as printed, from the root of the checkout."""

import pathlib
import re

import jax.numpy as jnp
import pytest

from tests.models import tiny

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names: dict = {}
    # Tests download nothing: a tiny random model replaces the known model.
    program = PROGRAMS[number].replace('"smollm2-135m"', repr(str(tiny.directory())))
    exec(compile(program, f"README.md, program {number}", "exec"), names)
    if "attended" in names:
        assert names["attended"].shape == (2, 1, 8, 64) and bool(jnp.isfinite(names["attended"]).all())
    else:
        assert capsys.readouterr().out.strip()


def test_links_have_targets():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []
