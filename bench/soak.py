"""Many threads and tasks on one engine for minutes: answers, blocks, memory, dictionaries.

    python -m bench.soak --minutes 3                        # a tiny random model
    python -m bench.soak --minutes 3 --model smollm2-135m

Rounds of 8 threads with 50 requests each, in event loops of their own, beside 200 asyncio tasks in
another one. Requests are awaited, streamed, left half-way, cancelled, aborted by id or late for
their deadline, with random priorities, on a cache that is too small for all of them. Every answer
is held against that of an engine which ran its prompt alone; after each round the engine must be as
it was before the first one.
"""

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil

from bench.tiny_model import VOCAB_SIZE, write_tiny_model
from nanovllm import LLM, AsyncLLM, QueueFullError, SamplingParams

NUM_TOKENS = 16
NUM_PROMPTS = 64
KINDS = ("await", "stream", "siblings", "leave", "cancel", "abort", "deadline")
"""What becomes of a request; each is as likely."""

NUM_WARM_UP_ROUNDS = 1
"""Rounds after which memory is first looked at."""


@attrs.frozen
class Reference:
    """Prompts, and what each gets alone.

    Attributes:
        prompts: Token ids.
        answers: Greedy tokens of each, `NUM_TOKENS` of them.
    """

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]


@attrs.define
class Findings:
    """What was seen; complete when the last round has ended.

    Attributes:
        outcomes: Requests by what became of them.
        faults: What should not have been, in words.
        resident_bytes: Memory of the process after each round.
        num_threads: Threads of the process before the first and after each round.
        duration_s: Of all rounds.
    """

    outcomes: Counter[str] = attrs.field(factory=Counter)
    faults: list[str] = attrs.field(factory=list)
    resident_bytes: list[int] = attrs.field(factory=list)
    num_threads: list[int] = attrs.field(factory=list)
    duration_s: float = 0.0

    @property
    def growth_bytes(self) -> int:
        """Memory after the last round, beyond that after the warm-up."""
        later = self.resident_bytes[NUM_WARM_UP_ROUNDS - 1 :]
        return later[-1] - later[0] if later else 0


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens, every other one of which begins like the others."""
    rng = random.Random(0)
    head = rng.choices(range(vocab_size), k=40)
    return [
        (head if index % 2 else []) + rng.choices(range(vocab_size), k=rng.randint(1, 40))
        for index in range(NUM_PROMPTS)
    ]


def run_alone(llm: LLM, prompts: Sequence[Sequence[int]]) -> Reference:
    """Let an engine answer one prompt after the other."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [llm.generate([list(prompt)], params)[0].token_ids for prompt in prompts]
    return Reference(tuple(map(tuple, prompts)), tuple(answers))


class Soak:
    """Keeps one engine busy from threads and tasks, and looks at what it does."""

    def __init__(
        self, llm: AsyncLLM, reference: Reference, *, num_threads: int, num_tasks: int
    ) -> None:
        self.findings = Findings()
        self._llm = llm
        self._reference = reference
        self._num_threads = num_threads
        self._num_tasks = num_tasks
        self._end_s = 0.0

    def run(self, duration_s: float, num_requests: int) -> Findings:
        """Run rounds until the time is up; the last one is cut short.

        Args:
            duration_s: Time after which no request is begun.
            num_requests: Of each thread in a round.
        """
        start_s = time.perf_counter()
        self._end_s = start_s + duration_s
        self.findings.num_threads.append(psutil.Process().num_threads())
        seed = 0
        while not seed or time.perf_counter() < self._end_s:
            seed += 1
            self._round(seed, num_requests)
            self._look()
        self.findings.duration_s = time.perf_counter() - start_s
        return self.findings

    def _round(self, seed: int, num_requests: int) -> None:
        threads = [
            threading.Thread(target=self._thread, args=(seed * 1000 + index, num_requests))
            for index in range(self._num_threads)
        ]
        for thread in threads:
            thread.start()
        asyncio.run(self._tasks(seed))
        for thread in threads:
            thread.join()

    def _thread(self, seed: int, num_requests: int) -> None:
        """A thread of the host with an event loop of its own."""

        async def one_after_the_other() -> None:
            rng = random.Random(seed)
            for _ in range(num_requests):
                if time.perf_counter() > self._end_s:
                    return
                await self._request(rng)

        asyncio.run(one_after_the_other())

    async def _tasks(self, seed: int) -> None:
        rngs = [random.Random(f"{seed} {index}") for index in range(self._num_tasks)]
        await asyncio.gather(*map(self._request, rngs))

    async def _request(self, rng: random.Random) -> None:
        kind = rng.choice(KINDS)
        index = rng.randrange(len(self._reference.prompts))
        while True:
            try:
                await self._one(kind, index, rng)
            except QueueFullError:
                self.findings.outcomes["queue full"] += 1
                await asyncio.sleep(rng.random() * 0.05)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is told
                self.findings.faults.append(f"{kind}: {type(error).__name__}: {error}")
                return
            else:
                self.findings.outcomes[kind] += 1
                return

    async def _one(self, kind: str, index: int, rng: random.Random) -> None:
        prompt = list(self._reference.prompts[index])
        priority = rng.randint(-1, 1)
        params = SamplingParams(
            temperature=0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            n=2 if kind == "siblings" else 1,
        )
        if kind in ("await", "siblings"):
            (output,) = await self._llm.generate([prompt], params, priority=priority)
            for completion in output.outputs:
                self._compare(kind, index, completion.token_ids, completion.finish_reason)
        elif kind == "cancel":
            task = asyncio.ensure_future(self._llm.generate([prompt], params, priority=priority))
            await asyncio.wait([task], timeout=rng.random() * 0.2)
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, QueueFullError):
                raise result
        else:
            await self._stream(kind, index, params, rng, priority)

    async def _stream(
        self, kind: str, index: int, params: SamplingParams, rng: random.Random, priority: int
    ) -> None:
        name = f"{kind}-{rng.getrandbits(64)}" if kind == "abort" else None
        num_wanted = rng.randint(1, NUM_TOKENS) if kind in ("leave", "abort") else NUM_TOKENS + 1
        stream = self._llm.stream(
            list(self._reference.prompts[index]),
            params,
            request_id=name,
            priority=priority,
            deadline_s=rng.random() * 0.5 + 1e-3 if kind == "deadline" else None,
        )
        token_ids: tuple[int, ...] = ()
        reason = None
        async for delta in stream:
            token_ids += delta.token_ids
            reason = delta.finish_reason
            if len(token_ids) >= num_wanted and name is None:
                break
            if len(token_ids) >= num_wanted and name is not None:
                await self._llm.abort(name)
        if kind == "leave":
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        self._compare(kind, index, token_ids, reason)

    def _compare(self, kind: str, index: int, token_ids: Sequence[int], reason: str | None) -> None:
        answer = self._reference.answers[index]
        if tuple(token_ids) != answer[: len(token_ids)]:
            self.findings.faults.append(f"{kind}: not the answer to its prompt, {index}")
        if reason == "length" and len(token_ids) != NUM_TOKENS:
            self.findings.faults.append(f"{kind}: {len(token_ids)} tokens and then 'length'")
        may_end: set[str | None] = {"length"}
        if kind in ("leave", "abort", "deadline"):
            may_end |= {"abort", None}
        if reason not in may_end:
            self.findings.faults.append(f"{kind}: ended with {reason!r}")

    def _look(self) -> None:
        """Wait until the engine has noticed that everybody has gone, and see what is left."""
        for _ in range(1000):
            left = what_is_left(self._llm)
            if not any(left.values()):
                break
            time.sleep(0.01)
        else:
            self.findings.faults.append(f"left behind: {left}")
        gc.collect()
        process = psutil.Process()
        self.findings.resident_bytes.append(process.memory_info().rss)
        self.findings.num_threads.append(process.num_threads())


