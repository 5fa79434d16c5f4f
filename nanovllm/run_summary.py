"""What a run came to, in a few figures: collected step by step, summed up at the end."""

import statistics
import sys
from typing import Self

import attrs
import psutil

from nanovllm.outputs import RequestOutput
from nanovllm.records import EngineStats, StepRecord


class StepLog:
    """An `on_step` hook that keeps when each step ended and whether it decoded."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def __call__(self, record: StepRecord) -> None:
        """Take in a step."""
        if record.num_decode_tokens:
            self.ends_s.append(
                record.start_s + record.schedule_s + record.execute_s + record.postprocess_s
            )
        elif self.ends_s and record.num_prefill_tokens:
            self.ends_s.append(float("nan"))  # no time between tokens spans this step


@attrs.frozen
class RunSummary:
    """The figures of a run.

    Attributes:
        load_s: Time to load the model.
        ttft_s: Median time to the first token.
        itls_s: Times between the tokens of steps that follow each other, sorted.
        num_generated_tokens: Tokens of all answers.
        generate_s: From the first request to the last token.
        peak_memory_bytes: Most memory that the process had resident.
        peak_used_blocks: Most K/V blocks in use.
        num_blocks: K/V blocks there are.
        num_prefix_hit_tokens: Prompt tokens found cached.
    """

    load_s: float
    ttft_s: float | None
    itls_s: tuple[float, ...]
    num_generated_tokens: int
    generate_s: float
    peak_memory_bytes: int
    peak_used_blocks: int
    num_blocks: int
    num_prefix_hit_tokens: int

    @classmethod
    def of(
        cls, outputs: list[RequestOutput], steps: StepLog, stats: EngineStats, *, load_s: float
    ) -> Self:
        """Sum up a run."""
        ttfts = [o.metrics.ttft_s for o in outputs if o.metrics.ttft_s is not None]
        firsts = [output.metrics.arrival_s for output in outputs]
        lasts = [o.metrics.finished_s for o in outputs if o.metrics.finished_s is not None]
        gaps = [
            after - before for before, after in zip(steps.ends_s, steps.ends_s[1:], strict=False)
        ]
        return cls(
            load_s=load_s,
            ttft_s=statistics.median(ttfts) if ttfts else None,
            itls_s=tuple(sorted(gap for gap in gaps if gap == gap)),  # NaN is not itself
            num_generated_tokens=sum(len(c.token_ids) for o in outputs for c in o.outputs),
            generate_s=max(lasts) - min(firsts) if lasts else 0.0,
            peak_memory_bytes=peak_memory_bytes(),
            peak_used_blocks=stats.peak_used_blocks,
            num_blocks=stats.num_blocks,
            num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
        )

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each figure, for people."""
        rows = [("load", f"{self.load_s:.2f} s")]
        if self.ttft_s is not None:
            rows.append(("time to first token", f"{self.ttft_s * 1e3:.1f} ms"))
        if self.itls_s:
            mean = statistics.mean(self.itls_s) * 1e3
            # The rank of the 99th percentile is rounded up: with few gaps it is the largest.
            p99 = self.itls_s[min(-(-len(self.itls_s) * 99 // 100), len(self.itls_s)) - 1] * 1e3
            rows.append(("time between tokens", f"mean {mean:.1f} ms, p99 {p99:.1f} ms"))
        if self.generate_s > 0:
            rate = self.num_generated_tokens / self.generate_s
            rows.append(("tokens", f"{self.num_generated_tokens}, {rate:.1f} a second"))
        rows += [
            ("peak memory", f"{self.peak_memory_bytes / 2**20:.0f} MiB"),
            ("K/V blocks used", f"{self.peak_used_blocks} of {self.num_blocks}"),
            ("prefix-hit tokens", str(self.num_prefix_hit_tokens)),
        ]
        return rows


def peak_memory_bytes() -> int:
    """Most memory that this process had resident."""
    if sys.platform == "win32":
        peak_on_windows: int = psutil.Process().memory_info().peak_wset
        return peak_on_windows
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
