"""`nanovllm generate`, as a user at a shell meets it."""

import json

import pytest
from typer.testing import CliRunner

import nanovllm
from nanovllm import LLM, SamplingParams, cli
from tests.command_line import assert_fails_in_one_line, quick, run
from tests.model_folder import tiny_model_folder

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny_model_folder(), device="cpu", dtype="float32", attention_backend="torch") as llm:
        yield llm


def answer(llm, prompt, **params):
    """The text that the engine itself gives."""
    params = {"temperature": 0, "max_tokens": 24, **params}
    return llm.generate(prompt, SamplingParams(**params))[0].text


def test_says_its_version():
    result = CliRunner().invoke(cli.app, ["--version"])

    assert (result.exit_code, result.stdout) == (0, f"nanovllm {nanovllm.__version__}\n")


# Prompts


def test_prints_the_answer_and_nothing_else(llm):
    result = run("generate", "The quick")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == answer(llm, "The quick") + "\n"


def test_generates_128_tokens_if_nothing_else_is_said():
    given = ["--model", str(tiny_model_folder()), "--device", "cpu", "--dtype", "float32"]
    result = CliRunner().invoke(cli.app, ["generate", "walk", *given, "--ignore-eos", "--json"])

    assert len(json.loads(result.stdout)["token_ids"]) == 128


@pytest.mark.parametrize("text", ["The quick", "The quick\n", "two\nlines 🌶\n\n"])
def test_a_dash_reads_the_prompt_from_standard_input_less_one_last_newline(llm, text):
    result = run("generate", "-", input=text)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == answer(llm, text.removesuffix("\n")) + "\n"


def test_completes_each_line_of_a_text_file_in_order(llm, tmp_path):
    path = tmp_path / "my prompts.txt"
    path.write_bytes("The quick\n\n  \r\nGrüße 🌶\r\nThe quick".encode())

    result = run("generate", "--prompts", str(path), "--max-tokens", "5")

    texts = [answer(llm, prompt, max_tokens=5) for prompt in ("The quick", "Grüße 🌶", "The quick")]
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "".join(f"{text}\n\n" for text in texts)


def prompts_read(path):
    result = run("generate", "--prompts", str(path), "--json", "--max-tokens", "1")
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    return [json.loads(line)["prompt"] for line in result.stdout.removesuffix("\n").split("\n")]


def test_completes_each_line_of_a_json_lines_file_in_order(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"one"\n\n{"prompt": "two\\nlines", "id": 7}\n"dr\\u00fcben"\n', encoding="utf-8"
    )

    assert prompts_read(path) == ["one", "two\nlines", "drüben"]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_line_ends_end_a_line(tmp_path, mark):
    """Python has more of them than files do, and JSON allows some inside strings."""
    lines = tmp_path / "prompts.txt"
    lines.write_text(f"one{mark}still one\ntwo", encoding="utf-8")
    assert prompts_read(lines) == [f"one{mark}still one", "two"]

    if mark > "\x20":  # JSON does not allow the others
        lines = tmp_path / "prompts.jsonl"
        lines.write_text(f'"one{mark}still one"\n"two"', encoding="utf-8")
        assert prompts_read(lines) == [f"one{mark}still one", "two"]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    for name, text in (("p.txt", "one"), ("p.jsonl", '"one"')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())

        assert prompts_read(tmp_path / name) == ["one"]


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        ("not json", 1, "not JSON"),
        ('"one"\n"two"\n"three', 3, "not JSON"),
        ('"one"\n7\n', 2, "'7'"),
        ('"one"\nnull\n', 2, "`prompt`"),
        ('"one"\n["two"]\n', 2, "`prompt`"),
        ('{"text": "one"}', 1, "`prompt`"),
        ('"one"\n{"prompt": 2}', 2, "`prompt`"),
        ('"one"\n{"prompt": [1, 2]}', 2, "`prompt`"),
        ('\n\n"one"\n\n7\n', 5, "'7'"),
        ("\n\nnot json", 3, "not JSON"),
    ],
    ids=repr,
)
def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path, content, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")

    result = run("generate", "--prompts", str(path))

    assert_fails_in_one_line(result, 2, f"bad.jsonl, line {line} is", said)
    assert result.stdout == ""


# Options


@pytest.mark.parametrize(
    ("options", "params"),
    [
        (["--max-tokens", "3"], {"max_tokens": 3}),
        (["--temperature", "0.9", "--seed", "5"], {"temperature": 0.9, "seed": 5}),
        (["--temperature", "2", "--top-k", "1"], {"temperature": 2, "top_k": 1}),
        (["--temperature", "2", "--top-p", "0"], {"temperature": 2, "top_p": 0}),
        (["--temperature", "2", "--min-p", "1"], {"temperature": 2, "min_p": 1}),
        (["--ignore-eos", "--max-tokens", "9"], {"ignore_eos": True, "max_tokens": 9}),
    ],
    ids=repr,
)
def test_options_reach_the_sampler(llm, options, params):
    assert (
        run("generate", "The quick", *options).stdout == answer(llm, "The quick", **params) + "\n"
    )


def test_each_stop_string_ends_the_text(llm):
    whole = answer(llm, "The quick")
    stop = next(character for character in reversed(whole[2:]) if character not in whole[:2])

    for options in (["--stop", stop], ["--stop", "not in it", "--stop", stop]):
        assert run("generate", "The quick", *options).stdout == whole.partition(stop)[0] + "\n"


def test_a_prompt_can_be_sent_as_a_message(llm):
    ids = llm.chat_token_ids([{"role": "user", "content": "The quick"}])

    assert (
        run("generate", "The quick", "--chat").stdout
        == answer(llm, ids) + "\n"
        != run("generate", "The quick").stdout
    )


def test_json_is_an_object_for_each_prompt(llm, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("The quick\nwalk", encoding="utf-8")

    result = run("generate", "--prompts", str(path), "--json", "--max-tokens", "5")

    objects = [json.loads(line) for line in result.stdout.removesuffix("\n").split("\n")]
    assert (result.exit_code, result.stderr) == (0, "")
    outputs = llm.generate(["The quick", "walk"], SamplingParams(temperature=0, max_tokens=5))
    for found, prompt, output in zip(objects, ("The quick", "walk"), outputs, strict=True):
        assert found["prompt"] == prompt
        assert found["text"] == output.text
        assert tuple(found["token_ids"]) == output.token_ids
        assert found["finish_reason"] == output.finish_reason
        assert found["num_prompt_tokens"] == len(output.prompt_token_ids)
        assert found["error"] is found["stop_reason"] is None
        assert found["ttft_s"] > 0
    assert (
        json.loads(run("generate", "walk", "--json", "--max-tokens", "5").stdout)["prompt"]
        == "walk"
    )


def test_a_summary_goes_to_standard_error():
    plain = run("generate", "The quick", "--max-tokens", "5")
    result = run("generate", "The quick", "--max-tokens", "5", "--summary")

    assert (result.exit_code, result.stdout) == (0, plain.stdout)
    for name in ("load", "time to first token", "tokens", "peak memory", "K/V blocks used"):
        assert name in result.stderr
