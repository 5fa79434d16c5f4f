"""`Request`: one request on its way, from its prompt to its text. Mutable, owned by the engine."""

from collections.abc import Sequence as ReadOnlySequence

import attrs

from nanovllm.core.sequence import FinishReason
from nanovllm.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    TokenDelta,
    TokenLogprobs,
)
from nanovllm.records import RequestRecord
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import IncrementalDetokenizer
from nanovllm.text.stop_strings import StopChecker
from nanovllm.text.structured import TokenMatcher


class Completion:
    """One completion: its tokens, its text, and what is new since it was last looked at."""

    def __init__(
        self,
        index: int,
        seq_id: int,
        seed: int,
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer | None,
        matcher: TokenMatcher | None = None,
    ) -> None:
        self.index = index
        self.seq_id = seq_id
        self.seed = seed
        self.params = params
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing says how likely the first token is
        self.matcher = matcher
        self._detokenizer = detokenizer
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)
        self._text: list[str] = []
        self._num_taken_pieces = 0
        self._num_taken_tokens = 0
        self._end_was_taken = False

    def append(
        self, token_id: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None
    ) -> None:
        """Take in a token.

        `finish_reason` is the core's; a stop string, and a structure that is complete, add theirs.
        """
        self.token_ids.append(token_id)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        ends_by_id = finish_reason is FinishReason.STOP
        if self._detokenizer is not None and (
            not ends_by_id or self.params.include_stop_str_in_output
        ):
            # Only a token after the first `min_tokens` may complete a stop string.
            active = len(self.token_ids) > self.params.min_tokens
            self._push(self._detokenizer.push([token_id]), active=active)
        if self.matcher is not None:
            self.matcher.follow(self.token_ids)
        if self._stop.stopped_by is not None:
            self._finish(FinishReason.STOP, self._stop.stopped_by)
        elif self.matcher is not None and self.matcher.is_complete:
            self._finish(FinishReason.STOP, token_id if ends_by_id else None)
        elif finish_reason is not None:
            self._finish(finish_reason, token_id if ends_by_id else None)

    def add_prompt_logprobs(self, start: int, scores: ReadOnlySequence[TokenLogprobs]) -> None:
        """Take in how likely the prompt's tokens are that follow the positions from `start` on.

        What was known of them before a preemption is replaced.
        """
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[start + 1 :] = scores

    def end(
        self,
        finish_reason: FinishReason,
        error: str | None = None,
        stop_reason: str | None = None,
    ) -> None:
        """End it from outside, unless it has ended."""
        if self.finish_reason is not None:
            return
        self.error = error
        try:
            self._finish(finish_reason, stop_reason)
        except Exception as text_error:  # noqa: BLE001  # it ends, whatever holds back its text
            # The text stays as far as it has come. Most likely this is why it ends at all.
            self.error = error or f"{type(text_error).__name__}: {text_error}"
            self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def take_delta(self, request_id: str) -> TokenDelta:
        """What is new since the last call."""
        new_ids = self.token_ids[self._num_taken_tokens :]
        new_logprobs = None
        if self.logprobs is not None:
            new_logprobs = tuple(self.logprobs[self._num_taken_tokens :])
        delta = TokenDelta(
            text="".join(self._text[self._num_taken_pieces :]),
            token_ids=tuple(new_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            index=self.index,
            request_id=request_id,
            logprobs=new_logprobs,
        )
        self._num_taken_tokens = len(self.token_ids)
        self._num_taken_pieces = len(self._text)
        self._end_was_taken = self.finish_reason is not None
        return delta

    @property
    def has_delta(self) -> bool:
        """Whether there is something new since the last `take_delta`."""
        return len(self.token_ids) > self._num_taken_tokens or (
            self.finish_reason is not None and not self._end_was_taken
        )

    def output(self) -> CompletionOutput:
        """The completion so far."""
        logprobs = self.logprobs
        return CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if logprobs is None else tuple(logprobs),
            cumulative_logprob=None
            if logprobs is None
            else sum(entry.logprob for entry in logprobs),
        )

    def _push(self, text: str, *, active: bool) -> None:
        shown = self._stop.push(text, active=active)
        if shown:
            self._text.append(shown)

    def _finish(self, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        """Give out what was held back, and stay finished."""
        if self.finish_reason is not None:
            return
        if self._detokenizer is not None and self._stop.stopped_by is None:
            active = len(self.token_ids) > self.params.min_tokens
            self._push(self._detokenizer.flush(), active=active)
        held_back = self._stop.flush()
        if held_back:
            self._text.append(held_back)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._stop.stopped_by is not None and finish_reason is FinishReason.LENGTH:
            self.finish_reason, self.stop_reason = FinishReason.STOP, self._stop.stopped_by


class Request:
    """A prompt and its completions."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        completions: ReadOnlySequence[Completion],
        arrival_s: float,
        deadline_s: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.deadline_s = deadline_s
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.completions = tuple(completions)
        self.num_cached_tokens: int | None = None
        self.metrics = RequestMetrics(arrival_s=arrival_s)
        self._num_tokens = 0
        self._last_token_s: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion ended."""
        return all(completion.finish_reason is not None for completion in self.completions)

    @property
    def is_queued(self) -> bool:
        """Whether it waits for its first step."""
        return self.num_cached_tokens is None

    def note_scheduled(self, now_s: float, num_prefix_hit_tokens: int) -> None:
        """Its first step began."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_prefix_hit_tokens
            self.metrics = attrs.evolve(self.metrics, first_scheduled_s=now_s)

    def note_preempted(self) -> None:
        """It lost its blocks."""
        self.metrics = attrs.evolve(self.metrics, num_preemptions=self.metrics.num_preemptions + 1)

    def note_progress(self, now_s: float) -> None:
        """A token came, or the request ended, or both."""
        metrics = self.metrics
        num_tokens = len(self.completions[0].token_ids)
        if num_tokens > self._num_tokens:
            self._num_tokens, self._last_token_s = num_tokens, now_s
        if metrics.first_token_s is None and any(c.token_ids for c in self.completions):
            metrics = attrs.evolve(metrics, first_token_s=now_s)
        if metrics.finished_s is None and self.finished:
            metrics = attrs.evolve(
                metrics,
                finished_s=now_s,
                last_token_s=self._last_token_s,
                num_tokens=num_tokens,
            )
        self.metrics = metrics

    def take_deltas(self) -> list[TokenDelta]:
        """What is new in each completion since the last call; the last one says why it ended."""
        return [
            completion.take_delta(self.request_id)
            for completion in self.completions
            if completion.has_delta
        ]

    def record(self) -> RequestRecord:
        """What became of it; it must have ended."""
        metrics, reason = self.metrics, self.completions[0].finish_reason
        assert metrics.finished_s is not None
        assert reason is not None
        return RequestRecord(
            request_id=self.request_id,
            seq_ids=tuple(completion.seq_id for completion in self.completions),
            arrival_s=metrics.arrival_s,
            first_scheduled_s=metrics.first_scheduled_s,
            first_token_s=metrics.first_token_s,
            finished_s=metrics.finished_s,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_prefix_hit_tokens=self.num_cached_tokens or 0,
            num_generated_tokens=sum(len(c.token_ids) for c in self.completions),
            num_preemptions=metrics.num_preemptions,
            finish_reason=reason.value,
        )

    def output(self) -> RequestOutput:
        """The request so far."""
        errors = [c.error for c in self.completions if c.error is not None]
        prompt_logprobs = self.completions[0].prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(completion.output() for completion in self.completions),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens or 0,
            metrics=self.metrics,
            error=errors[0] if errors else None,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        )
