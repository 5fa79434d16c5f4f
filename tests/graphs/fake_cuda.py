"""A driver without a device: it writes down what it was asked, and how the process stood then."""

import contextlib
import gc
import weakref

import attrs

from graphs.device import MemoryFigures


@attrs.define
class Call:
    """One call, and the state of the process at that moment."""

    name: str
    detail: object = None
    on_side_stream: bool = False
    gc_enabled: bool = False


class FakeGraph:
    """Replays by calling the program."""

    def __init__(self, driver, program):
        self.num_nodes = 7
        self._driver = driver
        self._program = program

    def replay(self):
        self._driver.note("replay")
        if self._driver.fail_replays:
            raise RuntimeError("an illegal memory access was encountered")
        self._program()


class FakeCudaDriver:
    """Keeps a log, grows a made-up pool, and fails when told to."""

    def __init__(self, *, fail_records=(), fail_replays=False, error=RuntimeError):
        self.calls = []
        self.fail_records = set(fail_records)  # counted from 0
        self.fail_replays = fail_replays
        self.error = error
        self.during_record = lambda: None
        self.used_bytes = 1000
        self._num_pools = 0
        self._num_records = 0
        self._on_side_stream = False
        self._pool_bytes = {}

    def note(self, name, detail=None):
        self.calls.append(Call(name, detail, self._on_side_stream, gc.isenabled()))

    def new_pool(self):
        self._num_pools += 1
        self.note("new_pool", self._num_pools)
        self._pool_bytes[self._num_pools] = 0
        return self._num_pools

    @contextlib.contextmanager
    def on_side_stream(self):
        self._on_side_stream = True
        try:
            yield
        finally:
            self._on_side_stream = False

    def record(self, program, pool):
        self.note("record", pool)
        self.during_record()
        number, self._num_records = self._num_records, self._num_records + 1
        if number in self.fail_records:
            raise self.error("operation not permitted when stream is capturing")
        # The first, largest graph needs most; the others find room in its memory.
        self._pool_bytes[pool] = max(self._pool_bytes[pool], 4096)
        self.used_bytes += 100
        graph = FakeGraph(self, program)
        weakref.finalize(graph, self.note, "dropped").atexit = False
        return graph

    def synchronize(self):
        self.note("synchronize")

    def memory(self, pool):
        reserved = sum(self._pool_bytes.values())
        return MemoryFigures(self._pool_bytes[pool], reserved, self.used_bytes + reserved)

    def names(self):
        return [call.name for call in self.calls]
