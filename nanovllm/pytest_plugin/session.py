"""What the plugin does in a run: which tests it measures, and what it says at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nanovllm.llm import LLM
from nanovllm.pytest_plugin.device_record import device_warnings
from nanovllm.pytest_plugin.measure import CacheUse, Measured
from nanovllm.pytest_plugin.options import telemetry_mode
from nanovllm.pytest_plugin.round_clock import RoundClock, Window, timer_named
from nanovllm.pytest_plugin.rows import (
    RowsUnavailableError,
    add_row,
    num_iterations_of,
    num_rounds_of,
)
from nanovllm.workloads.distribution import Distribution
from nanovllm.workloads.disturbances import Disturbance, DisturbanceWatch
from nanovllm.workloads.token_log import TokenLog

CLOCK = pytest.StashKey[RoundClock]()


class LlmSession:
    """The plugin's memory of one run.

    Attributes:
        facts: Of the engine that the `llm` fixture made; None before.
        compared_facts: Of the engines of the saved runs that this one is compared with.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.facts: dict[str, Any] | None = None
        self.compared_facts: list[dict[str, Any]] = []
        self._config = config
        self._lines: list[str] = []
        self._why_no_rows: str | None = None

    def prepare(self, items: list[pytest.Item]) -> None:
        """Give every benchmark of `llm` a clock, through the marker of pytest-benchmark."""
        for item in items:
            cache_use(item)  # a wrong marker shows before anything runs
        if not self._config.pluginmanager.hasplugin("benchmark"):
            return
        for item in items:
            names = item.fixturenames if isinstance(item, pytest.Function) else ()
            if "benchmark" not in names or "llm" not in names:
                continue
            given = item.get_closest_marker("benchmark")
            if given is not None and given.args:
                continue  # which pytest-benchmark will complain about
            options = dict(given.kwargs) if given is not None else {}
            clock = RoundClock(options.get("timer") or self._default_timer())
            item.stash[CLOCK] = clock
            # In front, since the first marker counts; its other options are those it hides.
            item.add_marker(pytest.mark.benchmark(**{**options, "timer": clock}), append=False)

    @contextmanager
    def measuring(self, item: pytest.Item) -> Iterator[None]:
        """Watch the engine while a test runs; a test that passes gets its rows."""
        clock = item.stash.get(CLOCK, None)
        fixtures = item.funcargs if isinstance(item, pytest.Function) else {}
        engine = fixtures.get("llm")
        if clock is None or not isinstance(engine, LLM):
            yield
            return
        cache = cache_use(item)
        log = TokenLog()
        clock.clean_between_rounds(engine.reset_prefix_cache if cache == "cold" else None)
        end_hooks = [engine.subscribe(log), engine.subscribe(lambda _: clock.note_use())]
        try:
            with self._recorded(engine) as device, DisturbanceWatch() as watch:
                yield
                disturbance = watch.so_far()
        finally:
            for end_hook in end_hooks:
                end_hook()
        self._publish(item, fixtures["benchmark"], log, cache, disturbance, device)

    def summary(self) -> list[str]:
        """Lines for the end of the run."""
        lines = list(self._lines)
        if self._why_no_rows is not None:
            lines.append(
                "no rows :ttft, :itl, :itl_p99: this version of pytest-benchmark is another "
                f"inside ({self._why_no_rows}); the figures are in extra_info"
            )
        for before in self.compared_facts:
            now = self.facts or {}
            same = {"commit", "nanovllm"}  # whose change is what is being measured
            changed = sorted(
                k for k in before if k in now and before[k] != now[k] and k not in same
            )
            if changed:
                told = ", ".join(f"{key} {before[key]} -> {now[key]}" for key in changed)
                lines.append(f"compared with another machine or set-up: {told}")
        return lines

    def _publish(
        self,
        item: pytest.Item,
        benchmark: Any,
        log: TokenLog,
        cache: CacheUse,
        disturbance: Disturbance,
        device: dict[str, Any],
    ) -> None:
        """Cut the log by the rounds, and give the test its rows and its `extra_info`."""
        windows, num_iterations, has_rows = whole_test(disturbance), 1, False
        try:
            num_rounds = num_rounds_of(benchmark)
            if num_rounds is None:
                return  # nothing was timed
            windows = item.stash[CLOCK].windows(num_rounds)
            num_iterations, has_rows = num_iterations_of(benchmark), True
        except RowsUnavailableError as error:
            self._why_no_rows = str(error)
        measured = Measured.of(
            log, windows, cache=cache, num_iterations=num_iterations, disturbance=disturbance
        )
        warnings = [*measured.warnings(), *device_warnings(device)]
        told = {**(self.facts or {}), **measured.as_data(), **device, "warnings": warnings}
        benchmark.extra_info["llm"] = told
        rows = measured.rows() if has_rows else {}
        for name, seconds in rows.items():
            extra_info = Distribution.of(seconds).as_data()
            try:
                add_row(self._config, benchmark, name, seconds, extra_info)
            except RowsUnavailableError as error:
                self._why_no_rows = str(error)
        self._lines += [f"{item.nodeid}  {figures(measured, device)}"]
        self._lines += [f"{item.nodeid}  warning: {text}" for text in warnings]

    @contextmanager
    def _recorded(self, engine: LLM) -> Iterator[dict[str, Any]]:
        """What the device did meanwhile; filled when the block ends."""
        mode, data = telemetry_mode(self._config), dict[str, Any]()
        if mode == "off":
            yield data
            return
        # Delayed: only for those who record.
        from nanovllm.pytest_plugin.device_record import device_data, recorder_for

        with recorder_for(engine, mode=mode) as recorder:
            yield data
        data.update(device_data(recorder))

    def _default_timer(self) -> Callable[[], float]:
        return timer_named(self._config.getoption("benchmark_timer", "time.perf_counter"))


def whole_test(disturbance: Disturbance) -> list[Window]:
    """One window over all of a test that has just ended, for want of its rounds."""
    now_s = time.perf_counter()
    return [Window(now_s - disturbance.duration_s, now_s)]


def cache_use(item: pytest.Item) -> CacheUse:
    """What a test's `llm` marker says of the prefix cache.

    Raises:
        pytest.UsageError: It says something that does not exist.
    """
    marker = item.get_closest_marker("llm")
    if marker is None:
        return None
    cache = marker.kwargs.get("cache")
    if marker.args or marker.kwargs.keys() - {"cache"} or cache not in (None, "cold", "warm"):
        raise pytest.UsageError(
            f'{item.nodeid}: the marker `llm` takes cache="cold" or cache="warm", not '
            f"{marker.args or marker.kwargs}."
        )
    return cache


def figures(measured: Measured, device: dict[str, Any]) -> str:
    """One line for people."""
    parts = []
    for name in ("ttft", "itl"):
        one = measured.distribution(name)
        if one.median_s is None or one.max_s is None:
            continue
        p99 = one.percentile_s(99)
        tail = f"max {one.max_s * 1e3:.2f}" if p99 is None else f"p99 {p99 * 1e3:.2f}"
        parts.append(f"{name.upper()} p50 {one.median_s * 1e3:.2f} {tail} ms (n={one.num_samples})")
    rate = measured.prefix_hit_rate
    if rate is not None:
        parts.append(f"cached {rate:.0%}")
    if device.get("joules_per_token") is not None:
        parts.append(f"{device['joules_per_token']:.3f} J/token")
    return ", ".join(parts) or "no tokens"
