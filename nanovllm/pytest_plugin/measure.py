"""From steps and rounds to what a test reports: latencies, percentiles, and what to beware of."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Self

import attrs

from nanovllm.pytest_plugin.round_clock import Window
from nanovllm.records import StepRecord
from nanovllm.workloads.distribution import Distribution, nearest_rank
from nanovllm.workloads.disturbances import Disturbance
from nanovllm.workloads.token_log import TokenLog, gaps_s, prefix_hit_rate, ttfts_s

CacheUse = Literal["cold", "warm"] | None

SLOW_FIRST_ROUND = 1.5
"""A first round this much slower than the median of the others was not warmed up."""

CACHE_CHANGE = 0.05
"""Rounds whose prefix-hit rates differ by more did not do the same work."""


@attrs.frozen
class Round:
    """What the engine did in one round.

    Attributes:
        window: When.
        steps: Its steps.
        ttft_s: Times to the first token of the requests that came in it.
        itl_s: Times between the tokens of its sequences, pooled.
    """

    window: Window
    steps: tuple[StepRecord, ...]
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]

    @property
    def itl_p99_s(self) -> float | None:
        """99th percentile; with fewer than 100 samples it is the largest."""
        return nearest_rank(sorted(self.itl_s), 99) if self.itl_s else None

    @property
    def num_tokens(self) -> int:
        """Tokens that came in it."""
        return sum(len(step.sampled) for step in self.steps)


@attrs.frozen
class Measured:
    """All rounds of a test.

    Attributes:
        rounds: In order.
        cache: What the test's `llm` marker says of the prefix cache.
        num_earlier_steps: Steps that the engine ran before the first round.
        num_iterations: Calls per round.
        disturbance: What else went on.
    """

    rounds: tuple[Round, ...]
    cache: CacheUse
    num_earlier_steps: int
    num_iterations: int
    disturbance: Disturbance

    @classmethod
    def of(
        cls,
        log: TokenLog,
        windows: Sequence[Window],
        *,
        cache: CacheUse,
        num_iterations: int,
        disturbance: Disturbance,
    ) -> Self:
        """Cut the engine's log by the rounds of a test."""
        requests, rounds = log.requests(), []
        for window in windows:
            steps = log.within(window.start_s, window.end_s)
            ttfts = ttfts_s(requests, window.start_s, window.end_s)
            rounds.append(Round(window, tuple(steps), tuple(ttfts), tuple(gaps_s(steps))))
        # Indices count every step of the engine, those of earlier tests included.
        first = next((step.index for one in rounds for step in one.steps), 0)
        return cls(tuple(rounds), cache, first, num_iterations, disturbance)

    @property
    def num_tokens(self) -> int:
        """Tokens that came in all rounds."""
        return sum(one.num_tokens for one in self.rounds)

    def rows(self) -> dict[str, list[float]]:
        """Seconds of each row beside the call itself; without those that have no sample."""
        rows = {
            "ttft": [ttft for one in self.rounds for ttft in one.ttft_s],
            "itl": [gap for one in self.rounds for gap in one.itl_s],
            # One a round: the gate then compares the median of the rounds' p99.
            "itl_p99": [p99 for one in self.rounds if (p99 := one.itl_p99_s) is not None],
        }
        return {name: seconds for name, seconds in rows.items() if seconds}

    def distribution(self, row: str) -> Distribution:
        """Of one of the rows."""
        return Distribution.of(self.rows().get(row, ()))

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of all prompt tokens that was found cached."""
        return prefix_hit_rate(step for one in self.rounds for step in one.steps)

    def hit_rates(self) -> list[float | None]:
        """Share of each round's prompt tokens that was found cached."""
        return [prefix_hit_rate(one.steps) for one in self.rounds]

    def warnings(self) -> list[str]:
        """Why the numbers may not mean what they seem to."""
        found = []
        if not self.num_tokens:
            found.append(
                "no token came within the rounds: does the call return before its answer is "
                "there (a generator, a coroutine, another engine)?"
            )
        elif not self.num_earlier_steps:
            found.append("the first round was the engine's first work; use warmup_rounds=2")
        elif self._first_is_slow():
            found.append("the first round was slower than the others; use more warmup_rounds")
        found += self._cache_warnings()
        return found + self.disturbance.warnings()

    def as_data(self) -> dict[str, Any]:
        """For `extra_info`: values that JSON can hold."""
        steps = [step for one in self.rounds for step in one.steps]
        duration_s = sum(one.window.end_s - one.window.start_s for one in self.rounds)
        return {
            "cache": self.cache,
            "num_rounds": len(self.rounds),
            "num_steps": len(steps),
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / duration_s if duration_s else None,
            "ttft": self.distribution("ttft").as_data(),
            "itl": self.distribution("itl").as_data(),
            "itl_p99_of_rounds_s": self.rows().get("itl_p99", []),
            "prefix_hit_rate": self.prefix_hit_rate,
            "modes": dict(Counter(step.mode for step in steps)),
            "num_preempted": sum(step.num_preempted for step in steps),
            "disturbance": self.disturbance.as_data(),
        }

    def _first_is_slow(self) -> bool:
        durations = [one.window.end_s - one.window.start_s for one in self.rounds]
        return len(durations) >= 3 and (
            durations[0] > SLOW_FIRST_ROUND * statistics.median(durations[1:])
        )

    def _cache_warnings(self) -> list[str]:
        rates = [rate for rate in self.hit_rates() if rate is not None]
        if not rates:
            return []
        spread = max(rates) - min(rates)
        if self.cache == "cold":
            if self.num_iterations > 1:
                return [
                    f"cold cache: of the {self.num_iterations} calls of a round only the first "
                    "is cold; use benchmark.pedantic with iterations=1"
                ]
            return []
        if spread > CACHE_CHANGE:
            return [
                f"the prefix cache served {min(rates):.0%} to {max(rates):.0%} of the prompt, "
                "depending on the round; warm it up with warmup_rounds, or mark the test "
                'llm(cache="cold")'
            ]
        if self.cache is None and max(rates) > CACHE_CHANGE:
            return [
                f"the prefix cache served {max(rates):.0%} of the prompt; mark the test "
                'llm(cache="warm") if it shall, else llm(cache="cold")'
            ]
        return []
