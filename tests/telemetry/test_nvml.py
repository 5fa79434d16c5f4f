"""NVML's figures, read by the real `pynvml` from a scripted driver."""

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from telemetry.providers import nvml_library
from telemetry.providers.base import Tier, read_all
from telemetry.providers.nvml import open_nvml
from telemetry.providers.nvml_sensors import ALL
from tests.telemetry.forking import is_true_in_a_child, needs_fork
from tests.telemetry.nvml_stub.library import GIB

ALL_TIERS = (Tier.FAST, Tier.SLOW, Tier.EDGES)

LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, RM_VERSION_MISMATCH = 12, 9, 18
NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION, VERSION_MISMATCH = 3, 13, 4, 25
TIMEOUT, UNKNOWN, IN_USE, NO_DATA = 10, 999, 19, 21
GPU_IS_LOST, RESET_REQUIRED, UNINITIALIZED = 15, 16, 1


def reason_of(provider, name):
    (sensor,) = [s for s in provider.sensors() if s.name == f"nvml.{name}"]
    return sensor.reason


def source_of(provider, name):
    (sensor,) = [s for s in provider.sensors() if s.name == f"nvml.{name}"]
    return sensor.source


def read(provider, *tiers):
    values = read_all(provider, tiers or ALL_TIERS)
    return {name.removeprefix("nvml."): value for name, value in values.items()}


class TestHealthyDevice:
    def test_gives_every_figure_with_its_unit(self, stub):
        stub.process(os.getpid(), 30 * GIB)
        stub.process(os.getpid() + 1, 4 * GIB)
        stub.process(os.getpid() + 2, 5 * GIB)

        assert read(open_nvml(None)) == {
            "memory_used_bytes": 40 * GIB,
            "memory_free_bytes": 39 * GIB,
            "memory_reserved_bytes": GIB,
            "memory_total_bytes": 80 * GIB,
            "gpu_utilization_percent": 97,
            "memory_utilization_percent": 55,
            "power_mw": 512_000,
            "energy_mj": 2_000_000,
            "sm_clock_mhz": 1980,
            "clock_event_reasons_bits": 4,
            "temperature_c": 61,
            "memory_temperature_c": 70,
            "memory_clock_mhz": 3201,
            "throttled_by_power_cap_ns": 1_000,
            "throttled_by_sync_boost_ns": 0,
            "throttled_by_thermal_sw_ns": 0,
            "throttled_by_thermal_hw_ns": 0,
            "throttled_by_power_brake_ns": 0,
            "process_memory_bytes": 30 * GIB,
            "other_processes_memory_bytes": 9 * GIB,
            "ecc_corrected_count": 2,
            "ecc_uncorrected_count": 0,
            "remapped_rows_count": 3,
        }

    def test_lists_the_sensors_that_are_known_in_advance(self, stub):
        """So that a machine without NVML shows the same list, with reasons."""
        sensors = open_nvml(None).sensors()

        assert sorted(s.name for s in sensors) == sorted(s.name for s in ALL)
        for sensor in sensors:
            known = next(s for s in ALL if s.name == sensor.name)
            assert (sensor.unit, sensor.kind) == (known.unit, known.kind)

    def test_tells_what_never_changes(self, stub):
        assert open_nvml(None).facts() == {
            "uuid": "GPU-00000000-0000-4000-8000-000000000000",
            "is_mig_slice": False,
            "name": "Stub GPU",
            "driver_version": "580.65.06",
            "cuda_version": "13.1",
            "power_limit_w": 700.0,
            "max_sm_clock_mhz": 1980,
            "max_memory_clock_mhz": 3201,
            "persistence_mode": True,
        }

    def test_needs_five_calls_for_its_fast_sensors(self, stub):
        provider = open_nvml(None)
        functions = (
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetUtilizationRates",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetClockInfo",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetTemperatureV",
        )
        before = [stub.calls(function) for function in functions]
        provider.read(Tier.FAST)
        after = [stub.calls(function) for function in functions]

        assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1, 1, 1, 0, 0]

    def test_a_slow_call_moves_to_a_slower_tier(self, timed_stub):
        timed_stub.sleep("nvmlDeviceGetUtilizationRates", 2_000)
        timed_stub.sleep("nvmlDeviceGetTemperatureV", 8_000)
        provider = open_nvml(None)

        tiers = {sensor.name.removeprefix("nvml."): sensor for sensor in provider.sensors()}
        assert tiers["gpu_utilization_percent"].tier in ("slow", "manual")  # on a busy machine
        assert tiers["temperature_c"].tier == "manual"
        assert tiers["temperature_c"].cost_us > 8_000
        values = read(provider, Tier.SLOW, Tier.MANUAL)
        assert (values["gpu_utilization_percent"], values["temperature_c"]) == (97, 61)


