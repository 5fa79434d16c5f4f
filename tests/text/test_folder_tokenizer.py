import os
import subprocess
import sys

import pytest
import tokenizers

from nanovllm.errors import ConfigError, WeightsError
from nanovllm.hub import FilesKind, ModelFiles
from nanovllm.text import folder_tokenizer
from nanovllm.text.tokenizer import load_tokenizer
from tests.tokenizer_files import (
    GPT2,
    QWEN2,
    SMOLLM,
    TEMPLATE,
    bos_json,
    byte_level_json,
    config_json,
    texts,
    write_folder,
)

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello 42"}]


def load(path):
    return load_tokenizer(ModelFiles(FilesKind.FOLDER, path, path.name))


@pytest.fixture(scope="module")
def content():
    return byte_level_json(SMOLLM)


@pytest.fixture
def no_transformers(monkeypatch):
    def refuse(folder):
        raise AssertionError(f"{folder.path} went to transformers")

    monkeypatch.setattr(folder_tokenizer, "_through_transformers", refuse)


def reference(path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)


def assert_same(tokenizer, expected):
    for text in texts(30):
        ids = tokenizer.encode(text)
        assert ids == expected(text)["input_ids"], text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected.decode(
                ids, skip_special_tokens=skip
            )
    assert tokenizer.vocab_size == len(expected)
    eos = expected.eos_token_id
    assert tokenizer.eos_token_ids == (frozenset() if eos is None else {eos})
    if expected.chat_template:
        prompt = expected.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
        assert tokenizer.render_chat(MESSAGES) == prompt
        chat = expected.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
        assert tokenizer.chat(MESSAGES) == chat


# The light way

QWEN_JSON = {"pre_tokenizer": QWEN2, "normalizer": {"type": "NFC"}}


LIGHT = {
    "as it is": (lambda: byte_level_json(SMOLLM), {}, "llama"),
    "named by transformers 5": (
        lambda: byte_level_json(SMOLLM),
        {"tokenizer_class": "TokenizersBackend"},
        "llama",
    ),
    "qwen 3": (
        lambda: byte_level_json(**QWEN_JSON),
        {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False},
        "qwen3",
    ),
    "qwen 2": (
        lambda: byte_level_json(**QWEN_JSON),
        {"tokenizer_class": "Qwen2TokenizerFast", "additional_special_tokens": ["<|turn|>"]},
        "qwen2",
    ),
    "gpt-2": (lambda: byte_level_json(GPT2), {"tokenizer_class": "GPT2Tokenizer"}, "llama"),
    "llama 3": (bos_json, {"bos_token": "<|turn|>"}, "llama"),
    "deepseek": (
        bos_json,
        {"bos_token": "<|turn|>", "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
        "qwen3",
    ),
    "no class": (lambda: byte_level_json(SMOLLM), {"tokenizer_class": None}, "llama"),
}


@pytest.mark.parametrize("name", LIGHT)
def test_gives_what_transformers_gives_without_it(tmp_path, name, no_transformers):
    make, options, model_type = LIGHT[name]
    made = make()
    path = write_folder(
        tmp_path, made, config=config_json(made, **options), model={"model_type": model_type}
    )

    assert_same(load(path), reference(path))


def test_a_tokenizer_json_alone_is_enough(tmp_path, content, no_transformers):
    path = write_folder(tmp_path, content)

    assert_same(load(path), reference(path))


def test_the_older_files_are_read_where_the_newer_are_silent(tmp_path, content, no_transformers):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|pad|>"}
    special = {"eos_token": {"content": "<|endoftext|>", "lstrip": False}, "unk_token": "<|pad|>"}
    path = write_folder(tmp_path, content, config=config, special_tokens_map=special)

    tokenizer = load(path)

    assert tokenizer.eos_token_ids == {0}
    assert_same(tokenizer, reference(path))


def test_smollm_keeps_its_digits_apart_whatever_its_class_is_called(
    tmp_path, content, no_transformers
):
    # Published as GPT2Tokenizer, which transformers 5 takes at its word: it cuts " 12" otherwise.
    config = config_json(content, tokenizer_class="GPT2Tokenizer")
    path = write_folder(tmp_path, content, config=config)

    expected = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))

    tokenizer = load(path)

    for text in texts(30):
        assert tokenizer.encode(text) == expected.encode(text).ids


