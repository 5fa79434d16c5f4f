"""Which of NVML's devices is the engine's."""

import os

import pytest

from telemetry.providers.base import Tier, read_all
from telemetry.providers.nvml import open_nvml
from tests.telemetry.nvml_stub.library import GIB, HEALTHY

FIRST = "aaaaaaaa-1111-4000-8000-000000000000"
SECOND = "bbbbbbbb-2222-4000-8000-000000000000"


@pytest.fixture
def two_gpus(stub):
    """CUDA's device 0 is NVML's device 1: CUDA lists the faster one first."""
    stub.gpus(2)
    stub.update(HEALTHY | {"used": 7 * GIB}, device=1)
    stub.uuid(0, f"GPU-{FIRST}")
    stub.uuid(1, f"GPU-{SECOND}")
    return stub


@pytest.fixture
def mig(stub):
    """A GPU in two slices of 20 GiB."""
    stub.set(mig=2, gpu_utilization=None)  # not to be had while MIG is on
    stub.uuid(4, f"MIG-{FIRST}")
    stub.uuid(5, f"MIG-{SECOND}")
    stub.update({"total": 20 * GIB, "used": 5 * GIB, "reserved": GIB}, device=5)
    stub.process(os.getpid(), 4 * GIB, device=5)
    return stub


def used(uuid):
    return read_all(open_nvml(uuid), [Tier.FAST])["nvml.memory_used_bytes"]


@pytest.mark.parametrize(
    ("uuid", "gib"),
    [(FIRST, 40), (SECOND, 7), (f"GPU-{SECOND}", 7), (SECOND.upper(), 7)],
)
def test_a_device_is_found_by_its_uuid_whatever_the_order(two_gpus, uuid, gib):
    assert used(uuid) == gib * GIB


@pytest.mark.parametrize("visible", ["1,0", "GPU-bbbb", "MIG-x", "", "-1", "0,foo", "1,1"])
def test_the_environment_is_not_parsed(two_gpus, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert used(SECOND) == 7 * GIB


def test_an_unknown_uuid_is_a_reason_that_lists_what_there_is(two_gpus):
    provider = open_nvml("cccccccc-3333-4000-8000-000000000000")

    assert all(f"GPU-{SECOND}" in sensor.reason for sensor in provider.sensors())


def test_without_a_uuid_the_only_device_is_taken_and_none_of_two(stub):
    assert used(None) == 40 * GIB

    stub.gpus(2)
    assert "2 GPUs" in open_nvml(None).sensors()[0].reason


def test_a_machine_whose_gpus_are_gone_has_reasons(stub):
    stub.gpus(0)

    assert "lists no GPU" in open_nvml(None).sensors()[0].reason


def test_a_neighbour_that_fell_off_the_bus_does_not_matter(two_gpus):
    two_gpus.fail("nvmlDeviceGetHandleByIndex_v2", 15, times=1)

    assert used(SECOND) == 7 * GIB


class TestMig:
    def test_memory_and_processes_are_the_slices_own(self, mig):
        values = read_all(open_nvml(SECOND), [Tier.FAST, Tier.EDGES])

        assert values["nvml.memory_total_bytes"] == 20 * GIB
        assert values["nvml.memory_used_bytes"] == 5 * GIB
        assert values["nvml.process_memory_bytes"] == 4 * GIB

    def test_what_only_the_whole_gpu_has_is_labelled_so(self, mig):
        provider = open_nvml(f"MIG-{SECOND}")
        scopes = {s.name.removeprefix("nvml."): s.scope for s in provider.sensors()}

        assert provider.facts()["is_mig_slice"]
        assert read_all(provider, [Tier.FAST])["nvml.power_mw"] == 512_000
        for name in ("power_mw", "energy_mj", "sm_clock_mhz", "temperature_c"):
            assert scopes[name] == "whole GPU"
        assert scopes["memory_used_bytes"] == "MIG slice"

    def test_utilization_is_not_available_while_the_gpu_is_divided(self, mig):
        sensors = {s.name: s for s in open_nvml(SECOND).sensors()}

        assert "NotSupported" in sensors["nvml.gpu_utilization_percent"].reason

    def test_the_whole_gpu_can_still_be_asked_for(self, mig):
        provider = open_nvml("00000000-0000-4000-8000-000000000000")

        assert not provider.facts()["is_mig_slice"]
