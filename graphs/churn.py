"""`churn`: a schedule of decode steps that brings out what padding and reuse can break. Pure.

Most faults of replayed steps do no harm until a page that one request gave up belongs to another:
then a stale row writes into a live context. So requests come and go all the time, the batch grows
and shrinks across buckets, and pages are handed out last freed first, so that a freed page finds
a new owner at once.
"""

import random
from collections.abc import Iterator

import attrs


@attrs.frozen
class ChurnRow:
    """One live request in one step.

    Attributes:
        request: Which one. Numbers are never used twice.
        position: Of the token that this step reads and stores, counted from 0; the row attends to
            `position + 1` tokens, its own included.
        pages: The pages of its context so far, that of `position` included.
        previous_row: Its row in the step before, whose output is its token now; None in its first
            step, when the token comes from outside.
    """

    request: int
    position: int
    pages: tuple[int, ...]
    previous_row: int | None


@attrs.frozen
class ChurnStep:
    """One step.

    Attributes:
        rows: The live requests, at least one. Rows move up when one in front leaves.
        freed_pages: Pages given up since the step before. Some have a new owner already, who has
            not written to them.
    """

    rows: tuple[ChurnRow, ...]
    freed_pages: tuple[int, ...]


def churn(
    *, num_steps: int, max_rows: int, page_size: int, num_pages: int, max_len: int, seed: int = 0
) -> Iterator[ChurnStep]:
    """Make up a schedule. Equal arguments give equal schedules.

    Args:
        num_steps: Steps to make.
        max_rows: Most live requests of a step. Every number from 1 to it occurs, given time.
        page_size: Tokens per page.
        num_pages: Pages to hand out, numbered from 0; enough for `max_rows` requests of `max_len`.
        max_len: Most tokens of a request's context.
        seed: Of the choices.
    """
    pages_each = -(-max_len // page_size)
    if num_pages < max_rows * pages_each:
        raise ValueError(
            f"`num_pages` is {num_pages}, but {max_rows} requests of {max_len} tokens in pages of "
            f"{page_size} need {max_rows * pages_each}."
        )
    draw = random.Random(seed)
    free = list(range(num_pages))[::-1]
    live: list[_Request] = []
    num_requests = 0
    for _ in range(num_steps):
        freed: list[int] = []
        # Leaving first and joining after: a page freed here is the first to be taken below.
        wanted = draw.randint(1, max_rows)
        finished = [one for one in live if one.position + 1 == one.length]
        for one in finished + draw.sample(live, len(live)):
            if one in live and (one in finished or (len(live) > wanted and draw.random() < 0.5)):
                live.remove(one)
                freed += one.pages
        free += freed
        num_joining = max(0 if live else 1, wanted - len(live))
        for _ in range(num_joining if draw.random() < 0.7 or not live else 0):
            live.append(_Request(num_requests, draw.randint(1, max_len)))
            num_requests += 1
        for one in live:
            one.position += 1
            if one.position % page_size == 0:
                one.pages.append(free.pop())
        yield ChurnStep(
            rows=tuple(
                ChurnRow(one.number, one.position, tuple(one.pages), one.row) for one in live
            ),
            freed_pages=tuple(freed),
        )
        for row, one in enumerate(live):
            one.row = row


@attrs.define(eq=False)
class _Request:
    number: int
    length: int
    position: int = -1  # its first step makes it 0
    pages: list[int] = attrs.field(factory=list)
    row: int | None = None
