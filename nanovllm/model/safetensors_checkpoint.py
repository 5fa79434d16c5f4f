"""A Hugging Face folder as a `Checkpoint`: config files and safetensors, one file or several."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from nanovllm.errors import WeightsError, list_some

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@attrs.frozen(eq=False)
class SafetensorsCheckpoint:
    """See `nanovllm.model.checkpoint.Checkpoint`. Build it with `open_folder`."""

    source: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    _files: Mapping[str, Any]  # tensor name -> open safetensors file
    _shapes: Mapping[str, tuple[int, ...]]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Map one tensor into memory."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def open_folder(folder: Path) -> SafetensorsCheckpoint:
    """Open a folder; tensors are mapped, not read.

    Raises:
        WeightsError: A file is missing, broken, or of a kind that is not read.
    """
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation_config = _read_json(generation_path) if generation_path.exists() else {}
    files: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, expected_names in _find_files(folder).items():
        try:
            opened = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{path} is truncated or no safetensors file ({error}); fetch it again."
            ) from error
        names = opened.keys() if expected_names is None else expected_names
        absent = sorted(set(names) - set(opened.keys()))
        if absent:
            raise WeightsError(
                f"{path} lacks tensors that {INDEX_NAME} promises: {list_some(absent)}; "
                "fetch it again."
            )
        for name in names:
            files[name] = opened
            shapes[name] = tuple(opened.get_slice(name).get_shape())
    return SafetensorsCheckpoint(str(folder), config, generation_config, files, shapes)


def _find_files(folder: Path) -> dict[Path, list[str] | None]:
    """Weight files with the tensors to take from each; None: all of them.

    The index decides where there is one: folders often hold further copies of the weights.
    """
    index_path = folder / INDEX_NAME
    if index_path.exists():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index_path} has no `weight_map`; fetch it again.")
        by_file: dict[Path, list[str] | None] = {}
        for name, file_name in weight_map.items():
            names = by_file.setdefault(folder / file_name, [])
            assert names is not None
            names.append(name)
        missing = sorted(path.name for path in by_file if not path.exists())
        if missing:
            raise WeightsError(
                f"{folder} lacks {len(missing)} of {len(by_file)} weight files that {INDEX_NAME} "
                f"lists: {list_some(missing)}; fetch them again."
            )
        return by_file
    if (folder / SINGLE_NAME).exists():
        return {folder / SINGLE_NAME: None}
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    )
    held = f"it holds {list_some(others)}" if others else "it holds no weights"
    raise WeightsError(
        f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; {held}. Convert the weights to "
        "safetensors, or name a .gguf file itself as the model."
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} does not exist; a model folder needs it.") from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not an object.")
    return content
