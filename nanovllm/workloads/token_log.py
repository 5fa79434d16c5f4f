"""When each token came, from the records of the engine's steps.

    step          0 ........ 1 ..... 2 ..... 3 ........
    sampled                 {7}     {7, 8}  {7, 8}
    tokens of 7             |------>|------>|            two gaps (ITL), each a sample
    tokens of 8                     |------>|            one

A token comes at the end of the step that sampled it. The time to the first token is told by the
record of its request, since it counts from the request's arrival.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from nanovllm.records import RequestRecord, StepRecord


class TokenLog:
    """A hook for `LLM.subscribe` that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> None:
        """Take in a step."""
        self.steps.append(record)

    def within(self, start_s: float, end_s: float) -> list[StepRecord]:
        """The steps that lie in a window of time, in order."""
        # From the end, since what is asked for is mostly what was just measured.
        found = []
        for step in reversed(self.steps):
            if step.end_s < start_s:
                break
            if step.start_s >= start_s and step.end_s <= end_s:
                found.append(step)
        return found[::-1]

    def requests(self) -> list[RequestRecord]:
        """Every request that ended."""
        return [request for step in self.steps for request in step.finished]


@attrs.frozen
class SequenceTimes:
    """When the tokens of one sequence came, in seconds."""

    token_s: tuple[float, ...]

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between its tokens (ITL)."""
        return tuple(
            after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)
        )

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; needs two."""
        if len(self.token_s) < 2:
            return None
        # -1: n tokens have n - 1 times between them.
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


def sequence_times(steps: Iterable[StepRecord]) -> dict[int, SequenceTimes]:
    """When the tokens of each sequence came, by its id.

    Several tokens of one step share the time since the last one evenly: a reader gets them at
    once, but n tokens in 10 ms are as good as one each 10 / n ms, and no gap is 0.
    """
    times: dict[int, list[float]] = {}
    for step in steps:
        for seq_id, num_tokens in Counter(step.sampled).items():
            mine = times.setdefault(seq_id, [])
            since_s = mine[-1] if mine else step.end_s
            gap_s = (step.end_s - since_s) / num_tokens
            mine += [since_s + gap_s * place for place in range(1, num_tokens)]
            mine.append(step.end_s)
    return {seq_id: SequenceTimes(tuple(token_s)) for seq_id, token_s in times.items()}


def gaps_s(steps: Iterable[StepRecord]) -> list[float]:
    """Every time between two tokens of one sequence, all sequences pooled."""
    return [gap for times in sequence_times(steps).values() for gap in times.gaps_s]


def ttfts_s(requests: Sequence[RequestRecord], start_s: float, end_s: float) -> list[float]:
    """Times to the first token, of requests that arrived and had it within a window."""
    return [
        request.first_token_s - request.arrival_s
        for request in requests
        if request.first_token_s is not None
        and start_s <= request.arrival_s
        and request.first_token_s <= end_s
    ]


def prefix_hit_rate(steps: Iterable[StepRecord]) -> float | None:
    """Share of the prompt tokens of steps that came from the prefix cache; None if no prompt."""
    hits = computed = 0
    for step in steps:
        hits += step.num_prefix_hit_tokens
        computed += step.num_prefill_tokens
    return hits / (hits + computed) if hits + computed else None
