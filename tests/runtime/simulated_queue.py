"""A device that does its work late: a test of what may be touched while it is on its way."""

import random
from collections import deque

import torch


class SimulatedQueue:
    """Does nothing until it has to, or a little now and then, always in order.

    Host memory is read when a copy runs, not when it was asked for: whoever fills a buffer too
    early changes a step that is on its way, as on a device.
    """

    def __init__(self, seed=None):
        self.work = deque()
        self.rng = None if seed is None else random.Random(seed)
        self.num_done = 0
        self.most_waiting = 0

    def host_buffer(self, num_words):
        return torch.zeros(num_words, dtype=torch.int32)

    def upload(self, host, device):
        self._put(lambda: device.copy_(host))

    def run(self, work):
        self._put(work)

    def download(self, device, host):
        host.fill_(-99)  # what is read too early is no token
        self._put(lambda: host.copy_(device))
        return _Ticket(self, self.num_done + len(self.work))

    def close(self):
        self.run_until(self.num_done + len(self.work))

    def give_back(self):
        pass

    def run_until(self, count):
        while self.num_done < count:
            self.num_done += 1
            self.work.popleft()()

    def _put(self, work):
        self.work.append(work)
        self.most_waiting = max(self.most_waiting, len(self.work))
        if self.rng is not None and self.rng.random() < 0.3:
            self.run_until(self.num_done + self.rng.randint(0, len(self.work)))


class _Ticket:
    def __init__(self, queue, count):
        self.queue, self.count = queue, count

    def wait(self):
        self.queue.run_until(self.count)
