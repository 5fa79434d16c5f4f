"""`Engine`: holds the state and the executor, and owns the one loop that moves them on.

    state, plan = schedule(state, limits)
    sampled = executor.run(build_batch(plan), rows)
    state, outputs = postprocess(state, plan, sampled)

Any thread may call it. One step runs at a time; a caller that wants its own request finished
steps the engine until it is, and serves everybody else's on the way. Whatever interrupts it, and
wherever, it is whole again before anybody else gets hold of it.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as ReadOnlySequence
from contextlib import contextmanager
from typing import Any

import attrs
from xxhash import xxh64_intdigest

from nanovllm.config import ResolvedConfig
from nanovllm.core import (
    EngineState,
    FinishReason,
    Sequence,
    SequenceOutput,
    StepPlan,
    abort,
    admit,
    build_batch,
    postprocess,
    reset_prefix_cache,
    schedule,
)
from nanovllm.errors import NanoVLLMError, RequestError
from nanovllm.outputs import TokenDelta, TokenLogprobs
from nanovllm.prompts import Prompt
from nanovllm.records import EngineStats, RequestRecord, StepHook, StepRecord
from nanovllm.request import Completion, Request
from nanovllm.runtime.executor import Executor
from nanovllm.runtime.sampler import Sampled, SamplingRow
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import IncrementalDetokenizer
from nanovllm.text.tokenizer import Tokenizer

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity) for this request; "
    "its weights or its type are likely at fault"
)


class Engine:
    """The loop, and the requests that are on their way through it."""

    def __init__(
        self,
        config: ResolvedConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        on_step: StepHook | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._facts = dict(facts or {})
        self._limits = config.limits
        self._executor = executor
        self._tokenizer = tokenizer
        # A tuple that is replaced, never changed: a step may be going through it.
        self._hooks: tuple[StepHook, ...] = () if on_step is None else (on_step,)
        self._ended: list[RequestRecord] = []  # since the last record
        self._state = EngineState.create(
            config.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        self._at_rest = self._state
        self._lock = threading.Lock()
        self._was_interrupted = False
        self._is_closed = False
        self._seq_ids = itertools.count()
        self._requests: dict[str, Request] = {}
        self._dropped: deque[Request] = deque()
        self._by_seq_id: dict[int, tuple[Request, Completion]] = {}
        self._totals = dict.fromkeys(
            ("steps", "requests", "prompt", "hits", "generated", "preemptions", "peak"), 0
        )

    @property
    def state(self) -> EngineState:
        """The state at rest, as of the last call that changed it: a value, safe to keep."""
        return self._at_rest

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do something."""
        return bool(self._state.num_unfinished)

    def add(
        self, prompts: ReadOnlySequence[Prompt], request_id: str | None = None
    ) -> list[Request]:
        """Queue prompts: all of them, or none if one is refused.

        Args:
            prompts: Checked by a `PromptReader`.
            request_id: Of the one prompt that there then is. Default: made up.

        Raises:
            RequestError: The id is taken, or a request can never run.
        """
        assert request_id is None or len(prompts) == 1, (request_id, len(prompts))
        with self._exclusive():
            if self._is_closed:
                raise NanoVLLMError("The engine is closed; make a new one.")
            if request_id in self._requests:
                raise RequestError(
                    f"`request_id` is {request_id!r}, which belongs to a live request; "
                    "use another or wait for its end."
                )
            state, requests = self._state, []
            for prompt in prompts:
                state, request = self._admit(state, prompt, request_id)
                requests.append(request)
            for request in requests:
                self._requests[request.request_id] = request
                self._by_seq_id.update({c.seq_id: (request, c) for c in request.completions})
                self._totals["requests"] += 1
                self._totals["prompt"] += len(request.prompt_token_ids)
            self._state = state
            return requests

    def _admit(
        self, state: EngineState, prompt: Prompt, request_id: str | None
    ) -> tuple[EngineState, Request]:
        """The state with a prompt's sequences in it, one per completion."""
        params = prompt.params
        completions = []
        for index in range(params.n):
            seq_id = next(self._seq_ids)
            state = admit(state, Sequence.create(seq_id, prompt.token_ids, params), self._limits)
            detokenizer = self._detokenizer(prompt.token_ids, params)
            seed = self._seed(params, seq_id, index)
            completions.append(Completion(index, seq_id, seed, params, detokenizer))
        if request_id is None:
            request_id = f"request-{completions[0].seq_id}"
            while request_id in self._requests:
                request_id += "-again"  # somebody gave a request of theirs this very name
        arrival_s = time.perf_counter()
        return state, Request(request_id, prompt.text, prompt.token_ids, completions, arrival_s)

    def abort(self, request_id: str) -> bool:
        """End the request of that id; False if there is none."""
        with self._exclusive():
            request = self._requests.get(request_id)
            return request is not None and self._abort(request)

    def abort_request(self, request: Request) -> bool:
        """End this very request, whoever else may use its id by now; False if it has ended."""
        with self._exclusive():
            return self._abort(request)

    def abort_soon(self, request: Request) -> None:
        """End a request now, or as soon as whoever holds the engine lets go of it.

        For finalizers, which may run in any thread at any point, also in the middle of a step of
        this very thread: it neither waits nor raises.
        """
        self._dropped.append(request)
        self._abort_dropped()

    def take_deltas(self, request: Request) -> list[TokenDelta]:
        """What is new in a request since the last call."""
        with self._exclusive():
            return request.take_deltas()

    def step(self) -> list[Request]:
        """Run one step; returns the requests that it changed, none if there is nothing to do.

        An exception in the model or the sampler ends the requests that were in the step, with
        the exception as their error, and leaves the engine fit for others.
        """
        with self._exclusive():
            changed, record = self._step()
        # Without holding the engine, so that a hook may call it.
        if record is not None:
            for hook in self._hooks:
                hook(record)
        return changed

    def subscribe(self, hook: StepHook) -> Callable[[], None]:
        """Call a hook after every step from now on; returns the function that ends it."""
        with self._exclusive():
            self._hooks = (*self._hooks, hook)

        def unsubscribe() -> None:
            with self._exclusive():
                self._hooks = tuple(other for other in self._hooks if other is not hook)

        return unsubscribe

    def describe(self) -> dict[str, Any]:
        """What runs here, in values that JSON can hold: see `nanovllm.facts`."""
        return {
            **self._facts,
            "config": attrs.asdict(
                self.config,
                value_serializer=lambda _, __, value: (
                    sorted(value) if isinstance(value, frozenset) else value
                ),
            ),
        }

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self._exclusive():
            self._state = reset_prefix_cache(self._state)

    def stats(self) -> EngineStats:
        """Totals so far."""
        with self._exclusive():
            totals, pool = self._totals, self._state.pool
            return EngineStats(
                num_steps=totals["steps"],
                num_requests=totals["requests"],
                num_prompt_tokens=totals["prompt"],
                num_prefix_hit_tokens=totals["hits"],
                num_generated_tokens=totals["generated"],
                num_preemptions=totals["preemptions"],
                num_waiting=len(self._state.waiting),
                num_running=len(self._state.running),
                num_blocks=pool.num_blocks,
                num_used_blocks=pool.num_used,
                num_cached_blocks=pool.num_cached,
                peak_used_blocks=totals["peak"],
            )

    def close(self) -> None:
        """End every request and give the memory back; may be called twice."""
        with self._exclusive():
            for request in list(self._requests.values()):
                self._abort(request)
            self._is_closed = True
            self._executor.close()

    # Who holds it.

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the engine, alone. What finalizers asked for meanwhile is done at the end."""
        try:
            with self._lock:
                if self._was_interrupted:
                    self._recover()
                try:
                    yield
                except Exception:
                    raise
                except BaseException:  # such as KeyboardInterrupt, at any point
                    self._was_interrupted = True
                    self._recover()
                    raise
                finally:
                    self._at_rest = self._state
        finally:
            self._abort_dropped()

    def _abort_dropped(self) -> None:
        while self._dropped:
            is_held = False
            try:
                # Whoever does not get the lock leaves the rest to its holder, who looks after
                # letting go.
                is_held = self._lock.acquire(blocking=False)
                if not is_held:
                    return
                self._abort(self._dropped.popleft())
                self._at_rest = self._state
            except IndexError:
                return  # another thread was quicker
            finally:
                if is_held:
                    self._lock.release()

    def _recover(self) -> None:
        """Make state and requests agree again after something was cut off in the middle."""
        live = {seq.seq_id: seq for seq in (*self._state.running, *self._state.waiting)}
        for seq_id, seq in live.items():
            _, completion = self._by_seq_id.get(seq_id, (None, None))
            in_flight = seq.num_scheduled_tokens > 0
            if completion is None or completion.finish_reason is not None or in_flight:
                self._state = abort(self._state, seq_id)
        live = {seq.seq_id: seq for seq in (*self._state.running, *self._state.waiting)}
        for seq_id, (_, completion) in self._by_seq_id.items():
            if seq_id not in live:
                completion.end(FinishReason.ABORT)
            else:
                num_known = len(completion.token_ids)
                for token_id in live[seq_id].completion_token_ids[num_known:]:
                    completion.append(token_id, None, None)
        # A request of an `add` that was cut off has nobody who waits for it: it has just ended.
        self._settle(list(self._requests.values()), time.perf_counter())
        for seq_id in [s for s, (r, _) in self._by_seq_id.items() if r.finished]:
            del self._by_seq_id[seq_id]
        self._was_interrupted = False

    def _abort(self, request: Request) -> bool:
        if request.finished:
            return False
        for completion in request.completions:
            self._end(completion, FinishReason.ABORT)
        self._settle([request], time.perf_counter())
        return True

    # One step, in the order in which it happens.

    def _step(self) -> tuple[list[Request], StepRecord | None]:
        start_s = time.perf_counter()
        self._state, plan = schedule(self._state, self._limits)
        if not plan.scheduled:
            return [], None
        try:
            self._note_plan(plan, start_s)
            execute_s = time.perf_counter()
            batch = build_batch(plan)
            sampled_rows = batch.sampled_rows.tolist()
            rows = [self._sampling_row(plan.scheduled[row]) for row in sampled_rows]
            sampled = self._executor.run(batch, rows)
            executed_s = time.perf_counter()
            changed = self._take_in(plan, sampled_rows, sampled, executed_s)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is these requests' end
            return self._fail(plan, error), None
        self._totals["steps"] += 1
        if not self._hooks:
            return changed, None
        times_s = (start_s, execute_s, executed_s)
        return changed, self._record(plan, sampled_rows, sampled, times_s)

    def _note_plan(self, plan: StepPlan, now_s: float) -> None:
        for seq_id in plan.preempted:
            self._by_seq_id[seq_id][0].note_preempted()
        for seq_id, num_tokens in plan.prefix_hits:
            request, _ = self._by_seq_id[seq_id]
            if request.num_cached_tokens is None:
                self._totals["hits"] += num_tokens
            request.note_scheduled(now_s, num_tokens)
        self._totals["preemptions"] += len(plan.preempted)

    def _sampling_row(self, seq: Sequence) -> SamplingRow:
        _, completion = self._by_seq_id[seq.seq_id]
        return SamplingRow(
            params=completion.params,
            seed=completion.seed,
            position=seq.num_tokens,
            num_completion_tokens=seq.num_completion_tokens,
            stop_token_ids=seq.info.stop_token_ids,
            prompt_token_ids=lambda: seq.prompt_token_ids,
            completion_token_ids=lambda: seq.completion_token_ids,
        )

    def _take_in(
        self, plan: StepPlan, sampled_rows: list[int], sampled: Sampled, now_s: float
    ) -> list[Request]:
        """Give each drawn token to its sequence and to its request."""
        token_ids = [0] * len(plan.scheduled)  # 0 stands where no token was drawn
        logprobs: dict[int, TokenLogprobs | None] = {}
        changed: dict[str, Request] = {}
        for place, row in enumerate(sampled_rows):
            token_id = sampled.token_ids[place]
            seq_id = plan.scheduled[row].seq_id
            if token_id is None:
                request, completion = self._by_seq_id[seq_id]
                self._end(completion, FinishReason.ERROR, NOT_FINITE)
                changed[request.request_id] = request
                continue
            token_ids[row] = token_id
            if sampled.logprobs is not None:
                logprobs[seq_id] = sampled.logprobs[place]
        self._totals["peak"] = max(self._totals["peak"], self._state.pool.num_used)
        self._state, outputs = postprocess(self._state, plan, token_ids)
        for output in outputs:
            if output.new_token_id is not None:
                request = self._take_token(output, logprobs.get(output.seq_id))
                changed[request.request_id] = request
        self._settle(changed.values(), now_s)
        return list(changed.values())

    def _take_token(self, output: SequenceOutput, logprobs: TokenLogprobs | None) -> Request:
        request, completion = self._by_seq_id[output.seq_id]
        assert output.new_token_id is not None
        self._totals["generated"] += 1
        try:
            completion.append(output.new_token_id, logprobs, output.finish_reason)
        except Exception as error:  # noqa: BLE001  # a tokenizer's fault ends its own request only
            self._end(completion, FinishReason.ERROR, _describe(error))
        if completion.finish_reason is not None and output.finish_reason is None:
            self._state = abort(self._state, output.seq_id)  # a stop string ended it
        return request

    def _fail(self, plan: StepPlan, error: Exception) -> list[Request]:
        """End what was in a step that did not get through."""
        changed: dict[str, Request] = {}
        for seq in plan.scheduled:
            if seq.seq_id not in self._by_seq_id:
                continue  # it ended before the error
            request, completion = self._by_seq_id[seq.seq_id]
            self._end(completion, FinishReason.ERROR, _describe(error))
            changed[request.request_id] = request
        self._settle(changed.values(), time.perf_counter())
        return list(changed.values())

    def _end(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        """End a completion from outside the core."""
        self._state = abort(self._state, completion.seq_id)
        completion.end(reason, error)

    def _settle(self, requests: Iterable[Request], now_s: float) -> None:
        """Note what happened, and forget the requests that ended."""
        for request in requests:
            request.note_progress(now_s)
            if request.finished:
                if self._hooks and request.request_id in self._requests:
                    self._ended.append(request.record())
                self._requests.pop(request.request_id, None)
                for completion in request.completions:
                    self._by_seq_id.pop(completion.seq_id, None)

    def _record(
        self,
        plan: StepPlan,
        sampled_rows: list[int],
        sampled: Sampled,
        times_s: tuple[float, float, float],
    ) -> StepRecord:
        start_s, execute_s, executed_s = times_s
        pool = self._state.pool
        ended, self._ended = tuple(self._ended), []
        end_s = time.perf_counter()
        return StepRecord(
            index=self._totals["steps"] - 1,  # -1: this step is counted already
            start_s=start_s,
            end_s=end_s,
            num_rows=len(plan.scheduled),
            num_decode_tokens=plan.num_decode_tokens,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_prefix_hit_tokens=sum(num_tokens for _, num_tokens in plan.prefix_hits),
            num_waiting=len(self._state.waiting),
            num_running=len(self._state.running),
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_preempted=len(plan.preempted),
            mode=self._executor.mode,
            bucket=None,
            fallback=None,
            schedule_s=execute_s - start_s,
            execute_s=executed_s - execute_s,
            postprocess_s=end_s - executed_s,
            pack_s=0.0,
            submit_s=0.0,
            wait_s=0.0,
            sampled=tuple(
                plan.scheduled[row].seq_id
                for row, token_id in zip(sampled_rows, sampled.token_ids, strict=True)
                if token_id is not None
            ),
            finished=ended,
        )

    # What a request starts with.

    def _seed(self, params: SamplingParams, seq_id: int, index: int) -> int:
        if params.seed is not None:
            return params.seed + index
        return xxh64_intdigest(seq_id.to_bytes(8, "little"), self.config.seed % 2**64)

    def _detokenizer(
        self, prompt_token_ids: ReadOnlySequence[int], params: SamplingParams
    ) -> IncrementalDetokenizer | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids=prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
