"""What measuring changes, by blocks with the recorder paused and live in turn."""

import pytest

from telemetry import Recorder, TelemetryError, measure_observer_effect, read_run
from tests.telemetry.fake_engine import FakeEngine


def test_blocks_alternate_and_the_result_is_in_the_run(tmp_path):
    engine, was_live = FakeEngine(), []

    def run_block():
        was_live.append(bool(engine.hooks))
        engine.step()
        return [0.002] * 99 + [0.004] if engine.hooks else [0.001] * 100

    path = tmp_path / "run.jsonl"
    effect = measure_observer_effect(run_block, lambda: Recorder(engine, path), blocks=8)

    # The first warms up; then off, live, live, off, so that a drift favours neither.
    assert was_live == [False, False, True, True, False, False, True, True, False]
    assert (effect.num_off, effect.num_live) == (400, 400)
    assert (effect.p50_off_ns, effect.p50_live_ns) == (1_000_000, 2_000_000)
    assert (effect.p99_live_ns, effect.max_live_ns) == (2_000_000, 4_000_000)
    assert effect.p50_change == pytest.approx(1.0)
    run = read_run(path)
    assert run.observer_effect == effect
    assert len(run.steps) == 4
    assert run.ended


@pytest.mark.parametrize("blocks", [0, 1, 7, -2])
def test_halves_of_different_size_are_refused(blocks):
    with pytest.raises(TelemetryError, match="even number"):
        measure_observer_effect(list, lambda: Recorder(FakeEngine()), blocks=blocks)


def test_a_recorder_that_does_not_sample_is_refused():
    with pytest.raises(TelemetryError, match="'edges'"):
        measure_observer_effect(lambda: [1.0], lambda: Recorder(FakeEngine(), mode="edges"))


def test_a_block_without_latencies_is_refused():
    with pytest.raises(TelemetryError, match="no latencies in block 0"):
        measure_observer_effect(list, lambda: Recorder(FakeEngine()))
