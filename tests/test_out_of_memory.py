"""A step for which there is not enough memory costs as little as can be, and nobody else."""

import pytest
import torch

from tests.checkpoints import greedy_tokens
from tests.engines import greedy, is_idle, random_prompts, tiny_llm
from tests.runtime.graph_engines import graph_llm
from tests.runtime.simulated_queue import SimulatedQueue

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
]


class Small:
    """An executor that has memory for so many positions and rows a step."""

    def __init__(self, executor, error, *, num_tokens=10**9, num_rows=10**9):
        self.executor, self.error = executor, error
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self.sizes = []
        self.close, self.may_run_ahead = executor.close, executor.may_run_ahead
        self.describe_graphs, self.recover = executor.describe_graphs, executor.recover

    def submit(self, batch, rows):
        if batch.num_tokens > self.num_tokens or batch.num_seqs > self.num_rows:
            raise self.error
        self.sizes.append(batch.num_tokens)
        return self.executor.submit(batch, rows)


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "python", "cpu"])
def test_a_prompt_that_is_too_long_for_one_step_is_computed_in_several(error):
    prompts = random_prompts(4)
    with tiny_llm() as llm:
        llm._engine._loop.executor = small = Small(llm._engine._loop.executor, error, num_tokens=7)
        outputs = llm.generate(prompts, greedy(6))

        assert is_idle(llm)
    assert [output.token_ids for output in outputs] == [
        greedy_tokens("llama", prompt, 6) for prompt in prompts
    ]
    assert max(small.sizes) <= 7


@pytest.mark.parametrize("llm_of", [tiny_llm, graph_llm], ids=["plain", "ahead"])
def test_too_many_rows_cost_the_youngest_their_request_and_the_others_nothing(llm_of):
    prompts = random_prompts(5)
    options = {"queue": SimulatedQueue()} if llm_of is graph_llm else {}
    with llm_of(max_num_seqs=8, **options) as llm:
        executor = llm._engine._loop.executor
        llm._engine._loop.executor = Small(executor, ERRORS[0], num_rows=3)
        outputs = llm.generate(prompts, greedy(6))

        assert is_idle(llm)
        again = llm.generate(prompts[:3], greedy(6))
    want = [greedy_tokens("llama", prompt, 6) for prompt in prompts]
    assert [output.finish_reason for output in outputs[:3]] == ["length"] * 3
    assert [output.token_ids for output in outputs[:3]] == want[:3]
    for output in outputs[3:]:
        assert output.finish_reason in ("error", "length")
        if output.finish_reason == "error":
            assert "CUDA out of memory" in output.error
    assert any(output.finish_reason == "error" for output in outputs[3:])
    assert [output.token_ids for output in again] == want[:3]


def test_without_memory_for_a_single_row_every_request_fails_and_the_engine_goes_on():
    with tiny_llm() as llm:
        executor = llm._engine._loop.executor
        llm._engine._loop.executor = Small(executor, MemoryError("no more"), num_tokens=0)
        outputs = llm.generate(random_prompts(3), greedy(3))
        assert [output.finish_reason for output in outputs] == ["error"] * 3
        llm._engine._loop.executor = executor

        assert is_idle(llm)
        assert llm.generate([1, 2], greedy(3))[0].token_ids == greedy_tokens("llama", [1, 2], 3)
