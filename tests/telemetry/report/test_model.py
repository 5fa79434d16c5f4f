"""What a report says of a run, against the run itself."""

from array import array
from itertools import groupby

import attrs
import pytest

from telemetry.records import Event, ObserverEffect, Overhead, Step
from telemetry.report import build_report
from telemetry.report.values import NotAvailable, Quantity
from telemetry.run import Series, StepTable
from tests.telemetry.report.simulated import GIB, MS, START_NS, simulated_run

GPU = simulated_run(seconds=6.0, load=8.0)
CPU = simulated_run(seconds=6.0, on_gpu=False, load=2.0)
NOTHING = attrs.evolve(CPU, steps=StepTable(), requests=(), series={}, ledgers=(), events=())


REPORTS = {id(run): build_report(run) for run in (GPU, CPU, NOTHING)}  # read by many tests


def report(run):
    return REPORTS.get(id(run)) or build_report(run)


def figures(run):
    return {key: figure.value for key, figure in report(run).figures.items()}


def section(run, key):
    return next(s for s in report(run).sections if s.key == key)


def table(run, key, caption):
    return next(t for t in section(run, key).tables if t.caption.startswith(caption))


def test_the_sections_stand_in_the_order_in_which_they_are_read():
    keys = [section.key for section in report(GPU).sections]

    assert keys == [
        "memory", "replay", "timeline", "steps", "latency", "cache", "energy", "health", "method",
    ]  # fmt: skip


@pytest.mark.parametrize("run", [GPU, CPU, NOTHING], ids=["gpu", "cpu", "nothing"])
def test_every_figure_names_its_source_and_is_either_known_or_has_a_reason(run):
    for figure in report(run).figures.values():
        assert figure.source
        if isinstance(figure.value, NotAvailable):
            assert figure.value.reason


@pytest.mark.parametrize("run", [GPU, CPU, NOTHING], ids=["gpu", "cpu", "nothing"])
def test_both_kinds_of_device_have_the_same_keys(run):
    fixed = {key for key in figures(run) if not key.startswith("growth_")}

    assert fixed == {key for key in figures(GPU) if not key.startswith("growth_")}


def test_a_run_without_anything_in_it_has_reasons_and_no_zeros_for_what_was_not_measured():
    found = figures(NOTHING)

    for key in ("itl_p50_s", "ttft_p50_s", "energy_j", "memory_peak_bytes", "kv_blocks_peak",
                "output_tokens_per_s", "throttled_s", "prefix_hit_ratio"):  # fmt: skip
        assert isinstance(found[key], NotAvailable), key


def test_the_ledger_sums_to_the_total_with_the_residual_in_it():
    rows = section(GPU, "memory").charts[0].table.rows
    *parts, total = [row[1] for row in rows]

    assert sum(parts) == total == 140 * GIB
    assert rows[-2][0] == "Not explained"


def test_bytes_that_are_counted_twice_are_a_warning():
    *rows, residual = GPU.ledgers[0].rows
    ledger = attrs.evolve(GPU.ledgers[0], rows=(*rows, attrs.evolve(residual, num_bytes=-3 * GIB)))
    said = build_report(attrs.evolve(GPU, ledgers=(ledger,)))

    assert "twice" in said.sections[0].lead
    assert any("counts 3.00 GiB twice" in warning for warning in said.warnings)


def test_growth_of_memory_during_replays_is_found_and_what_prefills_take_is_left_out():
    name = "nvml.memory_used_bytes"
    times = GPU.series[name].t_ns

    def with_memory(values):
        return attrs.evolve(GPU, series={**GPU.series, name: Series(times, values)})

    spans = [
        (GPU.steps[steps[0]].t0_ns, GPU.steps[steps[-1]].t1_ns)
        for mode, group in groupby(range(len(GPU.steps)), key=GPU.steps.mode.__getitem__)
        if mode == "replay" and (steps := list(group))
    ]
    inside = [any(t0 <= t <= t1 for t0, t1 in spans) for t in times]
    by_prefills = with_memory([42 * GIB if i else 60 * GIB for i in inside])
    by_replays = with_memory([42 * GIB + (i << 20) for i in range(len(times))])

    assert not all(inside)
    assert figures(by_prefills)["growth_nvml_memory_used_bytes"] == 0
    assert figures(by_replays)["growth_nvml_memory_used_bytes"] >= 1 << 20


def test_waste_is_what_the_replays_computed_for_nothing():
    steps = GPU.steps
    real = sum(n for n, bucket in zip(steps.num_rows, steps.bucket, strict=True) if bucket)
    padded = sum(bucket for bucket in steps.bucket if bucket)
    rows = section(GPU, "steps").charts[0].table.rows

    assert figures(GPU)["padding_waste_ratio"] == pytest.approx(1 - real / padded)
    assert sum(row[1] for row in rows) == sum(1 for bucket in steps.bucket if bucket)
    assert sum(row[3] + row[4] for row in rows) == padded


def test_misses_are_counted_by_why():
    missed = [reason for reason in GPU.steps.fallback if reason]
    rows = table(GPU, "steps", "Decode steps that were not replayed").rows

    assert rows == (("block table wider than captured", len(missed)),)
    assert figures(GPU)["num_graph_misses"] == len(missed) > 0


