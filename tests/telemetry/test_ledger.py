"""Where memory is: rows that sum to the total, whatever is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.cuda import CudaBackend
from graphs.guard import CaptureGuard
from telemetry import Recorder
from telemetry.ledger import MemoryFacts, build_ledger
from tests.engines import greedy, random_prompts
from tests.graphs.fake_cuda import FakeCudaDriver
from tests.runtime.graph_engines import graph_llm

GIB = 1 << 30
CUDA, CPU = {"type": "cuda"}, {"type": "cpu"}

# A GPU of 80 GiB: 1 reserved, 42 of ours (40 by torch), 5 of others, 32 free.
GPU_VALUES = {
    "nvml.memory_total_bytes": 80 * GIB,
    "nvml.memory_reserved_bytes": GIB,
    "nvml.memory_used_bytes": 47 * GIB,
    "nvml.memory_free_bytes": 32 * GIB,
    "nvml.process_memory_bytes": 42 * GIB,
    "nvml.other_processes_memory_bytes": 5 * GIB,
    "torch.reserved_bytes": 40 * GIB,
    "torch.allocated_peak_bytes": 38 * GIB,
}
GPU_MEMORY = {"weights_bytes": 15 * GIB, "kv_cache_bytes": 20 * GIB}
GRAPHS = {
    "captures": [
        {"bucket": 8, "variant": "a", "pool_bytes": GIB // 2, "driver_bytes": GIB // 8},
        {"bucket": 8, "variant": "b", "pool_bytes": GIB // 4, "driver_bytes": GIB // 8},
        {"bucket": 1, "variant": "a", "pool_bytes": GIB // 4, "driver_bytes": GIB // 4},
    ]
}


def sizes(ledger):
    return {row.name: row.num_bytes for row in ledger.rows}


def test_a_gpus_memory_is_told_apart_to_the_last_byte():
    ledger = build_ledger(5, MemoryFacts(CUDA, GPU_MEMORY, GRAPHS, GPU_VALUES))

    assert sizes(ledger) == {
        "driver_reserved": GIB,
        "weights": 15 * GIB,
        "kv_cache": 20 * GIB,
        "graph_pool_8": GIB * 3 // 4,
        "graph_pool_1": GIB // 4,
        "graph_driver": GIB // 2,
        "activations_peak": 2 * GIB,  # 38 - (15 + 20 + 1)
        "allocator_slack": 2 * GIB,  # 40 - 38
        "context": GIB * 3 // 2,  # 42 - 40 - 1/2
        "other_processes": 5 * GIB,
        "free": 32 * GIB,
        "residual": 0,
    }
    assert (ledger.total_bytes, ledger.t_ns, ledger.device) == (80 * GIB, 5, "cuda")
    assert ledger.row("activations_peak").estimate
    assert not ledger.row("free").estimate


def test_what_captures_did_not_measure_is_not_0():
    graphs = {"captures": [{**capture, "driver_bytes": None} for capture in GRAPHS["captures"]]}
    ledger = build_ledger(0, MemoryFacts(CUDA, GPU_MEMORY, graphs, GPU_VALUES))

    assert ledger.row("graph_driver").num_bytes is None
    assert "did not measure" in ledger.row("graph_driver").reason
    assert ledger.row("context").num_bytes == 2 * GIB  # what the graphs took is in it
    assert ledger.row("residual").num_bytes == 0


@pytest.fixture
def capturing_llm(monkeypatch):
    """An engine that captures and replays as on a GPU, by a driver without a device."""
    # Weights that oneDNN has packed are of CPUs only: no graph could name their memory.
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    backend = CudaBackend(FakeCudaDriver(), guard=CaptureGuard())
    with graph_llm(sizes=(1, 2), backend=backend, max_num_seqs=4) as llm:
        yield llm


def test_an_engine_that_captures_tells_what_the_ledger_asks_for(capturing_llm):
    described = capturing_llm.describe()["graphs"]
    ledger = build_ledger(0, MemoryFacts(CUDA, GPU_MEMORY, described, GPU_VALUES))
    pools = {row.name: row for row in ledger.rows if row.name.startswith("graph_pool_")}

    assert described["degraded"] is None
    assert {"graph_pool_1", "graph_pool_2", "graph_pool_4"} <= set(pools)
    assert sum(row.num_bytes for row in pools.values()) == sum(
        capture["pool_bytes"] for capture in described["captures"]
    )
    assert sum(row.num_bytes for row in pools.values()) > 0


def test_captured_steps_are_reported_by_bucket_with_what_capturing_cost(capturing_llm):
    with Recorder(capturing_llm, mode="edges") as recorder:
        capturing_llm.generate(random_prompts(3), greedy(6))
    section = next(s for s in recorder.report().sections if s.key == "steps")
    (chart,) = section.charts
    captures = next(table for table in section.tables if table.caption == "What capturing cost")
    described = capturing_llm.describe()["graphs"]["captures"]

    assert [row[0] for row in chart.table.rows] == [4]
    assert chart.table.rows[0][4] == chart.table.rows[0][1]  # a pad in each replay of 3 rows
    assert [row[:2] for row in captures.rows] == [(c["bucket"], c["variant"]) for c in described]


def test_a_bucket_of_positions_is_none_of_rows():
    prompts = {"variant": "prompts", "counts": "positions", "driver_bytes": 0}
    captures = [*GRAPHS["captures"], {**prompts, "bucket": 8, "pool_bytes": GIB // 16}]
    ledger = build_ledger(0, MemoryFacts(CUDA, GPU_MEMORY, {"captures": captures}, GPU_VALUES))

    assert sizes(ledger)["graph_pool_8"] == GIB * 3 // 4
    assert sizes(ledger)["graph_pool_8_positions"] == GIB // 16
    assert ledger.row("graph_pool_8_positions").label == "Graphs of 8 positions"
    assert sizes(ledger)["residual"] == 0


def test_without_graphs_there_are_no_rows_of_graphs():
    ledger = build_ledger(0, MemoryFacts(CUDA, GPU_MEMORY, {"captures": []}, GPU_VALUES))

    assert not [row for row in ledger.rows if row.name.startswith("graph")]
    assert ledger.row("residual").num_bytes == 0


def test_hidden_process_ids_leave_context_and_others_in_the_residual():
    values = GPU_VALUES | {
        "nvml.process_memory_bytes": None,
        "nvml.other_processes_memory_bytes": None,
    }
    reasons = {
        "nvml.process_memory_bytes": "pids differ",
        "nvml.other_processes_memory_bytes": "pids differ",
    }
    ledger = build_ledger(0, MemoryFacts(CUDA, GPU_MEMORY, {}, values, reasons))

    assert ledger.row("context").num_bytes is None
    assert ledger.row("context").reason == "pids differ"
    assert ledger.row("residual").num_bytes == 7 * GIB  # 2 of context, 5 of others
    assert "Other processes" in ledger.row("residual").source


def test_without_the_allocator_activations_are_in_the_context():
    values = {k: v for k, v in GPU_VALUES.items() if not k.startswith("torch")}
    ledger = build_ledger(0, MemoryFacts(CUDA, GPU_MEMORY, {}, values))

    assert ledger.row("activations_peak").num_bytes is None
    assert ledger.row("context").num_bytes == 7 * GIB  # 42 - 15 - 20
    assert "activations are in it" in ledger.row("context").source
    assert ledger.row("residual").num_bytes == 0


def test_unified_memory_has_no_total_and_says_why():
    reasons = {"nvml.memory_total_bytes": "NotSupported"}
    ledger = build_ledger(0, MemoryFacts(CUDA, GPU_MEMORY, {}, {}, reasons))

    assert ledger.total_bytes is None
    assert ledger.total_source == "NotSupported"
    assert ledger.row("residual").num_bytes is None
    assert ledger.row("weights").num_bytes == 15 * GIB


def test_a_cpus_memory_is_told_apart():
    values = {
        "host.rss_bytes": 10 * GIB,
        "host.shared_bytes": 2 * GIB,  # of which files; they count as reclaimable elsewhere
        "host.memory_used_bytes": 20 * GIB,
        "host.memory_limit_bytes": 64 * GIB,
    }
    memory = {"weights_bytes": 3 * GIB, "kv_cache_bytes": 8 * GIB}
    ledger = build_ledger(0, MemoryFacts(CPU, memory, {}, values, touched_blocks=0.25))

    assert sizes(ledger) == {
        "weights": 3 * GIB,
        "kv_cache": 2 * GIB,
        "python_and_libraries": 5 * GIB,
        "other_processes": 12 * GIB,
        "free": 42 * GIB,
        "residual": 0,
    }
    assert ledger.row("kv_cache").estimate


def test_memory_that_is_not_resident_is_not_made_up():
    values = {
        "host.rss_bytes": 4 * GIB,
        "host.shared_bytes": 0,
        "host.memory_used_bytes": 20 * GIB,
        "host.memory_limit_bytes": 64 * GIB,
    }
    memory = {"weights_bytes": 3 * GIB, "kv_cache_bytes": 8 * GIB}
    ledger = build_ledger(0, MemoryFacts(CPU, memory, {}, values))

    assert ledger.row("process").num_bytes == 4 * GIB
    assert ledger.row("weights").num_bytes is None
    assert ledger.row("residual").num_bytes == 0
    assert "Weights" not in ledger.row("residual").source


def test_nothing_known_is_nothing_said():
    ledger = build_ledger(0, MemoryFacts(CPU, {}))

    assert all(row.num_bytes is None and row.reason for row in ledger.rows)


maybe = st.none() | st.integers(0, 1 << 40)


@settings(deadline=None, max_examples=100)
@given(
    device=st.sampled_from([CUDA, CPU]),
    memory=st.fixed_dictionaries({"weights_bytes": maybe, "kv_cache_bytes": maybe}),
    values=st.fixed_dictionaries(
        dict.fromkeys(
            (
                *GPU_VALUES,
                "host.rss_bytes",
                "host.shared_bytes",
                "host.memory_used_bytes",
                "host.memory_limit_bytes",
            ),
            maybe,
        )
    ),
    captures=st.lists(
        st.fixed_dictionaries(
            {"bucket": st.integers(1, 4), "pool_bytes": maybe, "driver_bytes": maybe}
        ),
        max_size=4,
    ),
    touched=st.none() | st.floats(0, 1),
)
def test_rows_always_sum_to_the_total_and_only_the_residual_is_negative(
    device, memory, values, captures, touched
):
    facts = MemoryFacts(device, memory, {"captures": captures}, values, {}, touched)
    ledger = build_ledger(0, facts)
    known = [row.num_bytes for row in ledger.rows if row.num_bytes is not None]

    if ledger.total_bytes is None:
        assert ledger.row("residual").num_bytes is None
    else:
        assert sum(known) == ledger.total_bytes
    assert ledger.rows[-1].name == "residual"
    assert len({row.name for row in ledger.rows}) == len(ledger.rows)
    for row in ledger.rows:
        assert (row.num_bytes is None) == (row.reason is not None)
        assert row.name == "residual" or row.num_bytes is None or row.num_bytes >= 0


def test_a_cache_of_which_no_step_tells_is_not_0():
    values = {"host.rss_bytes": GIB, "host.memory_used_bytes": GIB, "host.memory_limit_bytes": GIB}
    memory = {"weights_bytes": 10, "kv_cache_bytes": 20}
    ledger = build_ledger(0, MemoryFacts(CPU, memory, {}, values, touched_blocks=0.0))

    assert ledger.row("kv_cache").num_bytes is None
    assert "no step ended" in ledger.row("kv_cache").reason
    assert ledger.row("python_and_libraries").num_bytes == GIB - 10


@pytest.mark.parametrize("missing", [{}, {"weights_bytes": None}])
def test_an_engine_that_does_not_count_its_weights_is_named(missing):
    ledger = build_ledger(0, MemoryFacts(CUDA, missing, {}, GPU_VALUES))

    assert ledger.row("weights").reason == "the engine does not tell"
    assert ledger.row("residual").num_bytes == 0  # the allocator's count holds them
