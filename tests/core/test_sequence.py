"""A sequence is a value: it can't be changed, and other snapshots never show through."""

import pickle

import attrs
import pytest

from nanovllm.core import Sequence, SequenceStatus
from nanovllm.core.sequence import MAX_TOKEN_ID, SequenceDraft
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams


def make(token_ids=(1, 2, 3, 4, 5), block_size=4, **params):
    return Sequence.create(7, token_ids, SamplingParams(**params), block_size=block_size)


def append(seq, token_id):
    draft = seq.thaw()
    draft.append_token(token_id)
    return draft.freeze()


def test_reports_what_it_was_made_of():
    seq = make(temperature=0.5, max_tokens=9, ignore_eos=True)

    assert (seq.seq_id, seq.num_tokens, len(seq), seq.num_prompt_tokens) == (7, 5, 5, 5)
    assert seq.token_ids == seq.prompt_token_ids == (1, 2, 3, 4, 5)
    assert seq.completion_token_ids == () and seq.num_completion_tokens == 0
    assert (seq.last_token, seq[0], seq[-1], seq[1:3]) == (5, 1, 5, (2, 3))
    assert (seq.temperature, seq.max_tokens, seq.ignore_eos) == (0.5, 9, True)
    assert seq.sampling_params.max_tokens == 9
    assert seq.status is SequenceStatus.WAITING and seq.is_prefill and not seq.is_finished
    assert (seq.num_cached_tokens, seq.num_scheduled_tokens, seq.block_table) == (0, 0, ())
    assert "seq_id=7" in repr(seq) and "WAITING" in repr(seq)


def test_default_parameters_are_those_of_sampling_params():
    assert Sequence.create(1, [1]).sampling_params == SamplingParams()


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4)]
)
def test_the_last_block_of_an_exact_multiple_is_full_and_not_empty(num_tokens, num_blocks, last):
    seq = make(range(num_tokens))

    assert (seq.num_blocks, seq.last_block_num_tokens) == (num_blocks, last)
    assert seq.block(num_blocks - 1) == tuple(range(num_tokens))[-last:]
    for index in (-1, num_blocks):
        with pytest.raises(IndexError):
            seq.block(index)


def test_has_the_same_slots_as_its_draft_so_that_freezing_in_place_is_sound():
    names = {field.name for field in attrs.fields(Sequence)}

    assert set(Sequence.__slots__) == set(SequenceDraft.__slots__) == names


def test_can_not_be_edited_even_by_who_built_it():
    draft = make().thaw()
    seq = draft.freeze()

    assert seq is draft and type(seq) is Sequence
    for name in Sequence.__slots__:
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(draft, name, None)
    with pytest.raises(AttributeError):
        draft.append_token(1)


def test_snapshots_share_a_log_and_none_sees_the_tokens_of_another():
    first = make()
    second = append(first, 6)
    third = append(second, 7)
    other = append(first, 8)

    assert second.token_log is first.token_log
    assert other.token_log is not first.token_log
    assert first.token_ids == (1, 2, 3, 4, 5)
    assert second.token_ids == (1, 2, 3, 4, 5, 6)
    assert third.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert other.token_ids == (1, 2, 3, 4, 5, 8)
    assert (first.last_token, second.last_token, other.last_token) == (5, 6, 8)
    assert first.block(1) == (5,)


def test_does_not_follow_the_callers_list():
    prompt = [1, 2, 3]
    seq = make(prompt)
    prompt.append(4)
    prompt[0] = 9

    assert seq.token_ids == (1, 2, 3)


def test_equal_values_are_equal_whatever_their_logs_hold_besides():
    first = make()
    append(first, 6)

    assert first == make() and hash(first) == hash(make())
    assert first != append(first, 6)
    assert first != "a sequence"


def test_pickles_its_own_tokens_only():
    first = make()
    append(first, 6)
    restored = pickle.loads(pickle.dumps(first))

    assert restored == first and type(restored) is Sequence
    assert len(restored.token_log) == 5


@pytest.mark.parametrize(
    "token_ids", [[], [1.0], [True], ["1"], [None], [-1], [MAX_TOKEN_ID + 1], [2**70]]
)
def test_refuses_what_is_no_prompt(token_ids):
    with pytest.raises(RequestError):
        make(token_ids)


def test_accepts_any_iterable_of_plain_ids():
    assert make(iter([1, 2])).token_ids == make((1, 2)).token_ids == (1, 2)
    assert make([MAX_TOKEN_ID]).last_token == MAX_TOKEN_ID


@pytest.mark.parametrize(
    ("status", "num_cached", "num_tokens_more", "expected"),
    [
        (SequenceStatus.WAITING, 0, 0, True),
        (SequenceStatus.RUNNING, 3, 0, True),  # the last chunk of a prompt
        (SequenceStatus.RUNNING, 4, 0, True),  # that chunk, one token long: nothing drawn yet
        (SequenceStatus.RUNNING, 5, 1, False),
        (SequenceStatus.RUNNING, 3, 1, True),  # again after preemption
        (SequenceStatus.FINISHED, 0, 1, False),
    ],
)
def test_is_prefill_until_only_its_newest_token_is_left(
    status, num_cached, num_tokens_more, expected
):
    draft = make().thaw()
    draft.status, draft.num_cached_tokens = status, num_cached
    for _ in range(num_tokens_more):
        draft.append_token(9)

    assert draft.freeze().is_prefill is expected
