"""`CapturedSteps`: decode steps for each batch size and way of choosing tokens; short prompts."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from graphs import (
    BucketPlan,
    Event,
    GraphBackend,
    GraphKey,
    Program,
    Replayable,
    SessionInfo,
    StepBuffer,
    capture_order,
)
from nanovllm.runtime.decode_program import DecodeStatics, Variant, decode_program
from nanovllm.runtime.paged_attention import PagedAttention
from nanovllm.runtime.prompt_program import PromptLayout, prompt_program

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
        prompts: Sequence[PromptLayout] = (),
    ) -> None:
        """Capture.

        Args:
            statics: The buffers that the steps read and write.
            attention: How they attend.
            plan: The batch sizes.
            backend: What captures. If it fails, every step is run as it is, and `info` says why.
            on_event: Told of everything that the backend does.
            prompts: Steps with prompts to capture besides.
        """
        self.plan = plan
        self._captures = backend.caps.captures
        self._session = backend.session(statics, on_event)
        padding = torch.from_numpy(StepBuffer(statics.layout).vector)

        def reset() -> None:
            """Make a step without a live row: it attends to the pad block and writes nowhere."""
            statics.staging.copy_(padding)

        # By key, what to capture and what makes its inputs padding only.
        todo: dict[GraphKey, tuple[Program, Callable[[], None]]] = {}
        for size, variant in itertools.product(plan.sizes, VARIANTS):
            program = decode_program(size, variant, statics, attention)
            todo[GraphKey(size, variant)] = program, reset
        for layout in prompts:
            program = prompt_program(layout, statics, attention)
            todo[_prompt_key(layout)] = program, partial(_reset_prompts, statics, layout)
        self._prompts = sorted(prompts, key=lambda one: (one.num_positions, one.num_rows))
        self._steps: dict[GraphKey, Replayable] = {}
        try:
            for key in capture_order(todo):
                program, make_padding = todo[key]
                self._steps[key] = self._session.capture(key, program, reset=make_padding)
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

    def prompts_for(self, num_positions: int, num_rows: int) -> PromptLayout | None:
        """The smallest captured step with prompts that holds as much; None if there is none."""
        for layout in self._prompts:
            if layout.num_positions >= num_positions and layout.num_rows >= num_rows:
                return layout
        return None

    def prompt_step(self, layout: PromptLayout) -> Replayable:
        """The step that was captured for a layout."""
        return self._steps[_prompt_key(layout)]

    def describe(self) -> dict[str, Any]:
        """See `Executor.describe_graphs`."""
        captures = [
            {
                "bucket": capture.key.bucket,
                "counts": "rows" if capture.key.variant in VARIANTS else "positions",
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


def _prompt_key(layout: PromptLayout) -> GraphKey:
    return GraphKey(layout.num_positions, f"prompts of up to {layout.num_rows}")


def _reset_prompts(statics: DecodeStatics, layout: PromptLayout) -> None:
    statics.mixed[: layout.num_words].copy_(torch.from_numpy(layout.empty()))