class TestOlderAndOtherDrivers:
    def test_older_symbols_stand_in_for_missing_ones(self, old_stub):
        old_stub.process(os.getpid(), GIB)
        provider = open_nvml(None)
        values = read(provider)

        assert values["memory_used_bytes"] == 41 * GIB  # the reserve is in it
        assert values["memory_reserved_bytes"] is None
        assert "counts the driver's reserve as used" in source_of(provider, "memory_used_bytes")
        assert values["temperature_c"] == 61
        assert source_of(provider, "temperature_c") == "nvmlDeviceGetTemperature"
        assert values["clock_event_reasons_bits"] == 4
        assert "Throttle" in source_of(provider, "clock_event_reasons_bits")
        assert values["process_memory_bytes"] == GIB

    def test_a_list_of_processes_that_the_driver_does_not_have_is_not_available(self, old_stub):
        old_stub.fail("nvmlDeviceGetComputeRunningProcesses_v2", FUNCTION_NOT_FOUND)
        provider = open_nvml(None)

        assert "FunctionNotFound" in reason_of(provider, "process_memory_bytes")
        assert reason_of(provider, "memory_used_bytes") is None

    def test_memory_in_a_layout_that_the_driver_refuses_is_read_the_old_way(self, stub):
        stub.fail("nvmlDeviceGetMemoryInfo_v2", VERSION_MISMATCH)

        assert read(open_nvml(None), Tier.FAST)["memory_used_bytes"] == 41 * GIB

    def test_fields_that_are_missing_are_replaced_where_there_is_another_call(self, stub):
        stub.update({"field.186": None, "field.83": None, "field.269": None})
        provider = open_nvml(None)
        values = read(provider)

        assert values["power_mw"] == 500_000
        assert "1 s" in source_of(provider, "power_mw")
        assert values["energy_mj"] == 1_000_000
        assert "throttled_by_thermal_sw_ns" not in values
        assert "NotSupported" in reason_of(provider, "throttled_by_thermal_sw_ns")
        assert values["throttled_by_power_cap_ns"] == 1_000

    def test_power_is_read_of_the_module_where_only_that_answers(self, stub):
        stub.update({"field.186": None, "field.186.scope1": 640_000})
        provider = open_nvml(None)

        assert read(provider, Tier.FAST)["power_mw"] == 640_000
        assert "module" in source_of(provider, "power_mw")

    def test_each_field_carries_a_code_of_its_own(self, stub):
        provider = open_nvml(None)
        stub.update({"field.83.error": TIMEOUT})
        values = read(provider, Tier.FAST)

        assert values["energy_mj"] is None
        assert values["power_mw"] == 512_000

    def test_unified_memory_has_no_memory_figures_and_says_so(self, stub):
        """As on GB10: the device answers, but its memory is the machine's."""
        stub.update({"total": None})
        provider = open_nvml(None)

        assert "NotSupported" in reason_of(provider, "memory_total_bytes")
        assert "NotSupported" in reason_of(provider, "memory_free_bytes")
        assert read(provider)["power_mw"] == 512_000

    def test_a_device_that_answers_nothing_is_open_with_reasons(self, stub):
        """As on Jetson."""
        stub.lib.stub_reset()
        provider = open_nvml(None)

        assert {s.reason is None for s in provider.sensors()} == {False}
        assert set(read(provider).values()) <= {None}


