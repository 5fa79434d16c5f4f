"""What several sections of a report need, computed once from a run."""

from collections import Counter
from collections.abc import Sequence
from typing import Self

import attrs
import numpy as np

from telemetry.gaps import Gaps, token_gaps, tpot_s
from telemetry.report.values import Figure, NotAvailable, Unit, Value
from telemetry.run import IntColumn, Run
from telemetry.stats import Distribution, Floats


@attrs.frozen(eq=False)
class Analysis:
    """A run and what follows from it; times in seconds from its begin.

    Attributes:
        run: The run.
        starts_s: `[N]` begin of each step.
        ends_s: `[N]` end of each step.
        gaps: Between the outputs of sequences, by the step that ended them.
        itl: Inter-token latency in seconds.
        stall: Gaps as a reader saw them, in seconds.
        ttft: Time to first token.
        queue: From arrival to the first step.
        tpot: Time per output token of each request.
        num_generated_tokens: Tokens that the recorded steps gave.
    """

    run: Run
    starts_s: Floats
    ends_s: Floats
    gaps: Gaps
    itl: Distribution | None
    stall: Distribution | None
    ttft: Distribution | None
    queue: Distribution | None
    tpot: Distribution | None
    num_generated_tokens: int

    @classmethod
    def of(cls, run: Run) -> Self:
        """Compute it."""
        zero, steps = run.info.start_mono_ns, run.steps
        ends_s = seconds(steps.t1_ns, zero)
        gaps = token_gaps(ends_s, steps.sampled)
        return cls(
            run=run,
            starts_s=seconds(steps.t0_ns, zero),
            ends_s=ends_s,
            gaps=gaps,
            itl=gaps.itl(),
            stall=gaps.stall(),
            ttft=Distribution.of(
                (r.first_token_ns - r.arrival_ns) / 1e9
                for r in run.requests
                if r.first_token_ns is not None
            ),
            queue=Distribution.of(
                (r.first_scheduled_ns - r.arrival_ns) / 1e9
                for r in run.requests
                if r.first_scheduled_ns is not None
            ),
            tpot=Distribution.of(
                tpot
                for r in run.requests
                if r.first_token_ns is not None
                # Where a request has several sequences, their tokens can't be told apart in time.
                and len(r.seq_ids) == 1
                and (
                    tpot := tpot_s(
                        r.first_token_ns / 1e9, r.finished_ns / 1e9, r.num_generated_tokens
                    )
                )
                is not None
            ),
            num_generated_tokens=sum(map(len, steps.sampled)),
        )

    @property
    def duration_s(self) -> float:
        """Length of the run."""
        return self.run.duration_ns / 1e9

    @property
    def serving_s(self) -> float:
        """From the begin of the first step to the end of the last; 0 without steps."""
        return float(self.ends_s[-1] - self.starts_s[0]) if len(self.ends_s) else 0.0

    @property
    def missed_replays(self) -> Counter[str]:
        """Why decode steps were not replayed, on a device with graphs, and how many for each."""
        steps = self.run.steps
        return Counter(
            reason
            for reason, num_prefill in zip(steps.fallback, steps.num_prefill_tokens, strict=True)
            if reason is not None and not num_prefill
        )

    @property
    def stepping_s(self) -> float:
        """Time during which some step ran; one that is submitted ahead begins in another."""
        if not len(self.ends_s):
            return 0.0
        # Steps end in order: of each, the part behind the end of the one before.
        ends_before = np.concatenate(([-np.inf], self.ends_s[:-1]))
        return float(np.sum(self.ends_s - np.maximum(self.starts_s, ends_before)))


def seconds(times_ns: IntColumn, zero_ns: int) -> Floats:
    """`[N]` times in seconds from the begin of the run."""
    return (np.asarray(times_ns) - zero_ns) / 1e9


def statistic(distribution: Distribution | None, name: str, missing: str) -> Value:
    """A distribution's "mean", "max" or percentile, or why it can't be told."""
    if distribution is None:
        return NotAvailable(missing)
    if name == "max":
        return distribution.max
    if name == "mean":
        return distribution.mean
    percentile = distribution.percentile(name)
    if percentile.value is None:
        return NotAvailable(percentile.reason or "not supported")
    return percentile.value


def statistics_of(
    prefix: str,
    label: str,
    distribution: Distribution | None,
    names: Sequence[str],
    *,
    unit: Unit,
    source: str,
    missing: str,
) -> tuple[Figure, ...]:
    """Several statistics of one distribution as figures."""
    suffix = f"_{unit}" if unit else ""
    return tuple(
        Figure(
            key=f"{prefix}_{name.replace('.', '_')}{suffix}",
            label=f"{label} {name}",
            value=statistic(distribution, name, missing),
            unit=unit,
            source=source,
            num_samples=distribution.num_samples if distribution else 0,
        )
        for name in names
    )
