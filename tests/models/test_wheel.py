"""Installs the wheel outside the checkout and runs it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests.models import tiny
from tests.models.support import ROOT

CHECKPOINT = tiny.directory()
CONSTRAINTS = f"python-3.{11 if sys.version_info[:2] == (3, 11) else 12}.txt"
README_EXAMPLE = f"""
import kvjax
from kvjax_models import load

llm = load({str(CHECKPOINT)!r})
print(llm.generate("Once upon a time", policy=kvjax.SubGen, budget=128, max_new_tokens=8))
for text in llm.cache("subgen", 128).stream("Once upon a time", max_new_tokens=8):
    print(text, end="", flush=True)
print(kvjax.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    # A build writes files into its source, which would become part of the next wheel.
    for name in ("kvjax", "pallas_kernels", "models/kvjax_models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    subprocess.run([sys.executable, "-m", "pip", *options], check=True)
    [path] = out.glob("*.whl")
    return path


def test_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "kvjax", "kvjax_models", "pallas_kernels",
    }  # fmt: skip
    assert {"kvjax/py.typed", "kvjax_models/py.typed", "kvjax_models/cli/__init__.py"} <= set(names)


def test_the_wheel_generates(wheel, tmp_path):
    """Uses the dependencies of this environment, but not its editable install."""
    python = install(tmp_path, wheel, "--no-deps")
    packages = next((tmp_path / "bare").glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    run_command(python, tmp_path)


@pytest.mark.heavy
def test_the_wheel_with_its_extra_is_sufficient(wheel, tmp_path):
    python = install(tmp_path, f"{wheel}[models]", "--constraint", str(ROOT / "constraints" / CONSTRAINTS))
    output = run(tmp_path, python, "-c", README_EXAMPLE)
    assert output.startswith(run_command(python, tmp_path))
    assert str(tmp_path / "bare") in output.splitlines()[-1]


def install(tmp_path, *arguments):
    """Installs packages into a new environment and returns its interpreter."""
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *arguments], check=True)
    return python


def run_command(python, tmp_path):
    """Returns the output of the installed command."""
    options = ("--prompt=Once upon a time", "--policy=subgen", "--budget=128", "--max_new_tokens=8")
    text = run(tmp_path, python.parent / "kvjax", "generate", f"--model={CHECKPOINT}", *options)
    assert text.strip()
    return text


def run(directory, *command):
    """Returns the output of a program that runs outside the checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
