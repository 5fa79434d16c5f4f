"""An `Executor` that runs every step natively on the CPU."""

from collections.abc import Sequence as ReadOnlySequence

from nanovllm.core import Batch
from nanovllm.runtime.native.program import NativeProgram
from nanovllm.runtime.sampler import Sampled, SamplingRow, sample


class NativeExecutor:
    """See `nanovllm.runtime.executor.Executor`."""

    mode = "native"

    def __init__(self, program: NativeProgram) -> None:
        self._program: NativeProgram | None = program

    def run(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> Sampled:
        """Compute a batch and draw its tokens."""
        assert self._program is not None, "the executor is closed"
        logits = self._program.run(batch)
        return sample(logits, rows) if rows else Sampled(token_ids=[], logprobs=None)

    def close(self) -> None:
        """End the helper threads and give the memory back."""
        if self._program is not None:
            self._program.close()
        self._program = None
