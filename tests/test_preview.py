"""A preview is what then happens, as far as step times go by the measured line."""

import asyncio
import itertools
import random

import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.core import EngineState, SchedulerLimits, Sequence, check
from nanovllm.preview import preview
from nanovllm.runtime.executor import Landed, StepTrace
from nanovllm.runtime.sampling import Sampled
from tests.checkpoints import VOCAB_SIZE, checkpoint_folder
from tests.engines import greedy, is_idle, tiny_llm

BASE_S, DECODE_S, PREFILL_S = 0.010, 0.001, 0.0002
LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100)


class Clock:
    """A clock that only the fake executor moves."""

    def __init__(self):
        self.now_s = 50.0

    def __call__(self):
        return self.now_s


class Timed:
    """An executor whose steps take known times and draw a fixed token."""

    def __init__(self, clock):
        self.clock = clock

    def submit(self, batch, rows):
        num_prefill = batch.num_tokens - batch.num_decodes
        self.clock.now_s += BASE_S + DECODE_S * batch.num_decodes + PREFILL_S * num_prefill
        return Landed(Sampled([7] * len(rows), None), StepTrace("eager"))

    def may_run_ahead(self, rows):
        return False

    def recover(self):
        pass

    def close(self):
        pass


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timed_llm(clock, monkeypatch):
    """Makes engines of which nothing takes time but the steps."""
    made = []

    def make(**options):
        llm = tiny_llm(attention_backend="torch", **options)
        llm._engine._loop.executor.close()
        llm._engine._loop.executor = Timed(clock)
        made.append(llm)
        return llm

    monkeypatch.setattr("time.perf_counter", clock)
    yield make
    for llm in made:
        llm.close()


def prompt_of(rng, longest=60):
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))]


@pytest.mark.parametrize("seed", range(8))
def test_the_first_token_comes_when_the_preview_said(timed_llm, seed):
    rng = random.Random(seed)
    llm = timed_llm(
        kvcache_block_size=4,
        num_kvcache_blocks=rng.choice((40, 60, 200)),
        max_num_seqs=rng.choice((2, 4)),
        max_num_batched_tokens=rng.choice((16, 64)),
        max_prefill_chunk=rng.choice((None, 8)),
    )
    llm.generate([prompt_of(rng) for _ in range(5)], greedy(6))  # to measure
    for _ in range(rng.randint(0, 8)):
        llm.add_request(prompt_of(rng), greedy(rng.randint(1, 20)), priority=rng.choice((0, 1)))
    for _ in range(rng.randint(0, 4)):
        llm.step()
    prompt, priority = prompt_of(rng), rng.choice((-1, 0, 1))
    params = greedy(3, n=rng.choice((1, 1, 3)))
    said = llm.preview(prompt, params, priority=priority)
    stream = llm.stream(prompt, params, priority=priority)
    num_steps = llm.stats().num_steps
    next(stream)

    assert said.ttft_s == pytest.approx(stream.output.metrics.ttft_s)
    assert said.num_steps == llm.stats().num_steps - num_steps
    assert said.num_prefix_hit_tokens == stream.output.num_cached_tokens
    assert said.obstacle is None and not said.was_cut_short


def test_looking_ahead_changes_nothing(timed_llm):
    llm = timed_llm()
    llm.generate([[1, 2, 3]], greedy(3))
    llm.add_request([4, 5, 6], greedy(9))
    llm.step()
    before = llm.state
    log = before.running[0].token_log
    llm.preview([1, 2, 3, 4], greedy(20))

    assert llm.state is before and llm.stats().num_requests == 2
    assert len(log) == before.running[0].num_tokens, "its log is not appended to"
    while llm.has_unfinished_requests():
        llm.step()
    assert is_idle(llm)


