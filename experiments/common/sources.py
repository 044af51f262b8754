"""Natural text that is wherever this runs: the Python sources of the standard library and of installed packages.

A package is its files in order of their paths, each behind a line that names it as in RepoBench's prompts
(https://github.com/Leolty/repobench). Some packages are held out: nothing of this project is trained on them. What a
package says follows from its installed version, which `constraints/` pins.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import re
import sysconfig

# The standard library under the name that it has among packages here; it differs between versions of Python.
STANDARD_LIBRARY = "python"
TRAINING = (
    STANDARD_LIBRARY,
    "PIL",
    "absl",
    "dateutil",
    "etils",
    "flax",
    "fontTools",
    "huggingface_hub",
    "jax",
    "jaxtyping",
    "matplotlib",
    "narwhals",
    "numpy",
    "orbax",
    "pygments",
    "scipy",
    "sklearn",
    "tqdm",
    "treescope",
)
# Numerics, an application, a compiler of templates, a runner of processes, parsers.
HELD_OUT = ("jinja2", "joblib", "optax", "pyparsing", "rich")

FILE_HEADER = "# Path: {path}\n"

# Others' code inside a package (which may be that of a held-out one), tests, and what is generated.
_LEFT_OUT = frozenset({"__pycache__", "_generated", "_vendor", "externals", "test", "testing", "tests", "vendor"})
_LEFT_OUT_OF_PYTHON = frozenset({"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "turtledemo"})
_LEFT_OUT_FILES = re.compile(r"test_.*|.*_test|conftest|_sysconfigdata.*|_emoji_codes")
# Where more of a file's characters than this are digits or not ASCII it is a table, not text.
_MOST_OF_A_TABLE = 0.1
_OF_A_TABLE = re.compile(r"[0-9]|[^\x00-\x7f]")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of a package: its path from the package's name on, with slashes, and its text."""

    path: str
    text: str


def packages(*, held_out: bool) -> tuple[str, ...]:
    """The packages that models are trained on, or those held out."""
    return HELD_OUT if held_out else TRAINING


@functools.cache
def files(package: str) -> tuple[SourceFile, ...]:
    """A package's Python files in order of their paths, without tests, vendored code, tables and empty files.

    Raises:
        ValueError: for a package that is in neither list, or that is not installed.
    """
    if package not in TRAINING + HELD_OUT:
        raise ValueError(f"package {package!r} is not known; known: {', '.join(TRAINING + HELD_OUT)}")
    left_out = _LEFT_OUT | (_LEFT_OUT_OF_PYTHON if package == STANDARD_LIBRARY else frozenset())
    found = []
    for root in _directories(package):
        for path in root.rglob("*.py"):
            inside = path.relative_to(root)
            if left_out.isdisjoint(inside.parts) and not _LEFT_OUT_FILES.fullmatch(path.stem):
                text = path.read_text(encoding="utf-8", errors="replace")
                if text.strip() and not _is_table(text):
                    found.append(SourceFile(f"{package}/{inside.as_posix()}", text))
    return tuple(sorted(found, key=lambda file: file.path))


def _is_table(text: str) -> bool:
    return len(_OF_A_TABLE.findall(text)) > _MOST_OF_A_TABLE * len(text)


def _directories(package: str) -> list[pathlib.Path]:
    if package == STANDARD_LIBRARY:
        return [pathlib.Path(sysconfig.get_paths()["stdlib"])]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package!r} is not installed: pip install kvjax[experiments]")
    return [pathlib.Path(place) for place in spec.submodule_search_locations]


def as_in_repository(file: SourceFile) -> str:
    """A file as it stands in `repository`."""
    return FILE_HEADER.format(path=file.path) + file.text.rstrip("\n") + "\n\n"


def repository(package: str) -> str:
    """A whole package as one text: every file behind its path."""
    return "".join(map(as_in_repository, files(package)))


def documents(*, held_out: bool) -> tuple[SourceFile, ...]:
    """The files of all packages, package after package."""
    return tuple(file for package in packages(held_out=held_out) for file in files(package))
