"""The executor: runs one batch on a device and draws the tokens. Owns all device memory."""

from collections.abc import Sequence as ReadOnlySequence
from typing import Any, Protocol

import attrs
import torch

from nanovllm.core import Batch
from nanovllm.core.batch import Int32Array
from nanovllm.model.decoder import Decoder
from nanovllm.runtime.inputs import attention_metadata, to_device
from nanovllm.runtime.logprobs import SCORED_BYTES, prompt_logprobs
from nanovllm.runtime.sampler import Sampled, SamplingRow, sample


@attrs.frozen
class StepTrace:
    """How a step was run: see the fields of that name in `nanovllm.records.StepRecord`."""

    mode: str
    bucket: int | None = None
    fallback: str | None = None
    pack_s: float = 0.0
    submit_s: float = 0.0
    wait_s: float = 0.0


class Flight(Protocol):
    """A step on its way."""

    @property
    def feeds_next(self) -> bool:
        """Whether the next step may start from its tokens while the host does not know them."""

    def result(self) -> tuple[Sampled, StepTrace]:
        """Wait for its tokens: one for each of the batch's `sampled_rows`, in order."""


class Executor(Protocol):
    """What the engine needs of a device."""

    def submit(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> Flight:
        """Begin to compute a batch and to draw one token for each of its `sampled_rows`.

        The result also says how likely the tokens of `batch.scored_indices` were.

        A batch with `sources` is submitted while the step before it is on its way, and reads its
        tokens from there. Results are asked for in the order of submission.
        """

    def may_run_ahead(self, rows: ReadOnlySequence[SamplingRow]) -> bool:
        """Whether a step with these rows may be submitted before the last one's tokens are known.

        False where tokens are drawn with a look at those before them, and on devices that gain
        nothing by it.
        """

    def recover(self) -> None:
        """Be fit for another step after a submission was cut off anywhere, or after `close`.

        Results of steps that were on their way are not asked for any more.
        """

    def describe_graphs(self) -> dict[str, Any]:
        """What was captured, and why not if nothing was, in values that JSON can hold.

        Returns:
            `captures`: of each one bucket, what that counts ("rows", or "positions" of steps with
            prompts), variant, warmup_ms, capture_ms, pool_bytes and driver_bytes; `degraded`: why
            every step runs eagerly though graphs were asked for.
        """

    def close(self) -> None:
        """Give the memory back; may be called twice."""


def no_graphs() -> dict[str, Any]:
    """`describe_graphs` of an executor that captures nothing."""
    return {"captures": [], "degraded": None}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed for want of memory, so that a smaller one may get through."""
    # torch has no type of its own for a CPU's memory, only this text.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@attrs.frozen
class Landed:
    """A step that was computed while it was submitted."""

    sampled: Sampled
    trace: StepTrace
    feeds_next: bool = False

    def result(self) -> tuple[Sampled, StepTrace]:
        """See `Flight`."""
        return self.sampled, self.trace


class TorchExecutor:
    """Runs the decoder eagerly, on a CPU or on a GPU."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: torch.Tensor,
        *,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._decoder: Decoder | None = decoder
        self._kv_cache: torch.Tensor | None = kv_cache
        self._block_size = block_size
        self._device = device

    def submit(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> Landed:
        """See `Executor`. The result is on the host, so this waits for the device."""
        return Landed(self._run(batch, rows), StepTrace("eager"))

    def may_run_ahead(self, rows: ReadOnlySequence[SamplingRow]) -> bool:
        """See `Executor`."""
        return False

    def recover(self) -> None:
        """See `Executor`: a step leaves nothing behind here."""

    def describe_graphs(self) -> dict[str, Any]:
        """See `Executor`."""
        return no_graphs()

    def _run(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> Sampled:
        assert self._decoder is not None, "the executor is closed"
        assert self._kv_cache is not None
        with torch.inference_mode():
            hidden = self._decoder.forward(
                to_device(batch.input_ids, self._device),
                to_device(batch.positions, self._device),
                self._kv_cache,
                attention_metadata(batch, self._block_size, self._device),
            )
            sampled = Sampled(token_ids=[], logprobs=None)
            if rows:  # else only prompts that were cut short: nothing to draw
                sampled = sample(self._logits(hidden, batch.logits_indices), rows)
            if len(batch.scored_indices):
                scores = prompt_logprobs(
                    batch,
                    lambda indices: self._logits(hidden, indices),
                    num_rows=max(1, SCORED_BYTES // (4 * self._decoder.config.vocab_size)),
                )
                sampled = attrs.evolve(sampled, prompt_logprobs=scores)
            return sampled

    def _logits(self, hidden: torch.Tensor, indices: Int32Array) -> torch.Tensor:
        assert self._decoder is not None
        return self._decoder.logits(hidden[to_device(indices, self._device)])

    def close(self) -> None:
        """See `Executor`."""
        self._decoder = None
        self._kv_cache = None
