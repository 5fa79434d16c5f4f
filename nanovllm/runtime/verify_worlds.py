"""The two sides of a verification: the decode step as it is captured, and the same step in words.

`CapturedWorld` holds the buffers and programs that a GPU would replay, and packs its inputs as
`GraphExecutor` does. `PlainWorld` computes each step with `model.decoder` and `runtime.sampler`,
from values on the host: it shares no line with the program. `graphs.verify` compares them.
"""

from collections.abc import Callable, Mapping
from typing import cast

import attrs
import numpy as np
import torch

from graphs import GraphKey, Program, StepBuffer
from nanovllm.core import Batch
from nanovllm.core.batch import Int32Array
from nanovllm.kernels.reference.steps import FAILED_TOKEN
from nanovllm.model.decoder import Decoder
from nanovllm.runtime.decode_program import (
    NO_SOURCE,
    DecodeStatics,
    Variant,
    decode_layout,
    decode_program,
)
from nanovllm.runtime.fused_decoder import FusedDecoder
from nanovllm.runtime.inputs import attention_metadata
from nanovllm.runtime.kv_cache import allocate_kv_cache
from nanovllm.runtime.paged_attention import PagedAttention
from nanovllm.runtime.sampler import SamplingRow, sample
from nanovllm.runtime.step_inputs import decode_fields, sampling_columns

MakeProgram = Callable[[int, Variant, DecodeStatics, PagedAttention], Program]
"""See `decode_program`."""


