"""The staging ring: every order of calls is lawful or refused, and no order of host and device
lets the device read bytes of another step.
"""

from collections import deque
from copy import deepcopy
from itertools import product

import pytest

from graphs import RingError, SlotState, StagingRing

NUM_STEPS, NUM_WORDS = 4, 2


class Pipeline:
    """A host that fills slots word by word, and a device that copies them word by word, later.

    Each runs on its own; `moves` are the things that can happen next, and one of them does.
    """

    def __init__(self, ring, waits=True):
        self.ring = ring
        self.waits = waits  # whether the host waits for a copy before it gives the slot back
        self.memory = [[None] * NUM_WORDS for _ in range(ring.depth)]
        self.slot, self.step, self.written = None, 0, 0
        self.queue = deque()  # copies that the device has yet to finish: (step, slot, words)
        self.num_done = 0
        self.num_released = 0

    def moves(self):
        if self.slot is not None and self.written < NUM_WORDS:
            yield self.write_word
        elif self.slot is not None:
            yield self.submit
        elif self.step < NUM_STEPS and self.ring.num_in_flight < self.ring.max_in_flight:
            yield self.begin
        if self.queue:
            yield self.copy_word
        if self.num_released < (self.num_done if self.waits else self.step):
            yield self.release

    def begin(self):
        self.slot, self.written = self.ring.begin_fill(), 0

    def write_word(self):
        self.memory[self.slot][self.written] = self.step
        self.written += 1

    def submit(self):
        self.ring.submit(self.slot)
        self.queue.append((self.step, self.slot, []))
        self.step, self.slot = self.step + 1, None

    def copy_word(self):
        step, slot, words = self.queue[0]
        words.append(self.memory[slot][len(words)])
        if len(words) == NUM_WORDS:
            assert words == [step] * NUM_WORDS, "the device read bytes of another step"
            self.queue.popleft()
            self.num_done += 1

    def release(self):
        self.ring.release(self.ring.oldest_in_flight)
        self.num_released += 1

    def key(self):
        queue = tuple((step, slot, tuple(words)) for step, slot, words in self.queue)
        memory = tuple(map(tuple, self.memory))
        return (
            (memory, queue, self.slot, self.step, self.written, self.num_done, self.num_released),
            self.ring.states,
        )


def explore(pipeline):
    """Every state that some interleaving reaches; returns how many."""
    seen, todo = {pipeline.key()}, [pipeline]
    while todo:
        state = todo.pop()
        names = [move.__name__ for move in state.moves()]
        assert names or state.num_released == NUM_STEPS, "stuck"
        for name in names:
            following = deepcopy(state)
            getattr(following, name)()
            if following.key() not in seen:
                seen.add(following.key())
                todo.append(following)
    return len(seen)


@pytest.mark.parametrize(("max_in_flight", "depth"), [(1, 2), (2, 3), (2, 4), (3, 4)])
def test_no_interleaving_lets_the_device_read_another_steps_bytes(max_in_flight, depth):
    """Nor does any make the host wait for a slot while fewer than the most are in flight."""
    assert explore(Pipeline(StagingRing(max_in_flight, depth=depth))) > 20


@pytest.mark.parametrize(("max_in_flight", "depth"), [(1, 2), (2, 3)])
def test_giving_slots_back_without_waiting_is_found(max_in_flight, depth):
    pipeline = Pipeline(StagingRing(max_in_flight, depth=depth), waits=False)

    with pytest.raises(AssertionError, match="bytes of another step"):
        explore(pipeline)


class Ledger:
    """Oracle: the rules of the ring, written down as plainly as possible."""

    def __init__(self, max_in_flight, depth):
        self.max_in_flight, self.depth = max_in_flight, depth
        self.filling, self.submitted, self.turn = None, [], 0

    def allows(self, verb, slot):
        match verb:
            case "begin_fill":
                return self.filling is None and self.turn not in self.submitted
            case "submit":
                return slot == self.filling and len(self.submitted) < self.max_in_flight
            case "cancel":
                return slot == self.filling
            case "release":
                return self.submitted[:1] == [slot]

    def apply(self, verb, slot):
        match verb:
            case "begin_fill":
                self.filling = self.turn
            case "submit":
                self.submitted.append(slot)
                self.filling, self.turn = None, (self.turn + 1) % self.depth
            case "cancel":
                self.filling = None
            case "release":
                self.submitted.remove(slot)


@pytest.mark.parametrize(("max_in_flight", "depth"), [(1, 2), (2, 3)])
def test_every_short_sequence_of_calls_is_allowed_or_refused_as_the_rules_say(max_in_flight, depth):
    calls = [
        ("begin_fill", None),
        *product(("submit", "cancel", "release"), range(-1, depth + 1)),
    ]
    todo = [(StagingRing(max_in_flight, depth=depth), Ledger(max_in_flight, depth), 0)]
    while todo:
        ring, ledger, length = todo.pop()
        for verb, slot in calls if length < 6 else ():
            following, rules = deepcopy(ring), deepcopy(ledger)
            arguments = () if slot is None else (slot,)
            if not ledger.allows(verb, slot):
                before = following.states
                with pytest.raises(RingError):
                    getattr(following, verb)(*arguments)
                assert following.states == before
                continue
            getattr(following, verb)(*arguments)
            rules.apply(verb, slot)
            assert following.num_in_flight == len(rules.submitted)
            assert following.oldest_in_flight == next(iter(rules.submitted), None)
            assert [state is SlotState.FILLING for state in following.states] == [
                index == rules.filling for index in range(depth)
            ]
            todo.append((following, rules, length + 1))


def test_errors_say_which_slot_to_wait_for():
    ring = StagingRing(1)
    ring.submit(ring.begin_fill())
    second = ring.begin_fill()

    with pytest.raises(RingError, match="most this ring allows; `release` slot 0"):
        ring.submit(second)
    with pytest.raises(RingError, match="slot 1 is being filled"):
        ring.begin_fill()


@pytest.mark.parametrize(("max_in_flight", "depth"), [(0, None), (2, 2), (2, 1)])
def test_refuses_a_ring_without_a_slot_to_spare(max_in_flight, depth):
    with pytest.raises(ValueError, match=r"`max_in_flight`|`depth`"):
        StagingRing(max_in_flight, depth=depth)
