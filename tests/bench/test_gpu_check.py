"""The check for a GPU runs to its end on a CPU, small, and its verdict is what it found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu_check, gpu_kernels
from nanovllm.kernels import ops

ROOT = Path(__file__).parents[2]


def test_runs_to_the_end_on_a_cpu_and_writes_every_result(tmp_path):
    path = tmp_path / "check.jsonl"
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--device", "cpu", "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
    )

    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[-1] == {"stage": "verdict", "ok": True, "failed": []}
    assert {row["stage"] for row in rows} >= set(gpu_check.STAGES)
    cases = [row for row in rows if row["stage"] == "parity" and "case" in row]
    assert len(cases) == 4
    assert all(row["ok"] and row["tokens"] for row in cases)


def one_stage(name):
    rows = []
    log = gpu_check.Log(None, rows)
    return gpu_check.run(torch.device("cpu"), log, [name]), rows


def test_a_kernel_that_is_wrong_decides_the_verdict(monkeypatch):
    decode = ops.paged_decode

    def scaled(*args):
        return decode(*args[:-1], args[-1]) * (1.5 if args[-1] == 7 else 1)

    monkeypatch.setattr(ops, "paged_decode", scaled)
    right, rows = one_stage("kernels")

    assert not right
    assert [row["splits"] for row in rows if row.get("ok") is False and "splits" in row] == [7]


def test_a_stage_that_breaks_is_said_and_fails_the_verdict(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "_sampler_case", lambda *_: 1 / 0)
    right, rows = one_stage("kernels")

    assert not right
    assert any("ZeroDivisionError" in row.get("error", "") for row in rows if row.get("error"))


@pytest.mark.parametrize("name", ["probes"])
def test_a_stage_that_decides_nothing_may_fail(monkeypatch, name):
    monkeypatch.setitem(gpu_check.STAGES, name, (1, lambda world, until_s: iter([{"ok": False}])))
    right, rows = one_stage(name)

    assert right
    assert rows[-1]["failed"] == [name]
