import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Models this small have nothing for more threads to do than wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