class TestNoNvml:
    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (LIBRARY_NOT_FOUND, "no NVIDIA driver here"),
            (DRIVER_NOT_LOADED, "not loaded"),
            (RM_VERSION_MISMATCH, "reboot or reload the driver"),
            (NO_PERMISSION, "container"),
            (UNKNOWN, "Unknown"),
        ],
    )
    def test_every_sensor_tells_why_it_could_not_be_initialized(self, stub, code, words):
        stub.fail("nvmlInitWithFlags", code)
        provider = open_nvml(None)

        assert len(provider.sensors()) == len(ALL)
        assert all(words in sensor.reason for sensor in provider.sensors())
        assert read(provider) == {}
        provider.close()

    def test_a_library_that_does_not_load_is_a_reason(self, stub, monkeypatch):
        def no_library(name):
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "CDLL", no_library)

        assert "not found" in open_nvml(None).sensors()[0].reason

    def test_a_missing_package_is_a_reason(self, stub, monkeypatch):
        monkeypatch.setitem(sys.modules, "pynvml", None)

        assert "nvidia-ml-py" in open_nvml(None).sensors()[0].reason

    def test_the_unrelated_package_of_the_same_name_is_told_apart(
        self, stub, monkeypatch, tmp_path
    ):
        (tmp_path / "pynvml.py").write_text("def nvmlInit():\n    raise AssertionError\n")
        monkeypatch.delitem(sys.modules, "pynvml")
        monkeypatch.syspath_prepend(tmp_path)

        assert "uninstall the package pynvml" in open_nvml(None).sensors()[0].reason

    def test_failing_to_list_devices_is_a_reason(self, stub):
        stub.fail("nvmlDeviceGetCount_v2", UNKNOWN)

        assert "Unknown" in open_nvml(None).sensors()[0].reason

    def test_a_device_that_is_lost_before_the_start_is_a_reason(self, stub):
        stub.fail("nvmlDeviceGetUUID", GPU_IS_LOST)

        assert "fallen off the bus" in open_nvml(None).sensors()[0].reason

    def test_a_device_that_is_lost_while_it_is_opened_is_lost(self, stub):
        stub.fail("nvmlDeviceGetClockInfo", GPU_IS_LOST)
        provider = open_nvml(None)

        assert "fallen off the bus" in provider.lost
        assert set(read(provider).values()) <= {None}


class TestSensorsThatFail:
    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (NOT_SUPPORTED, "NotSupported"),
            (FUNCTION_NOT_FOUND, "FunctionNotFound"),
            (NO_PERMISSION, "no permission"),
        ],
    )
    def test_only_the_sensor_that_can_not_be_read_is_off(self, stub, code, words):
        stub.fail("nvmlDeviceGetUtilizationRates", code)
        provider = open_nvml(None)

        assert words in reason_of(provider, "gpu_utilization_percent")
        assert read(provider)["power_mw"] == 512_000

    def test_what_goes_missing_midway_is_off_from_then_on(self, stub):
        provider = open_nvml(None)
        stub.fail("nvmlDeviceGetUtilizationRates", NOT_SUPPORTED)
        provider.read(Tier.FAST)
        calls = stub.calls("nvmlDeviceGetUtilizationRates")
        values = read(provider, Tier.FAST)

        assert values["gpu_utilization_percent"] is None
        assert values["sm_clock_mhz"] == 1980
        assert stub.calls("nvmlDeviceGetUtilizationRates") == calls

    @pytest.mark.parametrize("code", [TIMEOUT, UNKNOWN, IN_USE])
    def test_four_failures_in_a_row_are_gaps_and_the_fifth_turns_it_off(self, stub, code):
        provider = open_nvml(None)
        stub.fail("nvmlDeviceGetUtilizationRates", code, times=4)
        gaps = [read(provider, Tier.FAST)["gpu_utilization_percent"] for _ in range(5)]
        assert gaps == [None, None, None, None, 97]

        stub.fail("nvmlDeviceGetUtilizationRates", code)
        for _ in range(5):
            provider.read(Tier.FAST)
        assert "5 times in a row" in reason_of(provider, "gpu_utilization_percent")
        (sensor,) = [s for s in provider.sensors() if s.name == "nvml.gpu_utilization_percent"]
        assert sensor.num_gaps == 9

    def test_a_timeout_while_opening_is_tried_again(self, stub):
        stub.fail("nvmlDeviceGetUtilizationRates", TIMEOUT, times=3)

        assert reason_of(open_nvml(None), "gpu_utilization_percent") is None

    def test_no_data_is_no_failure(self, stub):
        provider = open_nvml(None)
        stub.fail("nvmlDeviceGetUtilizationRates", NO_DATA)
        for _ in range(9):
            assert read(provider, Tier.FAST)["gpu_utilization_percent"] is None

        assert reason_of(provider, "gpu_utilization_percent") is None

    @pytest.mark.parametrize("code", [GPU_IS_LOST, RESET_REQUIRED])
    def test_a_lost_device_is_asked_nothing_more(self, stub, code):
        provider = open_nvml(None)
        stub.fail("nvmlDeviceGetUtilizationRates", code)
        values = read(provider, Tier.FAST)
        assert values["memory_used_bytes"] is not None  # it was read before
        assert values["power_mw"] is None

        calls = stub.calls("nvmlDeviceGetMemoryInfo_v2")
        assert set(read(provider).values()) == {None}
        assert stub.calls("nvmlDeviceGetMemoryInfo_v2") == calls
        assert "GPU" in provider.lost

    def test_a_device_that_is_lost_in_a_field_is_lost(self, stub):
        provider = open_nvml(None)
        stub.update({"field.83.error": GPU_IS_LOST})
        provider.read(Tier.FAST)

        assert provider.lost is not None

    @pytest.mark.parametrize("pid", [0, 4_294_967_295])
    def test_scrambled_process_ids_are_not_believed(self, stub, pid):
        stub.process(pid, GIB)
        stub.process(os.getpid(), GIB)

        assert "scrambled" in reason_of(open_nvml(None), "process_memory_bytes")

    def test_hidden_memory_of_a_process_is_not_zero(self, stub):
        stub.process(os.getpid(), 2**64 - 1)  # how the driver says "not available"

        assert "does not tell" in reason_of(open_nvml(None), "process_memory_bytes")

    def test_another_pid_namespace_is_noticed(self, stub):
        stub.process(os.getpid() + 1, GIB)

        assert "container" in reason_of(open_nvml(None), "process_memory_bytes")

    def test_process_lists_that_need_rights_are_not_available(self, stub):
        stub.fail("nvmlDeviceGetComputeRunningProcesses_v3", NO_PERMISSION)

        assert "no permission" in reason_of(open_nvml(None), "other_processes_memory_bytes")

    def test_a_counter_that_goes_backwards_is_passed_on_as_it_is(self, stub):
        provider = open_nvml(None)
        stub.update({"field.83": 5})

        assert read(provider, Tier.FAST)["energy_mj"] == 5


