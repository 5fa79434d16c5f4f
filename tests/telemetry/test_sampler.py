"""The schedule of the sampler, on a clock of the test's own, and its thread."""

import ast
import inspect
import threading
import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import sampler as sampler_module
from telemetry.providers.base import Probe, Probes, Tier, Verdict, all_unavailable
from telemetry.records import Sensor
from telemetry.sampler import Sampler
from tests.telemetry.forking import is_true_in_a_child, needs_fork

PERIOD_S, PERIOD_NS = 0.1, 100_000_000

FAST = Sensor("x.fast", "count", "a test")


class FakeTime:
    """A clock that moves while one waits, and by what each read takes."""

    def __init__(self, until_ns):
        self.ns = 0
        self._until_ns = until_ns

    def now(self):
        return self.ns

    def wait(self, seconds):
        self.ns += round(seconds * 1e9)
        return self.ns >= self._until_ns


class TimedProvider:
    """Takes the given times for its fast reads, in turn, and remembers when it was asked."""

    def __init__(self, clock, costs_ns):
        self.clock = clock
        self.costs_ns = list(costs_ns)
        self.fast_at, self.slow_at = [], []
        self.name, self.lost = "x", None

    def names(self, tier):
        return {Tier.FAST: ("x.fast",), Tier.SLOW: ("x.slow",)}.get(tier, ())

    def read(self, tier):
        asked = self.fast_at if tier is Tier.FAST else self.slow_at
        asked.append(self.clock.ns)
        if tier is Tier.FAST and self.costs_ns:
            self.clock.ns += self.costs_ns.pop(0)
        return (len(asked),)


def sampled(costs_ns, *, until_s=3.0):
    clock = FakeTime(round(until_s * 1e9))
    provider = TimedProvider(clock, costs_ns)
    sampler = Sampler([provider], period_s=PERIOD_S, now=clock.now, wait=clock.wait)
    sampler.loop()
    return sampler, provider, clock


def test_ticks_come_on_an_absolute_schedule():
    sampler, provider, _ = sampled([7_000_000] * 99)

    assert provider.fast_at == [n * PERIOD_NS for n in range(30)]
    assert (sampler.num_ticks, sampler.num_late_ticks) == (30, 0)


def test_slow_sensors_are_read_each_second():
    _, provider, _ = sampled([])

    assert provider.slow_at == [0, 1_000_000_000, 2_000_000_000]


