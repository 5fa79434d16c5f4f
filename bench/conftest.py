"""What the suites share: a small model for anybody, and the built-in one where it is at hand."""

import gc
from collections.abc import Iterator

import pytest

from bench.tiny_model import write_tiny_model
from nanovllm import LLM
from nanovllm.builtin_model import SMOLLM2_135M, cache_folder, cached_file

NUM_SEQS = 64


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """What earlier tests left behind is not collected in the middle of a later one."""
    gc.collect()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LLM]:
    """The built-in model, from the cache only."""
    if cached_file(SMOLLM2_135M, cache_folder()) is None:
        pytest.skip("the built-in model is not in the cache; `make demo` fetches it")
    with LLM("smollm2-135m", enable_prefix_caching=False, max_num_seqs=NUM_SEQS) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A small model with random weights, with prefix caching."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        num_kvcache_blocks=2048,
        max_num_seqs=NUM_SEQS,
        max_model_len=2048,
    ) as llm:
        yield llm
