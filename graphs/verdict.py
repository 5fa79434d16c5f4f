"""What `graphs.verify` found, as values. Pure: no torch."""

from collections.abc import Mapping
from enum import Enum

import attrs

from graphs.backend import GraphKey
from graphs.findings import Finding

_NUM_LINES = 20


class MismatchKind(Enum):
    """How a replay differed from the reference."""

    OUTPUT = "a live row's result differs"
    NOT_FINITE = "a live row's result is not finite"
    CACHE = "a page differs"
    CANARY = "a page that belongs to nobody was written"
    RAISED = "the replay raised"


@attrs.frozen
class Mismatch:
    """One difference.

    Attributes:
        step: Index in the schedule.
        kind: What differs.
        detail: Where, in words.
    """

    step: int
    kind: MismatchKind
    detail: str

    def __str__(self) -> str:
        """Say it in one line."""
        return f"step {self.step}: {self.kind.value}: {self.detail}"


@attrs.frozen
class VerifyReport:
    """The outcome.

    Attributes:
        findings: What was found when capturing, and later in the static buffers.
        mismatches: What differed, in order. One often causes those after it.
        num_steps: Steps replayed.
        num_ops: Operations of each graph that do something, views left out.
    """

    findings: tuple[Finding, ...]
    mismatches: tuple[Mismatch, ...]
    num_steps: int
    num_ops: Mapping[GraphKey, int]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings and not self.mismatches

    def __str__(self) -> str:
        """Say it in a few lines."""
        head = f"{len(self.num_ops)} graphs, {self.num_steps} steps: "
        if self.ok:
            return head + "safe to replay"
        head += f"{len(self.findings)} findings, {len(self.mismatches)} mismatches"
        said = [str(one) for one in (*self.findings, *self.mismatches)]
        more = [f"... and {len(said) - _NUM_LINES} more"] if len(said) > _NUM_LINES else []
        return "\n  ".join([head, *said[:_NUM_LINES], *more])
