"""How threads share a job: by claiming chunks, never by waiting for one another to show up.

A job is a row of phases, and a phase is a number of chunks. Every member of the team walks through
the same phases: it claims chunks until none is left, and goes on when all are done, whoever did
them. So a member that the system has put aside delays the others only if it holds a chunk just
then. A barrier of OpenMP waits for every thread: where another program keeps one of two cores
busy, a decode step with its 150 barriers was seen to take a second instead of ten milliseconds.

Counters of the last few jobs are kept, so that a member that lags behind finds its job as it was:
all claimed, nothing left to do.
"""

from typing import Any

from numba import njit

from nanovllm.runtime.native.atomics import fetch, fetch_add, give_way, load, pause, store
from nanovllm.runtime.native.options import OPTIONS

NUM_SLOTS = 8
"""Jobs whose counters are kept: a helper that lags further behind is waited for."""

LINE = 8
"""int64 in a cache line: counters that different threads write lie on lines of their own."""

PHASE_WIDTH = 2 * LINE
"""int64 of a phase's counters: chunks claimed on the first line, chunks done on the second."""

# Places in the control block, a cache line each.
POSTED = 0  # jobs posted so far; the newest is number `posted - 1`
CLOSING = LINE  # not 0 when the helpers are to end
NUM_HELPERS = 2 * LINE
FIRST_HELPER = 3 * LINE  # a line per helper: the job it is in or awaits, or `ASLEEP`

ASLEEP = 2**62
"""In place of a job's number: later than any job, so nobody waits for this helper."""

SPINS_BEFORE_SLEEP = 50_000
"""Looks for a job before a helper sleeps: a millisecond or two, longer than between two steps."""

FETCH_BYTES = 2**17
"""Of what the next phase reads: about what the memory gives one thread in a short phase."""

SPINS_BEFORE_GIVING_WAY = 500
"""Looks for the end of a phase before letting the system run who holds the last chunk."""


@njit(**OPTIONS)
def claim(counters: int, phase: int) -> int:
    """The next chunk of a phase; past the last one when none is left."""
    return fetch_add(counters + 8 * phase * PHASE_WIDTH, 1)


@njit(**OPTIONS)
def finish(counters: int, phase: int) -> None:
    """Say that a claimed chunk is done."""
    fetch_add(counters + 8 * (phase * PHASE_WIDTH + LINE), 1)


@njit(**OPTIONS)
def wait_for(counters: int, phase: int, num_chunks: int) -> None:
    """Wait until all chunks of a phase are done."""
    done = counters + 8 * (phase * PHASE_WIDTH + LINE)
    spins = 0
    while load(done) < num_chunks:
        pause()
        spins += 1
        if spins % SPINS_BEFORE_GIVING_WAY == 0:
            give_way()


@njit(**OPTIONS)
def wait_fetching(counters: int, phase: int, num_chunks: int, upcoming: int) -> None:
    """The same; meanwhile ask for what the next phase reads, from an address on.

    Where there is less to do than there are threads, as in the norms of one row, the memory would
    have nothing to do either. A step of one row takes 0.91 of the time so.
    """
    done = counters + 8 * (phase * PHASE_WIDTH + LINE)
    end = upcoming + FETCH_BYTES
    while upcoming < end and load(done) < num_chunks:
        for _ in range(4):
            fetch(upcoming)
            upcoming += 64  # a cache line
    wait_for(counters, phase, num_chunks)


@njit(**OPTIONS)
def prepare_job(control: int, counters: Any) -> int:
    """Clear the counters of the next job's slot; returns the job's number.

    `counters` is `[NUM_SLOTS, num_phases * PHASE_WIDTH]` int64. A helper that is still in the job
    that had the slot before is waited for.
    """
    number = load(control + 8 * POSTED)
    for helper in range(load(control + 8 * NUM_HELPERS)):
        place = control + 8 * (FIRST_HELPER + helper * LINE)
        while load(place) <= number - NUM_SLOTS:
            give_way()
    counters[number % NUM_SLOTS] = 0
    return number


@njit(**OPTIONS)
def post_job(control: int, number: int) -> None:
    """Let the helpers see the job of this number."""
    store(control + 8 * POSTED, number + 1)


@njit(**OPTIONS)
def await_job(control: int, member: int, number: int) -> int:
    """Wait for a job of this number or a later one; member 0 is the caller, 1 the first helper.

    Returns:
        The number of a job to take part in; -1 to sleep.
    """
    place = control + 8 * (FIRST_HELPER + (member - 1) * LINE)
    store(place, number)
    for _ in range(SPINS_BEFORE_SLEEP):
        posted = load(control + 8 * POSTED)
        if posted > number:
            if posted - number < NUM_SLOTS:
                return number
            # Too far behind: its slot may be another job's already. Take the newest one.
            number = posted - 1
            store(place, number)
            continue
        if load(control + 8 * CLOSING):
            break
        pause()
    store(place, ASLEEP)
    return -1