def test_percentiles_that_the_sample_does_not_support_say_how_many_it_has():
    found = figures(CPU)["ttft_p99_s"]

    assert found == NotAvailable(f"{len(CPU.requests)} of 200 samples")
    assert figures(CPU)["ttft_max_s"] > 0


def test_the_worst_gaps_say_what_ran_then():
    at = len(CPU.steps) // 2
    begin = CPU.steps.t0_ns[at]
    end = CPU.steps.t1_ns[at] + 900 * MS
    shifted = attrs.evolve(CPU.steps, t1_ns=array("q", CPU.steps.t1_ns))
    for i in range(at, len(shifted)):
        shifted.t1_ns[i] = max(shifted.t1_ns[i], end)
    pause = Event(begin, "gc", {"duration_ns": 850 * MS, "generation": 2})
    run = attrs.evolve(CPU, steps=shifted, events=(pause,), last_ns=max(CPU.last_ns, end))

    rows = table(run, "latency", "The worst gaps").rows

    assert rows[0][1] > 0.85
    assert "garbage collection, 850 ms" in rows[0][-1]
    assert [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True)


def test_energy_per_token_is_the_counters_and_both_methods_are_shown():
    found = figures(GPU)
    tokens = sum(map(len, GPU.steps.sampled))

    assert found["energy_j_per_token"] == pytest.approx(found["energy_j"] / tokens)
    assert found["energy_methods_ratio"] == pytest.approx(1.0, abs=0.01)


def test_a_processor_without_a_counter_gives_the_sensors_own_reason():
    assert figures(CPU)["energy_j"] == NotAvailable("no energy counter of the processor")


def test_a_cpus_run_takes_no_energy_from_a_gpu_that_is_there_too():
    other = {name: GPU.series[name] for name in ("nvml.energy_mj", "nvml.power_mw")}
    run = attrs.evolve(CPU, sensors=GPU.sensors, series={**CPU.series, **other})

    assert isinstance(figures(run)["energy_j"], NotAvailable)
    assert isinstance(figures(run)["power_mean_w"], NotAvailable)


def test_energy_of_a_window_that_is_too_short_is_not_made_up():
    short = attrs.evolve(GPU.windows[1], name="blink", t1_ns=GPU.windows[1].t0_ns + 900 * MS)
    run = attrs.evolve(GPU, windows=(*GPU.windows, attrs.evolve(short, id=3)))

    rows = {row[0]: row for row in table(run, "energy", "Windows").rows}

    assert isinstance(rows["blink"][3], NotAvailable)
    assert "too short" in rows["blink"][3].reason
    assert rows["measured"][3] > 0


def test_windows_share_out_the_tokens_of_the_run():
    rows = table(GPU, "energy", "Windows").rows

    assert sum(row[2] for row in rows) == sum(map(len, GPU.steps.sampled))


def test_time_that_the_device_was_held_back_is_a_figure_and_a_warning():
    said = report(GPU)

    assert said.figures["throttled_s"].value == pytest.approx(0.75, abs=0.5)
    assert any(warning.startswith("The device was throttled") for warning in said.warnings)
    assert any(m.kind == "throttle" for m in section(GPU, "timeline").charts[0].marks)


def test_levels_and_changes_carry_units_of_their_own():
    clocks = next(r for r in table(GPU, "health", "Levels").rows if r[0] == "SM clock")

    assert clocks[1] == Quantity(1605, "MHz")


def test_a_run_that_was_cut_off_says_so_first_and_passes_on_what_the_file_lacks():
    run = simulated_run(seconds=3.0, ended=False)
    said = build_report(run)
    under_way = run.steps.num_running[-1] + run.steps.num_waiting[-1]

    assert "cut off" in said.warnings[0]
    assert f"the times of {under_way} sequences" in said.warnings[0]
    assert "the one below is of its begin" in said.warnings[0]
    assert said.sections[-1].notes == ("The last line, 42, is torn and was left out.",)


def test_what_a_recorder_did_not_get_to_tell_of_itself_is_not_shown_as_nothing():
    found = figures(attrs.evolve(CPU, overhead=Overhead(), ended=False))

    for key in ("num_ticks", "num_dropped", "sampler_cpu_ratio", "worst_tick_s", "file_bytes"):
        assert isinstance(found[key], NotAvailable), key


def test_a_lost_device_is_the_first_warning():
    lost = Event(START_NS + 5, "device_lost", {"reason": "fell off the bus"})
    said = build_report(attrs.evolve(GPU, events=(lost,), ended=False))

    assert said.warnings[0] == "The device was lost: fell off the bus."


def test_what_the_recorder_dropped_is_a_warning():
    run = attrs.evolve(GPU, overhead=Overhead(num_steps_dropped=3, num_samples_dropped=4))

    assert any(
        warning.startswith("7 records were dropped") for warning in build_report(run).warnings
    )


