import json

import pytest
from tokenizers import Tokenizer

from nanovllm.errors import ConfigError, RequestError, WeightsError
from nanovllm.model.gguf_file import end_token_ids, read_gguf
from nanovllm.text.gguf_splits import SPLITS
from nanovllm.text.gguf_tokenizer import tokenizer_from_gguf
from tests.builtin import builtin_gguf_path
from tests.tokenizer_files import (
    GPT2,
    LLAMA3,
    QWEN2,
    SMOLLM,
    SPECIAL,
    TEKKEN,
    TEMPLATE,
    byte_level_json,
    gguf_metadata,
    texts,
)

NFC = {"type": "NFC"}
FAMILIES = {
    "gpt-2": {"pre_tokenizer": GPT2},
    "smollm": {"pre_tokenizer": SMOLLM},
    "llama-bpe": {"pre_tokenizer": LLAMA3, "whole_words": True},
    "qwen2": {"pre_tokenizer": QWEN2, "normalizer": NFC},
    "tekken": {"pre_tokenizer": TEKKEN, "whole_words": True},
}


def build(metadata):
    return tokenizer_from_gguf(metadata, source="tiny.gguf", end_token_ids=end_token_ids(metadata))


@pytest.fixture(scope="module")
def content():
    return byte_level_json(**FAMILIES["qwen2"])


@pytest.fixture
def metadata(content):
    return gguf_metadata(content, "qwen2")


# Byte-level vocabularies


@pytest.mark.parametrize("pre", FAMILIES)
def test_gives_the_ids_of_the_models_own_tokenizer_json(pre):
    content = byte_level_json(**FAMILIES[pre])
    expected = Tokenizer.from_str(json.dumps(content))

    tokenizer = build(gguf_metadata(content, pre))

    for text in texts():
        ids = tokenizer.encode(text)
        assert ids == expected.encode(text).ids, text
        for skip in (True, False):
            decoded = tokenizer.decode(ids, skip_special_tokens=skip)
            assert decoded == expected.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 123's x", ["a", " 123", "'s", " x"]),
        ("default", "a 123's x", ["a", " 123", "'s", " x"]),
        ("smollm", "a 123's x", ["a", " ", "1", "2", "3", "'s", " x"]),
        ("llama-bpe", "a 1234'S x", ["a", " ", "123", "4", "'S", " x"]),
        ("qwen2", "a 123'S x", ["a", " ", "1", "2", "3", "'S", " x"]),
        ("tekken", "a 12HelloWorld//\nx", ["a", " ", "1", "2", "Hello", "World", "//\n", "x"]),
    ],
)
def test_cuts_text_the_way_its_name_says(content, pre, text, pieces):
    tokenizer = build(gguf_metadata(content, pre))

    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)

    assert [text[start:end] for _, (start, end) in cut] == pieces


@pytest.mark.parametrize("pre", ["deepseek-v3", "qwen35", None])
def test_refuses_a_cut_that_it_does_not_know_and_lists_what_it_knows(metadata, pre):
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    else:
        metadata["tokenizer.ggml.pre"] = pre

    with pytest.raises(WeightsError, match=f"the way {pre!r}, but {', '.join(SPLITS)} are"):
        build(metadata)


def test_marks_are_special_and_added_words_are_text(metadata):
    tokenizer = build(metadata)
    text = "<|turn|><think>a</think><|endoftext|>"

    ids = tokenizer.encode(text)

    marks = [token_id for token_id in ids if tokenizer.is_special(token_id)]
    assert [tokenizer.token(token_id) for token_id in marks] == ["<|turn|>", "<|endoftext|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids_without_text_decode_to_nothing(metadata):
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = (*tokens, "[PAD]", "[PAD2]")
    metadata["tokenizer.ggml.token_type"] += (5, 5)
    tokenizer = build(metadata)
    a = tokenizer.encode("a")

    for odd in (len(tokens), len(tokens) + 1, 10**6, 2**31, 2**40, -1):
        assert tokenizer.token(odd) is None
        assert not tokenizer.is_special(odd)
        for skip in (True, False):
            assert tokenizer.decode([odd], skip_special_tokens=skip) == ""
            assert tokenizer.decode([*a, odd, *a], skip_special_tokens=skip) == "aa"
    assert tokenizer.vocab_size == len(tokens)


def test_spaces_are_never_cleaned_up(metadata):
    tokenizer = build(metadata)
    text = " a , b . don 't   !"

    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("pre", "flags", "start", "end"),
    [
        ("qwen2", {}, [], []),
        ("llama-bpe", {}, ["<|turn|>"], []),
        ("tekken", {}, ["<|turn|>"], []),
        ("llama-bpe", {"ggml.add_bos_token": False}, [], []),
        ("qwen2", {"ggml.add_bos_token": True}, ["<|turn|>"], []),
        ("qwen2", {"ggml.add_eos_token": True}, [], ["<|endoftext|>"]),
        (
            "smollm",
            {"ggml.add_bos_token": True, "ggml.add_eos_token": True},
            ["<|turn|>"],
            ["<|endoftext|>"],
        ),
    ],
)
def test_puts_the_marks_around_a_text_that_the_file_asks_for(content, pre, flags, start, end):
    turn = SPECIAL.index("<|turn|>")
    tokenizer = build(gguf_metadata(content, pre, **{"ggml.bos_token_id": turn}, **flags))

    tokens = [tokenizer.token(token_id) for token_id in tokenizer.encode("a")]

    assert tokens == [*start, "a", *end]


