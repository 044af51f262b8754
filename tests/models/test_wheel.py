"""What `pip install` brings: the wheel, alone, outside the checkout."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CHECKPOINT = ROOT / "models" / "checkpoints" / "kvjax-lm-2k"
LINE = f"python-3.{11 if sys.version_info[:2] == (3, 11) else 12}.txt"
FIVE_LINES = f"""
import kvjax
from kvjax_models import load

llm = load({str(CHECKPOINT)!r})
print(llm.generate("Once upon a time", policy=kvjax.SubGen, budget=128, max_new_tokens=8))
for piece in llm.stream("Once upon a time", policy="subgen", budget=128, max_new_tokens=8):
    print(piece, end="", flush=True)
print(kvjax.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    # Building leaves files beside its source, which the next wheel would take in.
    for name in ("kvjax", "pallas_kernels", "models/kvjax_models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    [path] = out.glob("*.whl")
    return path


def test_packages_have_names_of_their_own(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "kvjax", "kvjax_models", "pallas_kernels",
    }  # fmt: skip
    assert {"kvjax/py.typed", "kvjax_models/py.typed", "kvjax_models/cli/__init__.py"} <= set(names)


def test_the_wheel_generates(wheel, tmp_path):
    """With the dependencies of this environment, but not its editable install."""
    python = installed(tmp_path, wheel, "--no-deps")
    packages = next((tmp_path / "bare").glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    writes(python, tmp_path)


@pytest.mark.heavy
def test_the_wheel_and_its_extra_need_nothing_else(wheel, tmp_path):
    python = installed(tmp_path, f"{wheel}[models]", "--constraint", str(ROOT / "constraints" / LINE))
    done = called(tmp_path, python, "-c", FIVE_LINES)
    assert done.startswith(writes(python, tmp_path))
    assert str(tmp_path / "bare") in done.splitlines()[-1]


def installed(tmp_path, *words):
    """The interpreter of a fresh environment with what pip is told to install."""
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *words], check=True)
    return python


def writes(python, tmp_path):
    """What the installed command writes."""
    words = ("--prompt=Once upon a time", "--policy=subgen", "--budget=128", "--max_new_tokens=8")
    text = called(tmp_path, python.parent / "kvjax", "generate", f"--model={CHECKPOINT}", *words)
    assert text.strip()
    return text


def called(tmp_path, *words):
    """What a program prints, outside the checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
