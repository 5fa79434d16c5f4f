"""Slots for steps in flight: none is written again while a device may still read it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import ZERO, Column, Fill, StepLayout, Table
from nanovllm.runtime.staging import Staging

LAYOUT = StepLayout(4, (), (Column("token", ZERO),), Table("blocks", 2, Fill(0)))
MAX_IN_FLIGHT = 2


class LateQueue:
    """A device that is as late as can be: it works only while somebody waits for it.

    Attributes:
        done: What each step's upload has read, in the order of the steps.
    """

    def __init__(self):
        self.done = []
        self._todo = []

    def host_buffer(self, num_words):
        return torch.zeros(num_words, dtype=torch.int32)

    def upload(self, host, device):
        self._todo.append(lambda: device.copy_(host))

    def download(self, device, host):
        def work():
            host.copy_(device)
            self.done.append(int(device[0]))

        self._todo.append(work)
        return LateTicket(self, len(self.done) + len(self._todo) // 2)

    def work_until(self, num_done):
        while len(self.done) < num_done:
            self._todo.pop(0)()


class LateTicket:
    """The end of the step of this number, counted from 1."""

    def __init__(self, queue, number):
        self.queue, self.number = queue, number

    def wait(self):
        self.queue.work_until(self.number)


class Host:
    """Sends the numbers of steps to the device and has them back."""

    def __init__(self):
        self.queue = LateQueue()
        self.staging = Staging(self.queue, LAYOUT, num_mixed_words=8, max_in_flight=MAX_IN_FLIGHT)
        self.device = torch.zeros(8, dtype=torch.int32)
        self.flights = []
        self.num_begun = 0

    def submit(self):
        """A step that sends its own number, counted from 1."""
        slot = self.staging.begin()
        self.num_begun += 1
        slot.mixed[:] = self.num_begun
        self.queue.upload(slot.mixed_words, self.device)
        ticket = self.queue.download(self.device[:4], slot.token_words)
        self.staging.fly(slot, ticket)
        self.flights.append((self.num_begun, slot, ticket))

    def begin_and_cancel(self):
        slot = self.staging.begin()
        slot.mixed[:] = -1
        self.staging.cancel(slot)

    def land_oldest(self):
        """Ask for the result of the oldest step that nobody has asked for or dropped."""
        if self.flights:
            number, slot, ticket = self.flights.pop(0)
            self.staging.land(ticket)
            assert slot.tokens.tolist() == [number] * 4

    def drop_oldest(self):
        if self.flights:
            self.flights.pop(0)

    def keep_what_may_be_in_flight(self):
        """The engine asks for results in order, soon: what is older can't be asked for any more."""
        self.flights = self.flights[-MAX_IN_FLIGHT:]


ACTIONS = ("submit", "submit", "land_oldest", "drop_oldest", "begin_and_cancel")


@settings(deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=40))
def test_every_step_sends_its_own_numbers_however_late_the_device_is(actions):
    """Steps are submitted, asked for, dropped and called off in any order."""
    host = Host()
    for action in actions:
        getattr(host, action)()
        host.keep_what_may_be_in_flight()
    host.queue.work_until(host.num_begun)

    assert host.queue.done == list(range(1, host.num_begun + 1))


def test_results_that_nobody_asks_for_never_block_the_steps_after_them():
    host = Host()
    for _ in range(20):
        host.submit()
        host.flights.clear()

    host.submit()
    host.land_oldest()
    assert host.queue.done == list(range(1, 22))


def test_as_many_steps_are_in_flight_as_may_be_and_no_more():
    host = Host()
    host.submit()
    host.submit()
    assert host.queue.done == []  # nobody has waited

    host.staging.cancel(host.staging.begin())
    assert host.queue.done == [1]


def test_a_step_may_be_asked_for_after_the_one_behind_it():
    host = Host()
    host.submit()
    host.submit()
    (_, first, first_ticket), (_, second, second_ticket) = host.flights
    host.staging.land(second_ticket)
    host.staging.land(first_ticket)

    assert first.tokens.tolist() == [1] * 4
    assert second.tokens.tolist() == [2] * 4
    host.submit()  # and both slots are free again
    host.submit()
    assert host.queue.done == [1, 2]


def test_slots_share_no_memory():
    slots = []
    host = Host()
    for _ in range(MAX_IN_FLIGHT + 1):
        host.submit()
        slots.append(host.flights[-1][1])

    words = [words for slot in slots for words in (slot.mixed, slot.tokens, slot.decode.vector)]
    assert len(slots) == len({slot.index for slot in slots})
    for index, one in enumerate(words):
        assert not any(np.shares_memory(one, other) for other in words[:index])


@pytest.mark.parametrize("field", ["decode", "mixed", "tokens"])
def test_arrays_and_words_of_a_slot_are_the_same_memory(field):
    slot = Host().staging.begin()
    array, words = {
        "decode": (slot.decode.vector, slot.decode_words),
        "mixed": (slot.mixed, slot.mixed_words),
        "tokens": (slot.tokens, slot.token_words),
    }[field]
    array[:] = 5

    assert words.tolist() == [5] * len(words)