def test_knows_every_end_that_the_file_names(content):
    more = {"ggml.eot_token_id": 1, "ggml.eom_token_id": 2}

    assert build(gguf_metadata(content, "qwen2", **more)).eos_token_ids == {0, 1, 2}


def test_chats_by_the_templates_in_the_file(content):
    more = {"chat_template": TEMPLATE, "chat_template.tool_use": "{{ tools[0] }}{{ eos_token }}"}
    tokenizer = build(gguf_metadata(content, "qwen2", **more))
    messages = [{"role": "user", "content": "Hi"}]

    prompt = tokenizer.render_chat(messages)

    assert prompt == "<|turn|>user\nHi<|endoftext|>\n<|turn|>assistant\n"
    assert tokenizer.chat(messages) == tokenizer.encode(prompt)
    assert tokenizer.render_chat(messages, tools=["f"]) == "f<|endoftext|>"


def test_a_chat_gets_no_second_beginning(content):
    more = {"chat_template": TEMPLATE, "ggml.bos_token_id": 1, "ggml.add_bos_token": True}
    tokenizer = build(gguf_metadata(content, "qwen2", **more))

    ids = tokenizer.chat([{"role": "user", "content": "Hi"}])

    assert ids[0] == 1
    assert ids[1] != 1


def test_without_a_template_there_is_no_chat(metadata):
    with pytest.raises(RequestError, match="no chat template"):
        build(metadata).chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("prompt", ["half \ud83c", 3, None, ["a"]])
def test_refuses_what_is_no_text(metadata, prompt):
    with pytest.raises(RequestError, match="must be text"):
        build(metadata).encode(prompt)


def test_a_file_without_tokenizer_says_how_to_go_on():
    with pytest.raises(ConfigError, match=r"`tokenizer=`, or .* `skip_tokenizer_init=True`"):
        build({"general.architecture": "llama"})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "bert", "kind 'bert', but gpt2 and llama are supported"),
        ("model", None, "kind None"),
        ("token_type", (1, 1), "2 types for"),
        ("merges", ("a b c",), "no pair"),
        ("merges", ("ab",), "no pair"),
        ("merges", ("q €",), "makes no token"),
    ],
)
def test_refuses_damaged_and_other_vocabularies(metadata, key, value, message):
    metadata[f"tokenizer.ggml.{key}"] = value

    with pytest.raises(WeightsError, match=message):
        build(metadata)


# The built-in model


@pytest.fixture(scope="module")
def builtin():
    return build(read_gguf(builtin_gguf_path()).metadata)


@pytest.mark.model
def test_the_built_in_tokenizer_gives_known_good_ids(builtin):
    metadata = read_gguf(builtin_gguf_path()).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [line.split(" ") for line in metadata["tokenizer.ggml.merges"]]
    marks = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    good = Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [
                    {"id": i, "content": tokens[i], "special": True, **flags} for i in marks
                ],
                "normalizer": None,
                "pre_tokenizer": SMOLLM,
                "post_processor": None,
                "decoder": GPT2,
                "model": {
                    "type": "BPE",
                    "vocab": {token: i for i, token in enumerate(tokens)},
                    "merges": merges,
                },
            }
        )
    )

    for text in [*texts(), "<|im_start|>user\nIn 1984, 12345 <|im_end|> <jupyter_code>x = 10"]:
        ids = builtin.encode(text)
        assert ids == good.encode(text).ids, text
        assert builtin.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_the_built_in_tokenizer_chats(builtin):
    ids = builtin.chat([{"role": "user", "content": "hi"}])

    ends = [builtin.token(token_id) for token_id in (ids[0], *ids[-4:])]
    assert ends == ["<|im_start|>", "<|im_start|>", "ass", "istant", "Ċ"]
    assert builtin.eos_token_ids == {2}
    assert builtin.vocab_size == 49152
    assert [builtin.is_special(i) for i in (0, 1, 2, 16, 17)] == [True] * 4 + [False]
