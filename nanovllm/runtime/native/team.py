"""`Team`: the threads that run native jobs, the caller among them.

Helpers sleep when no job came for a millisecond or two, so an idle engine uses no CPU. A job never
waits for a helper to wake: the caller does what nobody else has claimed, and that may be all.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from xxhash import xxh64_intdigest

from nanovllm.runtime.native.forward import forward_job, num_phases
from nanovllm.runtime.native.phases import (
    ASLEEP,
    CLOSING,
    FIRST_HELPER,
    LINE,
    NUM_HELPERS,
    NUM_SLOTS,
    PHASE_WIDTH,
    await_job,
    post_job,
    prepare_job,
)

# Places in a job's description.
NUM_INPUTS, NUM_LOGITS, NUM_TILES, NUM_PARTS = range(4)
JOB_WIDTH = 8  # a cache line

Int64Array = npt.NDArray[np.int64]


def _source_digest() -> int:
    """A number that changes with any file of this folder.

    Numba keeps compiled code by the file of the function alone. But all of `_work` is compiled
    into one piece, and must be again when anything in it has changed.
    """
    folder = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return xxh64_intdigest(sources) >> 1  # a positive int64


def _make_work(digest: int) -> Any:
    """Compile `_work`, under a key of the disk cache that the digest is part of."""

    @njit(nogil=True, cache=True, error_model="numpy")
    def _work(
        control: int, member: int, number: int, counters: Any, jobs: Any, job: Any, kind: Any,
        cache_kind: Any, model: Any, buffers: Any, member_buffers: Any,
    ) -> int:  # fmt: skip
        """What every member runs: one function, so that all of it is compiled once.

        Member 0, the caller, posts `job` and takes part until it is done. The others take part in
        jobs from `number` on, until it is time to sleep. Returns the number of the next job.
        """
        if digest < 0:
            return digest  # never; a cell of the closure has to be used to be part of the key
        if member == 0:
            number = prepare_job(control, counters)
            for place in range(job.shape[0]):
                jobs[number % NUM_SLOTS, place] = job[place]
            post_job(control, number)
        while True:
            if member > 0:
                awaited = await_job(control, member, number)
                if awaited < 0:
                    return number
                number = awaited
            one = jobs[number % NUM_SLOTS]
            places = counters[number % NUM_SLOTS].ctypes.data
            forward_job(
                places, kind, cache_kind, one[NUM_INPUTS], one[NUM_LOGITS], one[NUM_TILES],
                one[NUM_PARTS], model, buffers, member_buffers,
            )  # fmt: skip
            number += 1
            if member == 0:
                return number

    return _work


_work = _make_work(_source_digest())


class Team:
    """A caller and its helpers, over the buffers of one model. One job at a time."""

    def __init__(
        self,
        kinds: tuple[Any, Any],
        model: Any,
        buffers: Any,
        members: Sequence[Any],
        *,
        num_layers: int,
    ) -> None:
        """Start the helpers.

        Args:
            kinds: Numbers of the types of the weights and of the cache.
            model: The record `buffers.MODEL`.
            buffers: The record `buffers.BUFFERS`.
            members: A record `buffers.MEMBER` for each thread, the caller included.
            num_layers: Decoder layers, which say how many phases a job has.
        """
        num_threads = len(members)
        control: Int64Array = np.zeros(FIRST_HELPER + LINE * num_threads, np.int64)
        control[NUM_HELPERS] = num_threads - 1  # -1: the caller
        control[FIRST_HELPER:] = ASLEEP
        self._control = control
        self._job: Int64Array = np.zeros(JOB_WIDTH, np.int64)
        self._arguments: tuple[Any, ...] = (
            np.zeros((NUM_SLOTS, num_phases(num_layers) * PHASE_WIDTH), np.int64),
            np.zeros((NUM_SLOTS, JOB_WIDTH), np.int64),
            self._job,
            *kinds,
            model,
            buffers,
        )
        self._caller = members[0]
        self._wake = [threading.Event() for _ in range(num_threads - 1)]
        # The threads hold what they work on and not the team, so a team that is dropped can end.
        threads = [
            threading.Thread(
                target=_run_helper,
                args=(member, event, control, (*self._arguments, members[member])),
                name=f"nanovllm-{member}",
                daemon=True,
            )
            for member, event in enumerate(self._wake, 1)
        ]
        self.close: Callable[[], object] = weakref.finalize(
            self, _end, control, self._wake, threads
        )
        for thread in threads:
            thread.start()

    def forward(self, num_inputs: int, num_logits: int, num_tiles: int, num_parts: int) -> None:
        """Run one job: `forward_job` over the buffers of this team."""
        self._job[[NUM_INPUTS, NUM_LOGITS, NUM_TILES, NUM_PARTS]] = (
            num_inputs,
            num_logits,
            num_tiles,
            num_parts,
        )
        for member, event in enumerate(self._wake, 1):
            if self._control[FIRST_HELPER + (member - 1) * LINE] == ASLEEP:
                event.set()
        _work(self._control.ctypes.data, 0, 0, *self._arguments, self._caller)


def _run_helper(
    member: int, wake: threading.Event, control: Int64Array, arguments: tuple[Any, ...]
) -> None:
    """A helper thread: sleep, help, sleep again."""
    number = 0
    while True:
        wake.wait()
        wake.clear()
        if control[CLOSING]:
            return
        number = _work(control.ctypes.data, member, number, *arguments)


def _end(control: Int64Array, wake: list[threading.Event], threads: list[threading.Thread]) -> None:
    """Let the helpers end, and wait for it."""
    control[CLOSING] = 1
    for event in wake:
        event.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
