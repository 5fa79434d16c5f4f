"""`StepLoop`: one step after the other, each planned, run on the device and taken in.

    state, plan = schedule(state, limits)
    flight = executor.submit(build_batch(plan), rows)
    state, outputs = postprocess(state, plan, flight.result())

A device that gains by it always has the next step waiting: that one is planned and submitted
before the tokens of this one are asked for, see `nanovllm.core.lookahead`. A plan made ahead that
needs to know them, as it computes a prompt, preempts or draws by tokens before, is thrown away:
plans are values.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ReadOnlySequence

import attrs

from nanovllm.core import (
    FinishReason,
    SchedulerLimits,
    Sequence,
    SequenceOutput,
    SequenceStatus,
    StepPlan,
    abort,
    advance,
    build_batch,
    postprocess,
    schedule,
    settle,
)
from nanovllm.live_requests import LiveRequests
from nanovllm.outputs import TokenLogprobs
from nanovllm.request import Request
from nanovllm.runtime.executor import Executor, Flight, StepTrace, is_out_of_memory
from nanovllm.runtime.sampler import Sampled, SamplingRow

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity) for this request; "
    "its weights or its type are likely at fault"
)


@attrs.define
class Totals:
    """Counts since the engine was made; see `nanovllm.records.EngineStats`."""

    num_steps: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    peak_used_blocks: int = 0


@attrs.define(eq=False)
class Airborne:
    """A step that was submitted and not taken in.

    Attributes:
        plan: What it computes.
        sampled_rows: Rows of the plan that get a token.
        flight: The executor's.
        start_s: When planning it began.
        submit_s: When it was planned.
        was_ahead: Whether it was planned before the tokens of the step before it were known. The
            state's snapshots are newer than the plan's, then, as those tokens came in since.
        is_advanced: Whether the state counts it as computed already.
    """

    plan: StepPlan
    sampled_rows: list[int]
    flight: Flight
    start_s: float
    submit_s: float
    was_ahead: bool
    is_advanced: bool = False


@attrs.frozen
class Stepped:
    """A step that was taken in.

    Attributes:
        step: What it was.
        token_ids: One for each of its sampled rows, None where the row failed.
        trace: How it was run.
        executed_s: When its tokens were there.
    """

    step: Airborne
    token_ids: ReadOnlySequence[int | None]
    trace: StepTrace
    executed_s: float


class StepLoop:
    """Moves the requests of an engine on. Whoever calls it holds the engine.

    Attributes:
        executor: The device.
        is_ahead: Whether the last call left a step on its way, so that the state is not at rest.
            May be read by anybody at any time.
    """

    def __init__(
        self, live: LiveRequests, executor: Executor, limits: SchedulerLimits, totals: Totals
    ) -> None:
        self.executor = executor
        self.is_ahead = False
        self._live = live
        self._limits = limits
        self._totals = totals
        self._airborne: deque[Airborne] = deque()

    def step(self, *, may_run_ahead: bool = True) -> tuple[list[Request], Stepped | None]:
        """Take in one step; returns the requests that it changed, and None if there was none.

        An exception in it ends the requests of every step that is on its way.
        """
        start_s = time.perf_counter()
        changed = self._live.expire(start_s)
        try:
            if not self._airborne and not self._launch(start_s, changed):
                return changed, None
            step = self._airborne[0]
            if may_run_ahead and step.flight.feeds_next:
                self._launch_ahead(step)
            elif step.was_ahead:
                self._advance(step)
            sampled, trace = step.flight.result()
            executed_s = time.perf_counter()
            changed += self._take_in(step, sampled, executed_s)
            self._airborne.popleft()
            if not self._live.state.running:
                # A step ahead decodes only, and nothing is left of what it decodes: nobody wants
                # its tokens, and its time would be counted when the next request comes.
                self._airborne.clear()
            self.is_ahead = bool(self._airborne)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is these requests' end
            ended = self._fail((*self._in_air(), *self._planned()), error)
            self._airborne.clear()
            self.is_ahead = False
            return changed + ended, None
        self._totals.num_steps += 1
        return changed, Stepped(step, sampled.token_ids, trace, executed_s)

    def recover(self) -> None:
        """Make state and requests agree again after something was cut off in the middle."""
        for seq in self._in_air():
            self._live.state = abort(self._live.state, seq.seq_id)
        self._airborne.clear()
        self.is_ahead = False
        self._live.recover()
        self.executor.recover()

    def _in_air(self) -> Iterator[Sequence]:
        """What the steps on their way compute."""
        for step in self._airborne:
            yield from step.plan.scheduled

    def _planned(self) -> Iterator[Sequence]:
        """What a step is to compute, submitted or not."""
        for seq in (*self._live.state.running, *self._live.state.waiting):
            if seq.num_scheduled_tokens:
                yield seq

    # In the order in which it happens.

    def _launch(self, start_s: float, changed: list[Request]) -> bool:
        """Plan and submit a step; False if there is nothing to do.

        For want of memory a step is planned again with half of its prompt tokens; one that
        computes no prompt, without its least urgent request, which then fails.
        """
        limits = self._limits
        while True:
            before = self._live.state
            self._live.state, plan = schedule(before, limits)
            if not plan.scheduled:
                return False
            try:
                self._submit(plan, self._sampling_rows(plan), start_s, previous=None)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._airborne.clear()
                self._live.state = before  # a value: as if nothing had been planned
                if plan.num_prefill_tokens > 1:
                    half = plan.num_decode_tokens + plan.num_prefill_tokens // 2
                    limits = attrs.evolve(limits, max_num_batched_tokens=half)
                else:
                    last = max(plan.scheduled, key=lambda seq: seq.info.rank)
                    changed += self._fail([last], error)
                continue
            self._note_plan(plan, start_s)
            return True

    def _launch_ahead(self, step: Airborne) -> None:
        """Plan and submit the step after one whose tokens are not known, if that can be done."""
        start_s = time.perf_counter()
        self._advance(step)
        state, plan = schedule(self._live.state, self._limits)
        if not plan.scheduled or plan.num_prefill_tokens or plan.preempted:
            return
        rows = self._sampling_rows(plan)
        if not self.executor.may_run_ahead(rows):
            return
        before = self._live.state
        self._live.state = state
        try:
            self._submit(plan, rows, start_s, previous=step.plan)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._airborne.pop()
            self._live.state = before  # it is planned again when this step has landed

    def _advance(self, step: Airborne) -> None:
        """Count a step as computed; its tokens are then taken in by `settle`."""
        self._live.state = advance(self._live.state)
        step.is_advanced = True

    def _submit(
        self,
        plan: StepPlan,
        rows: list[SamplingRow],
        start_s: float,
        previous: StepPlan | None,
    ) -> None:
        submit_s = time.perf_counter()
        batch = build_batch(plan, previous)
        sampled_rows = batch.sampled_rows.tolist()
        # Noted before it is submitted, so that an interrupt finds what it is about.
        step = Airborne(
            plan, sampled_rows, _Grounded(), start_s, submit_s, was_ahead=previous is not None
        )
        self._airborne.append(step)
        step.flight = self.executor.submit(batch, rows)

    def _note_plan(self, plan: StepPlan, now_s: float) -> None:
        for seq_id in plan.preempted:
            self._live.by_seq_id[seq_id][0].note_preempted()
        for seq_id, num_tokens in plan.prefix_hits:
            request, _ = self._live.by_seq_id[seq_id]
            if request.num_cached_tokens is None:
                self._totals.num_prefix_hit_tokens += num_tokens
            request.note_scheduled(now_s, num_tokens)
        self._totals.num_preemptions += len(plan.preempted)

    def _sampling_rows(self, plan: StepPlan) -> list[SamplingRow]:
        """One for each sequence that gets a token, in order: for a batch's `sampled_rows`."""
        running = SequenceStatus.RUNNING
        return [self._sampling_row(seq) for seq in plan.scheduled if seq.status is running]

    def _sampling_row(self, seq: Sequence) -> SamplingRow:
        _, completion = self._live.by_seq_id[seq.seq_id]
        return SamplingRow(
            params=completion.params,
            seed=completion.seed,
            position=seq.num_tokens,
            num_completion_tokens=seq.num_completion_tokens,
            stop_token_ids=seq.info.stop_token_ids,
            prompt_token_ids=lambda: seq.prompt_token_ids,
            completion_token_ids=lambda: seq.completion_token_ids,
            allowed_tokens=None
            if completion.matcher is None
            else completion.matcher.allowed_tokens,
        )

    def _take_in(self, step: Airborne, sampled: Sampled, now_s: float) -> list[Request]:
        """Give each drawn token to its sequence and to its request."""
        plan = step.plan
        token_ids = [0] * len(plan.scheduled)  # 0 stands where no token was drawn
        logprobs: dict[int, TokenLogprobs | None] = {}
        changed: dict[str, Request] = {}
        if sampled.prompt_logprobs:
            changed.update(self._take_prompt_logprobs(plan, sampled))
        for place, row in enumerate(step.sampled_rows):
            token_id = sampled.token_ids[place]
            seq_id = plan.scheduled[row].seq_id
            if token_id is not None:
                token_ids[row] = token_id
                if sampled.logprobs is not None:
                    logprobs[seq_id] = sampled.logprobs[place]
            elif seq_id in self._live.by_seq_id:  # else it ended while the step was on its way
                request, completion = self._live.by_seq_id[seq_id]
                reason = sampled.failures.get(place, NOT_FINITE)
                self._live.end(completion, FinishReason.ERROR, reason)
                changed[request.request_id] = request
        self._totals.peak_used_blocks = max(
            self._totals.peak_used_blocks, self._live.state.pool.num_used
        )
        take_in = settle if step.is_advanced else postprocess
        self._live.state, outputs = take_in(self._live.state, plan, token_ids)
        for output in outputs:
            if output.new_token_id is not None:
                request = self._take_token(output, logprobs.get(output.seq_id))
                changed[request.request_id] = request
        self._live.settle(changed.values(), now_s)
        return list(changed.values())

    def _take_prompt_logprobs(self, plan: StepPlan, sampled: Sampled) -> dict[str, Request]:
        """Give the prompts' own log-probabilities to their requests; returns those that failed."""
        scores = iter(sampled.prompt_logprobs)
        failed: dict[str, Request] = {}
        for seq in plan.scheduled:
            if seq.num_scored_tokens == 0:
                continue
            scored = list(itertools.islice(scores, seq.num_scored_tokens))
            if seq.seq_id not in self._live.by_seq_id:
                continue  # it ended while the step was on its way
            request, completion = self._live.by_seq_id[seq.seq_id]
            known = [score for score in scored if score]
            if len(known) == seq.num_scored_tokens:
                completion.add_prompt_logprobs(seq.num_cached_tokens, known)
            else:
                self._live.end(completion, FinishReason.ERROR, NOT_FINITE)
                failed[request.request_id] = request
        return failed

    def _take_token(self, output: SequenceOutput, logprobs: TokenLogprobs | None) -> Request:
        request, completion = self._live.by_seq_id[output.seq_id]
        assert output.new_token_id is not None
        self._totals.num_generated_tokens += 1
        try:
            completion.append(output.new_token_id, logprobs, output.finish_reason)
        except Exception as error:  # noqa: BLE001  # a tokenizer's fault ends its own request only
            self._live.end(completion, FinishReason.ERROR, _describe(error))
        if completion.finish_reason is not None and output.finish_reason is None:
            self._live.state = abort(self._live.state, output.seq_id)  # a stop string ended it
        return request

    def _fail(self, seqs: Iterable[Sequence], error: Exception) -> list[Request]:
        """End the requests of sequences that could not be computed; returns them."""
        changed: dict[str, Request] = {}
        for seq in seqs:
            if seq.seq_id not in self._live.by_seq_id:
                continue  # it ended before the error
            request, completion = self._live.by_seq_id[seq.seq_id]
            self._live.end(completion, FinishReason.ERROR, _describe(error))
            changed[request.request_id] = request
        self._live.settle(changed.values(), time.perf_counter())
        return list(changed.values())


class _Grounded:
    """The flight of a step that is about to be submitted."""

    feeds_next = False

    def result(self) -> tuple[Sampled, StepTrace]:
        raise AssertionError("the step was not submitted")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
