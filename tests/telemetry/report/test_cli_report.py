"""`nanovllm report`, `nanovllm top` and `nanovllm generate --telemetry`, inside the process."""

import json
import random

import pytest
from typer.testing import CliRunner

from nanovllm import cli
from telemetry import read_run
from tests.command_line import assert_fails_in_one_line, quick, run  # noqa: F401 (a fixture)
from tests.telemetry.report.golden_reports import FOLDER

RECORDED = str(FOLDER / "cpu.jsonl")


def invoke(*args):
    return CliRunner().invoke(cli.app, args)


def test_a_report_goes_to_the_terminal_unless_a_file_is_named():
    result = invoke("report", RECORDED)

    assert result.exit_code == 0, result.output
    assert "smollm2-135m" in result.stdout
    assert "How it was measured" in result.stdout


def test_each_form_is_written_where_it_is_asked_for(tmp_path):
    paths = {form: tmp_path / f"out.{form}" for form in ("html", "json", "perfetto")}
    options = [text for form, path in paths.items() for text in (f"--{form}", str(path))]

    result = invoke("report", RECORDED, *options)

    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert [line.split()[1].rstrip(",") for line in result.stderr.splitlines()] == [
        str(path) for path in paths.values()
    ]
    assert paths["html"].read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")
    assert json.loads(paths["json"].read_text())["figures"]["num_steps"]["value"] == 90
    assert json.loads(paths["perfetto"].read_text())["traceEvents"]


@pytest.mark.parametrize("command", [("report",), ("top", "--once")])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["No such file"]),
        (b"", ["is not a run"]),
        (b"hello\nworld\n", ["line 1", "not a JSON object"]),
        (b'{"type":"run","v":999}\n', ["999", "version"]),
    ],
    ids=["missing", "empty", "text", "newer"],
)
def test_what_is_no_run_is_wrong_usage_and_one_line(tmp_path, command, content, words):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    name, *options = command

    assert_fails_in_one_line(invoke(name, str(path), *options), 2, "run.jsonl", *words)


def test_a_report_that_can_not_be_written_is_a_failed_run(tmp_path):
    result = invoke("report", RECORDED, "--html", str(tmp_path / "no" / "folder.html"))

    assert_fails_in_one_line(result, 1, "can't be written")


def test_a_run_that_was_killed_is_still_reported_with_what_is_missing(tmp_path):
    whole = (FOLDER / "cpu.jsonl").read_bytes()
    path = tmp_path / "killed.jsonl"
    path.write_bytes(whole[: len(whole) * 2 // 3])

    result = invoke("report", str(path))

    assert result.exit_code == 0, result.output
    assert "The run was cut off" in result.stdout
    assert "torn" in result.stdout


def test_top_prints_one_frame_of_a_run_on_request():
    result = invoke("top", "--once", RECORDED)

    assert result.exit_code == 0, result.output
    assert "ITL p50" in result.stdout
    assert "K/V blocks" in result.stdout


@pytest.mark.usefixtures("quick")
def test_generate_records_what_it_did(tmp_path):
    path = tmp_path / "run.jsonl"

    result = run("generate", "--telemetry", str(path), "abc abc")

    assert result.exit_code == 0, (result.output, result.exception)
    recorded = read_run(path)
    assert recorded.ended
    assert len(recorded.requests) == 1
    assert sum(map(len, recorded.steps.sampled)) == recorded.requests[0].num_generated_tokens > 1


@pytest.mark.usefixtures("quick")
def test_a_path_that_can_not_be_recorded_to_is_refused_before_a_model_is_loaded(
    tmp_path, monkeypatch
):
    def load(*args, **options):
        pytest.fail("the model was loaded")

    monkeypatch.setattr(cli, "LLM", load)
    for path in (tmp_path, tmp_path / "no" / "run.jsonl"):
        result = run("generate", "--telemetry", str(path), "abc")

        assert_fails_in_one_line(result, 2, "--telemetry", str(path))


@pytest.mark.parametrize("seed", range(12))
def test_values_that_no_run_has_are_wrong_usage_and_one_line(tmp_path, seed):
    """A value of another type, put anywhere: the report comes, or a line says what is wrong."""
    rng = random.Random(seed)
    lines = (FOLDER / "cpu.jsonl").read_text(encoding="utf-8").splitlines()
    index = rng.randrange(len(lines))
    row = json.loads(lines[index])
    name = rng.choice([name for name in row if name != "type"])
    row[name] = rng.choice(["text", None, [1], {"a": 2}, True])
    lines[index] = json.dumps(row)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    result = invoke("report", str(path), "--html", str(tmp_path / "out.html"))

    if result.exit_code != 0:
        assert_fails_in_one_line(result, 2, "run.jsonl")
