"""`CapturedSteps`: the decode step, captured for each batch size and way of choosing tokens."""

from collections.abc import Callable
from typing import Any

import torch

from graphs import (
    BucketPlan,
    Event,
    GraphBackend,
    GraphKey,
    Replayable,
    SessionInfo,
    StepBuffer,
    capture_order,
)
from nanovllm.runtime.decode_program import DecodeStatics, Variant, decode_program
from nanovllm.runtime.paged_attention import PagedAttention

VARIANTS: tuple[Variant, ...] = ("greedy", "sample")


class CapturedSteps:
    """Captures on construction; gives everything up at once on `close`."""

    def __init__(
        self,
        statics: DecodeStatics,
        attention: PagedAttention,
        plan: BucketPlan,
        backend: GraphBackend,
        on_event: Callable[[Event], None],
    ) -> None:
        """Capture.

        Args:
            statics: The buffers that the steps read and write.
            attention: How they attend.
            plan: The batch sizes.
            backend: What captures. If it fails, every step is run as it is, and `info` says why.
            on_event: Told of everything that the backend does.
        """
        self.plan = plan
        self._captures = backend.caps.captures
        self._session = backend.session(statics, on_event)
        padding = torch.from_numpy(StepBuffer(statics.layout).vector)

        def reset() -> None:
            """Make a step without a live row: it attends to the pad block and writes nowhere."""
            statics.staging.copy_(padding)

        keys = [GraphKey(size, variant) for size in plan.sizes for variant in VARIANTS]
        self._steps: dict[GraphKey, Replayable] = {}
        try:
            for key in capture_order(keys):
                variant: Variant = "sample" if key.variant == "sample" else "greedy"
                program = decode_program(key.bucket, variant, statics, attention)
                self._steps[key] = self._session.capture(key, program, reset=reset)
            self.info: SessionInfo = self._session.seal()
        except BaseException:
            self._session.close()
            raise

    @property
    def mode(self) -> str:
        """How a step runs, for `StepTrace.mode`."""
        return "replay" if self._captures and self.info.degraded_reason is None else "eager"

    def step(self, num_rows: int, variant: Variant) -> Replayable:
        """The smallest captured step that holds as many rows."""
        return self._steps[GraphKey(self.plan.bucket_for(num_rows), variant)]

    def describe(self) -> dict[str, Any]:
        """See `Executor.describe_graphs`."""
        captures = [
            {
                "bucket": capture.key.bucket,
                "variant": capture.key.variant,
                "warmup_ms": capture.warmup_ms,
                "capture_ms": capture.capture_ms,
                "pool_bytes": capture.pool_bytes,
                "driver_bytes": capture.driver_bytes,
            }
            for capture in self.info.captures
            if capture.captured
        ]
        return {"captures": captures, "degraded": self.info.degraded_reason}

    def close(self) -> None:
        """Wait for the device and give up all of them."""
        self._steps.clear()
        self._session.close()
