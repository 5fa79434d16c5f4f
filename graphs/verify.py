"""`verify`: replay a schedule on the tape, beside an eager run that pads nothing. Needs torch.

    class DecodeWorld:                                     # see `World`
        def __init__(self):
            self.staging = torch.zeros(layout.num_words(), dtype=torch.int32)
            self.tokens = torch.zeros(max_rows, dtype=torch.int64)
            self.cache = torch.zeros(num_pages, page_size, 2, 64)
            self.weights = make_weights(seed=0)            # equal in every world
            self.buffer = StepBuffer(layout)

        def named_tensors(self):
            return {"staging": self.staging, "tokens": self.tokens, "cache": self.cache,
                    **self.weights}

        def inputs(self): return {"staging": self.staging}
        def outputs(self): return {"tokens": self.tokens}
        def caches(self): return {"cache": self.cache}
        def program(self, key): return decode_program(self, key.bucket)
        def reset(self, key): self.fill(key, 0, NO_ROWS)

        def fill(self, key, num_rows, inputs):
            self.buffer.pack(num_rows, inputs)
            num_words = layout.num_words(key.bucket)
            self.staging[:num_words] = torch.from_numpy(self.buffer.vector[:num_words])

    steps = [VerifyStep(GraphKey(plan.bucket_for(n)), n, packed_inputs, freed_pages), ...]
    report = verify(DecodeWorld, [GraphKey(size) for size in plan.sizes], steps,
                    canary_pages=(num_pages - 1,), scratch_pages=(0,))
    assert report.ok, report

`graphs.churn` makes schedules in which freed pages go to live requests at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from graphs.backend import GraphKey, Program, capture_order
from graphs.errors import CaptureError
from graphs.findings import Finding, FindingKind
from graphs.poison import spoil
from graphs.statics import storage_id
from graphs.tape import TapeBackend, TapeGraph, TapeSession
from graphs.verdict import Mismatch, MismatchKind, VerifyReport

_CANARY = 17.0
"""Of a canary page: nothing writes there, so it must still be there in the end."""


class World(Protocol):
    """All that a program touches: buffers, caches, weights. Two are made, and must be equal.

    The tensors must be made outside `torch.inference_mode` and stay the same objects.
    """

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Look up every static buffer, weights and caches included."""
        ...

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """Look up the buffers that `fill` writes.

        They are spoiled before each `fill`: what the program reads must have been written for
        this step.
        """
        ...

    def outputs(self) -> Mapping[str, torch.Tensor]:
        """Look up the results, a row each: integers are compared exactly, the rest closely."""
        ...

    def caches(self) -> Mapping[str, torch.Tensor]:
        """Look up the paged caches, `[N, ...]` with pages first."""
        ...

    def program(self, key: GraphKey) -> Program:
        """Make the program of a key. The reference asks for buckets that are not captured."""
        ...

    def reset(self, key: GraphKey) -> None:
        """Write the inputs of a step without live rows."""
        ...

    def fill(self, key: GraphKey, num_rows: int, inputs: Any) -> None:
        """Write the inputs of a step of `num_rows` live rows for a graph of `key.bucket`."""
        ...


@attrs.frozen
class VerifyStep:
    """One step of the schedule.

    Attributes:
        key: The graph to replay.
        num_rows: Live rows; the rest of the bucket is padding.
        inputs: What `World.fill` takes.
        freed_pages: Pages given up since the step before: filled with NaN before this one, in which
            a new owner may write to them.
    """

    key: GraphKey
    num_rows: int
    inputs: Any
    freed_pages: Sequence[int] = ()


