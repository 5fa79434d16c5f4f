"""The tape: it repeats operations and not Python, and says what could not be captured."""

import numpy as np
import pytest
import torch

from graphs import CaptureError, EventKind, GraphKey, StaticsError, StaticTensors
from graphs.findings import FindingKind
from graphs.recording import find_escapes, record
from graphs.tape import TapeBackend
from graphs.verdict import MismatchKind
from tests.graphs import toy


@torch.library.custom_op("graphs_toy::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    """A kernel that works on numpy, as kernels written in Python do."""
    return torch.from_numpy(x.numpy() * 0.5)


@halve.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("graphs_toy::add_and_return_sum", mutates_args=("total",))
def add_and_return_sum(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Writes an argument and makes something new."""
    total.add_(x)
    return total.sum(0, keepdim=True)


def kinds(function, *statics):
    """What is found in a program that calls `function` and drops its result."""

    def program():
        function()

    return [finding.kind for finding in record(program, statics).findings]


class TestReplay:
    def replayed(self, program, x, out, inputs):
        """What a recorded program makes of each input, over poisoned memory."""
        results = []
        with TapeBackend().session(StaticTensors({"x": x, "out": out})) as session:
            graph = session.capture(GraphKey(1), program, reset=lambda: x.zero_())
            for values in inputs:
                x.copy_(torch.as_tensor(values))
                graph.replay()
                results.append(out.clone())
            assert session.findings == ()
        return results

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: torch.nn.functional.linear(x, x.t() * 0.1),
            lambda x: x.view(4).view(2, 2).t().reshape(4).view(2, 2).contiguous(),
            lambda x: torch.nn.functional.rms_norm(x, (2,)).softmax(1).log(),
            lambda x: torch.cat(x.split(1, dim=1), dim=1).sort(1, descending=True).values,
            lambda x: x.squeeze(0).unsqueeze_(0)[0].clone().add_(1).mul_(x),
            lambda x: torch.where(x > 0, x, 0.0).masked_fill_(x > 5, -1.0),
            lambda x: halve(x) + halve(x + 2),
            lambda x: add_and_return_sum(x.clone(), x).expand(2, 2),
            lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[
                0
            ],
            lambda x: x.new_empty(2, 2).copy_(x) + x.new_zeros(1) + torch.arange(2),
            lambda x: x.scatter(1, torch.zeros(2, 1, dtype=torch.int64), 3.0)[:, x.shape[1] - 1 :],
        ],
    )
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_repeats_what_the_program_would_do(self, function, mode):
        x, out = torch.zeros(2, 2), torch.zeros(2, 2)

        def program():
            with mode():
                out.copy_(function(x))

        inputs = [[[1.0, 2], [3, 4]], [[-6.0, 7], [8, 9]], [[1.0, 2], [3, 4]]]
        for values, result in zip(inputs, self.replayed(program, x, out, inputs), strict=True):
            with torch.no_grad():
                wanted = function(torch.tensor(values)).expand(2, 2)
            torch.testing.assert_close(result, wanted)

    def test_runs_no_python_of_the_program(self):
        x, out, calls = torch.zeros(1), torch.zeros(1), []

        def program():
            calls.append(len(calls))
            out.copy_(x + len(calls))

        results = self.replayed(program, x, out, [[10.0], [20.0]])

        assert len(calls) == 4  # two warm-ups, the search for escapes, the recording
        assert [result.item() for result in results] == [14.0, 24.0]

    def test_memory_that_was_never_written_stays_poisoned(self):
        x, out = torch.zeros(1), torch.zeros(1)

        def program():
            out.copy_(torch.empty(1).add_(x))

        assert self.replayed(program, x, out, [[1.0]])[0].isnan().all()

    def test_the_memory_of_every_graph_is_poisoned_by_each(self):
        out, kept = torch.zeros(1), []

        def keep():
            kept[:] = [out + 1]

        with TapeBackend().session(StaticTensors({"out": out})) as session:
            session.capture(GraphKey(2), keep, reset=lambda: None)
            other = session.capture(GraphKey(1), lambda: None, reset=lambda: None)
            other.replay()

            assert kept[0].isnan().all()

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bfloat16])
    def test_poison_is_no_value_that_a_program_makes(self, dtype):
        seen = []
        static = torch.zeros(3, dtype=dtype)

        def program():
            seen[:] = [static + 1]

        with TapeBackend().session(StaticTensors({"static": static})) as session:
            session.capture(GraphKey(1), program, reset=lambda: None)
            session.poison()

        assert not (seen[0] == 1).any()

    def test_a_shape_that_changes_is_an_error(self):
        mask, out = torch.tensor([True, True, False]), torch.zeros(1)

        def program():
            out.copy_(mask.nonzero().sum())

        with TapeBackend().session(StaticTensors({"mask": mask, "out": out})) as session:
            graph = session.capture(GraphKey(1), program, reset=lambda: None)
            mask[0] = False
            with pytest.raises(CaptureError, match=r"made \[2, 1\] .* \[1, 1\] when replayed"):
                graph.replay()