def test_an_engine_that_never_ran_knows_the_steps_but_not_the_time(timed_llm):
    said = timed_llm(max_num_batched_tokens=4).preview([1] * 10, greedy(1))

    assert (said.ttft_s, said.num_steps, said.obstacle) == (None, 3, None)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([VOCAB_SIZE], {}, "ids are 0 to"),
        ([1] * 10, {"max_tokens": 200}, "needs 53 blocks"),
        ([1] * 10, {"priority": "high"}, "`priority` is 'high'"),
        ([1] * 10, {"deadline_s": 0}, "`deadline_s` is 0"),
    ],
)
def test_what_would_be_refused_says_why(timed_llm, prompt, params, words):
    llm = timed_llm(kvcache_block_size=4, num_kvcache_blocks=20)
    urgency = {name: params.pop(name) for name in ("priority", "deadline_s") if name in params}
    said = llm.preview(prompt, greedy(**params), **urgency)

    assert words in said.obstacle
    assert said.ttft_s is None


def test_a_full_queue_is_an_obstacle(timed_llm):
    llm = timed_llm(max_queued_requests=2)
    for _ in range(2):
        llm.add_request([1, 2], greedy(2))

    assert "2 requests wait" in llm.preview([3], greedy(1)).obstacle
    llm.step()
    assert llm.preview([3], greedy(1)).obstacle is None


def test_a_deadline_that_comes_before_the_first_token_is_an_obstacle(timed_llm):
    llm = timed_llm(max_num_seqs=1)
    llm.generate([[1] * n for n in (2, 9)], greedy(5))
    llm.add_request([1, 2, 3], greedy(50))
    llm.step()

    assert llm.preview([4], greedy(1)).queue_position == 0
    assert llm.preview([4], greedy(1), deadline_s=30.0).obstacle is None
    assert "deadline" in llm.preview([4], greedy(1), deadline_s=0.1).obstacle
    assert llm.preview([4], greedy(1), priority=-1, deadline_s=0.1).obstacle is None


def test_a_live_request_that_will_have_expired_makes_room(timed_llm):
    llm = timed_llm(max_num_seqs=1)
    llm.generate([[1] * n for n in (2, 9)], greedy(5))
    llm.add_request([1, 2, 3], greedy(200), deadline_s=0.2)
    llm.step()
    said = llm.preview([4], greedy(1))
    stream = llm.stream([4], greedy(1))
    next(stream)

    assert said.ttft_s == pytest.approx(stream.output.metrics.ttft_s)
    assert said.ttft_s < 0.3


def test_the_look_ahead_is_bounded_and_says_so():
    state = EngineState.create(64, 4)
    seq = Sequence.create(0, [1] * 90, SamplingParams(max_tokens=2))
    said = preview(state, [seq], LIMITS, cost_s=lambda d, p: 1.0, now_s=0.0, max_steps=5)

    assert said.was_cut_short and said.num_steps == 5 and said.ttft_s is None
    assert preview(state, [seq], LIMITS, cost_s=lambda d, p: 1.0, now_s=0.0).ttft_s == 6.0
    check(state, LIMITS, at_rest=True)


def test_asyncio_programs_preview_too():
    async def main():
        folder = checkpoint_folder("llama")
        options = {"device": "cpu", "dtype": "float32", "attention_backend": "torch"}
        async with AsyncLLM(
            folder, skip_tokenizer_init=True, num_kvcache_blocks=64, **options
        ) as llm:
            await llm.generate([1, 2, 3], greedy(3))
            busy = [asyncio.create_task(llm.generate([n], greedy(20))) for n in range(3)]
            said = await llm.preview([1, 2, 3, 4], greedy(3))
            bad = await llm.preview("text")
            await asyncio.gather(*busy)
            return said, bad

    said, bad = asyncio.run(main())

    assert said.ttft_s > 0 and said.num_steps >= 1 and said.obstacle is None
    assert "no tokenizer" in bad.obstacle


def test_the_ids_of_a_preview_are_free(timed_llm):
    llm = timed_llm()
    for count in itertools.accumulate([1] * 3):
        llm.preview([1, 2], greedy(2, n=2))
        (output,) = llm.generate([[1, 2]], greedy(2))

        assert output.finish_reason == "length"
        assert llm.stats().num_requests == count
