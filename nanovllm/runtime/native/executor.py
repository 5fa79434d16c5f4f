"""An `Executor` that runs every step natively on the CPU."""

from collections.abc import Sequence as ReadOnlySequence
from typing import Any

from nanovllm.core import Batch
from nanovllm.runtime.executor import Landed, StepTrace, no_graphs
from nanovllm.runtime.logprobs import prompt_logprobs
from nanovllm.runtime.native.program import NativeProgram
from nanovllm.runtime.sampler import (
    Sampled,
    SamplingRow,
    all_plain_greedy,
    sample,
    unless_broken,
)


class NativeExecutor:
    """See `nanovllm.runtime.executor.Executor`."""

    def __init__(self, program: NativeProgram) -> None:
        self._program: NativeProgram | None = program

    def submit(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> Landed:
        """Compute a batch and draw its tokens."""
        return Landed(self._run(batch, rows), StepTrace("native"))

    def may_run_ahead(self, rows: ReadOnlySequence[SamplingRow]) -> bool:
        """A CPU has nobody to prepare the next step while it computes."""
        return False

    def recover(self) -> None:
        """See `Executor`: a step leaves nothing behind here."""

    def describe_graphs(self) -> dict[str, Any]:
        """See `Executor`."""
        return no_graphs()

    def _run(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> Sampled:
        assert self._program is not None, "the executor is closed"
        logits = self._program.run(batch)
        # Drawn first: what comes after it is computed into the same buffer.
        if not rows:
            sampled = Sampled(token_ids=[], logprobs=None)
        elif all_plain_greedy(rows):
            sampled = Sampled(unless_broken(*self._program.best(len(rows))), None)
        else:
            sampled = sample(logits, rows)
        if len(batch.scored_indices):
            program = self._program
            scores = prompt_logprobs(batch, program.more_logits, num_rows=program.max_num_logits)
            sampled = Sampled(sampled.token_ids, sampled.logprobs, sampled.failures, scores)
        return sampled

    def close(self) -> None:
        """End the helper threads and give the memory back."""
        if self._program is not None:
            self._program.close()
        self._program = None
