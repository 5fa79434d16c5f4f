"""The CUDA backend on a device: what the fake driver cannot show."""

import pytest
import torch

from graphs import EventKind, GraphKey, StaticTensors, capture_order
from graphs.cuda import CudaBackend
from graphs.cuda_driver import TorchCudaDriver
from graphs.guard import CaptureGuard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WIDTH = 64


class Device:
    """A product and a sum over static buffers, for buckets up to 8."""

    def __init__(self):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.tensors = {
            "x": torch.zeros(8, WIDTH, device=self.device),
            "weights": torch.randn(WIDTH, WIDTH, device=self.device),
            "out": torch.zeros(8, WIDTH, device=self.device),
        }

    def program(self, key):
        x, weights, out = self.tensors.values()

        def run():
            out[: key.bucket].copy_(x[: key.bucket] @ weights + 1.0)

        return run

    def reset(self):
        self.tensors["x"].zero_()

    def session(self, *, debug=False, events=None):
        driver = TorchCudaDriver(self.device, debug=debug)
        told = [] if events is None else events
        backend = CudaBackend(driver, guard=CaptureGuard())
        return backend.session(StaticTensors(self.tensors), told.append)


@pytest.mark.parametrize("debug", [False, True])
def test_replays_equal_eager_runs_of_the_same_bucket(debug):
    device = Device()
    keys = capture_order(GraphKey(bucket) for bucket in (1, 4, 8))
    with device.session(debug=debug) as session:
        steps = {key: session.capture(key, device.program(key), reset=device.reset) for key in keys}
        info = session.seal()
        assert info.degraded_reason is None and info.pool_bytes > 0
        for key in (keys[1], keys[0], keys[2], keys[0]):
            device.tensors["x"].normal_()
            steps[key].replay()
            ours = device.tensors["out"][: key.bucket].clone()
            device.program(key)()
            torch.cuda.synchronize()

            assert torch.equal(ours, device.tensors["out"][: key.bucket])
        counts = {one.num_nodes for one in info.captures}
        assert counts == {None} if not debug else all(counts)


def test_a_program_that_reads_a_value_degrades_and_still_runs():
    device, events = Device(), []

    def program():
        if device.tensors["x"].sum().item() > 0:
            device.tensors["out"].fill_(5.0)

    with device.session(events=events) as session:
        step = session.capture(GraphKey(8), program, reset=device.reset)
        session.seal()
        device.tensors["x"].fill_(1.0)
        step.replay()

        assert (device.tensors["out"] == 5.0).all()
    assert EventKind.DEGRADED in [event.kind for event in events]
