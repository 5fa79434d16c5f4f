"""What a checkpoint is to the rest of the engine: a config and named tensors, whatever the file."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Checkpoint(Protocol):
    """A model on disk. Names, config keys and tensor layouts are those of Hugging Face folders."""

    @property
    def source(self) -> str:
        """Where it came from, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's architecture, in the spelling of `config.json`."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Defaults for generation, in the spelling of `generation_config.json`; may be empty."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the checkpoint, by name, known without reading the data."""

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor, in the type it is stored in (dequantised to float32 if quantised)."""
