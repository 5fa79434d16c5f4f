"""The one table of backends: which is chosen, and what is said of the others."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import backends
from nanovllm.backends import BACKENDS, TABLE, choose_backend
from nanovllm.errors import ConfigError

DEVICE_TYPES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
BLOCK_SIZES = (None, 1, 16, 64, 256, 512, 300)


def choose(asked="auto", device_type="cuda", dtype="bfloat16", block_size=None, obstacles=()):
    return choose_backend(
        asked,
        device_type=device_type,
        dtype=dtype,
        block_size=block_size,
        obstacles=dict(obstacles),
    )


MISSING = {name: f"{name} can't be imported" for name in ("triton", "flash_attn", "varlen")}


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"device_type": "cpu"}, "native"),
        ({"device_type": "cpu", "dtype": "float32"}, "native"),
        ({"device_type": "cpu", "dtype": "float16"}, "torch"),
        ({"device_type": "cpu", "obstacles": {"native": "no Numba"}}, "torch"),
        ({}, "triton"),
        ({"dtype": "float32"}, "triton"),
        ({"block_size": 16}, "triton"),
        ({"obstacles": {"triton": "no Triton"}}, "flash_attn"),
        ({"obstacles": {"triton": "no Triton", "flash_attn": "none"}}, "varlen"),
        ({"obstacles": {"triton": "no Triton"}, "block_size": 256}, "flash_attn"),
        ({"obstacles": {"triton": "no Triton"}, "block_size": 16}, "torch"),
        ({"obstacles": {"triton": "no Triton"}, "dtype": "float32"}, "torch"),
        ({"obstacles": MISSING}, "torch"),
        ({"asked": "torch"}, "torch"),
        ({"asked": "flash_attn"}, "flash_attn"),
        ({"asked": "varlen", "block_size": 512}, "varlen"),
        ({"asked": "torch", "device_type": "cpu", "dtype": "float16"}, "torch"),
    ],
    ids=str,
)
def test_the_first_that_can_be_used_is_chosen(given, chosen):
    assert choose(**given).backend.name == chosen


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"asked": "native"}, "it is for CPUs"),
        ({"asked": "triton", "device_type": "cpu"}, "it is for NVIDIA GPUs"),
        (
            {"asked": "native", "device_type": "cpu", "dtype": "float16"},
            "computes in bfloat16, float32 and int8, not in float16",
        ),
        ({"asked": "flash_attn", "dtype": "float32"}, "bfloat16 and float16, not in float32"),
        ({"asked": "flash_attn", "block_size": 16}, "a multiple of 256, not 16"),
        ({"asked": "varlen", "obstacles": MISSING}, "varlen can't be imported"),
    ],
    ids=str,
)
def test_what_is_asked_for_and_can_not_be_used_is_refused_with_its_reason(given, said):
    with pytest.raises(ConfigError) as raised:
        choose(**given)

    message = str(raised.value)
    assert message.startswith(f"`attention_backend` is {given['asked']!r} but ")
    assert said in message
    assert "'auto'" in message


every_case = {
    "device_type": st.sampled_from(DEVICE_TYPES),
    "dtype": st.sampled_from(DTYPES),
    "block_size": st.sampled_from(BLOCK_SIZES),
    # All but torch, which nothing can rule out.
    "obstacles": st.dictionaries(st.sampled_from(BACKENDS[:-1]), st.just("it is broken")),
}


def usable(device_type, dtype, block_size, obstacles):
    """By the words of `Backend`: what the table says of each, without a look at how it is read."""
    return [
        backend
        for backend in TABLE
        if backend.device_type in (None, device_type)
        and dtype in backend.dtypes
        and (block_size is None or block_size % backend.block_size_multiple == 0)
        and backend.name not in obstacles
    ]


@given(**every_case)
def test_auto_takes_the_first_of_the_table_that_nothing_speaks_against(**case):
    choice = choose("auto", **case)

    assert choice.backend == usable(**case)[0]
    assert choice.why


@given(asked=st.sampled_from(BACKENDS), **every_case)
def test_a_name_is_taken_or_refused_and_never_replaced(asked, **case):
    names = [backend.name for backend in usable(**case)]
    if asked in names:
        assert choose(asked, **case).backend.name == asked
        return
    with pytest.raises(ConfigError) as raised:
        choose(asked, **case)
    # What it advises can be used.
    advised = str(raised.value).partition("; use ")[2].rstrip(".")
    assert advised == ", ".join(map(repr, ["auto", *names]))


@given(**every_case)
def test_auto_says_why_it_passed_over_the_better_ones_of_this_device(**case):
    choice = choose("auto", **case)
    better = [
        backend.name
        for backend in itertools.takewhile(lambda one: one != choice.backend, TABLE)
        if backend.device_type == case["device_type"]
    ]

    assert all(f"the {name} one can't be used" in choice.why for name in better)
    assert choice.why.count("can't be used") == len(better)


def test_the_block_size_of_each_is_one_that_it_accepts():
    for backend in TABLE:
        assert backend.block_size % backend.block_size_multiple == 0


def test_the_last_of_the_table_runs_everywhere():
    last = TABLE[-1]

    assert (last.device_type, last.block_size_multiple) == (None, 1)
    assert last.dtypes == set(DTYPES)


def test_names_are_distinct_and_none_is_auto():
    assert len(set(BACKENDS)) == len(TABLE)
    assert "auto" not in BACKENDS


def test_only_backends_of_gpus_use_graphs():
    assert {backend.device_type for backend in TABLE if backend.uses_graphs} == {"cuda"}


def test_the_table_is_not_written_to():
    with pytest.raises(AttributeError):
        backends.TABLE[0].name = "other"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device_type": "cuda"}, "it is for CPUs"),
        ({"device_type": "cpu", "obstacles": {"native": "no Numba"}}, "no Numba"),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_int8_runs_natively_or_not_at_all_and_the_reason_is_given(asked, given, said):
    with pytest.raises(ConfigError, match=rf"`dtype` is 'int8', which only the native .* {said}"):
        choose(asked, dtype="int8", **given)


def test_int8_where_it_can_be_used_is_no_choice_of_another_backend():
    assert choose(device_type="cpu", dtype="int8").backend.name == "native"
    with pytest.raises(ConfigError, match=r"'torch' but .* not in int8; use 'auto', 'native'"):
        choose("torch", device_type="cpu", dtype="int8")