def verify(
    make_world: Callable[[], World],
    keys: Iterable[GraphKey],
    steps: Iterable[VerifyStep],
    *,
    canary_pages: Sequence[int] = (),
    scratch_pages: Sequence[int] = (),
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> VerifyReport:
    """Replay `steps` on the tape, and compare each with an eager run of exactly its live rows.

    Between a replay and the look at its results the shared pool is spoiled, as if another graph
    had run: a result that was left there does not survive it.

    Args:
        make_world: Makes a world; called twice, and must give equal ones.
        keys: What to capture, in any order.
        steps: The schedule; consumed step by step.
        canary_pages: Pages that no step owns. The last page is a good one: it is where a slot of
            -1 lands when it is used as an index.
        scratch_pages: Pages that padding may write to, and read. Spoiled before each step.
        rtol: Relative tolerance of caches and results that are not integers: matrix products of
            other batch sizes round differently.
        atol: Absolute tolerance of the same.
    """
    worlds = _Worlds(make_world(), make_world(), _Pages(canary_pages, scratch_pages, rtol, atol))
    mismatches: list[Mismatch] = []
    num_steps = 0
    with TapeBackend().session(worlds.replayed) as session, torch.no_grad():
        graphs = {key: _capture(session, worlds.replayed, key) for key in capture_order(keys)}
        session.seal()
        worlds.set_canaries()
        for step in steps:
            worlds.prepare(step)
            num_steps += 1
            try:
                graphs[step.key].replay()
            except (RuntimeError, IndexError, CaptureError) as error:
                mismatches.append(Mismatch(num_steps - 1, MismatchKind.RAISED, str(error)))
                break  # half a step was made: nothing after it can be compared
            session.poison()
            found = worlds.compare(step.num_rows)
            mismatches += [Mismatch(num_steps - 1, kind, detail) for kind, detail in found]
        findings = (*session.findings, *_outputs_not_static(worlds.replayed))
        num_ops = {key: graph.info.num_nodes or 0 for key, graph in graphs.items()}
    return VerifyReport(findings, tuple(mismatches), num_steps, num_ops)


def _capture(session: TapeSession, world: World, key: GraphKey) -> TapeGraph:
    return session.capture(key, world.program(key), reset=lambda: world.reset(key))


@attrs.frozen
class _Pages:
    """Which pages are special, and how close the others must be."""

    canaries: Sequence[int]
    scratch: Sequence[int]
    rtol: float
    atol: float

    def differ(self, ours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """`[N]`: which rows or pages of two tensors are not the same."""
        close = torch.isclose(ours, wanted, rtol=self.rtol, atol=self.atol, equal_nan=True)
        if not wanted.is_floating_point():
            close = ours == wanted
        return ~close.reshape(len(close), -1).all(1)


@attrs.frozen(eq=False)
class _Worlds:
    """The world that is replayed, and the one that runs eagerly without padding."""

    replayed: World
    reference: World
    pages: _Pages
    _programs: dict[GraphKey, Program] = attrs.field(factory=dict, init=False)

    def set_canaries(self) -> None:
        for world in (self.replayed, self.reference):
            _fill_pages(world, self.pages.canaries, _CANARY)

    def prepare(self, step: VerifyStep) -> None:
        """Give both worlds the step's inputs, and run it in the reference."""
        exact = attrs.evolve(step.key, bucket=step.num_rows)
        if exact not in self._programs:
            self._programs[exact] = self.reference.program(exact)
        for world, key in ((self.replayed, step.key), (self.reference, exact)):
            _fill_pages(world, [*step.freed_pages, *self.pages.scratch], float("nan"))
            for tensor in world.inputs().values():
                spoil(tensor)
            world.fill(key, step.num_rows, step.inputs)
        self._programs[exact]()

    def compare(self, num_rows: int) -> Iterator[tuple[MismatchKind, str]]:
        """Look for differences in the live rows of results, and in the pages of caches."""
        for name, every_row in self.reference.outputs().items():
            ours, wanted = self.replayed.outputs()[name][:num_rows], every_row[:num_rows]
            rows = _indices(self.pages.differ(ours, wanted))
            if rows:
                yield MismatchKind.OUTPUT, f"`{name}` rows {rows}"
            if not ours.isfinite().all():
                yield MismatchKind.NOT_FINITE, f"`{name}`"
        for name, wanted in self.reference.caches().items():
            ours, canaries = self.replayed.caches()[name], list(self.pages.canaries)
            differs = self.pages.differ(ours, wanted)
            differs[[*canaries, *self.pages.scratch]] = False
            if pages := _indices(differs):
                yield MismatchKind.CACHE, f"`{name}` pages {pages}"
            if hit := _indices((ours[canaries] != _CANARY).reshape(len(canaries), -1).any(1)):
                yield MismatchKind.CANARY, f"`{name}` pages {[canaries[at] for at in hit]}"


def _fill_pages(world: World, pages: Sequence[int], value: float) -> None:
    for cache in world.caches().values():
        cache[list(pages)] = value


def _indices(mask: torch.Tensor) -> list[int]:
    return [int(index) for index in mask.nonzero().flatten()]


def _outputs_not_static(world: World) -> list[Finding]:
    """Results that are read from memory that is not static."""
    static = {storage_id(tensor) for tensor in world.named_tensors().values()}
    return [
        Finding(FindingKind.ESCAPED_TENSOR, f"output `{name}`")
        for name, tensor in world.outputs().items()
        if storage_id(tensor) not in static
    ]
