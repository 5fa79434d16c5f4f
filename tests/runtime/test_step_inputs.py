"""What a step needs, packed as int32 and looked at again: nothing is lost and nothing is moved."""

from itertools import pairwise

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.core import Batch
from nanovllm.kernels import ops
from nanovllm.runtime.decode_program import (
    NO_SOURCE,
    choose,
    decode_layout,
)
from nanovllm.runtime.philox import uniform
from nanovllm.runtime.sampler import SamplingRow, sample
from nanovllm.runtime.step_inputs import (
    decode_fields,
    how_to_choose,
    max_mixed_words,
    pack_arrays,
    sampling_columns,
)
from tests.runtime.sampling_rows import leave_the_cores_to_others

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

VOCAB_SIZE = 50
NUM_ALIGNED_WORDS = 4


def row(seed=0, position=0, **params):
    fields = ("num_completion_tokens", "allowed_tokens")
    about = {name: params.pop(name) for name in fields if name in params}
    return SamplingRow(SamplingParams(**params), seed=seed, position=position, **about)


# How tokens are chosen


CHOICES = [
    # Greedily, on the device.
    ("greedy", {"temperature": 0}),
    ("greedy", {"temperature": 1e-6}),
    ("greedy", {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.3}),  # they cut nothing
    ("greedy", {"temperature": 0, "min_tokens": 4, "num_completion_tokens": 4}),
    ("greedy", {"temperature": 0, "logit_bias": {}}),
    # Drawn, on the device.
    ("sample", {"temperature": 1e-5}),
    ("sample", {"temperature": 1}),
    ("sample", {"temperature": 1, "min_p": 0.2}),
    ("sample", {"temperature": 1, "top_p": 1.0, "top_k": 0}),
    ("sample", {"temperature": 1, "top_k": -1}),
    ("sample", {"temperature": 1, "top_k": VOCAB_SIZE}),
    ("sample", {"temperature": 1, "top_k": VOCAB_SIZE + 9}),
    # By the host.
    ("host", {"temperature": 1, "top_k": VOCAB_SIZE - 1}),
    ("host", {"temperature": 1, "top_k": 1}),
    ("host", {"temperature": 1, "top_p": 0.999}),
    ("host", {"temperature": 1, "top_p": 0}),
    ("host", {"temperature": 0, "logprobs": 0}),
    ("host", {"temperature": 1, "logprobs": 3}),
    ("host", {"temperature": 0, "min_tokens": 4, "num_completion_tokens": 3}),
    ("host", {"temperature": 0, "logit_bias": {3: 1.0}}),
    ("host", {"temperature": 0, "repetition_penalty": 1.1}),
    ("host", {"temperature": 0, "presence_penalty": -0.1}),
    ("host", {"temperature": 0, "frequency_penalty": 0.1}),
    ("host", {"temperature": 0, "allowed_tokens": lambda: np.zeros(2, np.int32)}),
]


@pytest.mark.parametrize(
    ("how", "params"),
    CHOICES,
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_a_row_is_dealt_with_where_it_can_be(how, params):
    assert how_to_choose([row(**params)], VOCAB_SIZE) == how


@settings(deadline=None)
@given(st.lists(st.sampled_from(CHOICES), min_size=1, max_size=6))
def test_a_step_goes_where_all_of_its_rows_can(choices):
    hows = {how for how, _ in choices}
    expected = "host" if "host" in hows else "sample" if "sample" in hows else "greedy"

    assert how_to_choose([row(**params) for _, params in choices], VOCAB_SIZE) == expected


on_device = st.sampled_from([params for how, params in CHOICES if how != "host"])


@settings(deadline=None)
@given(st.lists(st.tuples(on_device, st.integers(0, 2**70)), min_size=1, max_size=5))
def test_what_is_chosen_on_the_device_is_what_the_sampler_would_choose(rows_given):
    rows = [row(seed=seed, position=seed % 97, **params) for params, seed in rows_given]
    variant = how_to_choose(rows, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(len(rows))
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) * 3
    columns = {
        name: torch.from_numpy(column.copy())
        for name, column in sampling_columns(rows, variant).items()
    }

    positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
    token_ids, peak = choose(logits, variant, columns, positions)
    assert peak.isfinite().all()
    assert token_ids.tolist() == sample(logits, rows).token_ids


# Numbers


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-(2**66), 2**66), st.integers(0, 2**31 - 1)), min_size=1),
)
def test_uniform_numbers_on_the_device_are_those_of_the_host_bit_for_bit(pairs):
    rows = [row(seed=seed, position=position) for seed, position in pairs]
    columns = sampling_columns(rows, "sample")
    low, high = (torch.from_numpy(columns[f"seed_{part}"].copy()) for part in ("low", "high"))
    positions = torch.tensor([position for _, position in pairs], dtype=torch.int32)

    assert low.dtype == high.dtype == torch.int32
    drawn = ops.uniform(low, high, positions)
    assert drawn.tolist() == uniform(*map(list, zip(*pairs, strict=True))).tolist()


