import copy
import math
import pickle
from types import MappingProxyType

import attrs
import pytest

from nanovllm import NanoVLLMError, RequestError, SamplingParams
from nanovllm.sampling_params import MAX_LOGPROBS

NOT_NUMBERS = (math.nan, math.inf, -math.inf, "1", None, True, [1.0], 1j, 10**400)
NOT_INTEGERS = (1.0, math.nan, math.inf, "1", True, [1], 1.5)
NOT_FLAGS = (None, 0, 1, "yes", "", 1.0)

GOOD = {
    "temperature": (0, 0.0, 1e-9, 1, 0.7, 100),
    "top_p": (0, 1e-4, 0.5, 1, 1.0),
    "top_k": (-1, 0, 1, 319, 320, 2**31, 2**70),
    "min_p": (0, 0.05, 1),
    "seed": (None, 0, -1, 42, 2**64, -(2**70)),
    "n": (1, 2, 100),
    "max_tokens": (1, 64, 2**40),
    "min_tokens": (0, 1, 64),
    "stop": ((), ("a",), ("a", "\n\n", "🌶")),
    "stop_token_ids": ((), (0,), (5, 2**40)),
    "ignore_eos": (True, False),
    "repetition_penalty": (1e-3, 1, 1.3, 10),
    "presence_penalty": (-2, 0, 2.0),
    "frequency_penalty": (-2, 0, 2.0),
    "logit_bias": ((), ((0, 1.5), (2**40, -100))),
    "logprobs": (None, 0, 1, MAX_LOGPROBS),
    "skip_special_tokens": (True, False),
    "include_stop_str_in_output": (True, False),
    "detokenize": (True, False),
    "prompt_logprobs": (None, 0, 1, MAX_LOGPROBS),
    "json_schema": (None, "{}", '{"type": "integer"}'),
    "regex": (None, "a", "[0-9]{3}"),
    "choice": (None, ("yes",), ("yes", "no", "🌶")),
    "grammar": (None, 'start: "a"'),
}
"""Values at both ends of each range and inside."""

BAD = {
    "temperature": (-1, -1e-9, *NOT_NUMBERS),
    "top_p": (-0.1, 1.0001, 2, *NOT_NUMBERS),
    "top_k": (-2, None, *NOT_INTEGERS),
    "min_p": (-0.1, 1.0001, *NOT_NUMBERS),
    "seed": NOT_INTEGERS,
    "n": (0, -1, None, *NOT_INTEGERS),
    "max_tokens": (0, -1, None, *NOT_INTEGERS),
    "min_tokens": (-1, None, *NOT_INTEGERS),
    "stop": ("", ("",), ("a", ""), (1,), ("a", None), b"ab", 5, True, [["a"]]),
    "stop_token_ids": ((-1,), (5, -1), (1.0,), (True,), ("5",), "5", 5, [[5]], [None]),
    "ignore_eos": NOT_FLAGS,
    "repetition_penalty": (0, -1, *NOT_NUMBERS),
    "presence_penalty": (-2.1, 2.1, *NOT_NUMBERS),
    "frequency_penalty": (-2.1, 2.1, *NOT_NUMBERS),
    "logit_bias": (
        *({5: value} for value in NOT_NUMBERS),
        *({token_id: 1.0} for token_id in (-1, 1.0, "5", True, None)),
        {5: 1.0, -1: 1.0},
        5,
        "5",
        [5],
        ((5,),),
        ((5, 1.0, 2.0),),
    ),
    "logprobs": (-1, MAX_LOGPROBS + 1, *NOT_INTEGERS),
    "skip_special_tokens": NOT_FLAGS,
    "include_stop_str_in_output": NOT_FLAGS,
    "detokenize": NOT_FLAGS,
    "prompt_logprobs": (-1, MAX_LOGPROBS + 1, *NOT_INTEGERS),
    "json_schema": ("", "{", "[]", "5", "true", b"", 5, True, ["a"], {"a": math.nan}, {"a": {1}}),
    "regex": ("", b"", 5, True, ["a"]),
    "choice": ((), [], "yes", ("",), ("a", ""), (1,), ("a", None), b"ab", 5, True),
    "grammar": ("", b"", 5, True, ["a"]),
}
"""Values just out of range, and of every type that may come along instead of the right one."""


def cases(table):
    pairs = [(name, value) for name, values in table.items() for value in values]
    return pytest.mark.parametrize(("name", "value"), pairs, ids=lambda value: repr(value)[:30])


def leaves(value):
    """What a value consists of, however it is nested."""
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple | bytes):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_the_tables_above_cover_every_field():
    names = [field.name for field in attrs.fields(SamplingParams)]

    assert list(GOOD) == list(BAD) == names


# One field at a time


@cases(GOOD)
def test_takes_every_value_in_range_as_it_is(name, value):
    params = SamplingParams(**{name: value})

    assert getattr(params, name) == value


