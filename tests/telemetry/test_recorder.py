"""Recording an engine: what ends up in the run, and what happens when things go wrong."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from telemetry import DeviceLostError, Recorder, TelemetryError, read_run, session
from tests.telemetry.fake_engine import FakeEngine, request_record
from tests.telemetry.forking import is_true_in_a_child, needs_fork
from tests.telemetry.nvml_stub.library import GIB

ROOT = Path(__file__).parents[2]
STUB_GPU = {
    "type": "cuda",
    "index": 0,
    "uuid": "00000000-0000-4000-8000-000000000000",
    "name": "Stub GPU",
}


@pytest.fixture(autouse=True)
def _cheap(request):
    """Sensors stay in their tiers on a busy machine, but where their cost is what is tested."""
    if "timed_stub" not in request.fixturenames or "stub" in request.fixturenames:
        request.getfixturevalue("same_costs")


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def threads_of_ours():
    return [t for t in threading.enumerate() if t.name.startswith("telemetry")]


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class TestWhatIsRecorded:
    def test_every_step_and_every_request(self, engine, path):
        with Recorder(engine, path) as recorder:
            for i in range(300):
                engine.step(finished=(request_record(f"r{i}"),) if i % 100 == 99 else ())
        run = read_run(path)

        assert list(run.steps.index) == list(range(300))
        assert [request.request_id for request in run.requests] == ["r99", "r199", "r299"]
        assert run.ended
        assert run.notes == ()
        assert run.overhead.num_steps == 300
        assert recorder.run().steps.index == run.steps.index  # also after it was closed

    def test_what_the_engine_says_of_itself(self, engine, path):
        with Recorder(engine, path):
            pass
        info = read_run(path).info

        assert info.engine == {"name": "fake", "version": "1"}
        assert info.config == {"max_num_seqs": 4, "folder": ["a", "b"]}
        assert info.memory == {"weights_bytes": 4096, "kv_cache_bytes": 8192}
        assert info.host["pid"] == os.getpid()

    def test_graphs_that_are_captured_later(self, engine, path):
        with Recorder(engine, path):
            engine.captures.append({"bucket": 8, "pool_bytes": 5, "driver_bytes": 1})

        assert read_run(path).info.graphs["captures"] == engine.captures

    def test_windows_nest_and_know_their_parents(self, engine, path):
        with Recorder(engine, path) as recorder:
            with recorder.window("outer"), recorder.window("inner"):
                engine.step()
            with recorder.window("next"):
                pass
        windows = read_run(path).windows

        assert [(w.name, w.parent) for w in windows] == [
            ("run", None),
            ("outer", 0),
            ("inner", 1),
            ("next", 0),
        ]
        run, outer, inner, after = windows
        assert run.t0_ns <= outer.t0_ns <= inner.t0_ns <= inner.t1_ns <= outer.t1_ns
        assert outer.t1_ns <= after.t0_ns <= after.t1_ns <= run.t1_ns
        assert inner.change("host.cpu_ns") > 0

    def test_windows_of_two_recorders_do_not_mix(self, engine, tmp_path):
        with (
            Recorder(engine, tmp_path / "a.jsonl") as a,
            Recorder(engine, tmp_path / "b.jsonl") as b,
            a.window("of a"),
            b.window("of b"),
        ):
            pass

        assert read_run(tmp_path / "b.jsonl").windows[1].parent == 0

    def test_windows_of_threads_are_not_each_others_parents(self, engine, path):
        with Recorder(engine, path) as recorder, recorder.window("here"):
            thread = threading.Thread(target=lambda: recorder.window("there").__enter__())
            thread.start()
            thread.join()

        assert read_run(path).windows[2].parent == 0

    def test_sensors_are_sampled_between_edges(self, engine, path):
        with Recorder(engine, path, period_s=0.01) as recorder:
            wait_for(lambda: recorder.overhead().num_ticks >= 5)
        run = read_run(path)

        assert len(run.get("host.rss_bytes")) >= 7  # and one at each edge of the run
        assert all(value > 0 for value in run.get("host.rss_bytes").values)
        assert run.sensor("host.rss_bytes").period_s == 0.01
        assert run.sensor("torch.reserved_bytes").reason.startswith("the engine runs on the CPU")
        assert run.overhead.in_call_ns > 0

    def test_mode_edges_reads_at_edges_only(self, engine, path):
        with Recorder(engine, path, mode="edges") as recorder:
            assert [t.name for t in threads_of_ours()] == ["telemetry-writer"]
            with recorder.window("w"):
                engine.step()
        run = read_run(path)

        assert run.info.mode == "edges"
        assert len(run.steps) == 1
        assert len(run.get("host.rss_bytes")) == 4
        assert run.overhead.num_ticks == 0

    def test_long_pauses_of_the_collector_are_events(self, engine, path):
        with Recorder(engine, path):
            keep = [[] for _ in range(50_000)]
            gc.collect()
        pauses = [event for event in read_run(path).events if event.kind == "gc"]

        assert len(keep) == 50_000
        assert any(pause.data["duration_ns"] > 100_000 for pause in pauses)

    def test_the_ledger_sums_up_and_counts_the_blocks_that_were_touched(self, engine, path):
        with Recorder(engine, path):
            engine.step(num_used_blocks=12, num_cached_blocks=4, num_free_blocks=20)
            engine.step(num_used_blocks=4, num_cached_blocks=16, num_free_blocks=28)
        ledger = read_run(path).ledgers[-1]

        assert sum(row.num_bytes for row in ledger.rows) == ledger.total_bytes
        assert ledger.row("kv_cache").num_bytes == 8192 // 2  # 16 of 32 blocks

    def test_clocks_are_tied_at_both_ends(self, engine, path):
        with Recorder(engine, path):
            pass
        first, last = read_run(path).anchors

        assert abs(first.wall_ns - time.time_ns()) < 60e9
        assert last.mono_ns > first.mono_ns

    def test_clocks_are_tied_again_each_minute(self, engine, path, monkeypatch):
        monkeypatch.setattr("telemetry.writer.DRAIN_PERIOD_S", 0.01)
        monkeypatch.setattr("telemetry.writer.ANCHOR_PERIOD_NS", 10_000_000)
        with Recorder(engine, path):
            # So that a run that is cut off later still knows its anchors and its own cost.
            wait_for(lambda: len(read_run(path).anchors) >= 3)
            assert read_run(path).overhead.num_bytes > 0

    def test_a_pause_leaves_steps_out(self, engine, path):
        with Recorder(engine, path) as recorder:
            engine.step()
            recorder.pause()
            recorder.pause()
            assert engine.hooks == []
            engine.step()
            recorder.resume()
            recorder.resume()
            engine.step()
        run = read_run(path)

        assert list(run.steps.index) == [0, 2]
        assert [e.kind for e in run.events if e.kind in ("pause", "resume")] == ["pause", "resume"]
        assert run.overhead.num_steps_dropped == 0

    def test_a_path_may_begin_at_home(self, engine, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("USERPROFILE", str(tmp_path))
        with Recorder(engine, "~/run.jsonl"):
            pass

        assert read_run(tmp_path / "run.jsonl").ended

    def test_a_run_without_a_file_is_kept_in_memory(self, engine):
        with Recorder(engine) as recorder:
            engine.step()
            assert len(recorder.run().steps) == 1
            assert not recorder.run().ended
        assert recorder.run().ended

    def test_steps_that_the_writer_did_not_take_in_time_are_counted(
        self, engine, path, monkeypatch
    ):
        monkeypatch.setattr(session, "STEP_CAPACITY", 16)
        with Recorder(engine, path):
            for _ in range(100):
                engine.step()
        run = read_run(path)

        assert len(run.steps) + run.overhead.num_steps_dropped == 100
        assert run.steps.index[-1] == 99
        assert any("steps were lost" in note for note in run.notes)

    def test_memory_stays_flat_however_long_it_goes_on(self, engine, path, monkeypatch):
        monkeypatch.setattr("telemetry.writer.DRAIN_PERIOD_S", 0.01)
        with Recorder(engine, path, mode="edges") as recorder:
            sizes = []
            tracemalloc.start()
            for _ in range(3):
                for _ in range(800):
                    engine.step()
                recorder.run()  # drains
                sizes.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()

        assert sizes[2] - sizes[1] < 50_000


class TestModeOff:
    def test_does_nothing_at_all(self, engine, path):
        num_callbacks = len(gc.callbacks)
        with Recorder(engine, path, mode="off") as recorder:
            assert engine.hooks == []
            assert threads_of_ours() == []
            assert len(gc.callbacks) == num_callbacks
            with recorder.window("w"):
                recorder.pause()
                recorder.resume()

        assert not path.exists()
        with pytest.raises(TelemetryError, match="mode is 'off'"):
            recorder.report()


class TestBadUse:
    @pytest.mark.parametrize("mode", ["on", "", None, "LIVE"])
    def test_unknown_modes_are_refused_by_name(self, engine, mode):
        with pytest.raises(TelemetryError, match="use one of 'off', 'edges', 'live'"):
            Recorder(engine, mode=mode)

    @pytest.mark.parametrize("period_s", [0, -1, 0.001, float("nan"), float("inf")])
    def test_periods_that_disturb_or_never_end_are_refused(self, engine, period_s):
        with pytest.raises(TelemetryError, match="period_s"):
            Recorder(engine, period_s=period_s)

    def test_a_folder_that_is_not_there_is_named(self, engine, tmp_path):
        with pytest.raises(TelemetryError, match="nowhere"):
            Recorder(engine, tmp_path / "nowhere" / "run.jsonl")

    def test_a_report_before_the_start_says_so(self, engine):
        with pytest.raises(TelemetryError, match="not started"):
            Recorder(engine).report()

    def test_it_records_once(self, engine, path):
        recorder = Recorder(engine, path)
        with recorder:
            recorder.start()
            assert len(engine.hooks) == 1
        recorder.start()

        assert engine.hooks == []
        with pytest.raises(TelemetryError, match="closed"):
            recorder.read_sensors()

    def test_an_engine_that_fails_to_describe_itself_leaves_nothing_behind(self, path):
        class Broken(FakeEngine):
            def describe(self):
                raise RuntimeError("broken")

        num_callbacks = len(gc.callbacks)
        with pytest.raises(RuntimeError, match="broken"), Recorder(Broken(), path):
            pass

        assert threads_of_ours() == []
        assert len(gc.callbacks) == num_callbacks


class TestEnds:
    def test_an_exception_in_the_block_still_completes_the_run(self, engine, path):
        def work():
            with Recorder(engine, path) as recorder, recorder.window("w"):
                engine.step()
                raise KeyError("the app's own")

        with pytest.raises(KeyError):
            work()
        run = read_run(path)

        assert run.ended
        assert run.windows[1].t1_ns is not None
        assert engine.hooks == []
        assert threads_of_ours() == []

    def test_closing_twice_and_inside_of_a_window_is_fine(self, engine, path):
        recorder = Recorder(engine, path)
        recorder.start()
        with recorder.window("w"):
            recorder.close()
        recorder.close()
        with recorder.window("after"):
            pass
        run = read_run(path)

        assert run.ended
        assert [(w.name, w.t1_ns is None) for w in run.windows] == [("run", False), ("w", True)]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
    def test_a_full_disk_ends_the_recording_and_not_the_engine(self, engine):
        recorder = Recorder(engine, "/dev/full")
        recorder.start()
        engine.step()
        with pytest.raises(TelemetryError, match="No space left"):
            recorder.close()
        with pytest.raises(ZeroDivisionError), Recorder(engine, "/dev/full"):
            raise ZeroDivisionError  # this is what the user has to know

        assert threads_of_ours() == []

    @pytest.mark.parametrize("drained_by", ["the writer", "closing"])
    def test_a_record_that_can_not_be_written_ends_the_recording_and_not_the_engine(
        self, engine, path, monkeypatch, drained_by
    ):
        monkeypatch.setattr(
            "telemetry.writer.DRAIN_PERIOD_S", 0.01 if drained_by == "the writer" else 60
        )
        recorder = Recorder(engine, path)
        recorder.start()
        engine.hooks[0]("not a record")
        if drained_by == "the writer":
            wait_for(lambda: not any(t.name == "telemetry-writer" for t in threads_of_ours()))
        engine.step()
        with pytest.raises(TelemetryError, match="could not be recorded to its end"):
            recorder.close()

        assert threads_of_ours() == []
        assert engine.hooks == []

    @pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
    def test_a_killed_process_leaves_a_run_that_can_be_read(self, path):
        code = (
            "import time\n"
            "from telemetry import Recorder, writer\n"
            "from tests.telemetry.fake_engine import FakeEngine\n"
            "writer.DRAIN_PERIOD_S = 0.02\n"
            "engine = FakeEngine()\n"
            f"with Recorder(engine, {str(path)!r}, period_s=0.01) as recorder:\n"
            "    with recorder.window('cut off'):\n"
            "        while True:\n"
            "            engine.step()\n"
            "            time.sleep(1e-4)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        try:
            wait_for(lambda: path.exists() and path.stat().st_size > 30_000)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        run = read_run(path)

        assert len(run.steps) > 50
        assert len(run.get("host.rss_bytes")) > 2
        assert not run.ended
        assert any("not closed" in note for note in run.notes)
        assert run.windows[1].t1_ns is None
        assert run.ledgers[0].row("free").num_bytes > 0

    @needs_fork
    def test_a_forked_child_writes_nothing(self, engine, path):
        with Recorder(engine, path) as recorder:
            size = path.stat().st_size

            def leaves_it_alone():
                with recorder.window("child"):
                    engine.step()
                recorder.close()
                with contextlib.suppress(TelemetryError):
                    recorder.read_sensors()
                    return False
                return path.stat().st_size == size

            assert is_true_in_a_child(leaves_it_alone)
            engine.step()

        assert read_run(path).ended


class TestGpu:
    """A GPU by the scripted driver; torch has no CUDA here, and says so."""

    def test_figures_of_the_device_are_in_the_run(self, stub, path):
        stub.process(os.getpid(), 30 * GIB)
        stub.process(os.getpid() + 1, 10 * GIB)
        memory = {"weights_bytes": 12 * GIB, "kv_cache_bytes": 16 * GIB}
        engine = FakeEngine(STUB_GPU, memory)
        with Recorder(engine, path, period_s=0.01) as recorder, recorder.window("work"):
            stub.update({"field.83": 2_050_000})
        run = read_run(path)

        assert run.info.device["driver_version"] == "580.65.06"
        assert run.info.device["power_limit_w"] == 700
        assert run.windows[1].change("nvml.energy_mj") == 50_000
        assert set(run.get("nvml.power_mw").values) == {512_000}
        ledger = run.ledgers[-1]
        assert ledger.total_bytes == 80 * GIB
        assert sum(row.num_bytes or 0 for row in ledger.rows) == 80 * GIB
        assert ledger.row("context").num_bytes == 2 * GIB
        assert ledger.row("residual").num_bytes == 0

    def test_a_lost_gpu_stops_the_sampling_and_not_the_engine(self, stub, path):
        engine = FakeEngine(STUB_GPU)
        with Recorder(engine, path, period_s=0.01) as recorder:
            wait_for(lambda: recorder.overhead().num_ticks >= 2)
            stub.fail("nvmlDeviceGetMemoryInfo_v2", 15)
            wait_for(lambda: recorder.device_lost_at is not None)
            engine.step()
            with pytest.raises(DeviceLostError, match="fallen off the bus"):
                recorder.read_sensors()
            with recorder.window("after"):
                engine.step()
        run = read_run(path)

        (event,) = [e for e in run.events if e.kind == "device_lost"]
        assert event.t_ns == recorder.device_lost_at
        assert "GpuIsLost" in event.data["reason"]
        assert len(run.steps) == 2
        assert "GpuIsLost" in run.ledgers[-1].row("free").reason

    def test_a_gpu_that_is_lost_at_an_edge_is_an_event_too(self, stub, path):
        with Recorder(FakeEngine(STUB_GPU), path, mode="edges") as recorder:
            stub.fail("nvmlDeviceGetMemoryInfo_v2", 16)
            with recorder.window("w"):
                pass

        assert [e.kind for e in read_run(path).events if e.kind != "gc"] == ["device_lost"]
        window = read_run(path).windows[1]
        assert window.t0_ns >= recorder.device_lost_at

    def test_a_sensor_that_goes_off_is_an_event_with_its_reason(self, stub, path):
        with Recorder(FakeEngine(STUB_GPU), path, period_s=0.01) as recorder:
            stub.fail("nvmlDeviceGetUtilizationRates", 4)
            ticks = recorder.overhead().num_ticks
            wait_for(lambda: recorder.overhead().num_ticks > ticks + 1)
        run = read_run(path)

        off = [e.data["sensor"] for e in run.events if e.kind == "sensor_off"]
        assert sorted(off) == [
            "nvml.gpu_utilization_percent",
            "nvml.memory_utilization_percent",
        ]
        assert "no permission" in run.sensor("nvml.gpu_utilization_percent").reason

    def test_a_broken_driver_is_a_reason_on_every_sensor_and_the_run_goes_on(self, stub, path):
        stub.fail("nvmlInitWithFlags", 18)
        engine = FakeEngine(STUB_GPU)
        with Recorder(engine, path):
            engine.step()
        run = read_run(path)

        assert len(run.steps) == 1
        assert "reboot" in run.sensor("nvml.power_mw").reason
        assert "reboot" in run.ledgers[-1].total_source
        assert run.sensor("host.rss_bytes").available

    def test_slow_sensors_can_be_asked_for(self, timed_stub, path):
        timed_stub.sleep("nvmlDeviceGetUtilizationRates", 8_000)
        with Recorder(FakeEngine(STUB_GPU), path, mode="edges") as recorder:
            assert recorder.read_sensors()["nvml.gpu_utilization_percent"] == 97

        assert "nvml.gpu_utilization_percent" not in read_run(path).windows[0].end