def test_limits_left_in_the_file_do_not_bind(tmp_path, content, no_transformers):
    limits = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    free = load(write_folder(tmp_path / "free", content, config=config_json(content)))
    bound = {**content, "truncation": limits, "padding": padding}

    tokenizer = load(write_folder(tmp_path / "bound", bound, config=config_json(content)))

    for text in texts(10):
        assert tokenizer.encode(text) == free.encode(text)


@pytest.mark.parametrize("where", ["jinja", "config", "list", "json"])
def test_finds_the_chat_template_in_every_place(tmp_path, content, where, no_transformers):
    config = config_json(content)
    del config["chat_template"]
    path = write_folder(tmp_path, content, config=config)
    match where:
        case "jinja":
            (path / "chat_template.jinja").write_text(TEMPLATE)
            write_folder(path, content, config={**config, "chat_template": "not this"})
        case "config":
            write_folder(path, content, config={**config, "chat_template": TEMPLATE})
        case "list":
            named = [
                {"name": "default", "template": TEMPLATE},
                {"name": "tool_use", "template": "t"},
            ]
            write_folder(path, content, config={**config, "chat_template": named})
        case "json":
            write_folder(path, content, config=config, chat_template={"chat_template": TEMPLATE})

    prompt = load(path).render_chat(MESSAGES[:1])

    assert prompt == "<|turn|>user\nHi<|endoftext|>\n<|turn|>assistant\n"


def test_a_template_for_tools_lies_beside_the_other(tmp_path, content, no_transformers):
    path = write_folder(tmp_path, content, config=config_json(content))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")

    assert load(path).render_chat(MESSAGES, tools=[1]) == "[1]"


def test_loading_and_chatting_import_no_transformers_and_no_torch(tmp_path, content):
    path = write_folder(tmp_path, content, config=config_json(content))
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from nanovllm.hub import find_model\n"
        "from nanovllm.text.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(find_model({str(path)!r}))\n"
        f"tokenizer.chat({MESSAGES!r})\n"
        "sys.exit(str({'torch', 'transformers'} & set(sys.modules) or ''))"
    )
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)

    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.stderr.strip() == ""


# The long way


def more_tokens(config):
    token = {"content": "<extra>", "special": False, "normalized": False}
    config["added_tokens_decoder"]["500"] = token


def more_specials(config):
    config["additional_special_tokens"] = ["<|tool|>"]


def other_flags(config):
    config["added_tokens_decoder"]["1"]["lstrip"] = True


def a_space_in_front(config):
    config["add_prefix_space"] = True


@pytest.mark.parametrize("change", [more_tokens, more_specials, other_flags, a_space_in_front])
def test_what_tokenizer_json_does_not_say_is_left_to_transformers(tmp_path, content, change):
    config = config_json(content)
    change(config)
    path = write_folder(tmp_path, content, config=config)

    assert_same(load(path), reference(path))


def test_classes_that_build_their_own_tokenizer_are_left_to_transformers(tmp_path):
    made = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "▁a"])},
            "merges": [["▁", "a"]],
        },
    }
    path = write_folder(tmp_path, made, config={"tokenizer_class": "LlamaTokenizer"})

    tokenizer = load(path)

    expected = reference(path)
    assert tokenizer.encode("a a") == expected("a a")["input_ids"]
    assert tokenizer.decode([5, 5], skip_special_tokens=True) == expected.decode([5, 5])
    assert tokenizer.eos_token_ids == {2}


def test_code_in_a_folder_is_not_run(tmp_path, content):
    config = config_json(content, auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    config["tokenizer_class"] = "Evil"
    path = write_folder(tmp_path, content, config=config, model={"model_type": "evil"})
    (path / "tokenization_evil.py").write_text(f"open({str(path / 'ran')!r}, 'w')")

    with pytest.raises(ConfigError, match="Code inside model folders is never run"):
        load(path)

    assert not (path / "ran").exists()


# Damage


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["{", "[]", ""])
def test_damaged_files_are_named(tmp_path, content, name, damage):
    path = write_folder(tmp_path, content, config=config_json(content))
    (path / name).write_text(damage)

    with pytest.raises(WeightsError, match=name):
        load(path)
