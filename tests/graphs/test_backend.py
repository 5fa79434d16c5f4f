"""What all backends share: the order of a session, static buffers, and the eager backend."""

import gc

import pytest
import torch

from graphs import (
    EagerBackend,
    EventKind,
    GraphKey,
    GraphSession,
    SessionError,
    StaticTensors,
    capture_order,
)
from graphs.cuda import CudaBackend
from graphs.guard import CaptureGuard
from graphs.statics import StaticsRecord
from graphs.tape import TapeBackend
from tests.graphs.fake_cuda import FakeCudaDriver


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Let the collections that sessions make pass over what other tests left behind."""
    gc.freeze()
    yield
    gc.unfreeze()


def backends():
    return {
        "eager": EagerBackend(),
        "tape": TapeBackend(),
        "cuda": CudaBackend(FakeCudaDriver(), guard=CaptureGuard()),
    }


class Counting:
    """A program that adds one, over one static buffer."""

    def __init__(self):
        self.total = torch.zeros(1)
        self.num_resets = 0

    def program(self):
        self.total.add_(1.0)

    def reset(self):
        self.num_resets += 1
        self.total.zero_()

    def statics(self):
        return StaticTensors({"total": self.total})


@pytest.fixture(params=["eager", "tape", "cuda"])
def backend(request):
    return backends()[request.param]


def capture_all(session: GraphSession, counting, *buckets):
    return [
        session.capture(GraphKey(bucket), counting.program, reset=counting.reset)
        for bucket in buckets
    ]


class TestEverySession:
    def test_replays_what_was_captured(self, backend):
        counting = Counting()
        with backend.session(counting.statics()) as session:
            large, small = capture_all(session, counting, 8, 1)
            info = session.seal()
            counting.total.zero_()
            for step in (large, small, large):
                step.replay()

            assert counting.total.item() == 3.0
            assert (large.key, small.key) == (GraphKey(8), GraphKey(1))
            assert info.captures == (large.info, small.info)

    def test_leaves_the_buffers_as_reset_left_them(self, backend):
        counting = Counting()
        with backend.session(counting.statics()) as session:
            capture_all(session, counting, 8, 1)
            session.seal()

            assert counting.total.item() == 0.0

    def test_says_what_it_captured_and_when_it_is_done(self, backend):
        events = []
        counting = Counting()
        with backend.session(counting.statics(), events.append) as session:
            (step,) = capture_all(session, counting, 8)
            info = session.seal()
        told = {event.kind: event.data.get("info") for event in events}

        assert told[EventKind.CAPTURED] == step.info
        assert told[EventKind.SEALED] == info
        assert events[-1].kind is EventKind.SEALED

    def test_refuses_small_before_large(self, backend):
        counting = Counting()
        with backend.session(counting.statics()) as session:
            capture_all(session, counting, 4)
            with pytest.raises(SessionError, match=r"bucket 8 after bucket 4.*`capture_order`"):
                capture_all(session, counting, 8)

    def test_captures_several_programs_of_one_bucket(self, backend):
        counting = Counting()
        keys = [GraphKey(4, "greedy"), GraphKey(4, "sample"), GraphKey(4, "sample", 1)]
        with backend.session(counting.statics()) as session:
            for key in keys:
                session.capture(key, counting.program, reset=counting.reset)

            assert [one.key for one in session.seal().captures] == keys

    def test_refuses_the_same_key_twice(self, backend):
        counting = Counting()
        with (
            backend.session(counting.statics()) as session,
            pytest.raises(SessionError, match="captured already"),
        ):
            capture_all(session, counting, 4, 4)

    @pytest.mark.parametrize(("bucket", "warmups"), [(0, 2), (4, 0)])
    def test_refuses_no_rows_and_no_warmups(self, backend, bucket, warmups):
        """A capture without a warm-up would record the compiling of kernels."""
        counting = Counting()
        with (
            backend.session(counting.statics()) as session,
            pytest.raises(SessionError, match="must be at least 1"),
        ):
            session.capture(
                GraphKey(bucket), counting.program, reset=counting.reset, warmups=warmups
            )

    def test_refuses_captures_after_seal_and_after_close(self, backend):
        counting = Counting()
        session = backend.session(counting.statics())
        session.seal()
        with pytest.raises(SessionError, match="the session is sealed"):
            capture_all(session, counting, 4)
        with pytest.raises(SessionError, match="cannot seal a session that is sealed"):
            session.seal()
        session.close()
        with pytest.raises(SessionError, match="the session is closed"):
            capture_all(session, counting, 4)

    def test_refuses_replays_after_close_which_may_come_twice(self, backend):
        counting = Counting()
        with backend.session(counting.statics()) as session:
            (step,) = capture_all(session, counting, 4)
            session.seal()
        session.close()

        with pytest.raises(SessionError, match="closed"):
            step.replay()

    def test_offers_no_way_to_give_up_a_single_graph(self, backend):
        """Pitfall 20: graphs of a session share workspaces."""
        counting = Counting()
        with backend.session(counting.statics()) as session:
            (step,) = capture_all(session, counting, 4)
            public = {name for name in dir(step) if not name.startswith("_")}

            assert not public & {"close", "reset", "release", "free", "__exit__"}


def test_backends_say_what_they_do():
    said = {name: backend.caps for name, backend in backends().items()}

    assert {name: backend.name for name, backend in backends().items()} == {n: n for n in said}
    assert [caps.captures for caps in said.values()] == [False, True, True]
    assert [caps.verifies for caps in said.values()] == [False, True, False]


def test_capture_order_is_largest_first_and_keeps_the_order_of_equals():
    keys = [GraphKey(1), GraphKey(4, "sample"), GraphKey(8), GraphKey(4, "greedy")]

    assert capture_order(keys) == (keys[2], keys[1], keys[3], keys[0])


class TestStaticsRecord:
    def tensors(self):
        return {"a": torch.zeros(4, 4), "b": torch.zeros(2)}

    def test_sees_no_change_where_buffers_are_written(self):
        tensors = self.tensors()
        record = StaticsRecord.of(StaticTensors(tensors))
        tensors["a"].copy_(torch.ones(4, 4))
        tensors["b"][:] = 3

        assert record.changes(StaticTensors(tensors)) == ()

    @pytest.mark.parametrize(
        "replace",
        [
            lambda a: a.clone(),
            lambda a: a[:2],
            lambda a: a.t(),
            lambda a: a.view(16),
            lambda a: a.view(torch.int32),
            lambda a: a[1:],
        ],
    )
    def test_names_a_buffer_that_is_another_tensor(self, replace):
        tensors = self.tensors()
        record = StaticsRecord.of(StaticTensors(tensors))
        tensors["a"] = replace(tensors["a"])

        (change,) = record.changes(StaticTensors(tensors))
        assert "static `a` was replaced" in change and "copy_" in change

    def test_names_buffers_that_came_and_went(self):
        tensors = self.tensors()
        record = StaticsRecord.of(StaticTensors(tensors))
        tensors["c"] = tensors.pop("b")

        assert record.changes(StaticTensors(tensors)) == (
            "static `b` is gone",
            "static `c` is new",
        )

    def test_memory_of_a_lost_buffer_is_not_mistaken_for_it(self):
        """A new tensor may get the very address of one that was given up."""
        tensors = self.tensors()
        record = StaticsRecord.of(StaticTensors(tensors))
        for _ in range(50):
            tensors["a"] = torch.zeros(4, 4)

            assert record.changes(StaticTensors(tensors))
