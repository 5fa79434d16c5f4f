"""The command line inside the test's process, on a tiny model and a backend without a compiler."""

import functools

import pytest
import torch
from typer.testing import CliRunner

from nanovllm import LLM, build, cli
from tests.model_folder import tiny_model_folder

GIVEN = ("--device", "cpu", "--dtype", "float32", "--max-tokens", "24")


def run(command, *args, **options):
    """Run a command; options in `args` count more than those that are always given."""
    given = () if command == "doctor" else ("--model", str(tiny_model_folder()), *GIVEN)
    return CliRunner().invoke(cli.app, [command, *given, *args], **options)


def assert_fails_in_one_line(result, code, *words):
    assert result.exit_code == code, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("nanovllm: ")
    assert all(word in line for word in words), line


@pytest.fixture
def quick(monkeypatch):
    """Run on torch, which is there at once, and say nothing about how long it takes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such a small model has nothing for more to do
    monkeypatch.setattr(cli, "LLM", functools.partial(LLM, attention_backend="torch"))
    monkeypatch.setattr(build, "QUIET_S", 1e6)
    yield
    torch.set_num_threads(num_threads)
