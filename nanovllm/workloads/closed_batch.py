"""Latency of whole batches: `batch` prompts at once, again and again, nothing else running."""

import time
from collections import Counter
from typing import Any

import attrs

from nanovllm.llm import LLM
from nanovllm.records import StepRecord
from nanovllm.workloads.bandwidth import Bandwidth, decode_step_bytes
from nanovllm.workloads.distribution import Distribution
from nanovllm.workloads.prompts import exactly, random_prompt, vocab_size
from nanovllm.workloads.token_log import TokenLog, gaps_s, prefix_hit_rate, ttfts_s


@attrs.frozen
class BatchShape:
    """What a batch is: how many prompts, of how many tokens, to generate how many."""

    batch: int
    num_prompt_tokens: int
    num_output_tokens: int


@attrs.frozen
class LatencyReport:
    """What came of the timed runs of one shape.

    Attributes:
        shape: Of every batch.
        call: Each whole call of `generate`.
        ttft: Times to the first token, every request a sample.
        itl: Times between two tokens, every one a sample.
        decode_step: Steps in which every row decoded and no prompt was computed.
        decode_bytes: What such a step must read, in the middle of a run.
        prefix_hit_rate: Share of prompt tokens that were found cached.
        modes: How many steps ran in which mode.
        num_preempted: How often a sequence lost its blocks, since all did not fit.
    """

    shape: BatchShape
    call: Distribution
    ttft: Distribution
    itl: Distribution
    decode_step: Distribution
    decode_bytes: float
    prefix_hit_rate: float | None
    modes: dict[str, int]
    num_preempted: int

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens generated a second of a median call."""
        median_s = self.call.median_s
        return self.shape.batch * self.shape.num_output_tokens / median_s if median_s else 0.0

    def bandwidth_share(self, bandwidth: Bandwidth) -> float | None:
        """How much of a machine's bandwidth a median decode step uses; 1 is all of it."""
        median_s = self.decode_step.median_s
        return bandwidth.limit_s(self.decode_bytes) / median_s if median_s else None

    def as_data(self, bandwidth: Bandwidth) -> dict[str, Any]:
        """For JSON."""
        return {
            **attrs.asdict(self.shape),
            "call": self.call.as_data(),
            "ttft": self.ttft.as_data(),
            "itl": self.itl.as_data(),
            "decode_step": self.decode_step.as_data(),
            "decode_bytes": self.decode_bytes,
            "decode_limit_s": bandwidth.limit_s(self.decode_bytes),
            "bandwidth_share": self.bandwidth_share(bandwidth),
            "output_tokens_per_s": self.output_tokens_per_s,
            "prefix_hit_rate": self.prefix_hit_rate,
            "modes": self.modes,
            "num_preempted": self.num_preempted,
        }


def run_batches(
    llm: LLM,
    shape: BatchShape,
    *,
    num_runs: int,
    num_warmup_runs: int,
    seed: int = 0,
) -> LatencyReport:
    """Generate batches of fresh random prompts, one after the other, and time the last of them.

    Args:
        llm: Nobody else may use it meanwhile.
        shape: Of every batch.
        num_runs: Timed.
        num_warmup_runs: Before them, not timed.
        seed: Of the prompts.
    """
    size, params = vocab_size(llm), exactly(shape.num_output_tokens)
    log, calls, first_s = TokenLog(), [], 0.0
    unsubscribe = llm.subscribe(log)
    try:
        for run in range(-num_warmup_runs, num_runs):
            prompts = [
                random_prompt(shape.num_prompt_tokens, vocab_size=size, seed=f"{seed} {run} {row}")
                for row in range(shape.batch)
            ]
            llm.reset_prefix_cache()
            start_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if run >= 0:
                calls.append(time.perf_counter() - start_s)
            if run == 0:
                first_s = start_s
    finally:
        unsubscribe()
    steps = log.within(first_s, time.perf_counter())
    context = shape.num_prompt_tokens + shape.num_output_tokens / 2  # in the middle of a run
    return LatencyReport(
        shape=shape,
        call=Distribution.of(calls),
        ttft=Distribution.of(ttfts_s(log.requests(), first_s, time.perf_counter())),
        itl=Distribution.of(gaps_s(steps)),
        decode_step=Distribution.of(
            step.end_s - step.start_s for step in steps if _is_full_decode(step, shape.batch)
        ),
        decode_bytes=decode_step_bytes(llm, batch=shape.batch, num_context_tokens=context),
        prefix_hit_rate=prefix_hit_rate(steps),
        modes=dict(Counter(step.mode for step in steps)),
        num_preempted=sum(step.num_preempted for step in steps),
    )


def _is_full_decode(step: StepRecord, batch: int) -> bool:
    return step.num_decode_tokens == batch and step.num_prefill_tokens == 0