X = torch.arange(6.0)
MASK = X > 2


class TestFindings:
    @pytest.mark.parametrize(
        ("program", "kind"),
        [
            (lambda: X[0].item(), FindingKind.HOST_SYNC),
            (lambda: bool(X[0] > 1), FindingKind.HOST_SYNC),
            (lambda: range(9)[X[0].long()], FindingKind.HOST_SYNC),
            (lambda: f"{X[0]}", FindingKind.HOST_SYNC),
            (lambda: torch.equal(X, X), FindingKind.HOST_SYNC),
            (lambda: X.tolist(), FindingKind.HOST_SYNC),
            (lambda: X.numpy(), FindingKind.HOST_SYNC),
            (lambda: np.asarray(X), FindingKind.HOST_SYNC),
            (lambda: X.cpu(), FindingKind.HOST_SYNC),
            (lambda: X[MASK], FindingKind.DYNAMIC_SHAPE),
            (lambda: X.masked_select(MASK), FindingKind.DYNAMIC_SHAPE),
            (lambda: X.nonzero(), FindingKind.DYNAMIC_SHAPE),
            (lambda: X.unique(), FindingKind.DYNAMIC_SHAPE),
            (lambda: X.index_put_((MASK,), X[0]), FindingKind.DYNAMIC_SHAPE),
            (lambda: X.repeat_interleave(MASK.long()), FindingKind.DYNAMIC_SHAPE),
            (lambda: torch.tensor([1.0]), FindingKind.HOST_CONSTANT),
            (lambda: torch.as_tensor(np.ones(2)), FindingKind.HOST_CONSTANT),
            (lambda: torch.rand(2), FindingKind.TORCH_RNG),
            (lambda: X.multinomial(1), FindingKind.TORCH_RNG),
            (lambda: torch.empty(2).exponential_(), FindingKind.TORCH_RNG),
            (lambda: torch.nn.functional.dropout(X, 0.5), FindingKind.TORCH_RNG),
            (lambda: torch.empty(6, device="meta").copy_(X), FindingKind.MIXED_DEVICES),
        ],
    )
    def test_names_what_cannot_be_captured(self, program, kind):
        assert kinds(program, X, MASK) == [kind]

    @pytest.mark.parametrize(
        "program",
        [
            lambda: X[torch.zeros(2, dtype=torch.int64)],
            lambda: X[None, 1:, ...],
            lambda: X.masked_fill(MASK, 0.0),
            lambda: torch.where(MASK, X, 0.0),
            lambda: X.sort(),
            lambda: X.topk(2),
            lambda: halve(X),
            lambda: torch.full((2,), 3.0),
            lambda: torch.nn.functional.scaled_dot_product_attention(*[X.view(1, 2, 3)] * 3),
            lambda: X[1:3].add_(1.0),
        ],
    )
    def test_has_nothing_to_say_about_what_can(self, program):
        assert kinds(program, X, MASK) == []

    def test_says_where_in_the_source(self):
        def program():
            X.tolist()  # this line

        (finding,) = record(program, [X]).findings
        line = program.__code__.co_firstlineno + 1

        assert finding.where == f"test_tape.py:{line}"
        assert str(finding).startswith(f"Tensor.tolist at test_tape.py:{line}: reads a device")

    def test_names_tensors_that_nobody_promised_to_keep(self):
        weights, static = torch.ones(6), torch.zeros(6)

        def program():
            static.copy_(weights[1:4].sum())

        assert kinds(program, static) == [FindingKind.EXTERNAL_TENSOR]
        assert kinds(program, static, weights) == []

    def test_names_tensors_that_are_still_held_and_no_others(self):
        held = []

        def program():
            temporary = X + 1
            held[:] = [(temporary * 2)[1:]]

        (finding,) = find_escapes(program, [X])
        assert finding.kind is FindingKind.ESCAPED_TENSOR
        assert "[6] float32 tensor of aten::mul" in finding.detail

        assert find_escapes(lambda: halve(X) + 1, [X]) == ()  # gone with the call
        assert find_escapes(lambda: held.append(X[1:]), [X]) == ()  # a view of a static

    def test_a_cache_made_by_the_first_run_is_one_that_must_be_static(self):
        cache = {}

        def program():
            if "cos" not in cache:
                cache["cos"] = torch.arange(3.0).cos()
            X[:3].mul_(cache["cos"])

        with TapeBackend().session(StaticTensors({"x": X})) as session:
            session.capture(GraphKey(1), program, reset=lambda: None)

            assert [finding.kind for finding in session.findings] == [FindingKind.EXTERNAL_TENSOR]

    def test_a_moved_static_is_found_at_the_next_replay(self):
        tensors, events = {"x": torch.zeros(2)}, []

        def program():
            tensors["x"].add_(1)

        with TapeBackend().session(StaticTensors(tensors), events.append) as session:
            graph = session.capture(GraphKey(1), program, reset=lambda: None)
            assert session.findings == ()
            tensors["x"] = torch.zeros(2)
            graph.replay()
            graph.replay()

            (finding,) = session.findings
            assert finding.kind is FindingKind.STATIC_MOVED and finding.key == GraphKey(1)
        told = [event.data["finding"] for event in events if event.kind is EventKind.FINDING]
        assert told == [finding]

    def test_refuses_buffers_of_inference_mode(self):
        with torch.inference_mode():
            x = torch.zeros(1)

        with pytest.raises(StaticsError, match="`x` was made under"):
            TapeBackend().session(StaticTensors({"x": x}))


def test_counts_operations_that_do_something():
    x = torch.zeros(4)

    def program():
        x.copy_(x.view(2, 2).t().reshape(4) + 1)

    with TapeBackend().session(StaticTensors({"x": x})) as session:
        graph = session.capture(GraphKey(1), program, reset=lambda: None)

        assert graph.info.num_nodes == 3  # the copy of reshape, add, copy_
        assert graph.info.pool_bytes == 2 * 4 * 4
        assert session.seal().pool_bytes == graph.info.pool_bytes


def test_the_report_of_a_good_program_says_so():
    report = toy.verify_toy()

    assert str(report) == "4 graphs, 24 steps: safe to replay"
    assert report.ok and set(report.num_ops) == set(toy.KEYS)


def test_the_report_of_a_bad_one_lists_what_is_wrong_and_does_not_flood():
    report = toy.verify_toy(toy.Fault.BRANCH_ON_VALUE, num_steps=40)
    lines = str(report).splitlines()

    assert not report.ok and len(lines) <= 22
    assert "findings" in lines[0] and "toy.py" in lines[1]
    assert lines[-1].startswith("  ... and")
    assert {one.kind for one in report.mismatches} <= {MismatchKind.OUTPUT, MismatchKind.CACHE}
