import array
import math
import types
from collections import deque

import numpy as np
import pytest

from nanovllm import RequestError, SamplingParams
from nanovllm.prompts import Prompt, PromptReader, is_single
from nanovllm.text.fast_tokenizer import FastTokenizer
from tests.model_folder import small_tokenizer

VOCAB_SIZE = 330  # some ids have an embedding but no string
MAX_MODEL_LEN = 16
PARAMS = SamplingParams(temperature=0, max_tokens=8)

READER = PromptReader(FastTokenizer(small_tokenizer()), VOCAB_SIZE, MAX_MODEL_LEN)
NO_TEXT = PromptReader(None, VOCAB_SIZE, MAX_MODEL_LEN)


def ids_of(text):
    return tuple(small_tokenizer().encode(text).ids)


def token_ids(prompts, params=None):
    return [prompt.token_ids for prompt in READER.read(prompts, params)]


# One prompt or several


@pytest.mark.parametrize(
    ("prompts", "single"),
    [
        ("text", True),
        ("", True),
        ([1, 2], True),
        ((1, 2), True),
        ([5], True),
        ([None], True),
        ([1.5], True),
        ([], False),
        ((), False),
        (["text"], False),
        ([[1, 2]], False),
        ([(1, 2)], False),
        ([[]], False),
        (["text", [1, 2]], False),
        ([1, [2]], False),
    ],
    ids=repr,
)
def test_tells_one_prompt_from_a_list_of_them(prompts, single):
    assert is_single(prompts) is single


@pytest.mark.parametrize(
    "prompts", ["walk", ids_of("walk"), list(ids_of("walk")), ["walk"], [ids_of("walk")]], ids=repr
)
def test_reads_one_prompt_whichever_way_it_comes(prompts):
    assert token_ids(prompts) == [ids_of("walk")]


def test_keeps_the_text_of_a_text_and_the_order_of_a_list():
    assert READER.read(["walk", [1, 2], (3,), "The fox"], PARAMS) == [
        Prompt("walk", ids_of("walk"), PARAMS),
        Prompt(None, (1, 2), PARAMS),
        Prompt(None, (3,), PARAMS),
        Prompt("The fox", ids_of("The fox"), PARAMS),
    ]


def test_no_prompts_are_none():
    assert READER.read([], None) == READER.read((), PARAMS) == READER.read([], []) == []


def test_takes_every_id_that_the_model_has_an_embedding_for():
    assert token_ids([0, VOCAB_SIZE - 1]) == [(0, VOCAB_SIZE - 1)]
    assert NO_TEXT.read([[0], [VOCAB_SIZE - 1]], None)[1].token_ids == (VOCAB_SIZE - 1,)


def test_anything_that_gives_prompts_in_order_is_a_list_of_them():
    assert token_ids(text for text in ("walk", "fox")) == [ids_of("walk"), ids_of("fox")]
    assert token_ids(np.array([[1, 2], [3, 4]]).tolist()) == [(1, 2), (3, 4)]


def test_a_list_of_lists_changed_later_changes_nothing():
    given = [[1, 2], [3]]
    read = READER.read(given, None)

    given[0].append(4)

    assert [prompt.token_ids for prompt in read] == [(1, 2), (3,)]


# Bad prompts: (prompt, what the message says)

