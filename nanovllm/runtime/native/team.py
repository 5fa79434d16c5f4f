"""`Team`: the threads that run native jobs, the caller among them.

Helpers sleep when no job came for a millisecond or two, so an idle engine uses no CPU. A job never
waits for a helper to wake: the caller does what nobody else has claimed, and that may be all.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from nanovllm.runtime.native.decode import decode_job, num_phases
from nanovllm.runtime.native.matmul import matmul_phase
from nanovllm.runtime.native.phases import (
    ASLEEP,
    CLOSING,
    FIRST_HELPER,
    LINE,
    NUM_SLOTS,
    PHASE_WIDTH,
    await_job,
    post_job,
    prepare_job,
)

# Places in a job's description.
KIND, NUM_INPUTS, WEIGHT, IS_BF16, NUM_ROWS, LENGTH, INPUTS, OUTPUTS = range(8)

MATMUL, DECODE = 0, 1

Int64Array = npt.NDArray[np.int64]

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]  # numba has no types
def _take_part(counters: int, member: int, job: Any, decode_arguments: Any) -> None:
    """Walk through a job's phases as one member."""
    if job[KIND] == MATMUL:
        matmul_phase(
            counters, 0, job[WEIGHT], job[IS_BF16] != 0, job[NUM_ROWS], job[LENGTH],
            job[INPUTS], job[NUM_INPUTS], job[OUTPUTS],
        )  # fmt: skip
    else:
        decode_job(counters, member, job[NUM_INPUTS], *decode_arguments)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]  # as above
def _lead(
    control: int, num_helpers: int, counters: Any, jobs: Any, job: Any, decode_arguments: Any
) -> None:
    """Post a job and take part in it until it is done."""
    number = prepare_job(control, num_helpers, counters)
    slot = number % NUM_SLOTS
    jobs[slot] = job
    post_job(control, number)
    _take_part(counters[slot].ctypes.data, 0, jobs[slot], decode_arguments)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]  # as above
def _help(
    control: int, helper: int, number: int, counters: Any, jobs: Any, decode_arguments: Any
) -> int:
    """Take part in jobs from this number on, until it is time to sleep; returns the next number."""
    while True:
        joined = await_job(control, helper, number)
        if joined < 0:
            return number
        slot = joined % NUM_SLOTS
        # +1: the caller is member 0
        _take_part(counters[slot].ctypes.data, helper + 1, jobs[slot], decode_arguments)
        number = joined + 1


class Team:
    """A caller and its helpers. One job at a time."""

    def __init__(self, num_threads: int, num_layers: int) -> None:
        """Make a team; its helpers start with `start`.

        Args:
            num_threads: Members, the caller included.
            num_layers: Decoder layers, which say how many phases a job has.
        """
        self.num_threads = num_threads
        self._num_helpers = num_threads - 1  # -1: the caller
        self._control: Int64Array = np.zeros(FIRST_HELPER + LINE * num_threads, np.int64)
        self._control[FIRST_HELPER:] = ASLEEP
        width = num_phases(num_layers) * PHASE_WIDTH
        self._counters: Int64Array = np.zeros((NUM_SLOTS, width), np.int64)
        self._jobs: Int64Array = np.zeros((NUM_SLOTS, 8), np.int64)
        self._job: Int64Array = np.zeros(8, np.int64)
        self._decode_arguments: tuple[Any, ...] = ()
        self._wake: list[threading.Event] = []
        self._threads: list[threading.Thread] = []
        self.close: Callable[[], object] = lambda: None

    def start(self, decode_arguments: tuple[Any, ...]) -> None:
        """Compile for these arguments of `decode_job`, from `weights` on, and start the helpers."""
        self._decode_arguments = decode_arguments
        self._wake = [threading.Event() for _ in range(self._num_helpers)]
        shared = (self._control, self._counters, self._jobs, decode_arguments)
        # The threads hold what they work on and not the team, so a team that is dropped can end.
        self._threads = [
            threading.Thread(
                target=_run_helper,
                args=(index, event, *shared),
                name=f"nanovllm-{index}",
                daemon=True,
            )
            for index, event in enumerate(self._wake)
        ]
        self.close = weakref.finalize(self, _end, self._control, self._wake, self._threads)
        for thread in self._threads:
            thread.start()

    def decode(self, num_inputs: int) -> None:
        """Run a decode job over the arguments that the team was started with."""
        self._job[:2] = (DECODE, num_inputs)
        self._run()

    def matmul(
        self,
        weight: int,
        is_bf16: bool,
        num_rows: int,
        length: int,
        inputs: int,
        num_inputs: int,
        outputs: int,
    ) -> None:
        """Run a matrix product; arguments as in `matmul_phase`."""
        self._job[:] = (MATMUL, num_inputs, weight, is_bf16, num_rows, length, inputs, outputs)
        self._run()

    def _run(self) -> None:
        for index, event in enumerate(self._wake):
            if self._control[FIRST_HELPER + index * LINE] == ASLEEP:
                event.set()
        _lead(
            self._control.ctypes.data,
            self._num_helpers,
            self._counters,
            self._jobs,
            self._job,
            self._decode_arguments,
        )


def _run_helper(
    index: int,
    wake: threading.Event,
    control: Int64Array,
    counters: Int64Array,
    jobs: Int64Array,
    decode_arguments: tuple[Any, ...],
) -> None:
    """A helper thread: sleep, help, sleep again."""
    number = 0
    while True:
        wake.wait()
        wake.clear()
        if control[CLOSING]:
            return
        number = _help(control.ctypes.data, index, number, counters, jobs, decode_arguments)


def _end(control: Int64Array, wake: list[threading.Event], threads: list[threading.Thread]) -> None:
    """Let the helpers end, and wait for it."""
    control[CLOSING] = 1
    for event in wake:
        event.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
