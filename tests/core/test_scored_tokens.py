"""Prompt positions whose logits are asked for: each one, in order, whatever the schedule."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    admit,
    build_batch,
    postprocess,
    schedule,
)
from nanovllm.sampling_params import SamplingParams


def scored(batch):
    return list(
        zip(
            batch.scored_indices.tolist(),
            batch.scored_ids.tolist(),
            batch.scored_num_top.tolist(),
            strict=True,
        )
    )


def run(state, limits, prompts):
    """Run to the end; what was scored of each prompt, and whether a chunked one lost its blocks."""
    known = {seq_id: [None] for seq_id in prompts}
    lost_a_chunk = False
    for _ in range(1000):
        begun = {seq.seq_id for seq in state.waiting if seq.num_cached_tokens}
        state, plan = schedule(state, limits)
        lost_a_chunk |= bool(begun & set(plan.preempted))
        if not plan.scheduled:
            return known, lost_a_chunk
        batch = build_batch(plan)
        left = scored(batch)
        for row, seq in enumerate(plan.scheduled):
            mine, left = left[: seq.num_scored_tokens], left[seq.num_scored_tokens :]
            first = int(batch.cu_seqlens_q[row])
            assert [index for index, _, _ in mine] == list(range(first, first + len(mine)))
            assert {num_top for _, _, num_top in mine} <= {seq.sampling_params.prompt_logprobs}
            if mine:
                known[seq.seq_id][seq.num_cached_tokens + 1 :] = [token for _, token, _ in mine]
        assert not left
        assert not set(batch.scored_indices.tolist()) & set(batch.logits_indices.tolist())
        state, _ = postprocess(state, plan, [7] * len(plan.scheduled))
    raise AssertionError("it never ends")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_prompt_token_is_scored_by_those_that_ask_and_none_by_the_others(data):
    block_size = data.draw(st.integers(1, 4))
    prompts = {
        seq_id: data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
        for seq_id in range(data.draw(st.integers(1, 5)))
    }
    asks = {seq_id: data.draw(st.sampled_from([None, 0, 2])) for seq_id in prompts}
    limits = SchedulerLimits(
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_num_batched_tokens=data.draw(st.integers(1, 20)),
        max_model_len=64,
    )
    num_blocks = -(-17 // block_size) + data.draw(st.integers(0, 4))
    state = EngineState.create(num_blocks, block_size)
    for seq_id, prompt in prompts.items():
        params = SamplingParams(max_tokens=6, prompt_logprobs=asks[seq_id])
        state = admit(state, Sequence.create(seq_id, prompt, params), limits)

    known, _ = run(state, limits, prompts)

    for seq_id, prompt in prompts.items():
        assert known[seq_id] == [None, *(prompt[1:] if asks[seq_id] is not None else [])]


def test_a_prompt_that_loses_its_blocks_between_two_chunks_is_scored_anew():
    limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=3, max_model_len=64)
    state = EngineState.create(9, 1)
    prompts = {0: [1, 2], 1: [4, 5, 6, 7, 8, 9]}
    for seq_id, prompt in prompts.items():
        params = SamplingParams(max_tokens=4, prompt_logprobs=0)
        state = admit(state, Sequence.create(seq_id, prompt, params), limits)

    known, lost_a_chunk = run(state, limits, prompts)

    assert known == {seq_id: [None, *prompt[1:]] for seq_id, prompt in prompts.items()}
    assert lost_a_chunk


def test_a_cached_prompt_is_computed_again_only_for_those_that_ask():
    limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=64)
    state = EngineState.create(16, 4)
    hits = []
    for seq_id, asked in enumerate([None, None, 0, None]):
        params = SamplingParams(max_tokens=1, prompt_logprobs=asked)
        state = admit(state, Sequence.create(seq_id, range(9), params), limits)
        state, plan = schedule(state, limits)
        hits += [num_tokens for _, num_tokens in plan.prefix_hits]
        assert len(build_batch(plan).scored_indices) == (8 if asked == 0 else 0)
        state, _ = postprocess(state, plan, [7])

    assert hits == [0, 8, 0, 8]


def test_what_is_known_already_is_not_asked_for_again_after_a_preemption():
    seq = Sequence.create(0, [1, 2, 3], SamplingParams(prompt_logprobs=1))
    draft = seq.thaw()
    draft.append_token(9)
    later = draft.freeze()

    assert (seq.needs_prompt_logits, later.needs_prompt_logits) == (True, False)
    assert later.num_scored_tokens == 0