class TestLifeOfTheLibrary:
    def test_it_is_initialized_once_for_any_number_of_providers(self, stub):
        for _ in range(3):
            open_nvml(None).close()

        assert stub.calls("nvmlInitWithFlags") == 1
        assert stub.calls("nvmlShutdown") == 0

    def test_closing_leaves_it_to_others_in_the_process(self, stub):
        pynvml.nvmlInit()
        open_nvml(None).close()
        nvml_library._shut_down(pynvml, os.getpid())  # what runs when the process ends

        assert stub.users == 1
        assert pynvml.nvmlDeviceGetCount() == 1

    def test_a_foreign_shutdown_is_mended_once(self, stub):
        provider = open_nvml(None)
        pynvml.nvmlShutdown()
        assert read(provider, Tier.FAST)["memory_used_bytes"] == 40 * GIB
        assert stub.calls("nvmlInitWithFlags") == 2

        pynvml.nvmlShutdown()
        read(provider, Tier.FAST)
        assert "shut down by other code" in reason_of(provider, "memory_used_bytes")
        assert stub.calls("nvmlInitWithFlags") == 2

    def test_the_next_provider_opens_it_again_after_a_foreign_shutdown(self, stub):
        open_nvml(None).close()
        pynvml.nvmlShutdown()

        assert reason_of(open_nvml(None), "memory_used_bytes") is None

    @needs_fork
    def test_a_forked_child_does_not_touch_it(self, stub):
        provider = open_nvml(None)
        calls = stub.calls("nvmlDeviceGetMemoryInfo_v2")

        def leaves_it_alone():
            values = set(provider.read(Tier.FAST))
            provider.close()
            nvml_library._shut_down(pynvml, os.getppid())
            return (
                values == {None}
                and stub.calls("nvmlDeviceGetMemoryInfo_v2") == calls
                and stub.users == 1
            )

        assert is_true_in_a_child(leaves_it_alone)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="by the loader of Linux")
def test_pynvml_finds_the_library_by_itself(nvml_stub_path):
    """All of it in a process of its own, where `pynvml` loads the library by its name."""
    code = (
        "import ctypes, sys\n"
        f"ctypes.CDLL({str(nvml_stub_path)!r})\n"  # same SONAME, so that the loader finds this one
        "import telemetry\n"
        "assert 'pynvml' not in sys.modules and 'torch' not in sys.modules\n"
        "from telemetry.providers.nvml import open_nvml\n"
        "from tests.telemetry.nvml_stub.library import HEALTHY, Stub\n"
        f"Stub({str(nvml_stub_path)!r}).update(HEALTHY)\n"
        "provider = open_nvml('00000000-0000-4000-8000-000000000000')\n"
        "print(provider.facts()['name'], [s.reason for s in provider.sensors()][0])\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        timeout=60,
    )

    assert run.stdout == "Stub GPU None\n", run.stderr
    assert run.stderr == ""
