"""A K/V store made of token prefixes: the oracle that tells whether each step reads its own past.

A slot holds the tokens of one prompt up to and including its position. Before a step is counted
as done, every scheduled position is written to its slot, and then every scheduled sequence must
find, in the slots of all positions below `cached + scheduled`, exactly its own prefix.
"""

import random

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    abort,
    admit,
    build_batch,
    check,
    expire,
    postprocess,
    reset_prefix_cache,
    schedule,
)
from nanovllm.core.batch import NO_BLOCK
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams


class FakeEngine:
    """The core's loop over a fake K/V store, checking every state and every batch."""

    def __init__(self, num_blocks, block_size, limits, *, caching=True):
        self.limits = limits
        self.state = EngineState.create(num_blocks, block_size, caching)
        self.slots = {}  # slot -> tokens up to that position
        self.finished = {}
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.preempted = []
        self.prefix_hits = {}

    def admit(self, seq_id, token_ids, *, priority=0, deadline_s=None, group_id=None, **params):
        seq = Sequence.create(
            seq_id,
            token_ids,
            SamplingParams(**params),
            priority=priority,
            deadline_s=deadline_s,
            group_id=group_id,
        )
        self.state = admit(self.state, seq, self.limits)
        self.check()

    def abort(self, seq_id):
        self.state = abort(self.state, seq_id)
        self.check()

    def expire(self, now_s):
        self.state, expired = expire(self.state, now_s)
        self.check()
        return expired

    def check(self, *, at_rest=True):
        check(self.state, self.limits, at_rest=at_rest)

    def step(self, next_token, *, abort_in_flight=None, expire_in_flight=None):
        """Run one step; `next_token` maps a sequence to the token that is drawn for it."""
        before = self.state
        self.state, plan = schedule(self.state, self.limits)
        self.check(at_rest=False)
        self.preempted += plan.preempted
        self.prefix_hits.update(plan.prefix_hits)
        if not plan.scheduled:
            assert not before.num_unfinished, "sequences wait, but nothing is scheduled"
            return ()
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert plan.num_decode_tokens == len(before.running) - len(
            set(plan.preempted) & {seq.seq_id for seq in before.running}
        ), "every running sequence decodes or is preempted"
        _check_order(before, plan)
        self.num_prefill_tokens += plan.num_prefill_tokens
        self._write(plan)
        if abort_in_flight is not None:
            self.abort_in_flight(abort_in_flight)
        if expire_in_flight is not None:
            self.state, _ = expire(self.state, expire_in_flight)
            self.check(at_rest=False)
        tokens = [next_token(seq) for seq in plan.scheduled]
        self.state, outputs = postprocess(self.state, plan, tokens)
        self.check()
        self.num_steps += 1
        for output in outputs:
            if output.finish_reason is not None:
                self.finished[output.seq_id] = output
        return outputs

    def abort_in_flight(self, seq_id):
        self.state = abort(self.state, seq_id)
        self.check(at_rest=False)

    def run(self, next_token, *, max_steps=100_000):
        while self.state.num_unfinished:
            assert self.num_steps < max_steps, "no end"
            self.step(next_token)
        assert self.state.pool.num_free == self.state.pool.num_blocks
        return self.finished

    def _write(self, plan):
        """Do what the model would do with the batch, and compare with the sequences."""
        batch = build_batch(plan)
        block_size = plan.block_size
        assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens, "slots are distinct"
        first = 0
        for row, seq in enumerate(plan.scheduled):
            end = seq.num_cached_tokens + seq.num_scheduled_tokens
            assert batch.cu_seqlens_q[row] == first
            assert batch.context_lens[row] == end
            for position in range(seq.num_cached_tokens, end):
                index = first + position - seq.num_cached_tokens
                assert batch.positions[index] == position
                assert batch.input_ids[index] == seq[position]
                self.slots[int(batch.slot_mapping[index])] = seq[: position + 1]
            first += seq.num_scheduled_tokens
        assert first == batch.num_tokens == batch.cu_seqlens_q[-1]
        for row, seq in enumerate(plan.scheduled):
            table = batch.block_tables[row].tolist()
            assert tuple(table[: seq.num_held_blocks]) == seq.block_table
            assert set(table[seq.num_held_blocks :]) <= {NO_BLOCK}
            for position in range(int(batch.context_lens[row])):
                slot = table[position // block_size] * block_size + position % block_size
                assert self.slots[slot] == seq[: position + 1], (
                    f"sequence {seq.seq_id} reads the K/V of {self.slots[slot]} at {position}"
                )
        sampled = [row for row, seq in enumerate(plan.scheduled) if seq.status.name == "RUNNING"]
        assert batch.sampled_rows.tolist() == sampled
        assert batch.logits_indices.tolist() == [batch.cu_seqlens_q[row + 1] - 1 for row in sampled]


def _check_order(before, plan):
    """Who goes on, who gives way and who starts follows the one order of ranks."""
    live = (*before.running, *before.waiting)
    holders = [seq for seq in live if seq.block_table]
    first = min(live, key=lambda seq: seq.info.rank)
    if first.block_table:
        assert first.seq_id not in plan.preempted, "the first never loses its blocks"
        assert first.seq_id in {seq.seq_id for seq in plan.scheduled}, "the first always goes on"
    ranks = {seq.seq_id: seq.info.rank for seq in live}
    lost = [ranks[seq_id] for seq_id in plan.preempted]
    kept = [seq.info.rank for seq in holders if seq.seq_id not in plan.preempted]
    assert max(kept, default=(-1000,)) < min(lost, default=(1000,)), "blocks only move up"
    is_cut = any(seq.status.name == "WAITING" for seq in plan.scheduled)
    started = dict(plan.prefix_hits)
    for seq in plan.scheduled:
        if seq.seq_id not in started:
            continue
        for other in plan.waiting:
            if other.block_table or other.info.rank > seq.info.rank:
                continue
            has_sibling = any(
                seq.info.group_id == other.info.group_id is not None
                and seq.info.rank < other.info.rank
                for seq in before.waiting
            )
            is_longer = other.num_tokens > seq.num_scheduled_tokens
            assert has_sibling or (is_cut and is_longer), "nothing starts before its turn"


def drawn_token(seq):
    """A token that depends on the sequence's own tokens and on nothing else; over three ids."""
    return (seq.num_tokens * 7 + seq.last_token * 3 + seq[0]) % 3


def expected_completion(prompt, num_tokens):
    """What `drawn_token` generates for a prompt, however it is scheduled."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append((len(tokens) * 7 + tokens[-1] * 3 + tokens[0]) % 3)
    return tuple(tokens[len(prompt) :])


def run_random_engine(seed):
    """One engine with random limits, pool, requests, aborts and cache resets, run to the end."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 5)
    limits = SchedulerLimits(
        max_num_seqs=rng.choice((1, 2, 3, 8)),
        max_num_batched_tokens=rng.choice((1, 3, 5, 8, 16, 64)),
        max_model_len=rng.choice((24, 40, 1000)),
        max_prefill_chunk=rng.choice((None, None, 1, 2, 7)),
    )
    requests = _random_requests(rng)
    biggest = max(
        -(-(min(len(prompt) + new, limits.max_model_len) - 1) // block_size)
        for prompt, new, _ in requests
    )
    num_blocks = max(1, biggest) + rng.choice((0, 0, 1, 2, 5))
    engine = FakeEngine(num_blocks, block_size, limits, caching=rng.random() < 0.85)
    ended, admitted = set(), {}
    pending = list(enumerate(requests))
    while pending or engine.state.num_unfinished:
        assert engine.num_steps < 2000, "no end"
        while pending and rng.random() < 0.5:
            seq_id, (prompt, new, urgency) = pending.pop(0)
            try:
                engine.admit(seq_id, prompt, max_tokens=new, **urgency)
            except RequestError:
                assert len(prompt) >= limits.max_model_len
            else:
                admitted[seq_id] = (prompt, min(new, limits.max_model_len - len(prompt)))
        in_flight = None
        if admitted and rng.random() < 0.08:
            victim = rng.choice(list(admitted))
            if victim not in engine.finished:
                ended.add(victim)
                if rng.random() < 0.5:
                    engine.abort(victim)
                else:
                    in_flight = victim
        if rng.random() < 0.03:
            engine.state = reset_prefix_cache(engine.state)
            engine.check()
        if rng.random() < 0.1:
            ended |= set(engine.expire(engine.num_steps))
        engine.step(drawn_token, abort_in_flight=in_flight)
    for seq_id, (prompt, new) in admitted.items():
        if seq_id in engine.finished:
            seq = engine.finished[seq_id].sequence
            assert seq.completion_token_ids == expected_completion(prompt, new)
            assert seq.block_table == () and seq.num_cached_tokens == 0
        else:
            assert seq_id in ended
    assert engine.state.pool.num_free == num_blocks
    return engine


def _random_requests(rng):
    """(prompt, tokens to generate, urgency) of sequences that share heads or whole prompts."""
    head = [rng.randrange(3) for _ in range(rng.randint(0, 12))]
    num_priorities = rng.choice((1, 2, 4))
    requests = []
    for _ in range(rng.randint(1, 8)):
        tail = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        prompt = head[: rng.randint(0, len(head))] + tail
        urgency = {
            "priority": rng.randrange(num_priorities),
            # On a clock of steps; most come to their end before.
            "deadline_s": rng.choice((None, None, rng.randint(5, 200))),
        }
        new = rng.randint(1, 12)
        num_siblings = rng.choice((1, 1, 1, rng.randint(2, 4)))
        if num_siblings > 1:
            urgency["group_id"] = len(requests)
        requests += [(prompt, new, urgency)] * num_siblings
    return requests
