"""A row of a batch gets the same bits whoever its neighbours are and however it is computed."""

import random

import attrs
import numpy as np
import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, checkpoint_folder, reference_model
from tests.model.paged_model import CPU

pytest.importorskip("numba", reason="the native backend needs Numba")

from nanovllm.core import Batch  # after the skip
from nanovllm.model.config import read_model_config  # as above
from nanovllm.model.safetensors_checkpoint import open_folder  # as above
from nanovllm.runtime.kv_cache import allocate_kv_cache  # as above
from nanovllm.runtime.native.attention import PART  # as above
from nanovllm.runtime.native.loading import load_in_panels  # as above
from nanovllm.runtime.native.program import NativeProgram  # as above

MAX_LEN = 3 * PART
KINDS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "int8": (torch.bfloat16, True),
}


@attrs.define
class Sequences:
    """A program, and sequences that it has computed up to their last token, each in its blocks."""

    program: NativeProgram
    block_size: int
    rows: list[tuple[list[int], list[int]]]

    def run(self, *ranges):
        """Logits of the last position of each of `(row, first position, end)`."""
        ids, positions, slots, tables, lens, starts = [], [], [], [], [], [0]
        for row, first, end in ranges:
            tokens, blocks = self.rows[row]
            ids += tokens[first:end]
            positions += range(first, end)
            slots += [
                blocks[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(first, end)
            ]
            tables.append(blocks)
            lens.append(end)
            starts.append(len(ids))
        width = max(map(len, tables))
        tables = [[*table, *[-1] * (width - len(table))] for table in tables]
        cu_seqlens_q = np.array(starts, np.int32)
        batch = Batch(
            num_decodes=0,
            input_ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.array(slots, np.int32),
            context_lens=np.array(lens, np.int32),
            block_tables=np.array(tables, np.int32),
            cu_seqlens_q=cu_seqlens_q,
            sampled_rows=np.arange(len(ranges), dtype=np.int32),
            logits_indices=cu_seqlens_q[1:] - 1,
            max_seqlen_q=int(np.diff(cu_seqlens_q).max()),
        )
        return self.program.run(batch).clone()


@pytest.fixture
def make_sequences():
    programs = []

    def make(kind="bfloat16", lengths=(40, 3, 300, 17, 2, 90, 260, 33, 5), *, block_size=16):
        dtype, int8 = KINDS[kind]
        checkpoint = open_folder(checkpoint_folder("llama"))
        config = read_model_config(checkpoint.config, source=checkpoint.source)
        decoder = load_in_panels(checkpoint, config, dtype=dtype, int8=int8)
        counts = [-(-length // block_size) for length in lengths]
        rng = random.Random(0)
        blocks = rng.sample(range(sum(counts)), sum(counts))
        cache = allocate_kv_cache(
            config, num_blocks=sum(counts), block_size=block_size, dtype=dtype, device=CPU
        )
        program = NativeProgram(
            decoder,
            cache,
            block_size=block_size,
            max_num_seqs=len(lengths),
            max_num_batched_tokens=MAX_LEN,
            max_model_len=MAX_LEN,
            num_threads=2,
        )
        programs.append(program)
        cache.fill_(float("nan"))  # whatever is read before it is written shows
        rows = []
        for length, count in zip(lengths, counts, strict=True):
            tokens = rng.choices(range(VOCAB_SIZE), k=length)
            rows.append((tokens, [blocks.pop() for _ in range(count)]))
        return Sequences(program, block_size, rows)

    yield make
    for program in programs:
        program.close()


@pytest.mark.parametrize("kind", KINDS)
def test_alone_in_any_batch_and_in_any_chunks_the_bits_are_the_same(make_sequences, kind):
    sequences = make_sequences(kind)
    lengths = [len(tokens) for tokens, _ in sequences.rows]
    whole = [sequences.run((row, 0, length)) for row, length in enumerate(lengths)]
    # Few decodes with long contexts share them among threads, many do not.
    for count in (1, 2, 3, 4, 5, 8, 9):
        together = sequences.run(*((row, lengths[row] - 1, lengths[row]) for row in range(count)))
        assert torch.equal(together, torch.cat(whole[:count])), count
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    for ends in ([7, 8, 300], [129, 257, 300], [256, 300]):
        for first, end in zip([0, *ends], ends, strict=False):
            logits = sequences.run((longest, first, end))
        assert torch.equal(logits, whole[longest]), ends
    mixed = sequences.run((0, 39, 40), (longest, 290, 300), (5, 80, 90))
    assert torch.equal(mixed, torch.cat([whole[0], whole[longest], whole[5]]))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [1, 5, 48, 128])
def test_the_bits_do_not_depend_on_the_block_size(make_sequences, kind, block_size):
    usual = make_sequences(kind, (270, 19))
    other = make_sequences(kind, (270, 19), block_size=block_size)
    other.rows = [
        (tokens, blocks) for (tokens, _), (_, blocks) in zip(usual.rows, other.rows, strict=True)
    ]
    for ranges in ([(0, 0, 269), (1, 0, 18)], [(0, 269, 270), (1, 18, 19)]):
        assert torch.equal(usual.run(*ranges), other.run(*ranges))


def test_long_contexts_give_the_logits_of_transformers(make_sequences):
    sequences = make_sequences("float32", (2 * PART + 50, PART, PART + 1))
    with torch.inference_mode():
        expected = [
            reference_model("llama")(torch.tensor([tokens])).logits[0, -1]
            for tokens, _ in sequences.rows
        ]
    for row, (tokens, _) in enumerate(sequences.rows):
        logits = sequences.run((row, 0, len(tokens)))[0]

        torch.testing.assert_close(logits, expected[row], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_scratch_memory_holds_does_not_matter(make_sequences, kind):
    """Such as what a request left whose numbers had overflowed."""
    sequences = make_sequences(kind, (21, 39, 7))
    ranges = [(0, 0, 21), (1, 0, 39), (2, 0, 7)]
    expected = sequences.run(*ranges)
    cache, *scratch = sequences.program._memory._arrays
    for array in scratch:
        if array.dtype != np.int32:
            array.view(np.uint8)[...] = 0xFF  # of floats of any size: no number
    again = sequences.run(*ranges)

    assert torch.equal(again, expected)
    assert torch.equal(sequences.run((0, 20, 21), (1, 38, 39)), expected[:2])


def test_a_number_that_is_none_stays_one_in_int8(make_sequences):
    sequences = make_sequences("int8", (4,))
    model = sequences.program._model
    norms = next(a for a in sequences.program._arrays if a.ctypes.data == model["input_norms"])
    norms[0, 0] = np.inf

    assert sequences.run((0, 0, 4)).isnan().any()
