"""An `Executor` that replays captured decode steps, and runs every other step eagerly.

Per step the host packs one vector, copies it to the device, enqueues the step and a copy of its
tokens back, and returns. It waits only when it is asked for the result: by then the next step may
be on its way already.
"""

import time
from collections.abc import Sequence as ReadOnlySequence
from functools import partial
from typing import Any

import attrs
import torch

from nanovllm.core import Batch
from nanovllm.core.batch import Int32Array
from nanovllm.kernels.reference.steps import FAILED_TOKEN
from nanovllm.runtime.captured_steps import CapturedSteps
from nanovllm.runtime.decode_program import DecodeStatics, Variant
from nanovllm.runtime.device_queue import DeviceQueue, Ticket
from nanovllm.runtime.executor import StepTrace, no_graphs
from nanovllm.runtime.logprobs import SCORED_BYTES, prompt_logprobs
from nanovllm.runtime.paged_attention import PagedAttention
from nanovllm.runtime.prompt_program import mixed_views, run_prompts
from nanovllm.runtime.sampler import Sampled, SamplingRow, sample
from nanovllm.runtime.staging import Slot, Staging
from nanovllm.runtime.step_inputs import (
    Columns,
    HowToChoose,
    decode_fields,
    how_to_choose,
    mixed_fields,
    pack_arrays,
    sampling_columns,
)

MAX_IN_FLIGHT = 2
"""Steps on their way at most: the one whose tokens are awaited, and the next."""