@cases(BAD)
def test_refuses_what_is_out_of_range_or_of_another_type_and_names_field_and_value(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})

    message = str(caught.value)
    assert message.startswith(f"`{name}` is ")
    assert " but must be " in message
    assert all(repr(leaf)[:20] in message for leaf in leaves(value))
    assert len(message) < 300


def test_the_error_is_a_value_error_of_this_package():
    with pytest.raises(ValueError, match="`temperature` is -1 but must be a number >= 0") as caught:
        SamplingParams(temperature=-1)

    assert isinstance(caught.value, NanoVLLMError)


def test_a_long_value_is_shown_in_part():
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop_token_ids=[*range(10_000), -1])

    assert "(0, 1, 2, " in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "name", ["temprature", "max_new_tokens", "top-p", "use_beam_search", "eos"]
)
def test_a_misspelt_field_is_a_type_error_that_names_it(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


def test_fields_are_given_by_name_only():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)


# Fields together


def test_at_least_as_many_tokens_as_at_most_is_fine_and_more_is_not():
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8
    with pytest.raises(RequestError, match="`min_tokens` is 9 but `max_tokens` is 8; lower"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match=r"`stop` is \('END',\) but `detokenize` is False"):
        SamplingParams(stop="END", detokenize=False)
    assert SamplingParams(stop_token_ids=[5], detokenize=False).stop_token_ids == (5,)


def test_a_text_has_one_structure_at_most():
    with pytest.raises(RequestError, match="`json_schema` and `choice` are given"):
        SamplingParams(json_schema={}, choice=["a"])


@pytest.mark.parametrize(
    ("params", "structure"),
    [
        ({}, None),
        ({"json_schema": {"type": "null"}}, ("json_schema", '{"type": "null"}')),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"choice": ["a", "b"]}, ("choice", ("a", "b"))),
        ({"grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
    ],
)
def test_the_structure_is_the_field_that_is_set(params, structure):
    assert SamplingParams(**params).structure == structure


def test_a_schema_is_kept_as_text_in_its_own_order_however_it_came():
    schema = {"properties": {"b": {"type": "string"}, "a": {"enum": ["é"]}}, "type": "object"}
    params = SamplingParams(json_schema=schema)
    schema.clear()

    assert params.json_schema.index('"b"') < params.json_schema.index('"a"')
    assert "é" in params.json_schema
    assert SamplingParams(json_schema=params.json_schema) == params
    assert SamplingParams(json_schema=MappingProxyType({"type": "null"})).structure[1] == (
        '{"type": "null"}'
    )


# What is kept of what was given


@pytest.mark.parametrize("given", ["END", ["END"], ("END",), iter(["END"])])
def test_a_lone_stop_string_is_one_string_and_not_its_letters(given):
    assert SamplingParams(stop=given).stop == ("END",)


def test_none_stands_for_no_stop_and_no_bias():
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)

    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), None)


def test_changing_what_was_passed_afterwards_changes_nothing():
    stop, stop_ids, bias = ["a"], [1, 2], {3: 1.5}
    params = SamplingParams(stop=stop, stop_token_ids=stop_ids, logit_bias=bias)
    before = copy.deepcopy(params)

    stop.append("b")
    stop_ids.clear()
    bias[3] = -100.0
    bias[4] = 1.0

    assert params == before
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1, 2), ((3, 1.5),))


def test_any_mapping_is_a_bias():
    assert SamplingParams(logit_bias=MappingProxyType({7: -1})).logit_bias == ((7, -1),)


# As a value


@pytest.fixture
def everything():
    return SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        seed=-3,
        n=2,
        max_tokens=9,
        min_tokens=2,
        stop=["x", "yz"],
        stop_token_ids=[5],
        ignore_eos=True,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={5: 2},
        logprobs=3,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )


@pytest.mark.parametrize("name", GOOD)
def test_no_field_can_be_set_or_removed(everything, name):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(everything, name, getattr(everything, name))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        delattr(everything, name)


def test_a_new_attribute_is_not_taken_either(everything):
    with pytest.raises(AttributeError):
        everything.max_token = 5


@pytest.mark.parametrize("name", GOOD)
def test_is_equal_only_if_every_field_is(name):
    one, other = (SamplingParams(**{name: value}) for value in (GOOD[name][0], GOOD[name][-1]))

    assert one != other
    assert one == SamplingParams(**{name: GOOD[name][0]})
    assert hash(one) == hash(SamplingParams(**{name: GOOD[name][0]}))


def test_is_not_equal_to_something_else(everything):
    assert everything != attrs.asdict(everything)
    assert everything != None  # noqa: E711


def test_survives_pickling_and_copying(everything):
    for again in (pickle.loads(pickle.dumps(everything)), copy.deepcopy(everything)):
        assert again == everything
        assert hash(again) == hash(everything)


def test_evolves_and_is_checked_again(everything):
    assert attrs.evolve(everything, n=3) == SamplingParams(**(attrs.asdict(everything) | {"n": 3}))
    assert attrs.evolve(everything, n=2) == everything
    with pytest.raises(RequestError, match="`n` is 0"):
        attrs.evolve(everything, n=0)
