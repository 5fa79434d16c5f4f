"""What recording does to the latency of a real model, beside what the machine does by itself.

    python -m bench.observer_effect                          # the built-in model, one sequence
    python -m bench.observer_effect --blocks 24 --batch 8

Blocks of one workload run with the recorder paused and live in turn. The paused blocks are also
compared with each other, every other one with the rest: a difference between paused and live blocks
that is no larger than that one is noise.
"""

import argparse
import tempfile
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import median

from nanovllm import LLM, SamplingParams
from nanovllm.records import StepRecord
from telemetry import Recorder, measure_observer_effect
from telemetry.stats import nearest_rank

PROMPT = "The sea was calm that morning, and"


class Blocks:
    """Runs blocks, and keeps the times between tokens of each.

    Args:
        llm: Runs them.
        batch: Sequences at once.
        num_tokens: Of each sequence.
    """

    def __init__(self, llm: LLM, *, batch: int, num_tokens: int) -> None:
        self.found: list[list[float]] = []
        self._llm = llm
        self._prompts = [PROMPT] * batch
        self._params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def run(self) -> list[float]:
        """One block; gives the seconds between its decode steps."""
        records: list[StepRecord] = []
        remove = self._llm.subscribe(records.append)
        self._llm.generate(self._prompts, self._params)
        remove()
        ends = [record.end_s for record in records if not record.num_prefill_tokens]
        self.found.append([after - before for before, after in pairwise(ends)])
        return self.found[-1]

    def split(self) -> tuple[list[list[float]], list[list[float]]]:
        """The paused blocks and the live ones."""
        # The first block warms up; then they are paused, live, live, paused and so on.
        blocks = [*enumerate(self.found[1:])]
        paused = [block for i, block in blocks if i % 4 in (0, 3)]
        return paused, [block for i, block in blocks if i % 4 in (1, 2)]

    def paused(self) -> tuple[list[float], list[float]]:
        """The latencies of the paused blocks, of every other one and of the rest."""
        paused, _ = self.split()
        return [*chain.from_iterable(paused[0::2])], [*chain.from_iterable(paused[1::2])]


def change(before: Sequence[float], after: Sequence[float], percent: float) -> float:
    """By how much a percentile differs, as a share."""
    ranks = (nearest_rank(sorted(values), percent) for values in (before, after))
    first, second = ranks
    return second / first - 1


def main() -> None:
    """Measure, and print what there is to say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=24, help="a multiple of 4")
    parser.add_argument("--tokens", type=int, default=100, help="of each sequence in a block")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LLM(options.model, max_model_len=512) as llm:
        blocks = Blocks(llm, batch=options.batch, num_tokens=options.tokens)
        recorders: list[Recorder] = []

        def recorder() -> Recorder:
            recorders.append(Recorder(llm, Path(folder) / "run.jsonl"))
            return recorders[0]

        effect = measure_observer_effect(blocks.run, recorder, blocks=options.blocks)
        cost = recorders[0].overhead()
    seconds = sum(map(sum, blocks.found[1:])) / 2  # live is half of the blocks
    one, other = blocks.paused()
    print(f"{effect.num_blocks} blocks, {effect.num_off} latencies paused, {effect.num_live} live")
    for percent, off_ns, live_ns, moved in (
        (50, effect.p50_off_ns, effect.p50_live_ns, effect.p50_change),
        (99, effect.p99_off_ns, effect.p99_live_ns, effect.p99_change),
    ):
        print(
            f"ITL p{percent}: paused {off_ns / 1e6:.3f} ms, live {live_ns / 1e6:.3f} ms, "
            f"{moved:+.2%}; paused against paused {change(one, other, percent):+.2%}"
        )
    # On a machine with other work, the block that was disturbed least says most.
    paused_s, live_s = (min(map(median, found)) for found in blocks.split())
    print(
        f"fastest block's median: paused {paused_s * 1e3:.3f} ms, live {live_s * 1e3:.3f} ms, "
        f"{live_s / paused_s - 1:+.2%}"
    )
    worst_ms = [f"{ns / 1e6:.1f} ms" for ns in (effect.max_off_ns, effect.max_live_ns)]
    print(f"worst gap: paused {worst_ms[0]}, live {worst_ms[1]}")
    print(
        f"sampler: {cost.sampler_cpu_ns / 1e9 / seconds:.3%} of a core, worst tick "
        f"{cost.worst_tick_ns / 1e3:.0f} us; writer: {cost.writer_cpu_ns / 1e9 / seconds:.3%}, "
        f"longest stretch without a pause {cost.worst_chunk_ns / 1e3:.0f} us; "
        f"step hook {cost.hook_ns} ns"
    )


if __name__ == "__main__":
    main()
