"""`Engine`: what callers ask for, one at a time: queue requests, step, abort, look, close.

Any thread may call it. One step runs at a time (`nanovllm.step_loop`); a caller that wants its own
request finished steps the engine until it is, and serves everybody else's on the way. Whatever
interrupts it, and wherever, it is whole again before anybody else gets hold of it.
"""

import gc
import itertools
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ReadOnlySequence
from typing import Any

import attrs

from nanovllm.config import ResolvedConfig
from nanovllm.core import EngineState, reset_prefix_cache
from nanovllm.engine_lock import EngineLock
from nanovllm.errors import NanoVLLMError, QueueFullError, RequestError
from nanovllm.intake import Intake, check_queue, check_request_id, make_sequences
from nanovllm.live_requests import LiveRequests
from nanovllm.outputs import TokenDelta
from nanovllm.preview import Preview, preview
from nanovllm.prompts import Prompt
from nanovllm.records import EngineStats, RequestRecord, StepHook, StepRecord
from nanovllm.request import Completion, Request
from nanovllm.runtime.executor import Executor
from nanovllm.step_loop import StepLoop, Stepped, Totals
from nanovllm.step_records import make_record
from nanovllm.step_times import StepTimes
from nanovllm.text.tokenizer import Tokenizer

CLOSED = "The engine is closed; make a new one."


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
        # A tuple that is replaced, never changed: a step may be going through it.
        self._hooks: tuple[StepHook, ...] = () if on_step is None else (on_step,)
        self._ended: list[RequestRecord] = []  # since the last record
        self._live = LiveRequests(
            EngineState.create(
                config.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching
            ),
            on_end=self._note_end,
        )
        self._totals = Totals()
        self._loop = StepLoop(self._live, executor, config.limits, self._totals)
        self._lock = EngineLock(self._live, self._loop.recover)
        self._intake = Intake(config.limits, tokenizer, config.seed)
        self._is_closed = False
        self._step_times = StepTimes()
        if config.freeze_gc:
            gc.collect()
            gc.freeze()

    @property
    def state(self) -> EngineState:
        """The state at rest, as of the last call that changed it: a value, safe to keep.

        On a device that is always a step ahead this waits for the step that is on its way.
        """
        if self._loop.is_ahead:
            with self._lock.hold():
                records = self._land()
            self._tell(records)
        return self._lock.at_rest

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do something."""
        return bool(self._live.state.num_unfinished) or self._loop.is_ahead

    def add(
        self,
        prompts: ReadOnlySequence[Prompt],
        request_id: str | None = None,
        into: list[Request] | None = None,
    ) -> list[Request]:
        """Queue prompts: all of them, or none if one is refused.

        Args:
            prompts: Checked by a `PromptReader`.
            request_id: Of the one prompt that there then is. Default: made up.
            into: Gets the requests before any of them is queued, so that a caller who is
                interrupted on the way out of here can still end them.

        Raises:
            RequestError: The id is taken, a request can never run, or too many wait.
        """
        assert request_id is None or len(prompts) == 1, (request_id, len(prompts))
        with self._lock.hold():
            if self._is_closed:
                raise NanoVLLMError(CLOSED)
            check_request_id(request_id)
            if request_id in self._live.by_id:
                raise RequestError(
                    f"`request_id` is {request_id!r}, which belongs to a live request; "
                    "use another or wait for its end."
                )
            check_queue(self._live.by_id.values(), len(prompts), self.config.max_queued_requests)
            state, requests = self._live.state, []
            for prompt in prompts:
                arrival_s = time.perf_counter()
                state, completions = self._intake.admit(state, prompt, arrival_s)
                name = self._name(completions) if request_id is None else request_id
                requests.append(
                    Request(
                        name,
                        prompt.text,
                        prompt.token_ids,
                        completions,
                        arrival_s,
                        prompt.deadline_s,
                    )
                )
            if into is not None:
                into += requests
            self._live.enter(state, requests)
            self._totals.num_requests += len(requests)
            self._totals.num_prompt_tokens += sum(len(prompt.token_ids) for prompt in prompts)
            return requests

    def _name(self, completions: ReadOnlySequence[Completion]) -> str:
        """An id for a request that came without one."""
        request_id = f"request-{completions[0].seq_id}"
        while request_id in self._live.by_id:
            request_id += "-again"  # somebody gave a request of theirs this very name
        return request_id

    def abort(self, request_id: str) -> bool:
        """End the request of that id; False if there is none."""
        with self._lock.hold():
            request = self._live.by_id.get(request_id)
            return request is not None and self._live.abort(request)

    def abort_request(self, request: Request) -> bool:
        """End this very request, whoever else may use its id by now; False if it has ended."""
        with self._lock.hold():
            return self._live.abort(request)

    def abort_soon(self, request: Request) -> None:
        """End a request now, or as soon as whoever holds the engine lets go of it.

        For finalizers, which may run in any thread at any point, also in the middle of a step of
        this very thread: it neither waits nor raises.
        """
        self._lock.abort_soon(request)

    def take_deltas(self, request: Request) -> list[TokenDelta]:
        """What is new in a request since the last call."""
        with self._lock.hold():
            return request.take_deltas()

    def step(self) -> list[Request]:
        """Run one step; returns the requests that it changed, none if there is nothing to do.

        An exception in the model ends the requests that were in the step, with the exception as
        their error, and leaves the engine fit for others; one in the sampling or in the text of a
        request ends that request only.

        What a hook raises comes out of here, after every hook was called and with the step taken:
        its tokens are there for whoever asks next.
        """
        with self._lock.hold():
            changed, records = self._step()
        self._tell(records)
        return changed

    def subscribe(self, hook: StepHook) -> Callable[[], None]:
        """Call a hook after every step from now on; returns the function that ends it."""
        with self._lock.hold():
            self._hooks = (*self._hooks, hook)

        def unsubscribe() -> None:
            with self._lock.hold():
                self._hooks = tuple(other for other in self._hooks if other is not hook)
                if not self._hooks:
                    self._ended.clear()  # nobody who comes later was there

        return unsubscribe

    def describe(self) -> dict[str, Any]:
        """What runs here, in values that JSON can hold: see `nanovllm.facts`."""
        return {
            **self._facts,
            "graphs": self._loop.executor.describe_graphs(),
            "config": attrs.asdict(
                self.config,
                value_serializer=lambda _, __, value: (
                    sorted(value) if isinstance(value, frozenset) else value
                ),
            ),
        }

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self._lock.hold():
            self._live.state = reset_prefix_cache(self._live.state)

    def preview(self, prompt: Prompt) -> Preview:
        """When a request of this prompt would get its first token if it came now."""
        with self._lock.hold():
            records = self._land()
            state, cost_s = self._live.state, self._step_times.fit()
            obstacle = CLOSED if self._is_closed else None
            try:
                check_queue(self._live.by_id.values(), 1, self.config.max_queued_requests)
            except QueueFullError as error:
                obstacle = str(error)
        self._tell(records)
        if obstacle is not None:
            return Preview(obstacle=obstacle)
        # Without holding the engine: the state is a value, and this may take a while.
        now_s = time.perf_counter()
        first_id = 0 if state.highest_seq_id is None else state.highest_seq_id + 1
        sequences = make_sequences(prompt, itertools.count(first_id), now_s)
        return preview(state, sequences, self._limits, cost_s=cost_s, now_s=now_s)

    def stats(self) -> EngineStats:
        """Totals so far."""
        with self._lock.hold():
            pool = self._live.state.pool
            return EngineStats(
                num_waiting=len(self._live.state.waiting),
                num_running=len(self._live.state.running),
                num_blocks=pool.num_blocks,
                num_used_blocks=pool.num_used,
                num_cached_blocks=pool.num_cached,
                **attrs.asdict(self._totals),
            )

    def close(self) -> None:
        """End every request and give the memory back; may be called twice."""
        with self._lock.hold():
            for request in list(self._live.by_id.values()):
                self._live.abort(request)
            self._loop.recover()  # forgets a step that is on its way: nobody wants its tokens
            if self.config.freeze_gc and not self._is_closed:
                gc.unfreeze()
            self._is_closed = True
            self._loop.executor.close()

    def _step(self, *, may_run_ahead: bool = True) -> tuple[list[Request], list[StepRecord]]:
        """Run one step; returns the requests that it changed, and its record if somebody listens.

        Only by whoever holds the engine; `_tell` comes after letting go of it.
        """
        changed, stepped = self._loop.step(may_run_ahead=may_run_ahead)
        if stepped is None:
            return changed, []
        self._note_time(stepped)
        return changed, [self._record(stepped)] if self._hooks else []

    def _tell(self, records: ReadOnlySequence[StepRecord]) -> None:
        """Give every hook every record, and raise the first error only then.

        Without holding the engine, so that a hook may call it.
        """
        errors = []
        for record in records:
            for hook in self._hooks:
                try:
                    hook(record)
                except Exception as error:  # noqa: BLE001  # it is raised below
                    errors.append(error)
        if errors:
            raise errors[0]

    def _note_time(self, stepped: Stepped) -> None:
        step = stepped.step
        self._step_times.note(
            step.plan.num_decode_tokens,
            step.plan.num_prefill_tokens,
            step.start_s,
            time.perf_counter(),
        )

    def _land(self) -> list[StepRecord]:
        """Take in the step that is on its way, so that the state is at rest; returns its record."""
        landed = []
        while self._loop.is_ahead:
            _, records = self._step(may_run_ahead=False)
            landed += records
        return landed

    def _note_end(self, request: Request) -> None:
        if self._hooks:
            self._ended.append(request.record())

    def _record(self, stepped: Stepped) -> StepRecord:
        ended, self._ended = tuple(self._ended), []
        index = self._totals.num_steps - 1  # -1: this step is counted already
        return make_record(stepped, self._live.state, index=index, finished=ended)