class GraphExecutor:
    """See `nanovllm.runtime.executor.Executor`."""

    def __init__(
        self,
        statics: DecodeStatics,
        attention: PagedAttention,
        captured: CapturedSteps | None,
        queue: DeviceQueue,
    ) -> None:
        """Take over the parts.

        Args:
            statics: Buffers of the decode step; they hold the model and its K/V cache.
            attention: How it attends.
            captured: The decode step by batch size. None: every step is run eagerly.
            queue: The device.
        """
        layout = statics.layout
        self._statics: DecodeStatics | None = statics
        self._attention = attention
        self._captured = captured
        self._queue = queue
        self._staging = Staging(
            queue, layout, num_mixed_words=len(statics.mixed), max_in_flight=MAX_IN_FLIGHT
        )
        self._hidden: torch.Tensor | None = None  # of a step whose prompts are scored
        self._num_scored_rows = max(1, SCORED_BYTES // (4 * statics.logits.shape[1]))
        self._side = 0  # which half of `statics.tokens` the last step writes

    def submit(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> "GraphFlight":
        """See `Executor`. Does not wait for the device."""
        assert self._statics is not None, "the executor is closed"
        how = how_to_choose(rows, self._statics.logits.shape[1])
        if len(batch.scored_indices):
            how = "host"
        assert batch.sources is None or how != "host", "these rows may not run ahead"
        # What the host will choose is chosen greedily first: the step has to do something.
        variant: Variant = "sample" if how == "sample" else "greedy"
        slot = self._staging.begin()
        start_s = time.perf_counter()
        source_offset = self._side * self._statics.layout.max_num_rows
        out_offset = (1 - self._side) * self._statics.layout.max_num_rows
        try:
            if self._captured is not None and batch.num_decodes == batch.num_seqs:
                trace = self._submit_decodes(slot, batch, rows, variant, out_offset, source_offset)
            else:
                trace = self._submit_mixed(slot, batch, rows, variant, out_offset, source_offset)
            tokens = self._statics.tokens[out_offset : out_offset + len(rows)]
            ticket = self._queue.download(tokens, slot.token_words[: len(rows)])
        except BaseException:
            self._give_up(slot)
            raise
        self._side = 1 - self._side
        self._staging.fly(slot, ticket)
        submit_s = time.perf_counter() - start_s - trace.pack_s
        return GraphFlight(
            self, slot, ticket, batch, tuple(rows), how, attrs.evolve(trace, submit_s=submit_s)
        )

    def _give_up(self, slot: Slot) -> None:
        """Take back the slot of a step that could not be submitted whole.

        A part of it may be on its way and read the slot yet: so the slot goes the way of a step
        whose result nobody asks for.
        """
        assert self._statics is not None
        try:
            ticket = self._queue.download(self._statics.tokens[:0], slot.token_words[:0])
        except Exception:  # noqa: BLE001  # a device that takes nothing any more reads nothing
            self._staging.cancel(slot)
        else:
            self._staging.fly(slot, ticket)

    def may_run_ahead(self, rows: ReadOnlySequence[SamplingRow]) -> bool:
        """See `Executor`."""
        assert self._statics is not None
        return how_to_choose(rows, self._statics.logits.shape[1]) != "host"

    def recover(self) -> None:
        """See `Executor`. Waits for the device, which may be reading any slot."""
        if self._statics is not None:
            self._staging.start_over(self._statics.tokens[:0])

    def describe_graphs(self) -> dict[str, Any]:
        """See `Executor`."""
        return no_graphs() if self._captured is None else self._captured.describe()

    def close(self) -> None:
        """Wait for the device, then give up graphs and memory."""
        self._queue.close()
        if self._captured is not None:
            self._captured.close()
        self._captured = self._statics = self._hidden = None
        self._queue.give_back()

    def _submit_decodes(
        self,
        slot: Slot,
        batch: Batch,
        rows: ReadOnlySequence[SamplingRow],
        variant: Variant,
        out_offset: int,
        source_offset: int,
    ) -> StepTrace:
        """Replay the captured step of the smallest bucket that holds the batch."""
        start_s = time.perf_counter()
        assert self._captured is not None
        assert self._statics is not None
        step = self._captured.step(batch.num_seqs, variant)
        slot.decode.pack(
            batch.num_seqs,
            decode_fields(
                batch,
                sampling_columns(rows, variant),
                out_offset=out_offset,
                source_offset=source_offset,
            ),
        )
        pack_s = time.perf_counter() - start_s
        num_words = self._statics.layout.num_words(step.key.bucket)
        self._queue.upload(slot.decode_words[:num_words], self._statics.staging[:num_words])
        self._queue.run(step.replay)
        return StepTrace(
            self._captured.mode,
            bucket=step.key.bucket,
            fallback=self._captured.info.degraded_reason,
            pack_s=pack_s,
        )

    def _submit_mixed(
        self,
        slot: Slot,
        batch: Batch,
        rows: ReadOnlySequence[SamplingRow],
        variant: Variant,
        out_offset: int,
        source_offset: int,
    ) -> StepTrace:
        """Replay the smallest captured step with prompts that holds the batch, or run eagerly."""
        start_s = time.perf_counter()
        assert self._statics is not None
        arrays = mixed_fields(
            batch,
            sampling_columns(rows, variant),
            out_offset=out_offset,
            source_offset=source_offset,
        )
        layout = None
        if self._captured is not None and batch.sources is None and not len(batch.scored_indices):
            layout = self._captured.prompts_for(batch.num_tokens, batch.num_seqs)
        if layout is None:
            return self._submit_eagerly(slot, batch, arrays, variant, start_s)
        assert self._captured is not None
        layout.pack(arrays, slot.mixed)
        pack_s = time.perf_counter() - start_s
        num_words = layout.num_words
        self._queue.upload(slot.mixed_words[:num_words], self._statics.mixed[:num_words])
        self._queue.run(self._captured.prompt_step(layout).replay)
        return StepTrace(
            self._captured.mode,
            bucket=layout.num_positions,
            fallback=self._captured.info.degraded_reason,
            pack_s=pack_s,
        )

    def _submit_eagerly(
        self, slot: Slot, batch: Batch, arrays: Columns, variant: Variant, start_s: float
    ) -> StepTrace:
        assert self._statics is not None
        places, num_words = pack_arrays(arrays, slot.mixed)
        pack_s = time.perf_counter() - start_s
        self._queue.upload(slot.mixed_words[:num_words], self._statics.mixed[:num_words])
        inputs = mixed_views(self._statics.mixed, places, batch.block_tables.shape[1])
        keeps_hidden = bool(len(batch.scored_indices))
        self._queue.run(
            partial(self._run_eagerly, inputs, batch.max_seqlen_q, variant, keeps_hidden)
        )
        fallback = None
        if self._captured is not None:
            fallback = "prompts are scored" if keeps_hidden else "the step has too many positions"
        return StepTrace("eager", fallback=fallback, pack_s=pack_s)

    def _run_eagerly(
        self,
        inputs: dict[str, torch.Tensor],
        max_seqlen_q: int,
        variant: Variant,
        keeps_hidden: bool,
    ) -> None:
        assert self._statics is not None
        if "source" in inputs:  # decodes ahead of the host; clamped as in `decode_program`
            tokens = self._statics.tokens.index_select(0, inputs["source"])
            inputs["input_ids"] = tokens.clamp(min=0)
        hidden = run_prompts(
            self._statics, self._attention, inputs, max_seqlen_q=max_seqlen_q, variant=variant
        )
        self._hidden = hidden if keeps_hidden else None

    def _land(self, flight: "GraphFlight") -> Sampled:
        """The tokens of a step that was submitted."""
        assert self._statics is not None, "the executor is closed"
        self._staging.land(flight.ticket)
        if flight.how == "host":
            # Read where the step left them: no other step was submitted since.
            sampled = Sampled([], None)
            if flight.rows:
                sampled = sample(self._statics.logits[: len(flight.rows)], flight.rows)
            if len(flight.batch.scored_indices):
                scores = prompt_logprobs(flight.batch, self._logits, num_rows=self._num_scored_rows)
                sampled = attrs.evolve(sampled, prompt_logprobs=scores)
            return sampled
        drawn = flight.slot.tokens[: len(flight.rows)].tolist()
        return Sampled([None if token == FAILED_TOKEN else token for token in drawn], None)

    def _logits(self, indices: Int32Array) -> torch.Tensor:
        """Logits of packed positions of the last step, one that keeps its hidden states."""
        assert self._statics is not None
        assert self._hidden is not None
        rows = torch.from_numpy(indices).to(self._hidden.device)
        return self._statics.fused.decoder.lm_head(self._hidden.index_select(0, rows))


@attrs.frozen(eq=False)
class GraphFlight:
    """See `nanovllm.runtime.executor.Flight`."""

    executor: GraphExecutor
    slot: Slot
    ticket: Ticket
    batch: Batch
    rows: tuple[SamplingRow, ...]
    how: HowToChoose
    trace: StepTrace

    @property
    def feeds_next(self) -> bool:
        """Whether its tokens are drawn on the device."""
        return self.how != "host"

    def result(self) -> tuple[Sampled, StepTrace]:
        """See `Flight`."""
        start_s = time.perf_counter()
        sampled = self.executor._land(self)
        return sampled, attrs.evolve(self.trace, wait_s=time.perf_counter() - start_s)
