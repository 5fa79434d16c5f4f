"""`preview`: when a request would get its first token, found by running the scheduler ahead. Pure.

The scheduler is a function of the state, so its future can be computed: the request is admitted to
a copy of the live state, and step after step is planned on it as it would be, each taking as long
as such steps were measured to take. Nothing is computed on a device, and nothing is queued.
"""

from collections.abc import Callable, Iterable

import attrs

from nanovllm.core import (
    EngineState,
    SchedulerLimits,
    Sequence,
    StepPlan,
    admit,
    expire,
    postprocess,
    schedule,
)
from nanovllm.errors import RequestError

UNKNOWN_TOKEN = -1
"""Stands for every token that is not drawn yet: no stop token, and in no cached prompt."""

MAX_STEPS = 2000
"""Steps that are looked ahead: a few tenths of a second of work, whatever is queued."""


@attrs.frozen
class Preview:
    """What would become of a request that came now.

    It takes for granted that nothing else comes, and that what runs goes on to its `max_tokens`:
    requests that end sooner make room sooner, so the answer is rather too late than too early.

    Attributes:
        ttft_s: Seconds until its first token. None if that is not known: there is an obstacle, the
            look ahead was cut short, or no step has run yet to measure.
        num_steps: Steps until then, the one that draws the token included.
        queue_position: Sequences that would wait in front of it.
        num_prefix_hit_tokens: Prompt tokens that it would find cached when it starts.
        was_cut_short: Whether the look ahead ended at its bound; `num_steps` then is that bound.
        obstacle: Why it would be refused, or would end without a token; None if nothing is in its
            way.
    """

    ttft_s: float | None = None
    num_steps: int = 0
    queue_position: int = 0
    num_prefix_hit_tokens: int = 0
    was_cut_short: bool = False
    obstacle: str | None = None


def preview(
    state: EngineState,
    sequences: Iterable[Sequence],
    limits: SchedulerLimits,
    *,
    cost_s: Callable[[int, int], float] | None,
    now_s: float,
    max_steps: int = MAX_STEPS,
) -> Preview:
    """Look ahead to the first token of a request.

    Args:
        state: At rest. It stays as it is, and so do its token logs.
        sequences: Of the request, its first completion first; not admitted.
        limits: As the steps will have them.
        cost_s: Seconds of a step of so many decode and so many prefill tokens; None if unknown.
        now_s: The time, on the clock of the deadlines.
        max_steps: Bound on the steps that are planned.
    """
    state = _apart(state)
    seq_ids = []
    try:
        for seq in sequences:
            state = admit(state, seq, limits)
            seq_ids.append(seq.seq_id)
    except RequestError as error:
        return Preview(obstacle=str(error))
    first = seq_ids[0]
    position = next(i for i, seq in enumerate(state.waiting) if seq.seq_id == first)
    elapsed_s, num_hits = 0.0, 0
    for num_steps in range(1, max_steps + 1):
        state, expired = expire(state, now_s + elapsed_s)
        if first in expired:
            obstacle = (
                f"its deadline passes before its first token, in about {elapsed_s:.3g} s and "
                f"{num_steps - 1} steps"
            )
            return Preview(None, num_steps - 1, position, num_hits, obstacle=obstacle)
        state, plan = schedule(state, limits)
        num_hits = dict(plan.prefix_hits).get(first, num_hits)
        if cost_s is not None:
            elapsed_s += cost_s(plan.num_decode_tokens, plan.num_prefill_tokens)
        if _draws(plan, first):
            ttft_s = None if cost_s is None else elapsed_s
            return Preview(ttft_s, num_steps, position, num_hits)
        state, _ = postprocess(state, plan, [UNKNOWN_TOKEN] * len(plan.scheduled))
    return Preview(None, max_steps, position, num_hits, was_cut_short=True)


def _draws(plan: StepPlan, seq_id: int) -> bool:
    """Whether a step draws a token for the sequence: it then stands among those that run."""
    return any(seq.seq_id == seq_id for seq in plan.running)


def _apart(state: EngineState) -> EngineState:
    """The state with token logs of its own, since steps append to those of the live sequences."""
    return attrs.evolve(
        state,
        running=tuple(map(_with_own_log, state.running)),
        waiting=tuple(map(_with_own_log, state.waiting)),
    )


def _with_own_log(seq: Sequence) -> Sequence:
    draft = seq.thaw()
    log = seq.token_log[: seq.num_tokens]
    # A token that is on its way is counted before it is known.
    log.extend([UNKNOWN_TOKEN] * (seq.num_tokens - len(log)))
    draft.token_log = log
    return draft.freeze()
