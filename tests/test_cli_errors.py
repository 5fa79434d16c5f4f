"""How the commands fail: the exit code, one line, and nothing on standard output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanovllm import ConfigError, RequestError, WeightsError, cli
from nanovllm.cli import app
from nanovllm.llm import DeltaStream
from nanovllm.runtime.executor import TorchExecutor
from tests.command_line import assert_fails_in_one_line, quick, run
from tests.model_folder import tiny_model_folder, write_model_folder

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["Give one of the two", "`--prompts`"]),
        (["text", "--prompts", "p.txt"], ["Give one of the two"]),
        ([""], ["The prompt is empty"]),
        (["text", "--temperature", "-1"], ["`temperature` is -1.0"]),
        (["text", "--temperature", "nan"], ["`temperature` is nan"]),
        (["text", "--max-tokens", "0"], ["`max_tokens` is 0"]),
        (["text", "--top-p", "1.5"], ["`top_p` is 1.5"]),
        (["text", "--stop", ""], ["`stop` is ('',)"]),
        (["text", "--max-model-len", "0"], ["`max_model_len` is 0"]),
        (["text", "--max-model-len", "1000"], ["`max_model_len` is 1000", "256"]),
        (["walk walk", "--max-model-len", "2"], ["`max_model_len` is 2"]),
        (["text", "--device", "mps"], ["`device` is 'mps'"]),
        (["text", "--dtype", "int4"], ["`dtype` is 'int4'"]),
        (["text", "--model", "/no/such/model"], ["`model` is '/no/such/model'"]),
        (["--prompts", "/no/such/file"], ["`--prompts` is '/no/such/file'"]),
        (["--prompts", "/"], ["`--prompts` is '/'"]),
    ],
    ids=repr,
)
def test_wrong_usage_is_one_line_and_exit_code_2(args, words):
    result = run("generate", *args)

    assert_fails_in_one_line(result, 2, *words)
    assert result.stdout == ""


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "text", "--max-tokens", "many"],
        ["generate", "--nonsense"],
        ["chart"],
        ["chat", "x"],
    ],
    ids=repr,
)
def test_what_the_command_line_does_not_know_is_exit_code_2(args):
    result = CliRunner().invoke(app, args)

    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_bytes_that_are_no_text_are_wrong_usage(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"caf\xe9\n")

    assert_fails_in_one_line(run("generate", "--prompts", str(path)), 2, "p.txt", "can't be read")
    assert_fails_in_one_line(run("generate", "-", input=b"caf\xe9\n"), 2, "standard input")


def test_a_bad_prompt_in_a_file_is_named_by_its_place_and_nothing_runs(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('"walk"\n"' + "walk " * 300 + '"\n', encoding="utf-8")

    result = run("generate", "--prompts", str(path))

    assert_fails_in_one_line(result, 2, "Prompt 1 of 2", "`max_model_len` is 256")
    assert result.stdout == ""


def test_a_model_without_a_chat_template_can_not_chat(tmp_path):
    folder = str(write_model_folder(tmp_path / "model", chat_template=None))

    result = run("generate", "walk", "--chat", "--model", folder)

    assert_fails_in_one_line(result, 2, "no chat template")
    assert run("generate", "walk", "--model", folder).exit_code == 0


def test_weights_that_can_not_be_loaded_are_exit_code_1(tmp_path):
    folder = write_model_folder(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    assert_fails_in_one_line(
        run("generate", "walk", "--model", str(folder)), 1, "model.safetensors is truncated"
    )


@pytest.fixture
def broken(monkeypatch):
    """Make the second step of every engine raise."""

    def break_with(error):
        run_step = TorchExecutor.submit
        calls = []

        def run_once(executor, batch, rows):
            calls.append(None)
            if len(calls) > 1:
                raise error
            return run_step(executor, batch, rows)

        monkeypatch.setattr(TorchExecutor, "submit", run_once)

    return break_with


def test_a_run_that_fails_is_exit_code_1_and_says_why(broken, tmp_path):
    broken(RuntimeError("out of cheese"))

    assert_fails_in_one_line(run("generate", "walk"), 1, "1 of 1", "RuntimeError: out of cheese")


def test_in_json_what_failed_is_still_an_object(broken, tmp_path):
    broken(RuntimeError("out of cheese"))
    path = tmp_path / "p.txt"
    path.write_text("walk\njump", encoding="utf-8")

    result = run("generate", "--json", "--prompts", str(path))

    assert_fails_in_one_line(result, 1, "2 of 2 prompts failed")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [found["finish_reason"] for found in objects] == ["error", "error"]
    assert all("out of cheese" in found["error"] for found in objects)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_interrupt_is_exit_code_1_and_one_line(broken, more):
    broken(KeyboardInterrupt())

    assert_fails_in_one_line(run("generate", "walk", *more), 1, "interrupted")


def test_what_came_before_an_interrupt_was_printed(monkeypatch):
    following, calls = DeltaStream.__next__, []

    def interrupted(stream):
        calls.append(None)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return following(stream)

    whole = run("generate", "walk").stdout
    monkeypatch.setattr(DeltaStream, "__next__", interrupted)
    part = run("generate", "walk").stdout

    assert part.endswith("\n")
    assert 0 < len(part.rstrip("\n")) < len(whole.rstrip("\n"))
    assert whole.startswith(part.rstrip("\n"))


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["generate", ""], RequestError),
        (["generate", "walk", "--device", "mps"], ConfigError),
        (["chat", "--temperature", "-1"], RequestError),
    ],
)
def test_debug_lets_the_error_through_with_its_traceback(args, error):
    result = run(*args, "--debug")

    assert type(result.exception) is error
    assert result.exit_code == 1
    assert "nanovllm: " not in result.stderr


def test_debug_shows_where_weights_fail(tmp_path):
    folder = write_model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()

    result = run("generate", "walk", "--model", str(folder), "--debug")

    assert isinstance(result.exception, WeightsError)


def test_chat_fails_like_generate():
    assert_fails_in_one_line(run("chat", "--model", "/no/such"), 2, "`model` is '/no/such'")
    assert_fails_in_one_line(run("chat", "--min-p", "7"), 2, "`min_p` is 7.0")


# As a program of its own


def command(*args, stdout=subprocess.PIPE, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "nanovllm", *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        cwd=ROOT,
        **options,
    )


def generate(*args, **options):
    # float16 keeps it from compiling the native kernels.
    given = ("--model", str(tiny_model_folder()), "--device", "cpu", "--dtype", "float16")
    return command("generate", *given, *args, **options)


def test_the_program_prints_the_answer_and_exits_with_0():
    done = generate("-", "--max-tokens", "9", "--json", input="Grüße 🌶".encode())

    assert (done.returncode, done.stderr) == (0, b"")
    found = json.loads(done.stdout)
    assert found["prompt"] == "Grüße 🌶"
    assert len(found["token_ids"]) == 9


def test_the_program_fails_in_one_line():
    done = command("generate", "walk", "--model", "/no/such/model")

    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"nanovllm: `model` is '/no/such/model'")
    assert done.stderr.count(b"\n") == 1
    assert b"Traceback" in command("generate", "walk", "--model", "/no/such", "--debug").stderr


def test_the_program_ends_quietly_when_nobody_reads_on():
    read, write = os.pipe()
    os.close(read)
    try:
        done = generate("walk", "--max-tokens", "50", stdout=write)
    finally:
        os.close(write)

    assert done.returncode == 1
    assert done.stderr == b""


def test_the_package_says_which_commands_there_are():
    done = command("--help")

    assert done.returncode == 0
    assert all(name in done.stdout.decode() for name in ("generate", "chat", "doctor"))
    assert cli.DEFAULT_MODEL.encode() in command("generate", "--help").stdout
