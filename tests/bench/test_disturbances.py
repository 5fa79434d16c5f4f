import gc

import attrs

from nanovllm.workloads.disturbances import (
    Disturbance,
    DisturbanceWatch,
    _throttled_s,
    settled_heap,
)

QUIET = Disturbance(
    duration_s=10.0,
    gc_pauses_s=(),
    stolen_s=0.0,
    throttled_s=None,
    num_switches=3,
    load_average=0.1,
)


def test_pauses_for_garbage_collection_are_told_from_what_was_before():
    gc.collect()
    with DisturbanceWatch() as watch:
        gc.collect()
        gc.collect()
        seen = watch.so_far()
    gc.collect()

    assert len(seen.gc_pauses_s) >= 2
    assert all(pause >= 0 for pause in seen.gc_pauses_s)
    data = watch.so_far().as_data()
    assert data["num_gc_pauses"] == len(watch.so_far().gc_pauses_s) == len(seen.gc_pauses_s)
    assert data["longest_gc_pause_s"] == max(seen.gc_pauses_s)


def test_a_quiet_machine_gives_no_warning():
    assert QUIET.warnings() == []


def test_a_quota_that_stopped_the_process_is_flagged_as_throttling():
    (warning,) = attrs.evolve(QUIET, throttled_s=0.25).warnings()

    assert warning.startswith("throttled: ")
    assert "0.250 s" in warning


def test_time_taken_by_other_guests_is_flagged_when_it_matters():
    assert attrs.evolve(QUIET, stolen_s=0.01).warnings() == []
    (warning,) = attrs.evolve(QUIET, stolen_s=1e6).warnings()

    assert warning.startswith("shared: ")


def test_a_settled_heap_keeps_what_is_alive_out_of_collections_and_gives_it_back():
    num_frozen = gc.get_freeze_count()
    with settled_heap():
        assert gc.get_freeze_count() > num_frozen

    assert gc.get_freeze_count() == 0


def test_throttled_time_is_read_from_the_process_own_control_group(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/other\n0::/jobs/mine\n")
    group = tmp_path / "sys/fs/cgroup/jobs/mine"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 1500000\n")

    assert _throttled_s(tmp_path) == 1.5


def test_a_system_without_control_groups_does_not_tell(tmp_path):
    assert _throttled_s(tmp_path) is None
