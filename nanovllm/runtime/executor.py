"""The executor: runs one batch on a device and draws the tokens. Owns all device memory."""

from collections.abc import Sequence as ReadOnlySequence
from typing import Protocol

import torch

from nanovllm.core import Batch
from nanovllm.model.decoder import Decoder
from nanovllm.runtime.inputs import attention_metadata, to_device
from nanovllm.runtime.sampler import Sampled, SamplingRow, sample


class Executor(Protocol):
    """What the engine needs of a device."""

    @property
    def mode(self) -> str:
        """How it runs steps, for `StepRecord.mode`."""

    def run(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> Sampled:
        """Compute a batch and draw one token for each of `batch.sampled_rows`, given in order."""

    def close(self) -> None:
        """Give the memory back; may be called twice."""


class TorchExecutor:
    """Runs the decoder eagerly, on a CPU or on a GPU."""

    mode = "eager"

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

    def run(self, batch: Batch, rows: ReadOnlySequence[SamplingRow]) -> Sampled:
        """See `Executor`. The result is on the host, so this waits for the device."""
        assert self._decoder is not None, "the executor is closed"
        assert self._kv_cache is not None
        with torch.inference_mode():
            hidden = self._decoder.forward(
                to_device(batch.input_ids, self._device),
                to_device(batch.positions, self._device),
                self._kv_cache,
                attention_metadata(batch, self._block_size, self._device),
            )
            if not rows:  # only prompts that were cut short: nothing to draw
                return Sampled(token_ids=[], logprobs=None)
            last_rows = hidden[to_device(batch.logits_indices, self._device)]
            return sample(self._decoder.logits(last_rows), rows)

    def close(self) -> None:
        """See `Executor`."""
        self._decoder = None
        self._kv_cache = None
