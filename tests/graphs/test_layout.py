"""A step in one vector: fields do not overlap, both kinds of views agree, nothing stale is left."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs import KEEP, ZERO, Column, Fill, LayoutError, Scalar, StepBuffer, StepLayout, Table

PAGE_PAD = 7
LAYOUT = StepLayout(
    max_num_rows=6,
    scalars=(Scalar("step"), Scalar("scale", "float32")),
    columns=(
        Column("source", Fill(-1)),
        Column("length", ZERO),
        Column("temperature", Fill(0.5), "float32"),
        Column("scratch", KEEP),
    ),
    table=Table("pages", 5, Fill(PAGE_PAD)),
)
PADS = {"source": -1, "length": 0, "temperature": 0.5}


def step(num_rows, num_pages=5, base=100):
    """Values that are all different from each other and from every pad."""
    column = np.arange(num_rows) + base
    return {
        "step": base,
        "scale": base + 0.25,
        "source": column,
        "length": column + 1000,
        "temperature": column + 0.75,
        "scratch": column + 2000,
        "pages": np.arange(num_rows * num_pages).reshape(num_rows, num_pages) + base + 3000,
    }


def test_no_two_fields_share_a_word_and_the_vector_has_room_for_all():
    vector = np.zeros(LAYOUT.num_words(), np.int32)
    for view in LAYOUT.numpy_views(vector).values():
        view.view(np.int32)[...] += 1

    assert vector.max() == 1  # each word belongs to one field at most
    assert vector.sum() == 2 + 4 * 6 + 6 * 5


def test_columns_and_table_start_on_cache_lines():
    starts = [LAYOUT.offset_words(name) for name in ("source", "length", "temperature", "pages")]

    assert all(start * 4 % 128 == 0 for start in starts)


@pytest.mark.parametrize("bucket", range(1, 7))
def test_torch_sees_what_numpy_wrote(bucket):
    buffer = StepBuffer(LAYOUT)
    buffer.pack(6, step(6))

    ours = LAYOUT.numpy_views(buffer.vector, bucket)
    theirs = LAYOUT.torch_views(torch.from_numpy(buffer.vector), bucket)

    assert ours.keys() == theirs.keys() == LAYOUT.names
    for name, view in ours.items():
        assert theirs[name].numpy().dtype == view.dtype
        np.testing.assert_array_equal(theirs[name].numpy(), view)


@pytest.mark.parametrize("bucket", range(1, 7))
def test_rows_of_a_smaller_bucket_lie_as_far_apart_as_those_of_the_largest(bucket):
    table = LAYOUT.torch_views(torch.zeros(LAYOUT.num_words(), dtype=torch.int32), bucket)["pages"]

    assert table.shape == (bucket, 5) and table.stride() == (5, 1)


@pytest.mark.parametrize("bucket", range(1, 7))
def test_a_bucket_reads_only_the_words_it_asks_for(bucket):
    """So that a step copies no more than that to the device."""
    vector = np.zeros(LAYOUT.num_words(), np.int32)
    vector[LAYOUT.num_words(bucket) :] = 1

    assert not any(view.any() for view in LAYOUT.numpy_views(vector, bucket).values())
    assert LAYOUT.num_words() == LAYOUT.num_words(6)


def test_views_of_a_scalar_can_be_written():
    vector = np.zeros(LAYOUT.num_words(), np.int32)
    LAYOUT.numpy_views(vector)["scale"][...] = 1.5

    assert LAYOUT.torch_views(torch.from_numpy(vector))["scale"].item() == 1.5


def assert_holds(buffer, num_rows, values):
    """The law of `pack`: the step's values where it is live, and pads everywhere else."""
    views = LAYOUT.numpy_views(buffer.vector)
    for name in ("step", "scale"):
        assert views[name] == values[name]
    for name in ("source", "length", "temperature", "scratch"):
        np.testing.assert_array_equal(views[name][:num_rows], values[name])
    for name, pad in PADS.items():
        assert (views[name][num_rows:] == pad).all(), name
    used = values["pages"].shape[1]
    np.testing.assert_array_equal(views["pages"][:num_rows, :used], values["pages"])
    assert (views["pages"][:num_rows, used:] == PAGE_PAD).all()
    assert (views["pages"][num_rows:] == PAGE_PAD).all()


def test_a_new_buffer_is_all_padding_whatever_its_memory_held():
    buffer = StepBuffer(LAYOUT, np.full(LAYOUT.num_words(), -99, np.int32))

    assert_holds(buffer, 0, {**step(0, 0), "step": 0, "scale": 0})


