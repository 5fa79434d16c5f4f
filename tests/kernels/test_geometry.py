from hypothesis import given
from hypothesis import strategies as st

from nanovllm.kernels.geometry import decode_tile, prefill_tile, vocab_tile

HEAD_DIMS = st.integers(1, 16).map(lambda n: 16 * n)
GROUPS = st.integers(1, 64)
ITEM_BYTES = st.sampled_from([2, 4])


def is_power_of_2(number):
    return number > 0 and number & (number - 1) == 0


@given(HEAD_DIMS, ITEM_BYTES, GROUPS, st.integers(1, 10_000))
def test_tiles_hold_what_they_must(head_dim, item_bytes, group_size, max_seqlen_q):
    shared = {"head_dim": head_dim, "item_bytes": item_bytes, "group_size": group_size}
    for tile in (decode_tile(**shared), prefill_tile(**shared, max_seqlen_q=max_seqlen_q)):
        assert tile.num_rows >= group_size  # at least one position of every head of the group
        assert tile.num_channels >= head_dim
        for size in (tile.num_rows, tile.num_positions, tile.num_channels):
            assert is_power_of_2(size) and size >= 16  # what a matrix unit takes


@given(st.integers(1, 600), st.integers(1, 300_000))
def test_the_pieces_of_a_vocabulary_are_few_enough_to_combine_at_once(num_rows, vocab_size):
    block = vocab_tile(num_rows=num_rows, vocab_size=vocab_size)

    assert is_power_of_2(block)
    assert -(-vocab_size // block) <= 512


@given(HEAD_DIMS, ITEM_BYTES, GROUPS)
def test_a_model_has_two_tiles_for_prefills_to_warm_up(head_dim, item_bytes, group_size):
    tiles = {
        prefill_tile(
            head_dim=head_dim,
            item_bytes=item_bytes,
            group_size=group_size,
            max_seqlen_q=max_seqlen_q,
        )
        for max_seqlen_q in range(1, 200)
    }

    assert len(tiles) <= 2
