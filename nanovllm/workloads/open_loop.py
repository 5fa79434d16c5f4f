"""Serving under load: requests come when they are due, and each is timed from then.

The clock starts when a request is *due*, not when the loop gets round to queueing it: a step that
keeps the next request waiting is part of its latency. In a closed loop, where a request is sent
when another is answered, it starts when the request is sent.
"""

import time
from collections.abc import Sequence
from typing import Any, Self

import attrs

from nanovllm.errors import RequestError
from nanovllm.llm import LLM
from nanovllm.records import RequestRecord
from nanovllm.workloads.arrivals import Arrival
from nanovllm.workloads.distribution import Distribution
from nanovllm.workloads.prompts import exactly, random_prompt, vocab_size
from nanovllm.workloads.token_log import SequenceTimes, TokenLog, sequence_times

REQUEST_PREFIX = "load-"


@attrs.frozen
class Served:
    """A request that was answered, in seconds on the clock of `time.perf_counter`.

    Attributes:
        due_s: When its latency starts.
        record: What the engine says of it.
        times: Of its tokens.
    """

    due_s: float
    record: RequestRecord
    times: SequenceTimes

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token."""
        return self.times.token_s[0] - self.due_s

    @property
    def e2el_s(self) -> float:
        """From when it was due to its last token."""
        return self.times.token_s[-1] - self.due_s


@attrs.frozen
class Objective:
    """What a request must keep to count as good; None: anything.

    Attributes:
        ttft_s: Longest time to the first token.
        tpot_s: Longest time per output token after the first, mean of the request.
        e2el_s: Longest time to the last token.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `ttft:500,tpot:50,e2el:3000`, in milliseconds.

        Raises:
            RequestError: It does not read like that.
        """
        limits: dict[str, float] = {}
        for part in text.replace(" ", ",").split(","):
            name, _, value = part.partition(":")
            try:
                limits[f"{name}_s"] = float(value) * 1e-3
            except ValueError:
                limits[part] = -1.0
        names = {field.name for field in attrs.fields(cls)}
        if not limits.keys() <= names or any(not limit > 0 for limit in limits.values()):
            raise RequestError(
                f"the objective is {text!r}; it must be like 'ttft:500,tpot:50,e2el:3000', "
                "milliseconds, any of the three."
            )
        return cls(**limits)

    def __str__(self) -> str:
        limits = [
            f"{field.name.removesuffix('_s').upper()} <= {limit * 1e3:g} ms"
            for field in attrs.fields(type(self))
            if (limit := getattr(self, field.name)) is not None
        ]
        return ", ".join(limits) or "none"

    def is_met(self, served: Served) -> bool:
        """Whether a request kept all of it."""
        measured = (served.ttft_s, served.times.tpot_s or 0.0, served.e2el_s)
        limits = (self.ttft_s, self.tpot_s, self.e2el_s)
        return all(
            limit is None or value <= limit for value, limit in zip(measured, limits, strict=True)
        )


@attrs.frozen
class LoadReport:
    """What came of a load.

    Attributes:
        served: The requests that were answered in full, in the order in which they came.
        num_failed: Requests that were not.
        duration_s: From the first request to the last token.
        objective: What `goodput` asks of a request.
    """

    served: tuple[Served, ...]
    num_failed: int
    duration_s: float
    objective: Objective

    @property
    def num_prompt_tokens(self) -> int:
        """Of all answered requests."""
        return sum(one.record.num_prompt_tokens for one in self.served)

    @property
    def num_output_tokens(self) -> int:
        """Of all answered requests."""
        return sum(len(one.times.token_s) for one in self.served)

    @property
    def num_good(self) -> int:
        """Requests that met the objective."""
        return sum(self.objective.is_met(one) for one in self.served)

    def distributions(self) -> dict[str, Distribution]:
        """TTFT, TPOT (one sample a request), ITL (one a token) and E2EL."""
        tpots = (one.times.tpot_s for one in self.served)
        return {
            "ttft": Distribution.of(one.ttft_s for one in self.served),
            "tpot": Distribution.of(tpot for tpot in tpots if tpot is not None),
            "itl": Distribution.of(gap for one in self.served for gap in one.times.gaps_s),
            "e2el": Distribution.of(one.e2el_s for one in self.served),
        }

    def per_second(self, count: int) -> float:
        """A count as a rate."""
        return count / self.duration_s if self.duration_s > 0 else 0.0

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_served": len(self.served),
            "num_failed": self.num_failed,
            "duration_s": self.duration_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "requests_per_s": self.per_second(len(self.served)),
            "output_tokens_per_s": self.per_second(self.num_output_tokens),
            "total_tokens_per_s": self.per_second(self.num_prompt_tokens + self.num_output_tokens),
            "objective": attrs.asdict(self.objective),
            "goodput_per_s": self.per_second(self.num_good),
            "num_good": self.num_good,
            **{name: one.as_data() for name, one in self.distributions().items()},
        }


def run_load(
    llm: LLM,
    arrivals: Sequence[Arrival],
    *,
    seed: int = 0,
    max_in_flight: int | None = None,
    objective: Objective = Objective(),
) -> LoadReport:
    """Serve requests as they come; returns when the last is answered.

    Args:
        llm: Nobody else may use it meanwhile.
        arrivals: In order.
        seed: Of the random prompts.
        max_in_flight: Send no more than this many at a time: a closed loop. Default: send each
            when it is due.
        objective: For `LoadReport.num_good`.

    Raises:
        RequestError: A request can't run in this engine.
    """
    size, log = vocab_size(llm), TokenLog()
    prompts = [
        random_prompt(arrival.num_prompt_tokens, vocab_size=size, seed=f"{seed} {i}")
        for i, arrival in enumerate(arrivals)
    ]
    llm.reset_prefix_cache()  # an earlier load may have had the same prompts
    unsubscribe = llm.subscribe(log)
    try:
        start_s = time.perf_counter()
        _drive(llm, arrivals, prompts, start_s, max_in_flight or len(arrivals))
    finally:
        unsubscribe()
    return _report(log, arrivals, start_s, objective, is_closed=max_in_flight is not None)


def _drive(
    llm: LLM,
    arrivals: Sequence[Arrival],
    prompts: Sequence[list[int]],
    start_s: float,
    max_in_flight: int,
) -> None:
    num_queued = num_ended = 0
    try:
        while num_ended < len(arrivals):
            now_s = time.perf_counter() - start_s
            while (
                num_queued < len(arrivals)
                and arrivals[num_queued].due_s <= now_s
                and num_queued - num_ended < max_in_flight
            ):
                llm.add_request(
                    prompts[num_queued],
                    exactly(arrivals[num_queued].num_output_tokens),
                    request_id=f"{REQUEST_PREFIX}{num_queued}",
                )
                num_queued += 1
            if num_queued == num_ended:  # nothing to do before the next one comes
                time.sleep(max(arrivals[num_queued].due_s - now_s, 0.0))
            else:
                num_ended += sum(output.finished for output in llm.step())
    finally:
        for index in range(num_queued):
            llm.abort(f"{REQUEST_PREFIX}{index}")


def _report(
    log: TokenLog,
    arrivals: Sequence[Arrival],
    start_s: float,
    objective: Objective,
    *,
    is_closed: bool,
) -> LoadReport:
    times = sequence_times(log.steps)
    served = []
    for record in log.requests():
        if not record.request_id.startswith(REQUEST_PREFIX):
            continue
        index = int(record.request_id.removeprefix(REQUEST_PREFIX))
        mine = times.get(record.seq_ids[0], SequenceTimes(()))
        if len(mine.token_s) == arrivals[index].num_output_tokens:
            due_s = record.arrival_s if is_closed else start_s + arrivals[index].due_s
            served.append(Served(due_s, record, mine))
    served.sort(key=lambda one: one.due_s)
    end_s = max((one.times.token_s[-1] for one in served), default=start_s)
    return LoadReport(tuple(served), len(arrivals) - len(served), end_s - start_s, objective)
