"""`check` finds each kind of broken state, and names the law."""

from array import array

import attrs
import pytest

from nanovllm.core import BrokenLawError, SchedulerLimits, Sequence, SequenceStatus, check, schedule
from tests.core.fake_engine import FakeEngine, drawn_token

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=100)


@pytest.fixture
def state():
    """Two run, a third is partly cached, a fourth and a fifth wait."""
    engine = FakeEngine(32, 2, LIMITS)
    for seq_id, num_tokens in enumerate((2, 2, 9, 3, 3)):
        engine.admit(seq_id, [seq_id] * num_tokens, max_tokens=9)
    for _ in range(2):
        engine.step(drawn_token)
    assert [len(engine.state.running), len(engine.state.waiting)] == [2, 3]
    return engine.state


def change(state, where, index, **fields):
    """The state with one sequence changed."""
    draft = getattr(state, where)[index].thaw()
    for name, value in fields.items():
        setattr(draft, name, value)
    seqs = list(getattr(state, where))
    seqs[index] = draft.freeze()
    return attrs.evolve(state, **{where: tuple(seqs)})


def change_info(state, where, index, **fields):
    info = getattr(state, where)[index].info
    return change(state, where, index, info=attrs.evolve(info, **fields))


def change_array(state, name, index, value):
    changed = getattr(state.pool, name)[:]
    changed[index] = value
    return attrs.evolve(state, pool=attrs.evolve(state.pool, **{name: changed}))


def change_entry(state, **fields):
    """The state with one entry of the prefix map changed."""
    place = next(index for index, shard in enumerate(state.pool.shards) if shard)
    shards = [dict(shard) for shard in state.pool.shards]
    key, entry = next(iter(shards[place].items()))
    shards[place][key] = entry._replace(**fields)
    return attrs.evolve(state, pool=attrs.evolve(state.pool, shards=tuple(shards)))


def drop_entries(state):
    return attrs.evolve(
        state, pool=attrs.evolve(state.pool, shards=tuple({} for _ in state.pool.shards))
    )


def skip_a_free_block(state):
    """The list passes over its second block, consistently in both directions."""
    first, _, third = state.pool.free_block_ids[:3]
    return change_array(
        change_array(state, "next_free", first, third), "previous_free", third, first
    )


def other_tokens(state):
    seq = state.running[0]
    return change(state, "running", 0, token_log=array("i", [9] * seq.num_tokens))


BREAKAGES = {
    "ids are unique": [
        lambda s: attrs.evolve(s, running=(s.running[0], s.running[0])),
    ],
    "cached and scheduled tokens are tokens": [
        lambda s: change(s, "waiting", 0, num_cached_tokens=10),
        lambda s: change(s, "waiting", 1, num_cached_tokens=-1),
    ],
    "status follows from the counts": [
        lambda s: change(s, "waiting", 1, status=SequenceStatus.RUNNING),
        lambda s: change(s, "waiting", 0, num_cached_tokens=9),
        lambda s: change(s, "running", 0, status=SequenceStatus.WAITING),
        lambda s: change(s, "running", 0, num_cached_tokens=0),
    ],
    "a table covers what is cached and scheduled": [
        lambda s: change(s, "running", 0, packed_block_table=b""),
        lambda s: change(s, "waiting", 0, packed_block_table=bytes(4 * 6)),
        lambda s: change(s, "waiting", 1, prefix=(1, 1)),
        lambda s: change(s, "running", 0, packed_block_table=bytes(4)),
    ],
    "the queue is in order": [
        lambda s: attrs.evolve(s, waiting=s.waiting[::-1]),
        lambda s: change(s, "waiting", 2, packed_block_table=bytes(4)),
        lambda s: change_info(s, "waiting", 1, arrival=99),
        lambda s: change_info(s, "waiting", 2, priority=-1),
        lambda s: change_info(s, "waiting", 2, deadline_s=1e9),
    ],
    "no deadline is overlooked": [
        lambda s: change_info(s, "running", 0, deadline_s=1.0),
    ],
    "every sequence can fit": [
        lambda s: change(s, "waiting", 1, info=attrs.evolve(s.waiting[1].info, max_num_tokens=999)),
    ],
    "references equal table entries": [
        lambda s: change_array(s, "ref_counts", 0, 2),
        lambda s: change(
            s, "running", 0, packed_block_table=s.running[0].packed_block_table[:4] * 2
        ),
    ],
    "the free list holds what nobody uses": [
        lambda s: change_array(s, "next_free", 32, s.pool.free_block_ids[1]),
        lambda s: change_array(s, "previous_free", 32, 0),
        lambda s: attrs.evolve(s, pool=attrs.evolve(s.pool, num_free=1)),
        lambda s: change_array(s, "previous_free", s.pool.free_block_ids[0], 0),
        skip_a_free_block,
    ],
    "the prefix map and the blocks' keys agree": [
        lambda s: change_entry(s, block_id=31),
        lambda s: change_entry(s, tokens=b"1"),
        lambda s: change_entry(s, parent_id=10**6),
        drop_entries,
    ],
    "cached blocks hold their tokens": [other_tokens],
}
CASES = [(law, breakage) for law, breakages in BREAKAGES.items() for breakage in breakages]


def test_a_good_state_passes(state):
    check(state, LIMITS, at_rest=True)
    check(schedule(state, LIMITS)[0], LIMITS)


@pytest.mark.parametrize(("law", "breakage"), CASES)
def test_each_broken_law_is_named(state, law, breakage):
    with pytest.raises(BrokenLawError, match=f"^{law}: "):
        check(breakage(state), LIMITS, at_rest=True)


def test_a_block_registered_before_its_kv_exist_is_found(state):
    early = change(state, "waiting", 0, num_cached_tokens=0)
    with pytest.raises(BrokenLawError, match="registered before its K/V exist"):
        check(early)


def test_a_block_twice_in_one_table_is_found(state):
    seq = state.running[0]
    table = seq.packed_block_table
    twice = change(state, "running", 0, packed_block_table=table[:4] + table[:4])
    counted = change_array(twice, "ref_counts", seq.block_table[0], 2)
    counted = change_array(counted, "ref_counts", seq.block_table[1], 0)
    with pytest.raises(BrokenLawError, match="the same block twice"):
        check(counted)


def test_seats_are_counted(state):
    with pytest.raises(BrokenLawError, match="3 of 2"):
        check(state, SchedulerLimits(2, 4, 100))


def test_something_scheduled_at_rest_is_found(state):
    in_flight, _ = schedule(state, LIMITS)
    with pytest.raises(BrokenLawError, match="nothing is scheduled at rest"):
        check(in_flight, at_rest=True)


def test_sequences_of_a_state_are_sequences(state):
    assert all(isinstance(seq, Sequence) for seq in (*state.running, *state.waiting))
