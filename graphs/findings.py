"""What can be wrong with a program, as values. Pure: no torch."""

from enum import Enum

import attrs

from graphs.backend import GraphKey


class FindingKind(Enum):
    """A reason why a program cannot be captured, or not safely replayed.

    The value says what would happen on a device, and what to do.
    """

    HOST_SYNC = (
        "reads a device value on the host: the capture fails, or the value is baked in; "
        "compute with tensors, as `torch.where`"
    )
    DYNAMIC_SHAPE = (
        "makes a shape out of device values: the capture fails; keep shapes of the whole bucket "
        "and mask with `torch.where`"
    )
    HOST_CONSTANT = (
        "makes a tensor from host numbers: a copy from pageable memory, which cannot be captured; "
        "make it once and keep it among the statics"
    )
    EXTERNAL_TENSOR = (
        "uses a tensor that is neither static nor its own: its memory may be given to somebody "
        "else before a replay; name it among the statics"
    )
    TORCH_RNG = (
        "draws from torch's generator: tokens then depend on which graphs ran before; use a "
        "counter-based generator keyed by seed and position"
    )
    MIXED_DEVICES = (
        "mixes devices in one operation: a copy inside the step, or a failed capture; move inputs "
        "once per step, before the replay"
    )
    ESCAPED_TENSOR = (
        "leaves a tensor of the shared pool behind: the next replay of any graph overwrites it; "
        "copy it into a static buffer inside the program"
    )
    STATIC_MOVED = "a static buffer is not where it was at the capture: replays use the old memory"


@attrs.frozen
class Finding:
    """One thing that is wrong with a program.

    Attributes:
        kind: What.
        detail: The operation or the buffer, in words.
        where: Source line that called it, "file.py:12", or "" if it has none.
        key: The graph it was found in; None outside a session.
    """

    kind: FindingKind
    detail: str
    where: str = ""
    key: GraphKey | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        at = f" at {self.where}" if self.where else ""
        graph = f" (bucket {self.key.bucket}, {self.key.variant})" if self.key else ""
        return f"{self.detail}{at}{graph}: {self.kind.value}"