def test_ticks_that_were_missed_are_skipped_and_counted():
    sampler, provider, _ = sampled([0, 350_000_000], until_s=1.0)

    # The read at 100 ms ends at 450: of the ticks at 200, 300 and 400 only the last is made.
    assert [t // 1_000_000 for t in provider.fast_at[:5]] == [0, 100, 450, 500, 600]
    assert sampler.num_late_ticks == 2


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 5 * PERIOD_NS), max_size=30))
def test_every_tick_is_either_made_or_counted_as_late(costs_ns):
    sampler, provider, clock = sampled(costs_ns)
    due = -(-clock.ns // PERIOD_NS)  # ticks that were due before the end

    assert due - 1 <= sampler.num_ticks + sampler.num_late_ticks <= due + 1
    gaps = [b - a for a, b in pairwise(provider.fast_at)]
    # Never a burst: two ticks in a row never fall into one period.
    assert all(a + b >= PERIOD_NS for a, b in pairwise(gaps))


def test_its_own_time_is_counted():
    sampler, _, _ = sampled([5_000_000, 20_000_000, 1_000_000], until_s=0.35)

    assert sampler.in_call_ns == 26_000_000
    assert sampler.worst_tick_ns == 20_000_000


def test_rows_carry_the_times_around_the_read():
    sampler, _, _ = sampled([5_000_000], until_s=0.15)
    rows = sampler.rows.take(9)

    assert rows[0] == (0, 5_000_000, 0, Tier.FAST, (1,))
    assert [row[3] for row in rows] == [Tier.FAST, Tier.SLOW, Tier.FAST]


def test_providers_without_anything_to_read_are_not_asked():
    clock = FakeTime(10**9)
    nothing = all_unavailable("y", [FAST], "not here")
    sampler = Sampler([nothing], period_s=PERIOD_S, now=clock.now, wait=clock.wait)
    sampler.loop()

    assert sampler.num_ticks == 10
    assert len(sampler.rows) == 0


def test_a_lost_device_stops_it_and_tells_when():
    clock = FakeTime(10**10)

    def read():
        if clock.ns >= 2 * PERIOD_NS:
            raise OSError("gone")
        return (1,)

    provider = Probes(
        "x",
        [Probe((FAST,), Tier.FAST, read)],
        classify=lambda error: (Verdict.LOST, str(error)),
        errors=(OSError,),
    )
    sampler = Sampler([provider], period_s=PERIOD_S, now=clock.now, wait=clock.wait)
    sampler.loop()

    assert sampler.device_lost_at == 2 * PERIOD_NS
    assert sampler.num_ticks == 3
    assert provider.lost == "gone"


class TestThread:
    def provider(self, read=lambda: (1,)):
        return Probes(
            "x",
            [Probe((FAST,), Tier.FAST, read)],
            classify=lambda error: (Verdict.GAP, str(error)),
            errors=(OSError,),
        )

    def wait_for(self, condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def test_samples_until_it_is_stopped(self):
        sampler = Sampler([self.provider()], period_s=0.01)
        sampler.start()
        self.wait_for(lambda: sampler.num_ticks >= 3)
        sampler.stop()
        sampler.stop()
        ticks = sampler.num_ticks

        assert not [t for t in threading.enumerate() if t.name == "telemetry-sampler"]
        assert len(sampler.rows) >= ticks
        assert sampler.cpu_ns > 0

    def test_a_pause_makes_no_ticks_and_no_late_ones(self):
        clock = FakeTime(10**18)
        sampler = Sampler([self.provider()], period_s=0.01, now=clock.now, wait=clock.wait)
        sampler.pause()
        sampler.start()
        time.sleep(0.01)
        clock.ns += 10**12
        assert sampler.num_ticks == 0
        sampler.resume()
        self.wait_for(lambda: sampler.num_ticks >= 1)
        sampler.stop()

        assert sampler.num_late_ticks == 0

    def test_stopping_a_paused_one_ends_it(self):
        sampler = Sampler([self.provider()], period_s=0.01)
        sampler.start()
        sampler.pause()
        sampler.stop()

        assert sampler.failure is None

    def test_a_bug_in_a_provider_is_kept_for_the_user(self):
        calls = []

        def read():
            calls.append(1)
            if len(calls) > 40:  # not while it is opened
                raise ZeroDivisionError("a bug")
            return (1,)

        sampler = Sampler([self.provider(read)], period_s=0.01)
        sampler.start()
        self.wait_for(lambda: sampler.failure is not None)
        sampler.stop()

        assert "a bug" in str(sampler.failure)

    @needs_fork
    def test_a_forked_child_has_no_sampler(self):
        sampler = Sampler([self.provider()], period_s=0.01)
        sampler.start()
        self.wait_for(lambda: sampler.num_ticks >= 1)

        def makes_no_tick():
            ticks = sampler.num_ticks
            time.sleep(0.05)
            return sampler.num_ticks == ticks

        assert is_true_in_a_child(makes_no_tick)
        sampler.stop()


def test_the_thread_makes_no_record_no_line_and_no_cuda_call():
    """By its imports: what it does not know it can not call."""
    tree = ast.parse(inspect.getsource(sampler_module))
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }

    assert modules == {
        "threading",
        "time",
        "collections.abc",
        "typing",
        "telemetry.clock",
        "telemetry.providers.base",
        "telemetry.records",
        "telemetry.ring",
    }
