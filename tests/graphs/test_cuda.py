"""The CUDA backend over a driver without a device: the order of calls, and what faults lead to.

`broken_laws` reads a log of calls and says which rule it breaks. Sessions with a fault put in must
each break theirs: a rule that nothing can break would prove nothing.
"""

import gc
import threading
import weakref

import attrs
import pytest
import torch

from graphs import EventKind, GraphKey, SessionError, StaticsError, StaticTensors
from graphs.cuda import CudaBackend, CudaSession
from graphs.device import MemoryFigures
from graphs.guard import PROCESS_GUARD, CaptureGuard
from tests.graphs.fake_cuda import FakeCudaDriver

BUCKETS = (8, 4, 1)


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Let the collections that sessions make pass over what other tests left behind."""
    gc.freeze()
    yield
    gc.unfreeze()


class Steps:
    """Programs that write down that they ran, each with a kernel that nobody else holds."""

    def __init__(self, driver):
        self.driver = driver
        self.total = torch.zeros(1)
        self.kernels = []

    def program(self, bucket):
        kernel = type("Kernel", (), {})()
        self.kernels.append(weakref.ref(kernel))

        def run():
            assert kernel is not None
            self.driver.note("program", bucket)
            self.total.add_(1)

        return run

    def reset(self):
        self.driver.note("reset")

    def statics(self):
        return StaticTensors({"total": self.total})


@attrs.define
class Run:
    """One life of a session."""

    driver: FakeCudaDriver
    steps: Steps
    events: list
    replays: list
    info: object = None
    kernels_lost: int = 0


def live(session_class=CudaSession, guard=None, buckets=BUCKETS, reserve_bytes=None, **faults):
    """Capture, seal, replay and close."""
    driver = FakeCudaDriver(**faults)
    backend = CudaBackend(driver, reserve_bytes, guard or CaptureGuard())
    steps, events = Steps(driver), []
    run = Run(driver, steps, events, [])
    with session_class(backend, steps.statics(), events.append) as session:
        run.replays = [
            session.capture(GraphKey(bucket), steps.program(bucket), reset=steps.reset)
            for bucket in buckets
        ]
        run.info = session.seal()
        for replay in run.replays:
            replay.replay()
        gc.collect()
        run.kernels_lost = sum(kernel() is None for kernel in steps.kernels)
    gc.collect()
    return run


def broken_laws(run):
    """Which rules a life broke, by the number in the list of pitfalls."""
    calls, names = run.driver.calls, run.driver.names()
    records = [index for index, name in enumerate(names) if name == "record"]
    broken = set()
    if any(calls[index].gc_enabled for index in records):
        broken.add("17: garbage is collected during a capture")
    if not all(call.on_side_stream for call in calls if call.name == "record"):
        broken.add("a capture is not on the side stream")
    if len({calls[index].detail for index in records}) > 1:
        broken.add("28: graphs do not share one pool")
    warm = [call.detail for call in calls[: records[-1]] if call.name == "program"]
    if warm != sorted(warm, reverse=True):
        broken.add("28: small graphs come first")
    for index in records:
        before = names[:index]
        while before[-1] == "synchronize":
            before.pop()
        if before[-1] != "reset":
            broken.add("the program was not reset before its capture")
        if before[-3:] != ["reset", "program", "reset"]:
            broken.add("the warm-up was not under the padding of replays")
    if run.kernels_lost:
        broken.add("16: a kernel was unloaded before its graph")
    drops = [index for index, name in enumerate(names) if name == "dropped"]
    if drops[0] < records[-1]:
        broken.add("20: a graph was given up alone")
    elif names[drops[0] - 1] != "synchronize":
        broken.add("20: a graph was given up while it may run")
    if len(drops) != len(records):
        broken.add("20: a graph outlived its session")
    return broken


def test_a_session_breaks_no_law():
    run = live()

    assert broken_laws(run) == set()
    assert run.driver.names()[-4:] == ["synchronize", *["dropped"] * 3]


class CollectsGarbage(CudaSession):
    def _record_graph(self, step):
        gc.enable()
        super()._record_graph(step)


class CapturesOnTheCurrentStream(CudaSession):
    def _record_graph(self, step):
        self._driver._on_side_stream = False
        super()._record_graph(step)


class TakesNewPools(CudaSession):
    def _record_graph(self, step):
        self._pool = self._driver.new_pool()
        super()._record_graph(step)


class LetsSmallGraphsGoFirst(CudaSession):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._ledger.admit = lambda key, warmups: None


class ForgetsToReset(CudaSession):
    def _record_graph(self, step):
        step.program()
        super()._record_graph(step)


class DropsPrograms(CudaSession):
    def seal(self):
        info = super().seal()
        for step in self._steps:
            step.graph._program = step.program = step.run = lambda: None
        return info


class ClosesWithoutWaiting(CudaSession):
    def close(self):
        self._driver.synchronize = lambda: None
        super().close()


class KeepsTheFirst(CudaSession):
    def close(self):
        self._driver.kept = [step.graph for step in self._steps[:1]]
        super().close()


class EvictsTheFirst(CudaSession):
    def _record_graph(self, step):
        super()._record_graph(step)
        if len(self._steps) == 2:
            self._steps[0].graph, self._steps[0].run = None, lambda: None


@pytest.mark.parametrize(
    ("session_class", "buckets", "law"),
    [
        (CollectsGarbage, BUCKETS, "17: garbage is collected during a capture"),
        (CapturesOnTheCurrentStream, BUCKETS, "a capture is not on the side stream"),
        (TakesNewPools, BUCKETS, "28: graphs do not share one pool"),
        (LetsSmallGraphsGoFirst, (1, 4, 8), "28: small graphs come first"),
        (ForgetsToReset, BUCKETS, "the program was not reset before its capture"),
        (DropsPrograms, BUCKETS, "16: a kernel was unloaded before its graph"),
        (ClosesWithoutWaiting, BUCKETS, "20: a graph was given up while it may run"),
        (KeepsTheFirst, BUCKETS, "20: a graph outlived its session"),
        (EvictsTheFirst, BUCKETS, "20: a graph was given up alone"),
    ],
)
def test_a_session_with_this_fault_breaks_its_law(session_class, buckets, law):
    assert law in broken_laws(live(session_class, buckets=buckets))


class TestGarbageCollection:
    @pytest.mark.parametrize("was_on", [True, False])
    def test_is_as_it_was_after_the_session(self, was_on):
        (gc.enable if was_on else gc.disable)()
        try:
            live()
            assert gc.isenabled() is was_on
        finally:
            gc.enable()

    @pytest.mark.parametrize("how", ["warm-up", "record", "close"])
    def test_is_on_again_and_the_guard_free_when_a_session_ends_early(self, how):
        driver = FakeCudaDriver(fail_records=[0], error=KeyboardInterrupt)
        guard, events, steps = CaptureGuard(), [], Steps(driver)
        session = CudaBackend(driver, guard=guard).session(steps.statics(), events.append)

        def fail():
            raise TypeError("a fault of the program")

        match how:
            case "warm-up":
                with pytest.raises(TypeError):
                    session.capture(GraphKey(1), fail, reset=steps.reset)
            case "record":
                with pytest.raises(KeyboardInterrupt):
                    session.capture(GraphKey(1), steps.program(1), reset=steps.reset)
            case "close":
                driver.fail_records = set()
                session.capture(GraphKey(1), steps.program(1), reset=steps.reset)
                assert guard.is_held and not gc.isenabled()
                session.close()

        assert gc.isenabled() and not guard.is_held
        assert events[-1].kind is EventKind.STOPPED
        session.close()


class TestOneCaptureAtATime:
    def begin(self, guard):
        driver = FakeCudaDriver()
        steps = Steps(driver)
        session = CudaBackend(driver, guard=guard).session(steps.statics())
        return session, steps

    def capture_elsewhere_meanwhile(self, first_guard, second_guard):
        """Whether another thread's capture gets through while one is being made here."""
        session, steps = self.begin(first_guard)
        done = threading.Event()

        def elsewhere():
            with self.begin(second_guard)[0] as other:
                other.capture(GraphKey(1), lambda: None, reset=lambda: None)
                other.seal()
                done.set()

        thread = threading.Thread(target=elsewhere)
        got_through = []
        session._driver.during_record = lambda: (
            thread.start(),
            got_through.append(done.wait(0.1)),
        )
        with session:
            session.capture(GraphKey(1), steps.program(1), reset=steps.reset)
            session.seal()
            thread.join(10)
        assert done.is_set()
        return got_through == [True]

    def test_another_thread_waits_until_the_session_is_sealed(self):
        guard = CaptureGuard()

        assert not self.capture_elsewhere_meanwhile(guard, guard)

    def test_without_a_common_guard_it_would_not_wait(self):
        assert self.capture_elsewhere_meanwhile(CaptureGuard(), CaptureGuard())

    def test_a_second_session_of_the_same_thread_is_refused_and_not_deadlocked(self):
        guard = CaptureGuard()
        (first, steps), (second, _) = self.begin(guard), self.begin(guard)
        with first, second:
            first.capture(GraphKey(1), steps.program(1), reset=steps.reset)
            with pytest.raises(SessionError, match="another session of this thread"):
                second.capture(GraphKey(1), steps.program(1), reset=steps.reset)
            assert guard.is_held

    def test_sessions_share_the_guard_of_the_process_by_default(self):
        assert CudaBackend(FakeCudaDriver()).guard is PROCESS_GUARD

    def test_others_are_told_when_to_leave_the_device_alone(self):
        events = []
        driver = FakeCudaDriver()
        driver.during_record = lambda: events.append("record")
        steps = Steps(driver)
        with CudaBackend(driver, guard=CaptureGuard()).session(
            steps.statics(), lambda event: events.append(event.kind)
        ) as session:
            for bucket in (2, 1):
                session.capture(GraphKey(bucket), steps.program(bucket), reset=steps.reset)
            session.seal()

        assert events == [
            EventKind.CAPTURING,
            "record",
            EventKind.CAPTURED,
            "record",
            EventKind.CAPTURED,
            EventKind.SEALED,
        ]


