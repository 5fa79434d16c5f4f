"""What a host's own thread feels of the engine: a tick every millisecond beside generation.

    python -m bench.guest                      # the built-in model
    python -m bench.guest --seconds 20 --num-requests 8

A thread of the host wakes every millisecond and does a little work in Python, as the loop of a
game, an editor or a voice agent does. How late it wakes and how long its work takes is told without
an engine, beside one that waits for requests, and beside one that answers some. The engine's pause
between tokens is told with and without the host's thread.
"""

import argparse
import asyncio
import threading
import time
from collections.abc import Callable

import attrs

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.workloads.distribution import Distribution
from nanovllm.workloads.disturbances import DisturbanceWatch

PERIOD_S = 0.001
NUM_ADDITIONS = 2000
"""The host's work in a tick: some 50 us of plain Python."""


@attrs.frozen
class Ticks:
    """Of a host's thread.

    Attributes:
        late: How long after its time each tick began.
        took: How long its work took.
    """

    late: Distribution
    took: Distribution


def tick(seconds: float) -> Ticks:
    """Wake every millisecond and work a little; a tick that is late skips those it missed."""
    late, took = [], []
    due_s = time.perf_counter() + PERIOD_S
    end_s = due_s + seconds
    while due_s < end_s:
        time.sleep(max(0.0, due_s - time.perf_counter()))
        start_s = time.perf_counter()
        total = 0
        for value in range(NUM_ADDITIONS):
            total += value
        now_s = time.perf_counter()
        late.append(start_s - due_s)
        took.append(now_s - start_s)
        due_s += PERIOD_S * (1 + max(0.0, now_s - due_s) // PERIOD_S)
    return Ticks(Distribution.of(late), Distribution.of(took))


def generate_beside(
    llm: AsyncLLM, num_requests: int, beside: Callable[[], None]
) -> tuple[Distribution, int]:
    """Answer requests all the time until something else has ended.

    Returns:
        The pauses between the tokens of each stream, and how many tokens there were.
    """
    pauses: list[float] = []
    other = threading.Thread(target=beside)

    async def answer(index: int) -> int:
        num_tokens = 0
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        while other.is_alive():
            last_s = None
            async for delta in llm.stream([1 + index, 2, 3, 4, 5, 6, 7, 8], params):
                now_s = time.perf_counter()
                if last_s is not None:
                    pauses.append(now_s - last_s)
                last_s = now_s
                num_tokens += len(delta.token_ids)
                if not other.is_alive():
                    break
        return num_tokens

    async def main() -> int:
        return sum(await asyncio.gather(*map(answer, range(num_requests))))

    other.start()
    num_tokens = asyncio.run(main())
    other.join()
    return Distribution.of(pauses), num_tokens


def show(name: str, values: Distribution) -> str:
    """One line of microseconds."""
    figures = {
        "p50": values.median_s,
        "p99": values.percentile_s(99),
        "worst": values.max_s,
    }
    cells = [
        f"{what} {'-' if value is None else f'{value * 1e6:.0f}':>7}"
        for what, value in figures.items()
    ]
    return f"{name:44} {'  '.join(cells)}  ({values.num_samples})"


def main() -> None:
    """Measure, and print a table in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--num-requests", type=int, default=4)
    options = parser.parse_args()
    lines: list[str] = []

    def tell(name: str, ticks: Ticks) -> None:
        lines.append(show(f"host, {name}: late by", ticks.late))
        lines.append(show(f"host, {name}: work of", ticks.took))

    with DisturbanceWatch() as watch:
        tell("alone", tick(options.seconds))
        llm = AsyncLLM(options.model)
        asyncio.run(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4)))
        cpu_s = time.process_time()
        time.sleep(2)
        lines.append(f"CPU time of an idle engine in 2 s: {time.process_time() - cpu_s:.4f} s")
        tell("idle engine", tick(options.seconds))
        found: list[Ticks] = []
        pauses, num_tokens = generate_beside(
            llm, options.num_requests, lambda: found.append(tick(options.seconds))
        )
        tell(f"{options.num_requests} streams", found[0])
        lines.append(show("engine, beside the host: between tokens", pauses))
        alone, _ = generate_beside(llm, options.num_requests, lambda: time.sleep(options.seconds))
        lines.append(show("engine, alone: between tokens", alone))
        lines.append(f"{num_tokens / options.seconds:.0f} tokens a second beside the host")
        llm.close()
        disturbance = watch.so_far()
    print("\n".join(lines))
    print(
        f"{len(disturbance.gc_pauses_s)} pauses for GC, the longest "
        f"{max(disturbance.gc_pauses_s, default=0) * 1e6:.0f} us; "
        f"load average {disturbance.load_average}"
    )
    for warning in disturbance.warnings():
        print(warning)


if __name__ == "__main__":
    main()
