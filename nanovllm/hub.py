"""From what the user calls a model to files on this machine. Knows no torch and no tokenizers."""

import enum
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from nanovllm.builtin_model import SMOLLM2_135M, BuiltinModel, cache_folder, install
from nanovllm.errors import ConfigError

BUILTIN_MODELS: Mapping[str, BuiltinModel] = {SMOLLM2_135M.name: SMOLLM2_135M}
"""Names that need no file and no account."""

VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken")
"""A folder has a tokenizer if one of these is in it."""

_TOKENIZER_FILES = (*VOCABULARY_FILES, "*.json", "*.jinja", "merges.txt")
_MODEL_FILES = (*_TOKENIZER_FILES, "*.safetensors")
# Folders hold the same model in other formats, and so does consolidated.safetensors.
_NEVER_FILES = ("*/*", "consolidated*")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class FilesKind(enum.Enum):
    """Layouts that are understood."""

    FOLDER = "folder"
    GGUF = "gguf"


@attrs.frozen
class ModelFiles:
    """A model on this machine.

    Attributes:
        kind: How it is laid out.
        path: The folder, or the `.gguf` file.
        name: What to call it in messages.
    """

    kind: FilesKind
    path: Path
    name: str


@attrs.frozen
class _Request:
    """What is being looked for: the option's name, its value, and which files make a folder one."""

    option: str
    spec: str
    folder_needs: tuple[str, ...]
    hub_files: tuple[str, ...]


def say(message: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def find_model(
    spec: str | os.PathLike[str], *, progress: Callable[[str], None] = say
) -> ModelFiles:
    """Find a model's files, downloading them if need be.

    A built-in name goes before a folder of the same name (`./smollm2-135m` is that folder), and
    whatever exists on disk goes before the hub. What is cached is used without asking the network.

    Args:
        spec: A folder in Hugging Face layout, a `.gguf` file, a built-in name or a hub id.
        progress: Called with a line before and after a download.

    Raises:
        ConfigError: There is no such model, or it cannot be downloaded.
    """
    return _find(_Request("model", _text("model", spec), ("config.json",), _MODEL_FILES), progress)


def find_tokenizer(
    spec: str | os.PathLike[str], *, progress: Callable[[str], None] = say
) -> ModelFiles:
    """Find a tokenizer's files; like `find_model`, but a folder needs no model in it."""
    text = _text("tokenizer", spec)
    return _find(_Request("tokenizer", text, VOCABULARY_FILES, _TOKENIZER_FILES), progress)


def _text(option: str, spec: object) -> str:
    text = os.fspath(spec) if isinstance(spec, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"`{option}` is {spec!r}, but {_ALLOWED}.")
    return text


_ALLOWED = (
    "a folder in Hugging Face layout, a .gguf file, a hub id such as Qwen/Qwen3-0.6B, or "
    f"{' or '.join(BUILTIN_MODELS)} is allowed"
)


def _find(request: _Request, progress: Callable[[str], None]) -> ModelFiles:
    option, spec = request.option, request.spec
    if spec in BUILTIN_MODELS:
        path = install(BUILTIN_MODELS[spec], cache_folder(), progress=progress)
        return ModelFiles(FilesKind.GGUF, path, spec)
    try:
        path = Path(spec).expanduser().absolute()
        # Not resolved: a link into a cache often points to a file without a telling name.
        if path.is_dir():
            return _folder(request, path)
        if path.is_file():
            return _file(request, path)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"`{option}` is {spec!r}, which cannot be read ({error}).") from error
    if path.is_symlink():
        raise ConfigError(f"`{option}` is {spec!r}, a link to nothing; {_ALLOWED}.")
    if _HUB_ID.fullmatch(spec) and path.suffix.lower() != ".gguf":
        return _from_hub(request, progress)
    raise ConfigError(
        f"`{option}` is {spec!r}, but {path} does not exist; {_ALLOWED}. Check the spelling."
    )


def _has_any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def _folder(request: _Request, path: Path) -> ModelFiles:
    if _has_any(path, request.folder_needs):
        return ModelFiles(FilesKind.FOLDER, path, path.name)
    found = sorted(path.glob("*.gguf"))
    advice = f"give the file {found[0]}" if found else "give another folder"
    raise ConfigError(
        f"`{request.option}` is {request.spec!r}, a folder without "
        f"{' or '.join(request.folder_needs)}; {_ALLOWED}: {advice}."
    )


def _file(request: _Request, path: Path) -> ModelFiles:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix.lower() == ".gguf":
        return ModelFiles(FilesKind.GGUF, path, path.stem)
    raise ConfigError(
        f"`{request.option}` is {request.spec!r}, a {path.suffix or 'nameless'} file; {_ALLOWED}. "
        f"For a single file of a model give its folder: {path.parent}."
    )


def _from_hub(request: _Request, progress: Callable[[str], None]) -> ModelFiles:
    # Of the cache just the first file is asked for, and then looked at what a run needs: another
    # program may have left a part of the model there, or all but a file that nobody misses.
    cached = _snapshot(request, request.folder_needs[:1], local_files_only=True)
    if isinstance(cached, Path) and _is_complete(request, cached):
        return ModelFiles(FilesKind.FOLDER, cached, request.spec)
    progress(f"Downloading {request.spec} from the Hugging Face hub ...")
    fetched = _snapshot(request, request.hub_files, local_files_only=False)
    if isinstance(fetched, Path) and _has_any(fetched, request.folder_needs):
        return ModelFiles(FilesKind.FOLDER, fetched, request.spec)
    if isinstance(fetched, Path):
        why = f"it has no {' or '.join(request.folder_needs)}; choose a model in that layout"
    else:
        why = f"{fetched}; check name, network and access rights, or give a local folder"
    raise ConfigError(
        f"`{request.option}` is {request.spec!r}, which is no local folder or file, and of which "
        f"the Hugging Face hub gives nothing usable: {why}."
    )


def _is_complete(request: _Request, folder: Path) -> bool:
    if not (_has_any(folder, request.folder_needs) and _has_any(folder, VOCABULARY_FILES)):
        return False
    if "*.safetensors" not in request.hub_files:
        return True
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return _has_any(folder, ("*.safetensors",))
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / shard).exists() for shard in set(shards))


def _snapshot(request: _Request, files: tuple[str, ...], *, local_files_only: bool) -> Path | str:
    """The folder of a hub model, or in words why there is none."""
    import huggingface_hub  # takes a third of a second, and most models are local

    try:
        folder = huggingface_hub.snapshot_download(
            request.spec,
            allow_patterns=list(files),
            ignore_patterns=list(_NEVER_FILES),
            local_files_only=local_files_only,
        )
    # It lets errors of the HTTP package beneath it through, and which package that is has changed.
    except Exception as error:  # noqa: BLE001
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"
    return Path(folder)
