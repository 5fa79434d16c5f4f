"""The allocator's figures; on a GPU the real ones, elsewhere torch's layout of them."""

import pytest
import torch

from telemetry.providers.base import Tier, read_all
from telemetry.providers.torch_alloc import SENSORS, allocator_values, open_torch_allocator


def test_on_a_cpu_every_sensor_says_why_there_is_nothing():
    provider = open_torch_allocator({"type": "cpu"})

    assert len(provider.sensors()) == len(SENSORS)
    assert all("CPU" in sensor.reason for sensor in provider.sensors())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_in_the_process_the_reason_says_so():
    provider = open_torch_allocator({"type": "cuda", "index": 0})

    assert all("not set up CUDA" in sensor.reason for sensor in provider.sensors())


def test_values_come_from_torchs_nested_statistics():
    def all_of(current, peak):
        return {"all": {"current": current, "peak": peak, "allocated": 0, "freed": 0}}

    stats = {
        "allocated_bytes": all_of(100, 150),
        "reserved_bytes": all_of(400, 400),
        "inactive_split_bytes": all_of(30, 40),
        "requested_bytes": all_of(90, 140),
        "num_alloc_retries": 2,
        "reserved_bytes_by_private_pools": {(0, 1): all_of(50, 50), (0, 2): all_of(20, 25)},
    }

    assert allocator_values(stats) == (100, 150, 400, 30, 90, 70, 2)
    del stats["reserved_bytes_by_private_pools"]  # as before torch 2.13
    assert allocator_values(stats)[5] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_peak_starts_anew_at_each_edge():
    torch.zeros(1, device="cuda")
    provider = open_torch_allocator({"type": "cuda", "index": 0})
    block = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    del block
    first = read_all(provider, [Tier.EDGES])
    second = read_all(provider, [Tier.EDGES])

    assert first["torch.allocated_peak_bytes"] - first["torch.allocated_bytes"] >= 64 << 20
    assert second["torch.allocated_peak_bytes"] == second["torch.allocated_bytes"]
