"""pytest plugin: latency of a language model, for pytest-benchmark's tables, files and gates.

    def test_latency(benchmark, llm):
        benchmark.pedantic(llm.generate, args=(prompts, params), rounds=10, warmup_rounds=2)

gains the rows `test_latency:ttft`, `:itl` and `:itl_p99` (one p99 a round) beside the call itself,
and percentiles, hit rates and warnings in its `extra_info`. So the run

    pytest --benchmark-autosave                       # keep a base
    pytest --benchmark-compare --benchmark-compare-fail=median:10%

fails when the p99 of the times between tokens gets worse.

This module is imported in every pytest run of an environment that has this package: it must be
quick, load no torch, and change nothing for those who use neither `llm` nor pytest-benchmark.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from nanovllm.pytest_plugin.options import add_options, engine_config, report_path, telemetry_mode
from nanovllm.pytest_plugin.session import LlmSession

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.pytest_plugin.memory import MemoryFlat

MARKER = (
    'llm(cache="cold" | "warm"): before each round of a benchmark of `llm` forget the prefix '
    "cache, or expect it to be filled."
)

SESSION = pytest.StashKey[LlmSession]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--llm-model` and its kind."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)
    # What is wrong shows now, not in the middle of the tests or after them.
    telemetry_mode(config)
    engine_config(config)
    report_path(config)
    config.stash[SESSION] = LlmSession(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every benchmark of `llm` a timer that knows the rounds."""
    config.stash[SESSION].prepare(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measure what the engine does in a benchmark of `llm`."""
    with item.config.stash[SESSION].measuring(item):
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before a failed gate ends the run
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say the percentiles that pytest-benchmark's table has no column for."""
    lines = config.stash[SESSION].summary()
    if lines:
        terminalreporter.section("language model latency")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Say what the engine ran on, once there is one."""
    facts = config.stash[SESSION].facts
    if facts is not None:
        machine_info["llm"] = facts


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, compared_benchmark: dict[str, Any]
) -> None:
    """Compare what the engines ran on at the end, as there is none yet when this is called."""
    before = compared_benchmark.get("machine_info", {}).pop("llm", None)
    if before is not None:
        config.stash[SESSION].compared_facts.append(json.loads(json.dumps(before)))


@pytest.fixture(scope="session")
def llm_config(pytestconfig: pytest.Config) -> dict[str, Any]:
    """`model` and options of the engine; override it in a `conftest.py` to choose them there."""
    return engine_config(pytestconfig)


@pytest.fixture(scope="session")
def llm(llm_config: dict[str, Any], pytestconfig: pytest.Config) -> "Iterator[LLM]":
    """Make an engine for the whole session, warmed up."""
    # Delayed, as all imports of these fixtures: for those who do not use them.
    from nanovllm.pytest_plugin.engine import session_engine

    with session_engine(llm_config, report=report_path(pytestconfig)) as (engine, facts):
        pytestconfig.stash[SESSION].facts = facts
        yield engine


@pytest.fixture
def gpu_telemetry(llm: "LLM", request: pytest.FixtureRequest) -> Iterator[Any]:
    """A `telemetry.Recorder` around the test, also where there is only a CPU to record."""
    from nanovllm.pytest_plugin.device_record import recorder_for

    mode = telemetry_mode(request.config)
    with recorder_for(llm, mode="edges" if mode == "off" else mode) as recorder:
        yield recorder


@pytest.fixture
def memory_flat(llm: "LLM") -> "MemoryFlat":
    """Check that memory does not grow within a `with` block."""
    from nanovllm.pytest_plugin.memory import MemoryFlat

    return MemoryFlat(llm)
