"""`--llm-telemetry`, `--llm-report`, `gpu_telemetry` and `memory_flat`."""

import pytest

from tests.pytest_plugin.app_suite import benchmarks_of, run_suite, write_suite

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("mode", ["edges", "live"])
def test_telemetry_adds_energy_or_the_reason_why_there_is_none(pytester, mode):
    pytest.importorskip("pytest_benchmark")
    write_suite(pytester)

    rows, _, _ = benchmarks_of(pytester, f"--llm-telemetry={mode}")

    llm = rows["test_app"]["extra_info"]["llm"]
    assert llm["telemetry_mode"] == mode
    for name in ("joules", "joules_per_token", "throttled_s"):
        assert llm[name] is not None or llm[f"{name}_missing"]
    assert rows["test_app:itl"]["stats"]["rounds"] == 4 * 2 * 4


def test_a_report_of_all_that_the_engine_did_is_written_at_the_end(pytester):
    write_suite(pytester, "def test_app(app):\n    app([[1, 2, 3]])\n")

    run_suite(pytester, "--llm-report=report.html").assert_outcomes(passed=1)

    page = (pytester.path / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")


def test_the_recorder_of_a_test_sees_the_steps_of_its_test_only(pytester):
    write_suite(
        pytester,
        """
def test_before(app):
    app([[1, 2, 3]])
def test_recorded(app, gpu_telemetry):
    app([[4, 5, 6]])
    gpu_telemetry.close()
    assert len(gpu_telemetry.run().steps) == 5
""",
    )

    run_suite(pytester).assert_outcomes(passed=2)


def test_memory_that_grows_fails_a_test_and_memory_that_does_not_passes(pytester):
    write_suite(
        pytester,
        """
def test_flat(app, memory_flat):
    app([[1, 2, 3]])
    with memory_flat():
        app([[1, 2, 3]])
def test_growing(memory_flat):
    with memory_flat():
        kept = bytearray(32 * 2**20)
        kept[::4096] = bytes(len(kept[::4096])).replace(b"\\0", b"1")
def test_allowed(memory_flat):
    with memory_flat(tolerance_bytes=2**30):
        kept = bytearray(32 * 2**20)
        kept[::4096] = bytes(len(kept[::4096])).replace(b"\\0", b"1")
""",
    )

    result = run_suite(pytester)

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*memory grew by 3?.? MiB (resident memory*8.0 MiB are allowed*"])