@attrs.frozen
class Geometry:
    """How big a verification is.

    Blocks 0 to `num_blocks` - 1 are for requests. Behind them come the one that padding attends
    to, and a last one that nobody owns: a slot of -1 taken as an index leads there.

    Attributes:
        sizes: Batch sizes to capture, ascending; the last is the most rows of a step.
        block_size: Positions of a block.
        max_model_len: The longest context.
    """

    sizes: tuple[int, ...] = (1, 2, 4, 6)
    block_size: int = 4
    max_model_len: int = 11

    @property
    def max_num_rows(self) -> int:
        """The largest batch."""
        return self.sizes[-1]

    @property
    def num_table_columns(self) -> int:
        """One more than a context ever uses, so that rows of the table are wider than they need."""
        return -(-self.max_model_len // self.block_size) + 1

    @property
    def num_blocks(self) -> int:
        """Just enough for the largest batch: a freed block finds a new owner soon."""
        return self.max_num_rows * -(-self.max_model_len // self.block_size)

    @property
    def pad_block(self) -> int:
        """What padding rows attend to."""
        return self.num_blocks

    @property
    def canary_block(self) -> int:
        """The last one."""
        return self.num_blocks + 1

    def allocate(self, decoder: Decoder) -> torch.Tensor:
        """A K/V cache, see `allocate_kv_cache`."""
        return allocate_kv_cache(
            decoder.config,
            num_blocks=self.canary_block + 1,
            block_size=self.block_size,
            dtype=decoder.embedding.dtype,
            device=decoder.embedding.device,
        )

    def by_block(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """View a K/V cache as `[num_blocks, L, 2, block_size, K, D]`."""
        num_layers, two, _, num_kv_heads, head_dim = kv_cache.shape
        by_block = kv_cache.view(num_layers, two, -1, self.block_size, num_kv_heads, head_dim)
        return by_block.movedim(2, 0)


@attrs.frozen
class DecodeStep:
    """One step of decodes.

    Attributes:
        batch: Its rows. `input_ids` counts where `sources` says `NO_SOURCE`.
        rows: How each row's token is chosen.
        sources: `[S]` which row of the step before drew the row's token, or `NO_SOURCE`. Unlike
            `Batch.sources` it may say so for some rows only.
        side: Which half of the tokens the step writes, 0 or 1; it reads the other.
        num_previous_rows: Rows of the step before.
    """

    batch: Batch
    rows: tuple[SamplingRow, ...]
    sources: Int32Array
    side: int
    num_previous_rows: int


@attrs.frozen
class _Outputs:
    """What a step leaves for the host."""

    tokens: torch.Tensor  # [2 R] int32
    logits: torch.Tensor  # [R, V]

    def of(self, step: DecodeStep) -> Mapping[str, torch.Tensor]:
        tokens = self.tokens.view(2, -1)
        return {
            "tokens": tokens[step.side],
            # The host may still be fetching these. As one row, so that all are looked at however
            # many rows are live now.
            "tokens before": tokens[1 - step.side, : step.num_previous_rows][None],
            "logits": self.logits,
        }


class CapturedWorld:
    """The decode step with its own buffers (see `graphs.verify.World`).

    Attributes:
        geometry: Its size.
        statics: Its buffers.
        attention: How it attends.
        buffer: What packs its inputs.
        step: The step that was packed last.
        make_program: What captures are made of.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: PagedAttention,
        geometry: Geometry,
        make_program: MakeProgram = decode_program,
    ) -> None:
        layout = decode_layout(
            geometry.max_num_rows, geometry.num_table_columns, geometry.pad_block
        )
        fused = FusedDecoder.create(
            decoder, geometry.allocate(decoder), max_model_len=geometry.max_model_len
        )
        self.geometry = geometry
        self.statics = DecodeStatics.create(fused, layout)
        self.attention = attention
        self.buffer = StepBuffer(layout)
        self.step: DecodeStep | None = None
        self.make_program = make_program

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """See `World`."""
        return self.statics.named_tensors()

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """See `World`."""
        return {"staging": self.statics.staging}

    def outputs(self) -> Mapping[str, torch.Tensor]:
        """See `World`."""
        assert self.step is not None
        return _Outputs(self.statics.tokens, self.statics.logits).of(self.step)

    def caches(self) -> Mapping[str, torch.Tensor]:
        """See `World`."""
        return {"kv_cache": self.geometry.by_block(self.statics.fused.kv_cache)}

    def program(self, key: GraphKey) -> Program:
        """See `World`."""
        variant = cast(Variant, key.variant)
        return self.make_program(key.bucket, variant, self.statics, self.attention)

    def reset(self, key: GraphKey) -> None:
        """See `World`. As `CapturedSteps` does it."""
        del key
        self.statics.staging.copy_(torch.from_numpy(StepBuffer(self.statics.layout).vector))

    def fill(self, key: GraphKey, num_rows: int, inputs: DecodeStep) -> None:
        """See `World`. As `GraphExecutor` does it."""
        self.step = inputs
        layout = self.statics.layout
        columns = sampling_columns(inputs.rows, cast(Variant, key.variant))
        source_offset = (1 - inputs.side) * layout.max_num_rows
        fields = decode_fields(
            inputs.batch,
            columns,
            out_offset=inputs.side * layout.max_num_rows,
            source_offset=source_offset,
        )
        if inputs.batch.sources is None:  # some rows may have one all the same
            has_source = inputs.sources != NO_SOURCE
            source = np.where(has_source, inputs.sources + source_offset, NO_SOURCE)
            fields = {**fields, "source": source}
        self.buffer.pack(num_rows, fields)
        num_words = layout.num_words(key.bucket)
        self.statics.staging[:num_words] = torch.from_numpy(self.buffer.vector[:num_words])


class PlainWorld:
    """The same steps by the plain decoder and the sampler (see `graphs.verify.World`).

    It reads nothing from static buffers, pads nothing, and has `NO_SOURCE` and failed rows dealt
    with on the host.
    """

    def __init__(self, decoder: Decoder, geometry: Geometry) -> None:
        self.geometry = geometry
        self._decoder = decoder
        self._kv_cache = geometry.allocate(decoder)
        self._tokens = torch.zeros(2 * geometry.max_num_rows, dtype=torch.int32)
        self._logits = torch.zeros(geometry.max_num_rows, decoder.config.vocab_size)
        self._step: DecodeStep | None = None
        self._previous: list[int] = []

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """See `World`. Nothing: it is not captured."""
        return {}

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """See `World`. They come as values."""
        return {}

    def outputs(self) -> Mapping[str, torch.Tensor]:
        """See `World`."""
        assert self._step is not None
        return _Outputs(self._tokens, self._logits).of(self._step)

    def caches(self) -> Mapping[str, torch.Tensor]:
        """See `World`."""
        return {"kv_cache": self.geometry.by_block(self._kv_cache)}

    def program(self, key: GraphKey) -> Program:
        """See `World`."""
        del key
        return self._run

    def reset(self, key: GraphKey) -> None:
        """See `World`. There is nothing to pad."""

    def fill(self, key: GraphKey, num_rows: int, inputs: DecodeStep) -> None:
        """See `World`."""
        del key, num_rows
        self._step = inputs

    def _run(self) -> None:
        step = self._step
        assert step is not None
        given = zip(step.batch.input_ids, step.sources, strict=True)
        token_ids = [
            int(token) if source == NO_SOURCE else self._previous[source] for token, source in given
        ]
        device = self._kv_cache.device
        hidden = self._decoder.forward(
            torch.tensor([max(token, 0) for token in token_ids], device=device),
            torch.from_numpy(step.batch.positions).long().to(device),
            self._kv_cache,
            attention_metadata(step.batch, self.geometry.block_size, device),
        )
        logits = self._decoder.logits(hidden)
        drawn = sample(logits, step.rows).token_ids
        self._previous = [FAILED_TOKEN if token is None else token for token in drawn]
        num_rows = step.batch.num_seqs
        self._logits[:num_rows] = logits
        self._tokens.view(2, -1)[step.side, :num_rows] = torch.tensor(
            self._previous, dtype=torch.int32
        )