class TestFailure:
    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_after_a_failed_capture_every_step_runs_eagerly(self, number):
        run = live(fail_records=[number])
        names = run.driver.names()

        assert names.count("record") == number + 1  # no retry, and no capture after it
        assert "replay" not in names
        ran = [call.detail for call in run.driver.calls if call.name == "program"]
        assert ran == [8, 8, 4, 4, 1, 1, 8, 4, 1]  # warm-ups, then a replay of each
        assert all(not info.captured for info in run.info.captures)

    def test_the_reason_is_told_once_and_kept(self):
        run = live(fail_records=[1])
        degraded = [event for event in run.events if event.kind is EventKind.DEGRADED]

        assert len(degraded) == 1
        assert "not permitted when stream is capturing" in degraded[0].message
        assert run.info.degraded_reason == degraded[0].data["reason"]
        assert "bucket=4" in run.info.degraded_reason

    def test_graphs_that_exist_are_kept_until_close(self):
        names = live(fail_records=[2]).driver.names()

        assert names[-3:] == ["synchronize", "dropped", "dropped"]

    def test_later_sessions_of_the_process_do_not_try_again(self):
        guard = CaptureGuard()
        live(guard=guard, fail_records=[0])
        second = live(guard=guard)

        assert "record" not in second.driver.names()
        assert [e.kind for e in second.events].count(EventKind.DEGRADED) == 1
        assert second.info.degraded_reason

    def test_a_guard_that_forgets_would_try_again(self):
        class Forgetful(CaptureGuard):
            failure = property(lambda self: None, lambda self, reason: None)

        guard = Forgetful()
        live(guard=guard, fail_records=[0])

        assert "record" in live(guard=guard).driver.names()

    def test_a_fault_in_the_first_replay_shows_at_seal(self):
        run = live(fail_replays=True)

        assert "illegal memory access" in run.info.degraded_reason
        assert run.driver.names().count("replay") == 1  # and none after seal

    def test_an_interrupted_capture_is_a_failed_one(self):
        guard = CaptureGuard()
        with pytest.raises(KeyboardInterrupt):
            live(guard=guard, fail_records=[0], error=KeyboardInterrupt)

        assert "interrupted" in guard.failure

    def test_an_error_in_a_warm_up_is_the_programs_own(self):
        guard = CaptureGuard()
        driver = FakeCudaDriver()

        def fail():
            raise RuntimeError("a shape does not fit")

        with CudaBackend(driver, guard=guard).session(Steps(driver).statics()) as session:
            with pytest.raises(RuntimeError, match="does not fit"):
                session.capture(GraphKey(1), fail, reset=lambda: None)
            assert guard.failure is None

    def test_a_replaced_static_is_an_error_at_seal(self):
        driver, guard = FakeCudaDriver(), CaptureGuard()
        tensors = {"total": torch.zeros(1)}
        with CudaBackend(driver, guard=guard).session(StaticTensors(tensors)) as session:
            tensors["total"] = torch.zeros(1)
            with pytest.raises(StaticsError, match="`total` was replaced"):
                session.seal()
            assert not guard.is_held


