"""The core under random load, against the fake K/V store.

Here 1,000 random engines run. This runs more:

    NANOVLLM_RANDOM_ENGINES=40000 pytest tests/core/test_random_engines.py

A failure names its seed, and `run_random_engine(seed)` runs it again.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nanovllm.core import SchedulerLimits, reset_prefix_cache
from nanovllm.errors import RequestError
from tests.core.fake_engine import (
    FakeEngine,
    drawn_token,
    expected_completion,
    run_random_engine,
)

NUM_ENGINES = int(os.environ.get("NANOVLLM_RANDOM_ENGINES", "1000"))
NUM_GROUPS = 10


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_every_step_of_random_engines_reads_its_own_past(group):
    num_preemptions = num_hit_tokens = 0
    for seed in range(group, NUM_ENGINES, NUM_GROUPS):
        try:
            engine = run_random_engine(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_preemptions += len(engine.preempted)
        num_hit_tokens += sum(engine.prefix_hits.values())

    assert num_preemptions and num_hit_tokens, "the load exercises preemption and prefix hits"


class EngineMachine(RuleBasedStateMachine):
    """Transitions in an order that Hypothesis chooses; every one is checked by `FakeEngine`."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 12),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 12),
        max_prefill_chunk=st.none() | st.integers(1, 4),
        caching=st.booleans(),
    )
    def start(self, block_size, num_blocks, caching, **limits):
        self.limits = SchedulerLimits(max_model_len=30, **limits)
        self.engine = FakeEngine(num_blocks, block_size, self.limits, caching=caching)
        self.prompts = {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        new=st.integers(1, 9),
        count=st.sampled_from((1, 1, 1, 3)),
        priority=st.integers(-1, 1),
        deadline_s=st.none() | st.integers(0, 60),
    )
    def admit(self, prompt, new, count, priority, deadline_s):
        group_id = len(self.prompts)
        for seq_id in range(group_id, group_id + count):
            try:
                self.engine.admit(
                    seq_id,
                    prompt,
                    max_tokens=new,
                    priority=priority,
                    deadline_s=deadline_s,
                    group_id=group_id if count > 1 else None,
                )
            except RequestError:
                pool = self.engine.state.pool
                assert len(prompt) + new - 1 > pool.num_blocks * pool.block_size
            else:
                self.prompts[seq_id] = prompt

    @rule()
    def expire(self):
        """On a clock of steps."""
        before = self.engine.state.num_unfinished
        expired = self.engine.expire(self.engine.num_steps)
        assert before - len(expired) == self.engine.state.num_unfinished

    @precondition(lambda self: self.engine.state.num_unfinished)
    @rule()
    def step(self):
        self.engine.step(drawn_token)

    @precondition(lambda self: self.engine.state.num_unfinished)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data, in_flight):
        state = self.engine.state
        victim = data.draw(
            st.sampled_from([seq.seq_id for seq in (*state.running, *state.waiting)])
        )
        if in_flight:
            self.engine.step(drawn_token, abort_in_flight=victim)
        else:
            self.engine.abort(victim)

    @rule()
    def reset(self):
        self.engine.state = reset_prefix_cache(self.engine.state)
        self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for seq_id, output in self.engine.run(drawn_token).items():
            seq = output.sequence
            assert seq.completion_token_ids == expected_completion(
                self.prompts[seq_id], seq.num_completion_tokens
            )


EngineMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineMachine = EngineMachine.TestCase
