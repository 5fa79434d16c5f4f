"""The scripted NVML for those tests that ask for it."""

import pytest

from telemetry.providers import base
from tests.telemetry.nvml_stub import library


@pytest.fixture(scope="session")
def nvml_stub_path(tmp_path_factory):
    if library.compiler() is None:
        pytest.skip("no C compiler to build the stub of NVML with")
    return library.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_nvml_stub_path(tmp_path_factory):
    if library.compiler() is None:
        pytest.skip("no C compiler to build the stub of NVML with")
    return library.build(tmp_path_factory.mktemp("old-nvml"), old_driver=True)


@pytest.fixture
def timed_stub(nvml_stub_path):
    """A driver with one healthy GPU, whose calls are timed to sort its sensors into tiers."""
    stub = library.plug_in(nvml_stub_path)
    stub.update(library.HEALTHY)
    yield stub
    stub.lib.stub_reset()
    library.plug_in(None)


@pytest.fixture
def same_costs(monkeypatch):
    """Every sensor is cheap, however busy the machine is that runs the tests."""
    monkeypatch.setattr(base, "measure_cost_us", lambda read: 1.0)


@pytest.fixture
def stub(same_costs, timed_stub):
    """A driver with one healthy GPU."""
    return timed_stub


@pytest.fixture
def old_stub(same_costs, old_nvml_stub_path):
    """The same with a driver that lacks the newer symbols."""
    stub = library.plug_in(old_nvml_stub_path)
    stub.update(library.HEALTHY)
    yield stub
    stub.lib.stub_reset()
    library.plug_in(None)
