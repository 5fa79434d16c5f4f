import functools
import json

import pytest
from typer.testing import CliRunner

from nanovllm import LLM, build, cli, cli_bench
from nanovllm.workloads import bandwidth
from tests.command_line import assert_fails_in_one_line
from tests.model_folder import tiny_model_folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(cli_bench, "LLM", functools.partial(LLM, attention_backend="torch"))
    monkeypatch.setattr(build, "QUIET_S", 1e6)
    small = functools.partial(bandwidth.measure_read_bandwidth, buffer_bytes=2**20)
    monkeypatch.setattr(bandwidth, "measure_read_bandwidth", small)


def bench(command, *args):
    given = ("--model", str(tiny_model_folder()), "--device", "cpu", "--dtype", "float32")
    sizes = ("--input-len", "20", "--output-len", "4")
    return CliRunner().invoke(cli.app, ["bench", command, *given, *sizes, *args])


def figures(output):
    """Label -> cells of each line of a table."""
    lines = [line.rsplit("  ", 1) for line in output.splitlines() if "  " in line.strip()]
    return {label.split("  ")[0].strip(): value.strip() for label, value in lines}


def test_latency_prints_a_column_per_batch_and_writes_the_same_as_json(tmp_path):
    path = tmp_path / "out.json"
    result = bench("latency", "--batch", "1,3", "--num-iters", "2", "--json", str(path))

    assert result.exit_code == 0, result.output
    header = next(line for line in result.stdout.splitlines() if "batch 1" in line)
    assert header.split() == ["batch", "1", "batch", "3"]
    data = json.loads(path.read_text())
    assert [one["batch"] for one in data["results"]] == [1, 3]
    assert [one["ttft"]["num_samples"] for one in data["results"]] == [2, 6]
    assert {one["prefix_hit_rate"] for one in data["results"]} == {0}
    assert data["engine"]["config"]["dtype"] == "float32"
    assert data["machine"]["num_usable_cpus"] >= 1
    assert data["bandwidth"]["bytes_per_s"] > 0
    last = data["results"][-1]
    assert figures(result.stdout)["Output token throughput (tok/s)"] == (
        f"{last['output_tokens_per_s']:.1f}"
    )
    assert figures(result.stdout)["ITL, p99 (ms)"] == "-"
    assert "a p99 200" in result.stdout.splitlines()[-1]
    assert "batch 3: 2 + 2 times" in result.stderr


def test_throughput_serves_batches_and_counts_what_came(tmp_path):
    path = tmp_path / "out.json"
    result = bench("throughput", "--batch", "2", "--num-prompts", "5", "--json", str(path))

    assert result.exit_code == 0, result.output
    shown = figures(result.stdout)
    assert (shown["Successful requests"], shown["Failed requests"]) == ("5", "0")
    assert (shown["Total input tokens"], shown["Total generated tokens"]) == ("100", "20")
    (one,) = json.loads(path.read_text())["results"]
    assert shown["Total token throughput (tok/s)"] == f"{one['total_tokens_per_s']:.1f}"
    assert one["itl"]["num_samples"] == 5 * 3


def test_a_load_is_saved_as_a_trace_and_served_again_from_it(tmp_path):
    path = tmp_path / "trace.jsonl"
    first = bench("throughput", "--rate", "300", "--num-prompts", "4", "--save-trace", str(path))
    again = bench("throughput", "--trace", str(path), "--goodput", "ttft:60000")

    assert (first.exit_code, again.exit_code) == (0, 0), first.output + again.output
    assert len(path.read_text().splitlines()) == 4
    shown = figures(again.stdout)
    assert (shown["Total input tokens"], shown["Total generated tokens"]) == ("80", "16")
    assert shown["Request goodput (req/s)"] == shown["Request throughput (req/s)"]
    assert "TTFT <= 60000 ms" in again.stdout


@pytest.mark.parametrize(
    ("command", "args", "words"),
    [
        ("latency", ("--batch", "1,x"), ("--batch", "1,8,64")),
        ("latency", ("--batch", "0"), ("--batch", "above 0")),
        ("latency", ("--batch", ""), ("--batch",)),
        ("throughput", ("--rate", "1", "--trace", "t"), ("--rate", "--trace", "give one")),
        ("throughput", ("--rate", "0"), ("above 0",)),
        ("throughput", ("--trace", "none.jsonl"), ("none.jsonl", "can't be read")),
        ("throughput", ("--goodput", "fast"), ("fast", "ttft:500")),
    ],
)
def test_a_wrong_option_is_one_line_and_code_2_before_anything_is_loaded(command, args, words):
    assert_fails_in_one_line(bench(command, *args), 2, *words)


def test_a_prompt_that_the_model_has_no_room_for_is_one_line_too():
    result = bench("latency", "--batch", "1", "--input-len", "5000", "--num-iters", "1")

    assert result.exit_code == 2
    assert "5000" in result.stderr.splitlines()[-1]