def test_an_observer_effect_above_its_budget_is_a_figure_and_a_warning():
    effect = ObserverEffect(20, 500, 500, 2 * MS, 2 * MS + MS // 10, 4 * MS, 4 * MS, 9, 9, 1, 1)
    said = build_report(attrs.evolve(GPU, observer_effect=effect))

    assert said.figures["observer_p50_ratio"].value == pytest.approx(0.05)
    assert any(warning.startswith("Measuring slowed the tokens") for warning in said.warnings)


def test_sensors_that_are_off_are_listed_with_their_reason():
    rows = table(GPU, "method", "Sensors that could not be read").rows

    assert ("nvml.gpu_utilization_percent", "not supported by this device") in rows


def test_building_a_report_changes_nothing_and_gives_the_same_again():
    before = attrs.asdict(GPU)

    assert build_report(GPU) == build_report(GPU)
    assert attrs.asdict(GPU) == before


@pytest.mark.parametrize(
    ("num_cached", "evictions"), [([3, 7, 5, 9, 8], 3), ([3, 7, 0, 4], None), ([1, 1, 2], None)]
)
def test_evictions_are_told_as_far_as_the_count_of_cached_blocks_shows_them(num_cached, evictions):
    steps = StepTable()
    for i, count in enumerate(num_cached):
        step = attrs.evolve(GPU.steps[i], num_cached_blocks=count)
        for field in attrs.fields(StepTable):
            getattr(steps, field.name).append(getattr(step, field.name))
    found = figures(attrs.evolve(GPU, steps=steps))["num_evictions_min"]

    if evictions is None:
        assert "never fell" in found.reason  # also where the cache was reset
    else:
        assert found == evictions


def test_the_headline_shows_a_maximum_where_the_sample_has_no_p99():
    short = simulated_run(seconds=1.5, load=2.0)
    keys = [figure.key for figure in build_report(short).headline]

    assert isinstance(figures(short)["ttft_p99_s"], NotAvailable)
    assert "ttft_max_s" in keys and "ttft_p99_s" not in keys
    assert "itl_p99_s" in [figure.key for figure in report(GPU).headline]


def test_percentiles_that_no_sample_supports_have_no_column():
    short = simulated_run(seconds=0.4, load=2.0)
    (found,) = (t for t in build_report(short).sections[4].summary)
    most = max(row[1] for row in found.rows)

    assert most < 2000
    assert "p99.9" not in [column.label for column in found.columns]
    assert "p99.9 from 2,000 samples on" in found.caption


@pytest.mark.parametrize(
    ("steps_end_late", "cpu_ns", "expected"),
    [
        (True, 0, "the process hardly ran, in a step"),
        (False, 0, "the process hardly ran, between steps"),
        (False, 10**9, "no step: the caller's own time"),
        (True, 10**9, "only decoding"),
    ],
)
def test_a_gap_in_which_nothing_happened_says_where_the_time_went(steps_end_late, cpu_ns, expected):
    ends = [10 * MS, 20 * MS, 900 * MS]
    starts = [0, 10 * MS, (20 if steps_end_late else 890) * MS]
    steps = StepTable()
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        step = Step(i, START_NS + start, START_NS + end, num_rows=1, sampled=(7,), mode="native")
        for field in attrs.fields(StepTable):
            getattr(steps, field.name).append(getattr(step, field.name))
    times = array("q", (START_NS, START_NS + 1000 * MS))
    series = {"host.cpu_ns": Series(times, [0, cpu_ns])}
    run = attrs.evolve(CPU, steps=steps, requests=(), events=(), series=series)

    assert table(run, "latency", "The worst gaps").rows[0][-1] == expected


def columns_of(steps):
    """Copies that may be changed."""
    return {name: list(getattr(steps, name)) for name in attrs.fields_dict(StepTable)}


def test_steps_that_overlap_count_their_time_once():
    """A step that is submitted ahead begins while the one before it runs."""
    columns = columns_of(GPU.steps)
    columns["t0_ns"][1:] = columns["t0_ns"][:-1]  # each begins with the one before
    ahead = attrs.evolve(GPU, steps=StepTable(**columns))
    lead = section(ahead, "timeline").lead
    share = float(lead.split("running ")[1].split(" %")[0])

    # Never over 100, and no less than steps that leave gaps between them.
    before = section(GPU, "timeline").lead
    assert float(before.split("running ")[1].split(" %")[0]) <= share <= 100
    assert figures(ahead)["idle_ratio"] <= figures(GPU)["idle_ratio"]


def test_steps_with_prompts_are_told_from_decodes():
    columns = columns_of(GPU.steps)
    prompts = [i for i, count in enumerate(columns["num_prefill_tokens"]) if count]
    for i in prompts[::2]:
        columns["mode"][i], columns["bucket"][i] = "replay", 512
    for i in prompts[1::2]:
        columns["fallback"][i] = "the step has too many positions"
    run = attrs.evolve(GPU, steps=StepTable(**columns))
    before, after = figures(GPU), figures(run)

    assert after["prompt_replay_ratio"] == pytest.approx(len(prompts[::2]) / len(prompts))
    assert isinstance(before["prompt_replay_ratio"], NotAvailable)
    for name in ("replay_ratio", "padding_waste_ratio", "num_graph_misses"):
        assert after[name] == before[name]