WRONG_KIND = [
    (None, "None of type NoneType"),
    (5, "5 of type int"),
    (1.5, "1.5 of type float"),
    (True, "True of type bool"),
    (b"text", "b'text' of type bytes"),
    ({"prompt": "text"}, "{'prompt': 'text'} of type dict"),
    (len, "of type builtin_function_or_method"),
]
BAD_IDS = [
    ([], "The prompt is empty; give at least one token"),
    (["1"], "'1' of type str"),
    ([1, 1.0], "1.0 of type float"),
    ([1, math.nan], "nan of type float"),
    ([True], "True of type bool"),
    ([None], "None of type NoneType"),
    ([np.int64(1)], "of type int64"),
    ([-1], "token id -1; ids are 0 to 329"),
    ([1, 2, -5, 3], "token id -5; "),
    ([VOCAB_SIZE], "token id 330; ids are 0 to 329"),
    ([2**31], f"token id {2**31}; "),
    ([2**40], f"token id {2**40}; "),
    ([10**30, -1], f"token id {10**30}; "),
    ([1] * MAX_MODEL_LEN, "The prompt has 16 tokens but `max_model_len` is 16"),
    ([1] * (MAX_MODEL_LEN + 1), "has 17 tokens but `max_model_len` is 16"),
    ([1] * 100, "shorten the prompt to at most 15 tokens"),
]
NO_ORDER = [
    ({3, 1, 2}, "of type set"),
    (frozenset({1}), "of type frozenset"),
    (types.MappingProxyType({1: 2}), "of type mappingproxy"),
    (bytearray(b"text"), "of type bytearray"),
    (memoryview(b"text"), "of type memoryview"),
]
ONE_BAD = pytest.mark.parametrize(
    ("prompt", "said"),
    [*WRONG_KIND, *BAD_IDS],
    ids=lambda value: repr(value)[:30],
)


@ONE_BAD
@pytest.mark.parametrize("reader", [READER, NO_TEXT], ids=["text", "no text"])
def test_refuses_a_bad_prompt_and_says_what_is_wrong(reader, prompt, said):
    with pytest.raises(RequestError) as caught:
        reader.read_one(prompt, PARAMS)

    assert said in str(caught.value)


@pytest.mark.parametrize(("prompt", "said"), NO_ORDER, ids=lambda value: type(value).__name__)
def test_refuses_what_holds_numbers_but_is_no_list_of_ids(prompt, said):
    """Unordered things would give any order, and bytes are text that nobody encoded."""
    with pytest.raises(RequestError, match=said):
        READER.read_one(prompt, PARAMS)
    with pytest.raises(RequestError, match=f"Prompt 1 of 2: .*{said}"):
        READER.read([[1], prompt], PARAMS)


def test_refuses_texts_without_an_order():
    with pytest.raises(RequestError, match="of type set"):
        READER.read({"walk", "jump"}, PARAMS)


@ONE_BAD
def test_a_bad_prompt_in_a_list_is_refused_with_its_place(prompt, said):
    with pytest.raises(RequestError) as caught:
        READER.read([[1, 2], "walk", prompt, [3]], PARAMS)

    assert str(caught.value).startswith("Prompt 2 of 4: ")
    # A list that holds text, as [["1"]] does, is not taken for a list of prompts again.
    assert said in str(caught.value)


@pytest.mark.parametrize(("prompt", "said"), BAD_IDS, ids=lambda value: repr(value)[:30])
def test_a_bad_prompt_alone_in_a_list_needs_no_place(prompt, said):
    with pytest.raises(RequestError) as caught:
        READER.read([prompt], PARAMS)

    assert said in str(caught.value)
    assert "Prompt 0" not in str(caught.value)


@pytest.mark.parametrize(("prompts", "said"), WRONG_KIND, ids=lambda value: repr(value)[:30])
def test_refuses_what_is_no_list_of_prompts(prompts, said):
    with pytest.raises(RequestError) as caught:
        READER.read(prompts, PARAMS)

    assert f"`prompts` is {prompts!r}" in str(caught.value)
    assert said.rpartition(" ")[2] in str(caught.value)


def test_one_less_than_the_model_length_leaves_room_for_a_token():
    assert len(token_ids([1] * (MAX_MODEL_LEN - 1))[0]) == MAX_MODEL_LEN - 1


@pytest.mark.parametrize("prompt", [deque([1, 2]), array.array("i", [1, 2]), range(1, 3)], ids=repr)
def test_anything_that_gives_plain_integers_in_order_is_a_list_of_ids(prompt):
    assert READER.read_one(prompt, None).token_ids == (1, 2)


# Text


def test_text_without_tokens_is_empty():
    with pytest.raises(RequestError, match="The prompt is empty"):
        READER.read("", PARAMS)
    with pytest.raises(RequestError, match="Prompt 1 of 2: The prompt is empty"):
        READER.read(["walk", ""], PARAMS)


