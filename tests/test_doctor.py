import importlib.metadata
import json

import attrs
import psutil
import pytest
import torch

from nanovllm import build, builtin_model, doctor
from nanovllm.builtin_model import SMOLLM2_135M
from nanovllm.doctor import PACKAGES, SMOLLM2_SHAPE, Finding, examine
from nanovllm.hub import find_model
from nanovllm.model.config import read_model_config
from tests.builtin import builtin_gguf_path
from tests.command_line import run

GIB = 2**30


def found(what):
    return [finding.found for finding in examine() if finding.what == what]


@pytest.fixture
def cuda(monkeypatch):
    """Pretend that torch is built for CUDA and finds so many GPUs."""

    def set_up(count, version="12.8"):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (22 * GIB, 24 * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    return set_up


def test_shows_each_finding_on_a_line():
    result = run("doctor")

    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    names = [finding.what for finding in examine()]
    assert len(lines) == len(names)
    width = max(map(len, names))
    assert [line[:width].rstrip() for line in lines] == names
    assert all(line[width : width + 2] == "  " and line[width + 2] != " " for line in lines)


def test_gives_the_same_as_json():
    result = run("doctor", "--json")

    assert (result.exit_code, result.stderr) == (0, "")
    entries = [Finding(**entry) for entry in json.loads(result.stdout)]
    assert [entry.what for entry in entries] == [finding.what for finding in examine()]
    for what in ("python", "torch", "cpu", "memory", "cuda", "built-in model", "device", "threads"):
        (entry,) = [entry for entry in entries if entry.what == what]
        assert entry.found


def test_names_the_version_of_each_package_or_that_it_is_not_there(monkeypatch):
    def version(package):
        if package == "numba":
            raise importlib.metadata.PackageNotFoundError(package)
        return f"1.{len(package)}"

    monkeypatch.setattr(importlib.metadata, "version", version)

    for package in PACKAGES:
        expected = "not installed" if package == "numba" else f"1.{len(package)}"
        assert found(package) == [expected]


def test_says_what_would_run_and_why(cuda, monkeypatch):
    cuda(0)
    monkeypatch.setattr(build, "_native_obstacle", lambda model: "the moon is full")

    notes = found("smollm2-135m")

    assert "backend torch: the native one can't be used, the moon is full" in notes
    assert any(note.startswith("dtype ") for note in notes)
    assert any("K/V blocks" in note for note in notes)


def test_too_little_memory_is_a_finding(cuda, monkeypatch):
    cuda(0)
    memory = attrs.make_class("Memory", ["total", "available"])(16 * GIB, 1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    assert found("memory") == ["16.0 GiB, 0.0 free"]
    (finding,) = found("smollm2-135m")
    assert "No memory for the K/V cache: 25% of 1000 free bytes" in finding


def test_a_model_that_was_not_fetched_yet_is_a_finding(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path)

    assert found("built-in model") == [f"not fetched yet; it will go to {tmp_path}"]

    file = tmp_path / SMOLLM2_135M.file_name
    with file.open("wb") as made:
        made.truncate(SMOLLM2_135M.num_bytes)
    assert builtin_model.cached_file(SMOLLM2_135M, tmp_path) == file
    assert found("built-in model") == [str(file)]


def test_tells_a_build_without_cuda_from_a_machine_without_a_gpu(cuda):
    cuda(0, version=None)
    assert found("cuda") == [f"torch {torch.__version__} is a CPU build"]

    cuda(0)
    assert found("cuda") == ["torch is built for CUDA 12.8 but finds no device or driver"]
    assert found("device")[0].startswith("cpu:")


def test_names_the_gpus_and_would_run_on_the_first(cuda):
    cuda(2)

    assert found("cuda") == ["CUDA 12.8: GPU 0, GPU 1"]
    assert found("device")[0].startswith("cuda:0:")
    (note,) = [line for line in found("smollm2-135m") if line.startswith("backend ")]
    assert "native" not in note  # it is for CPUs


@pytest.mark.parametrize("name", ["get_device_name", "mem_get_info", "get_device_capability"])
def test_a_gpu_that_does_not_answer_is_a_finding(cuda, monkeypatch, name):
    def fail(*args):
        raise RuntimeError("CUDA error: device busy")

    cuda(1)
    monkeypatch.setattr(torch.cuda, name, fail)

    assert any("CUDA error: device busy" in finding.found for finding in examine())
    assert run("doctor").exit_code == 0


@pytest.mark.model
def test_the_shape_it_knows_is_that_of_the_built_in_model():
    files = find_model(builtin_gguf_path())
    config = build.open_checkpoint(files).config

    known = read_model_config(SMOLLM2_SHAPE, source="doctor")
    actual = read_model_config(config, source="file")

    for name in (
        "architecture",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "max_position_embeddings",
        "sliding_window",
        "dtype",
    ):
        assert getattr(known, name) == getattr(actual, name), name