SIZES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=8)


@given(SIZES)
def test_nothing_of_an_earlier_step_is_left_in_padding(sizes):
    buffer = StepBuffer(LAYOUT)
    for index, (num_rows, num_pages) in enumerate(sizes):
        values = step(num_rows, num_pages, base=10_000 * (index + 1))
        buffer.pack(num_rows, values)

        assert_holds(buffer, num_rows, values)


class BucketOnlyBuffer(StepBuffer):
    """The fault: clears the rest of its own bucket, but not what a larger step left beyond."""

    def pack(self, num_rows, values):
        self._num_dirty_rows = min(self._num_dirty_rows, num_rows + 1)
        super().pack(num_rows, values)


def test_clearing_only_the_own_bucket_would_be_noticed():
    buffer = BucketOnlyBuffer(LAYOUT)
    buffer.pack(6, step(6))
    buffer.pack(2, step(2))

    with pytest.raises(AssertionError):
        assert_holds(buffer, 2, step(2))


def test_a_kept_field_keeps_what_its_padding_rows_held():
    buffer = StepBuffer(LAYOUT)
    buffer.pack(3, step(3))
    buffer.pack(1, step(1, base=500))

    kept = LAYOUT.numpy_views(buffer.vector)["scratch"]
    assert kept.tolist() == [2500, 2101, 2102, 0, 0, 0]


def test_a_step_that_does_not_fit_leaves_nothing_behind():
    buffer = StepBuffer(LAYOUT)
    with pytest.raises(LayoutError, match="`pages` has shape"):
        buffer.pack(5, {**step(5), "pages": np.zeros((5, 6))})
    buffer.pack(1, step(1, 1))

    assert_holds(buffer, 1, step(1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": [1]}, r"`source` has shape \[1\]; the step needs \[2\]"),
        ({"source": 3}, r"`source` has shape \[\]"),
        ({"source": [0.5, 1.5]}, "`source` is int32 but was given float64"),
        ({"pages": np.zeros((2, 6), int)}, r"`pages` has shape \[2, 6\]; .* \[2, 0 to 5\]"),
        ({"pages": np.zeros((3, 2), int)}, r"`pages` has shape \[3, 2\]"),
        ({"unknown": 1}, "fields"),
    ],
)
def test_refuses_values_of_another_shape(change, message):
    with pytest.raises(LayoutError, match=message):
        StepBuffer(LAYOUT).pack(2, {**step(2), **change})


def test_refuses_more_rows_than_there_are_and_missing_fields():
    buffer = StepBuffer(LAYOUT)
    with pytest.raises(LayoutError, match="7 rows; this layout holds 0 to 6"):
        buffer.pack(7, step(7))
    with pytest.raises(LayoutError, match="needs the fields"):
        buffer.pack(0, {})


def test_words_of_64_bits_are_cut_to_their_lower_32():
    buffer = StepBuffer(LAYOUT)
    seed = 0xFEDC_BA98_7654_3210
    low = np.array([seed], np.uint64)
    buffer.pack(1, {**step(1), "source": low, "length": low >> np.uint64(32)})

    views = LAYOUT.numpy_views(buffer.vector)
    assert views["source"].view(np.uint32)[0] == 0x7654_3210
    assert views["length"].view(np.uint32)[0] == 0xFEDC_BA98


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_rows": 0}, "`max_num_rows` is 0"),
        ({"table": Table("pages", 0, ZERO)}, "`pages` is 0 wide"),
        ({"table": Table("step", 5, ZERO)}, r"\['step'\] are there more than once"),
    ],
)
def test_refuses_fields_that_cannot_be_laid_out(change, message):
    fields = {
        "max_num_rows": 6,
        "scalars": LAYOUT.scalars,
        "columns": LAYOUT.columns,
        "table": LAYOUT.table,
    }
    with pytest.raises(LayoutError, match=message):
        StepLayout(**{**fields, **change})


def test_refuses_vectors_and_buckets_of_another_size():
    with pytest.raises(LayoutError, match=r"has shape \[3\]"):
        LAYOUT.numpy_views(np.zeros(3, np.int32))
    with pytest.raises(LayoutError, match="is not int32"):
        LAYOUT.torch_views(torch.zeros(LAYOUT.num_words()))
    with pytest.raises(LayoutError, match="`bucket` is 7"):
        LAYOUT.num_words(7)