def what_is_left(llm: AsyncLLM) -> dict[str, int]:
    """How much is in every place where an engine keeps something of a request."""
    engine, thread, state = llm._engine, llm._thread, llm.state
    return {
        "sequences": state.num_unfinished,
        "used blocks": state.pool.num_used,
        "requests by id": len(engine._live.by_id),
        "requests by sequence": len(engine._live.by_seq_id),
        "requests to be told of": len(engine._ended),
        "steps on their way": len(engine._loop._airborne),
        "dropped requests": len(engine._lock._dropped),
        "jobs": len(thread._inbox),
        "subscribers": len(thread._subscribers),
    }


def report(findings: Findings) -> str:
    """The figures in words."""
    mib = [value / 2**20 for value in findings.resident_bytes]
    total = sum(count for kind, count in findings.outcomes.items() if kind in KINDS)
    lines = [
        f"{total} requests in {findings.duration_s:.0f} s, {len(mib)} rounds",
        ", ".join(f"{kind} {count}" for kind, count in sorted(findings.outcomes.items())),
        f"resident memory after each round, MiB: {' '.join(f'{value:.1f}' for value in mib)}",
        f"growth since the first: {findings.growth_bytes / 2**20:+.1f} MiB",
        f"threads before and after each round: {' '.join(map(str, findings.num_threads))}",
        f"faults: {len(findings.faults)}",
        *findings.faults[:20],
    ]
    return "\n".join(lines)


def soak(
    model: Path | str,
    vocab_size: int,
    duration_s: float,
    *,
    num_threads: int = 8,
    num_requests: int = 50,
    num_tasks: int = 200,
) -> Findings:
    """Make the engines, run the rounds, close the engine, look once more."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    alone: dict[str, Any] = {
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "max_model_len": 256,
    }
    with LLM(model, **alone, **options) as one:
        reference = run_alone(one, make_prompts(vocab_size))
    llm = AsyncLLM(
        model,
        max_model_len=256,
        max_num_seqs=24,
        kvcache_block_size=16,
        num_kvcache_blocks=72,  # 24 requests may need 144
        max_queued_requests=180,
        **options,
    )
    with_engine = psutil.Process().num_threads()
    work = Soak(llm, reference, num_threads=num_threads, num_tasks=num_tasks)
    findings = work.run(duration_s, num_requests)
    findings.outcomes["preemptions"] = llm.stats().num_preemptions
    own = psutil.Process().num_threads() - with_engine
    llm.close()
    if own > 0:
        findings.faults.append(f"{own} more threads than before")
    return findings


def main() -> None:
    """Soak, print what was found, and fail if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--model", help="default: a tiny one with random weights")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_tiny_model(Path(folder) / "tiny")
        findings = soak(model, options.vocab_size, options.minutes * 60)
    print(report(findings))
    sys.exit(1 if findings.faults else 0)


if __name__ == "__main__":
    main()