def test_text_is_too_long_by_its_tokens():
    with pytest.raises(RequestError, match="has 30 tokens but `max_model_len` is 16"):
        READER.read("\x00" * 30, PARAMS)


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(RequestError, match="UTF-8"):
        READER.read("half a pair: \ud800", PARAMS)


def test_text_needs_a_tokenizer():
    for prompts in ("walk", ["walk"], [[1], "walk"]):
        with pytest.raises(RequestError, match=r"no tokenizer \(`skip_tokenizer_init`\); pass tok"):
            NO_TEXT.read(prompts, PARAMS)
    with pytest.raises(RequestError, match=r"`skip_tokenizer_init`.*pass token ids"):
        NO_TEXT.chat([{"role": "user", "content": "walk"}])


# Parameters


def test_without_parameters_each_prompt_gets_the_defaults():
    assert [prompt.params for prompt in READER.read([[1], [2]], None)] == [SamplingParams()] * 2


def test_one_set_of_parameters_is_for_all_and_a_list_has_one_for_each():
    each = [SamplingParams(max_tokens=count) for count in (1, 2, 3)]
    prompts = [[1], [2], [3]]

    assert [prompt.params for prompt in READER.read(prompts, PARAMS)] == [PARAMS] * 3
    assert [prompt.params for prompt in READER.read(prompts, each)] == each
    assert [prompt.params for prompt in READER.read(prompts, tuple(each))] == each
    assert READER.read([1, 2], [PARAMS])[0].params == PARAMS


@pytest.mark.parametrize(
    ("prompts", "count"),
    [([[1], [2], [3]], 2), ([[1], [2]], 3), ([[1]], 0), ([1, 2], 2), ("walk", 4), ([], 1)],
)
def test_as_many_parameters_as_prompts_or_it_is_refused(prompts, count):
    num_prompts = 1 if is_single(prompts) else len(prompts)

    with pytest.raises(RequestError, match=f"has {count} entries for {num_prompts} prompts"):
        READER.read(prompts, [PARAMS] * count)


@pytest.mark.parametrize("params", [{"max_tokens": 5}, 5, "greedy", True, SamplingParams], ids=repr)
def test_parameters_of_another_type_are_refused(params):
    for prompts in ([1, 2], [[1], [2]]):
        with pytest.raises(RequestError, match=r"`sampling_params` is .*must be a SamplingParams"):
            READER.read(prompts, params)
    with pytest.raises(RequestError, match=r"`sampling_params` is .*must be a SamplingParams"):
        READER.read_one([1], params)
    with pytest.raises(RequestError, match="Prompt 1 of 2: `sampling_params` is"):
        READER.read([[1], [2]], [PARAMS, params])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "`stop_token_ids` names token id 330; .* 0 to 329"),
        ({"stop_token_ids": [1, 2**40]}, f"`stop_token_ids` names token id {2**40}"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "`logit_bias` names token id 330; .* 0 to 329"),
        ({"logit_bias": {1: 1.0, 2**40: -1.0}}, f"`logit_bias` names token id {2**40}"),
    ],
)
def test_parameters_that_name_an_id_outside_the_vocabulary_are_refused(given, said):
    params = SamplingParams(**given)

    with pytest.raises(RequestError, match=f"^{said}"):
        READER.read([1, 2], params)
    with pytest.raises(RequestError, match=f"Prompt 1 of 3: {said}"):
        READER.read([[1], [2], [3]], [PARAMS, params, PARAMS])


def test_parameters_may_name_any_id_of_the_vocabulary():
    params = SamplingParams(stop_token_ids=[0, VOCAB_SIZE - 1], logit_bias={VOCAB_SIZE - 1: 1.0})

    assert READER.read([1], params)[0].params == params


def test_stop_strings_need_a_tokenizer_and_stop_ids_do_not():
    with pytest.raises(RequestError, match=r"`stop` is \('END',\), but .*use `stop_token_ids`"):
        NO_TEXT.read([1], SamplingParams(stop="END"))
    assert NO_TEXT.read([1], SamplingParams(stop_token_ids=[2]))[0].params.stop_token_ids == (2,)
    assert READER.read([1], SamplingParams(stop="END"))[0].params.stop == ("END",)