@settings(deadline=None)
@given(st.floats(0, 1e300), st.floats(0, 1))
def test_temperatures_and_min_p_are_those_of_the_rows(temperature, min_p):
    rows = [row(temperature=temperature, min_p=min_p), row(temperature=1)]
    columns = sampling_columns(rows, "sample")

    # What float32 can't hold is flat long before.
    expected = 0.0 if temperature < 1e-5 else np.float32(min(temperature, 1e30))
    assert columns["temperature"].tolist() == [expected, 1]
    assert columns["min_p"].tolist() == [np.float32(min_p), 0]


@pytest.mark.parametrize("variant", ["greedy", "sample"])
def test_every_field_of_the_layout_is_given_and_fits(variant):
    rows = [row(temperature=0.0 if variant == "greedy" else 1.0)] * 3
    batch = decode_batch(3)
    fields = decode_fields(batch, sampling_columns(rows, variant), out_offset=8, source_offset=0)
    layout = decode_layout(8, 6, pad_block=9)

    assert set(fields) == layout.names
    dtypes = {column.name: column.dtype for column in layout.columns}
    for name, dtype in dtypes.items():
        assert np.asarray(fields[name]).dtype == dtype, name
        assert np.asarray(fields[name]).shape == (3,), name


def decode_batch(num_rows, sources=None):
    rows = np.arange(num_rows, dtype=np.int32)
    return Batch(
        num_decodes=num_rows,
        input_ids=rows + 1,
        positions=rows + 2,
        slot_mapping=rows,
        context_lens=rows + 3,
        block_tables=np.zeros((num_rows, 2), np.int32),
        cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int32),
        sampled_rows=rows,
        logits_indices=rows,
        max_seqlen_q=1,
        sources=sources,
    )


def test_sources_lie_in_the_half_that_the_step_before_wrote():
    columns = sampling_columns([row(temperature=0)] * 3, "greedy")
    offsets = {"out_offset": 0, "source_offset": 8}

    host = decode_fields(decode_batch(3), columns, **offsets)
    ahead = decode_fields(
        decode_batch(3, sources=np.array([2, 0, 1], np.int32)), columns, **offsets
    )

    assert list(host["source"]) == [NO_SOURCE] * 3
    assert list(ahead["source"]) == [10, 8, 9]


# Arrays one after the other


arrays_given = st.dictionaries(
    st.text("abcdef", min_size=1),
    st.tuples(
        st.sampled_from([np.int32, np.float32]),
        st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 4), st.integers(0, 5))),
    ),
    max_size=10,
)


def filled(shapes):
    return {
        name: (np.arange(np.prod(shape)) + 100 * index).astype(dtype).reshape(shape) - 50
        for index, (name, (dtype, shape)) in enumerate(shapes.items())
    }


@settings(deadline=None)
@given(arrays_given)
def test_arrays_come_back_as_they_were(shapes):
    arrays = filled(shapes)
    out = np.full(1000, 77, np.int32)
    places, num_words = pack_arrays(arrays, out)

    assert list(places) == list(arrays)
    for name, array in arrays.items():
        again = out[places[name]].view(array.dtype).reshape(array.shape)
        assert np.array_equal(again, array)
        assert places[name].stop <= num_words
    assert (out[num_words:] == 77).all()


@settings(deadline=None)
@given(arrays_given)
def test_arrays_start_where_kernels_expect_them(shapes):
    places, num_words = pack_arrays(filled(shapes), np.zeros(1000, np.int32))

    assert all(place.start % NUM_ALIGNED_WORDS == 0 for place in places.values())
    spans = [(place.start, place.stop) for place in places.values()]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert num_words % NUM_ALIGNED_WORDS == 0


@settings(deadline=None)
@given(
    num_seqs=st.integers(1, 40),
    num_tokens=st.integers(1, 200),
    num_columns=st.integers(1, 20),
    variant=st.sampled_from(["greedy", "sample"]),
)
def test_the_largest_step_with_prefills_fits(num_seqs, num_tokens, num_columns, variant):
    """The arrays of `GraphExecutor._submit_mixed`, each as large as it can be."""
    num_seqs = min(num_seqs, num_tokens)  # a row has a position at least
    rows = [row(temperature=0.0 if variant == "greedy" else 1.0)] * num_seqs
    columns = sampling_columns(rows, variant)
    tokens, seqs = np.zeros(num_tokens, np.int32), np.zeros(num_seqs, np.int32)
    arrays = {
        "input_ids": tokens,
        "positions": tokens,
        "slot_mapping": tokens,
        "context_lens": seqs,
        "cu_seqlens_q": np.zeros(num_seqs + 1, np.int32),
        "block_tables": np.zeros((num_seqs, num_columns), np.int32),
        "logits_indices": seqs,
        **columns,
        "source": seqs,
    }
    most = max_mixed_words(num_tokens, num_seqs, num_columns)
    _, num_words = pack_arrays(arrays, np.zeros(most, np.int32))

    assert num_words <= most


def test_batches_of_this_file_are_whole():
    """`decode_batch` gives every field that `Batch` has no default for."""
    assert attrs.fields_dict(Batch).keys() >= {"sources", "scored_indices"}
    assert decode_batch(2).num_seqs == 2
