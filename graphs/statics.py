"""Static buffers: tensors whose memory a captured program has baked in.

A graph knows addresses, not names. `buffer.copy_(new)` changes what the next replay reads;
`buffer = new` does not, and the graph goes on reading memory that may have gone to somebody else.
`StaticsRecord` notes where each buffer lies and says which have moved since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    import torch


class Statics(Protocol):
    """Whatever owns the static buffers: inputs, outputs, K/V cache and weights."""

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Look up every static buffer by name, as the owner holds it now."""
        ...


@attrs.frozen
class StaticTensors:
    """Static buffers in a mapping.

    Attributes:
        tensors: By name. Looked at anew each time, so that a replaced entry is noticed.
    """

    tensors: Mapping[str, torch.Tensor]

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Look up every static buffer by name."""
        return self.tensors


@attrs.frozen(eq=False)
class StaticsRecord:
    """Where the static buffers lay when the record was made.

    It holds the tensors: memory of a buffer that was given up could otherwise be taken by the one
    that replaced it, and the change would not show.
    """

    _tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, statics: Statics) -> StaticsRecord:
        """Note where every buffer lies."""
        return cls(dict(statics.named_tensors()))

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The buffers as they were, by name."""
        return self._tensors

    def changes(self, statics: Statics) -> tuple[str, ...]:
        """List, in words, what is no longer as it was; empty if every buffer still lies there."""
        now = statics.named_tensors()
        said = [f"static `{name}` is gone" for name in self._tensors if name not in now]
        said += [f"static `{name}` is new" for name in now if name not in self._tensors]
        for name, tensor in self._tensors.items():
            if name in now and _place(now[name]) != _place(tensor):
                said.append(
                    f"static `{name}` was replaced by another tensor; write into it with `copy_` "
                    "instead of assigning it"
                )
        return tuple(said)


def storage_id(tensor: torch.Tensor) -> int:
    """Identify the memory behind a tensor, for as long as somebody holds it."""
    return int(tensor.untyped_storage()._cdata)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a captured program has baked in of a tensor."""
    return (
        storage_id(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )
