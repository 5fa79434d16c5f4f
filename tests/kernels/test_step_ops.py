"""What a step reads and keeps, row by row."""

import torch

from nanovllm.kernels import ops


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_a_row_takes_its_token_from_the_step_before_or_from_the_host():
    token_ids, _, _ = ops.decode_inputs(
        int32(10, 11, -1, 13),
        int32(3, -1, 0, 2),
        int32(20, 21, 22, 23),
        int32(1, 1, 1, 1),
        torch.zeros(4, 1, dtype=torch.int32),
        torch.tensor(4, dtype=torch.int32),
        4,
    )

    assert token_ids.tolist() == [13, 21, 10, 0]  # the last one failed, and goes on as 0


def test_slots_follow_from_tables_and_lengths_and_padding_has_none():
    tables = torch.tensor([[5, 2, 9], [7, 1, 9], [8, 8, 8]], dtype=torch.int32)
    _, positions, slots = ops.decode_inputs(
        int32(0),
        int32(-1, -1, -1),
        int32(0, 0, 0),
        int32(4, 5, 1),
        tables,
        torch.tensor(2, dtype=torch.int32),
        4,
    )

    assert positions.tolist() == [3, 4, 0]
    assert slots.tolist() == [5 * 4 + 3, 1 * 4 + 0, -1]


def test_a_row_that_failed_keeps_no_token_and_nothing_is_written_beside():
    kept = int32(1, 2, 3, 4, 5)
    peak = torch.tensor([0.5, float("nan"), float("inf")])

    ops.keep_tokens(torch.tensor([7, 8, 9]), peak, torch.tensor(1, dtype=torch.int32), kept)

    assert kept.tolist() == [1, 7, -1, -1, 5]
