import pytest

from tests.engines import greedy, tiny_llm


@pytest.fixture(scope="session", autouse=True)
def loaded():
    """Load whatever an engine loads, once: a run inside of a run forgets the modules it loaded."""
    with tiny_llm(attention_backend="torch") as llm:
        llm.generate([[1, 2]], greedy(2))
