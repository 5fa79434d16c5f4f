"""What every backend offers: a session that captures one step program per key, and replays it.

    with backend.session(statics, on_event) as session:
        steps = {key: session.capture(key, program(key), reset=pads) for key in capture_order(keys)}
        session.seal()
        ...
        steps[key].replay()

A program is any callable without arguments or results. It reads and writes *static* buffers only:
tensors that are allocated once, before the session, and never replaced. What it creates on the
way lives in memory that all graphs of a session share, so nothing of that may be kept: the next
replay of any graph overwrites it.

A graph is never closed alone: graphs of one session share memory and library workspaces, and only
`GraphSession.close` gives them back, all together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

import attrs

from graphs.statics import Statics

Program = Callable[[], None]
"""One step over static buffers. It takes nothing and returns nothing."""


@attrs.frozen
class GraphKey:
    """What a graph was captured for.

    Attributes:
        bucket: Rows, padding included.
        variant: Which program, as "greedy" or "sample".
        ctx_class: Which ceiling of context lengths, where programs are captured for several.
    """

    bucket: int
    variant: str = "greedy"
    ctx_class: int = 0


@attrs.frozen
class GraphCaps:
    """What a backend does.

    Attributes:
        captures: A replay runs recorded operations and not the Python of the program.
        shares_pool: Graphs of a session use the same memory for what they create.
        verifies: It reports what would go wrong on a device (`graphs.findings`).
    """

    captures: bool
    shares_pool: bool
    verifies: bool


@attrs.frozen
class CaptureInfo:
    """What one capture cost.

    Attributes:
        key: What was captured.
        warmup_ms: Time of all warm-up runs, compiling included.
        capture_ms: Time of the capture.
        pool_bytes: By how much the shared pool grew.
        driver_bytes: By how much the device memory grew that the allocator does not know of, as
            that of the graph's own nodes; None where it cannot be measured.
        num_nodes: Operations in the graph; None where they cannot be counted.
        captured: False for a program that a degraded session runs eagerly.
    """

    key: GraphKey
    warmup_ms: float = 0.0
    capture_ms: float = 0.0
    pool_bytes: int = 0
    driver_bytes: int | None = None
    num_nodes: int | None = None
    captured: bool = True


@attrs.frozen
class SessionInfo:
    """What all captures of a session cost together. Measured: nothing is extrapolated.

    Attributes:
        captures: One for each key, in the order of capture.
        total_ms: From the first capture to the end of `seal`.
        pool_bytes: Size of the shared pool.
        driver_bytes: Like that of `CaptureInfo`, over the whole session.
        degraded_reason: Why every program runs eagerly; None if graphs are replayed.
    """

    captures: tuple[CaptureInfo, ...]
    total_ms: float = 0.0
    pool_bytes: int = 0
    driver_bytes: int | None = None
    degraded_reason: str | None = None


class EventKind(Enum):
    """What a session tells its owner while it works."""

    CAPTURING = "capturing"  # no other thread may use the device from here ...
    CAPTURED = "captured"  # one key done; `data["info"]` is its `CaptureInfo`
    SEALED = "sealed"  # ... to here; `data["info"]` is the `SessionInfo`
    STOPPED = "stopped"  # ... or here, where a session ended without being sealed
    DEGRADED = "degraded"  # no graphs: every program runs eagerly
    OVER_BUDGET = "over budget"  # graphs took more memory than was set aside for them
    FINDING = "finding"  # `data["finding"]` is a `graphs.findings.Finding`


@attrs.frozen
class Event:
    """Something to log or count.

    Attributes:
        kind: What happened.
        message: One sentence for a reader.
        data: The values behind it.
    """

    kind: EventKind
    message: str
    data: Mapping[str, object] = attrs.field(factory=dict)


OnEvent = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """Do nothing: for a session whose owner does not listen."""
    del event


class Replayable(Protocol):
    """A captured program."""

    @property
    def key(self) -> GraphKey:
        """What it was captured for."""
        ...

    @property
    def info(self) -> CaptureInfo:
        """What the capture cost."""
        ...

    def replay(self) -> None:
        """Enqueue the step. Never waits for the device and never allocates.

        The static outputs hold its results until the next replay of any graph of the session.
        """
        ...


class GraphSession(Protocol):
    """Captures programs, then keeps them until `close`. Leaving the context closes it."""

    def capture(
        self, key: GraphKey, program: Program, *, reset: Callable[[], None], warmups: int = 2
    ) -> Replayable:
        """Warm a program up and capture it. Larger buckets must come first.

        Args:
            key: What it is captured for; once per session.
            program: The step. It is kept until `close`.
            reset: Puts the static inputs into the state of a step without live rows, under the
                padding that replays use, and forgets what a run left in caches of the program. It
                runs before each warm-up and before the capture.
            warmups: Runs before the capture, in which kernels are compiled and libraries choose
                their algorithms; at least 1.

        Raises:
            SessionError: After `seal` or `close`, for a key that was captured before, or for a
                bucket larger than the one before it.
        """
        ...

    def seal(self) -> SessionInfo:
        """End the capturing: replay each graph once under its `reset`, and wait for it."""
        ...

    def close(self) -> None:
        """Wait for the device and give up all graphs together. May be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class GraphBackend(Protocol):
    """A way to capture."""

    @property
    def name(self) -> str:
        """For messages and reports."""
        ...

    @property
    def caps(self) -> GraphCaps:
        """What it does."""
        ...

    def session(self, statics: Statics, on_event: OnEvent = ignore_event) -> GraphSession:
        """Begin a session over these static buffers."""
        ...


def capture_order(keys: Iterable[GraphKey]) -> tuple[GraphKey, ...]:
    """Sort keys into the order to capture them in: largest bucket first, equal ones as given."""
    return tuple(sorted(keys, key=lambda key: -key.bucket))
