"""Open-loop arrivals: when each request comes, which does not depend on how fast we answer.

A closed loop sends the next request when the last is answered, and so slows down together with
the engine it measures. Users do not. Arrivals come from a Poisson process or from a recording.
"""

import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from nanovllm.errors import RequestError
from nanovllm.records import RequestRecord


@attrs.frozen
class Arrival:
    """A request of a trace.

    Attributes:
        due_s: When it comes, in seconds after the trace's start.
        num_prompt_tokens: Length of its prompt.
        num_output_tokens: Tokens to generate.
    """

    due_s: float
    num_prompt_tokens: int
    num_output_tokens: int


def poisson(
    num_requests: int,
    *,
    rate: float,
    num_prompt_tokens: int,
    num_output_tokens: int,
    seed: int,
) -> tuple[Arrival, ...]:
    """Requests of one kind whose times between arrivals are exponentially distributed.

    Args:
        num_requests: How many.
        rate: Requests a second, on average; infinite: all come at once.
        num_prompt_tokens: Length of every prompt.
        num_output_tokens: Tokens that each is to generate.
        seed: Equal seeds give equal arrivals, on every machine.

    Raises:
        RequestError: The rate is not above 0.
    """
    if not rate > 0:
        raise RequestError(f"`rate` is {rate}; it must be above 0 requests a second, or infinite.")
    rng, due_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        arrivals.append(Arrival(due_s, num_prompt_tokens, num_output_tokens))
        due_s += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return tuple(arrivals)


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """A recorded trace: a JSON object per line, with the fields of `Arrival`.

    Raises:
        RequestError: It can't be read, or a line is not an arrival.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the trace {str(path)!r} can't be read: {error}") from error
    arrivals = [
        _arrival(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not arrivals:
        raise RequestError(f"the trace {str(path)!r} has no requests.")
    return tuple(sorted(arrivals, key=lambda arrival: arrival.due_s))


def write_trace(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write what `read_trace` reads."""
    lines = [json.dumps(attrs.asdict(arrival)) for arrival in arrivals]
    path.expanduser().write_text("\n".join(lines) + "\n", encoding="utf-8")


def recorded(requests: Sequence[RequestRecord]) -> tuple[Arrival, ...]:
    """The trace of requests that an engine served."""
    start_s = min((request.arrival_s for request in requests), default=0.0)
    arrivals = [
        Arrival(
            request.arrival_s - start_s, request.num_prompt_tokens, request.num_generated_tokens
        )
        for request in requests
        if request.num_generated_tokens
    ]
    return tuple(sorted(arrivals, key=lambda arrival: arrival.due_s))


def _arrival(line: str, where: str) -> Arrival:
    problem = 'an object such as {"due_s": 0.5, "num_prompt_tokens": 32, "num_output_tokens": 16}'
    try:
        data = json.loads(line)
        arrival = Arrival(
            float(data["due_s"]), int(data["num_prompt_tokens"]), int(data["num_output_tokens"])
        )
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError(f"{where} is {line!r}; it must be {problem}.") from error
    if arrival.due_s < 0 or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
        raise RequestError(f"{where} is {line!r}; times can't be below 0 nor lengths below 1.")
    return arrival
