"""A test suite of an app, as a user has it, and what is run of it."""

import importlib.metadata
import json

CONFTEST = """
import os, time
import pytest, torch
from tests.checkpoints import checkpoint_folder

@pytest.fixture(scope="session")
def llm_config():
    torch.set_num_threads(1)
    return {
        "model": checkpoint_folder("llama"), "device": "cpu", "dtype": "float32",
        "skip_tokenizer_init": True, "num_kvcache_blocks": 64, "attention_backend": "torch",
    }

@pytest.fixture
def app(llm):
    from nanovllm import SamplingParams
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    pause_s = float(os.environ.get("SLOWED_BY_S", "0"))
    end = llm.subscribe(lambda record: time.sleep(pause_s))
    yield lambda prompts: llm.generate(prompts, params)
    end()
"""
"""An app that keeps an engine of its own; it can be slowed down between tokens."""

QUICK_MACHINE = """
@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_machine_info():
    return {"cpu": "not asked"}   # asking takes a second
"""

TEST = """
PROMPTS = [[7, 8, 9] * 11, [3, 4, 5] * 11]

def test_app(benchmark, app):
    outputs = benchmark.pedantic(app, args=(PROMPTS,), rounds=4, warmup_rounds=1)
    assert [len(output.token_ids) for output in outputs] == [5, 5]
"""
"""What the user wrote: nothing of it knows the plugin."""


def write_suite(pytester, test=TEST, conftest=CONFTEST + QUICK_MACHINE):
    pytester.makeconftest(conftest)
    pytester.makepyfile(test_app=test)


def run_suite(pytester, *args):
    """Run it in this process, with the plugin as an installation has it."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")}
    plugin = ("-p", "nanovllm.pytest_plugin") if "nanovllm" not in names else ()
    # This run's own filters, which make errors of warnings, are none of the inner run's.
    args = ("-p", "no:cacheprovider", "-W", "default", *plugin, *args)
    return pytester.runpytest_inprocess(*args)


def benchmarks_of(pytester, *args):
    """Run it and read the file that it leaves: name -> row, in order."""
    result = run_suite(pytester, "--benchmark-json=run.json", *args)
    assert result.ret == 0, result.stdout.str()
    saved = json.loads((pytester.path / "run.json").read_text())
    return {row["name"]: row for row in saved["benchmarks"]}, result, saved
