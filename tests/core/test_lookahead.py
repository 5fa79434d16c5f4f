"""Steps planned before the last one's tokens are known end in the same tokens."""

import random

import attrs
import pytest

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    abort,
    admit,
    advance,
    build_batch,
    check,
    postprocess,
    schedule,
    settle,
)
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from tests.core.fake_engine import FakeEngine, drawn_token

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
EOS = frozenset({2})


def state_of(*prompts, num_blocks=32, block_size=4, limits=LIMITS, **params):
    state = EngineState.create(num_blocks, block_size)
    for seq_id, prompt in enumerate(prompts):
        state = admit(state, Sequence.create(seq_id, prompt, SamplingParams(**params)), limits)
    return state


@attrs.define(eq=False)
class Flight:
    """A step on its way: the plan, what each row knew when it left, and what it will draw."""

    plan: object
    batch: object
    known: list
    previous: "Flight | None"
    tokens: "list | None" = None


class LookaheadEngine:
    """The loop of a device that is always a step ahead, over a fake K/V store.

    The device runs steps in the order in which they left, some time after the host has gone on.
    """

    def __init__(self, num_blocks, block_size, limits, *, caching=True, rng=None):
        self.limits = limits
        self.state = EngineState.create(num_blocks, block_size, caching)
        self.slots = {}
        self.outputs = {}
        self.num_ahead = self.num_discarded = 0
        self.rng = rng or random.Random(0)
        self.flight = None

    def submit(self, plan, previous):
        batch = build_batch(plan, None if previous is None else previous.plan)
        num_unknown = previous is not None
        known = [tuple(seq.token_log[: seq.num_tokens - num_unknown]) for seq in plan.scheduled]
        return Flight(plan, batch, known, previous)

    def execute(self, flight):
        """What the device does with a step, once those before it are done."""
        batch, block_size = flight.batch, flight.plan.block_size
        sampled = set(batch.sampled_rows.tolist())
        drawn, tokens = [], []
        prefixes = []
        for row, seq in enumerate(flight.plan.scheduled):
            prefix = flight.known[row]
            if flight.previous is not None:
                prefix = (*prefix, flight.previous.tokens[int(batch.sources[row])])
            prefixes.append(prefix)
            for offset in range(seq.num_scheduled_tokens):
                position = seq.num_cached_tokens + offset
                slot = int(batch.slot_mapping[int(batch.cu_seqlens_q[row]) + offset])
                self.slots[slot] = prefix[: position + 1]
        for row, prefix in enumerate(prefixes):
            table = batch.block_tables[row].tolist()
            for position in range(int(batch.context_lens[row])):
                slot = table[position // block_size] * block_size + position % block_size
                assert self.slots[slot] == prefix[: position + 1], "reads what is not its own"
            token = drawn_token_of(prefix)
            tokens.append(token)
            if row in sampled:
                drawn.append(token)
        flight.tokens = drawn
        flight.previous = None
        return tokens

    def step(self):
        if self.flight is None:
            self.state, plan = schedule(self.state, self.limits)
            check(self.state, self.limits)
            if not plan.scheduled:
                return
            self.flight = self.submit(plan, None)
        flight = self.flight
        self.state = advance(self.state)
        self.flight = None
        if self.rng.random() < 0.8:
            self.flight = self.look_ahead(flight)
        tokens = self.execute(flight)
        if self.rng.random() < 0.1 and self.state.num_unfinished:
            self.abort(self.rng.choice((*self.state.running, *self.state.waiting)).seq_id)
        self.state, outputs = settle(self.state, flight.plan, tokens)
        check(self.state, self.limits)
        for output in outputs:
            self.outputs.setdefault(output.seq_id, []).append(output)

    def look_ahead(self, flight):
        state, plan = schedule(self.state, self.limits)
        if not plan.scheduled or plan.num_prefill_tokens or plan.preempted:
            self.num_discarded += 1
            return None
        check(state, self.limits)
        self.state = state
        self.num_ahead += 1
        return self.submit(plan, flight)

    def abort(self, seq_id):
        self.state = abort(self.state, seq_id)
        self.outputs.setdefault(seq_id, []).append(None)
        check(self.state, self.limits)


def drawn_token_of(prefix):
    return (len(prefix) * 7 + prefix[-1] * 3 + prefix[0]) % 3


def random_run(seed):
    """The same requests through both loops; what was not aborted must come out the same."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 5)
    limits = SchedulerLimits(
        max_num_seqs=rng.choice((1, 2, 3, 8)),
        max_num_batched_tokens=rng.choice((1, 3, 8, 64)),
        max_model_len=40,
        max_prefill_chunk=rng.choice((None, 2, 7)),
        eos_token_ids=EOS if rng.random() < 0.5 else frozenset(),
    )
    head = [rng.randrange(3) for _ in range(8)]
    requests = [
        (
            head[: rng.randint(0, 8)] + [rng.randrange(3) for _ in range(rng.randint(1, 8))],
            rng.randint(1, 12),
        )
        for _ in range(rng.randint(1, 6))
    ]
    most = max(-(-(len(prompt) + new - 1) // block_size) for prompt, new in requests)
    num_blocks = most + rng.choice((0, 1, 2, 5))
    caching = rng.random() < 0.8
    sync = FakeEngine(num_blocks, block_size, limits, caching=caching)
    ahead = LookaheadEngine(num_blocks, block_size, limits, caching=caching, rng=rng)
    for seq_id, (prompt, new) in enumerate(requests):
        params = SamplingParams(max_tokens=new)
        try:
            sync.admit(seq_id, prompt, max_tokens=new)
        except RequestError:
            continue
        ahead.state = admit(ahead.state, Sequence.create(seq_id, prompt, params), limits)
        if rng.random() < 0.5:
            ahead.step()
    want = sync.run(drawn_token)
    for _ in range(10_000):
        if not ahead.state.num_unfinished and ahead.flight is None:
            break
        ahead.step()
    assert ahead.state.pool.num_free == num_blocks
    for seq_id, outputs in ahead.outputs.items():
        if None in outputs:
            continue  # aborted on the way
        tokens = [output.new_token_id for output in outputs if output.new_token_id is not None]
        assert tuple(tokens) == want[seq_id].sequence.completion_token_ids
        assert outputs[-1].finish_reason == want[seq_id].finish_reason
        assert outputs[-1].sequence.token_ids == want[seq_id].sequence.token_ids
        assert all(output.finish_reason is None for output in outputs[:-1])
    return ahead


@pytest.mark.parametrize("group", range(5))
def test_a_loop_that_runs_ahead_gives_the_tokens_of_one_that_waits(group):
    num_ahead = num_discarded = 0
    for seed in range(group, 1500, 5):
        try:
            engine = random_run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_ahead += engine.num_ahead
        num_discarded += engine.num_discarded

    assert num_ahead > 1000
    assert num_discarded, "some plans hold prompts or preempt, and are thrown away"


@pytest.mark.parametrize("seed", range(200))
def test_settling_what_was_advanced_is_postprocessing(seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 20))] for _ in range(5)]
    limits = attrs.evolve(LIMITS, eos_token_ids=EOS, max_num_batched_tokens=rng.choice((3, 16)))
    options = {"num_blocks": 12, "limits": limits, "max_tokens": rng.randint(1, 9)}
    left, right = state_of(*prompts, **options), state_of(*prompts, **options)
    while left.num_unfinished:
        left, left_plan = schedule(left, limits)
        right, right_plan = schedule(right, limits)
        assert left_plan.scheduled == right_plan.scheduled
        tokens = [drawn_token(seq) for seq in left_plan.scheduled]
        left, left_outputs = postprocess(left, left_plan, tokens)
        right, right_outputs = settle(advance(right), right_plan, tokens)
        assert left_outputs == right_outputs
        assert left == right
        check(right, limits, at_rest=True)


def test_a_sequence_with_all_its_tokens_is_not_scheduled_again():
    state, plan = schedule(state_of([1, 1, 1], max_tokens=1), LIMITS)
    state, following = schedule(advance(state), LIMITS)

    assert following.scheduled == ()
    state, (output,) = settle(state, plan, [0])
    assert output.finish_reason == "length"
    assert state.num_unfinished == 0


def test_a_token_that_ends_its_sequence_is_found_out_a_step_late_and_the_next_one_dropped():
    limits = attrs.evolve(LIMITS, eos_token_ids=EOS)
    state, plan = schedule(state_of([1, 1, 1], [0, 1], max_tokens=9, limits=limits), limits)
    state, following = schedule(advance(state), limits)
    assert [seq.seq_id for seq in following.scheduled] == [0, 1]

    state, outputs = settle(state, plan, [2, 1])
    assert [output.finish_reason for output in outputs] == ["stop", None]
    assert outputs[0].sequence.token_ids == (1, 1, 1, 2)
    state, outputs = settle(advance(state), following, [0, 0])
    assert [output.seq_id for output in outputs] == [1]
    assert state.running[0].token_ids == (0, 1, 1, 0)


def test_no_block_is_found_by_its_prefix_before_its_tokens_are_known():
    state, plan = schedule(state_of([1, 1, 1], max_tokens=9), LIMITS)  # block size 4
    state, following = schedule(advance(state), LIMITS)  # computes position 3: block 0 is full
    assert state.pool.num_cached == 0 and not any(state.pool.keys)
    state, _ = settle(state, plan, [0])
    assert not any(state.pool.keys), "its last position is still being computed"
    state, _ = settle(advance(state), following, [1])
    assert any(state.pool.keys)


def test_a_log_that_goes_on_elsewhere_is_copied():
    """Somebody ran on from a kept state, so that tokens of theirs follow in the shared log."""
    kept, kept_plan = schedule(state_of([1, 1, 1], max_tokens=9), LIMITS)
    state, plan = kept, kept_plan
    theirs, _ = postprocess(kept, kept_plan, [2])
    state, following = schedule(advance(state), LIMITS)
    state, _ = settle(state, plan, [0])
    state, _ = settle(advance(state), following, [1])

    assert state.running[0].token_ids == (1, 1, 1, 0, 1)
    assert theirs.running[0].token_ids == (1, 1, 1, 2)


def test_the_wrong_number_of_tokens_is_refused():
    state, plan = schedule(state_of([1, 1]), LIMITS)
    with pytest.raises(ValueError, match="2 token ids for 1 scheduled"):
        settle(advance(state), plan, [1, 2])


def test_without_a_prefix_cache_nothing_is_entered_into_it():
    state = EngineState.create(8, 2, enable_prefix_caching=False)
    state = admit(state, Sequence.create(0, [1, 1, 1, 1], SamplingParams(max_tokens=3)), LIMITS)
    state, plan = schedule(state, LIMITS)
    state, _ = settle(advance(state), plan, [0])

    assert not any(state.pool.keys)
    assert state.running[0].token_ids == (1, 1, 1, 1, 0)


def test_a_sequence_that_lost_its_blocks_since_keeps_its_token_and_no_block():
    """Its last token was on its way when the next plan took its blocks away."""
    state, plan = schedule(state_of([1, 1, 1, 1], max_tokens=1), LIMITS)
    state = advance(state)
    editor, draft = state.pool.thaw(), state.running[0].thaw()
    editor.release(state.running[0].block_table)
    draft.release()
    state = attrs.evolve(state, running=(draft.freeze(),), pool=editor.freeze())
    state, (output,) = settle(state, plan, [0])

    assert output.finish_reason == "length"
    assert state.pool.num_free == state.pool.num_blocks
    assert not any(state.pool.keys)
