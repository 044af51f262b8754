"""Source files of installed Python packages, used as long texts.

The packages were held out when the shipped checkpoints were trained. A package's text is its files in order of their
paths, each after a line that names its path as in RepoBench's prompts (https://github.com/Leolty/repobench). The text
depends on the installed version, which `constraints/` pins.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import re

# A templating engine, a library for parallel jobs, an optimizer library, a parser, a terminal application.
PACKAGES = ("jinja2", "joblib", "optax", "pyparsing", "rich")

FILE_HEADER = "# Path: {path}\n"

# Directories and files with third-party code, tests or generated code.
_EXCLUDED_DIRECTORIES = frozenset(
    {"__pycache__", "_generated", "_vendor", "externals", "test", "testing", "tests", "vendor"}
)
_EXCLUDED_FILES = re.compile(r"test_.*|.*_test|conftest|_emoji_codes")
# A file with a larger share of digits and non-ASCII characters is a table of data, not text.
_MAX_DATA_SHARE = 0.1
_DATA = re.compile(r"[0-9]|[^\x00-\x7f]")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of a package: its path relative to the package's parent directory, with slashes, and its text."""

    path: str
    text: str


@functools.cache
def files(package: str) -> tuple[SourceFile, ...]:
    """Returns a package's Python files in order of their paths, without tests, third-party code, data and empty files.

    Raises:
        ValueError: if `package` is not in `PACKAGES` or is not installed.
    """
    if package not in PACKAGES:
        raise ValueError(f"package {package!r} is not known; known: {', '.join(PACKAGES)}")
    result = []
    for root in _directories(package):
        for path in root.rglob("*.py"):
            inside = path.relative_to(root)
            if _EXCLUDED_DIRECTORIES.isdisjoint(inside.parts) and not _EXCLUDED_FILES.fullmatch(path.stem):
                text = path.read_text(encoding="utf-8", errors="replace")
                if text.strip() and not _is_data(text):
                    result.append(SourceFile(f"{package}/{inside.as_posix()}", text))
    return tuple(sorted(result, key=lambda file: file.path))


def _is_data(text: str) -> bool:
    return len(_DATA.findall(text)) > _MAX_DATA_SHARE * len(text)


def _directories(package: str) -> list[pathlib.Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package!r} is not installed: pip install kvjax[experiments]")
    return [pathlib.Path(location) for location in spec.submodule_search_locations]


def repository(package: str) -> str:
    """Returns the concatenated files of a package, each after a line with its path."""
    return "".join(FILE_HEADER.format(path=file.path) + file.text.rstrip("\n") + "\n\n" for file in files(package))