class TestMemory:
    def test_is_measured_and_not_extrapolated(self):
        """Pitfall 27: the first graph's share times the number of graphs would be 3 * 4096."""
        info = live().info

        assert [one.pool_bytes for one in info.captures] == [4096, 0, 0]
        assert info.pool_bytes == 4096
        assert [one.driver_bytes for one in info.captures] == [100, 100, 100]
        assert info.driver_bytes == 300
        assert [one.num_nodes for one in info.captures] == [7, 7, 7]

    @pytest.mark.parametrize(("reserve_bytes", "is_told"), [(4395, True), (4396, False)])
    def test_more_than_was_set_aside_is_told(self, reserve_bytes, is_told):
        events = live(reserve_bytes=reserve_bytes).events
        told = [event.data for event in events if event.kind is EventKind.OVER_BUDGET]

        assert told == ([{"used_bytes": 4396, "reserve_bytes": 4395}] if is_told else [])

    def test_of_the_driver_is_never_negative_and_may_be_unknown(self):
        before = MemoryFigures(pool_bytes=0, reserved_bytes=10, used_bytes=100)

        assert MemoryFigures(0, 10, 90).driver_bytes_since(before) == 0
        assert MemoryFigures(0, 30, 150).driver_bytes_since(before) == 30
        assert MemoryFigures(0, 10, None).driver_bytes_since(before) is None
