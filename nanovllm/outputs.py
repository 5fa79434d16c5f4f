"""What a request gives back: values that are safe to keep, compare and pass between threads."""

from typing import Any

import attrs

from nanovllm.core.sequence import FinishReason


@attrs.frozen
class TokenLogprobs:
    """How likely the model found one token: log-softmax of its raw logits, in float32.

    Attributes:
        token_id: The token: one that was drawn, or one of the prompt.
        logprob: Its natural log-probability, before bias, penalties and temperature.
        rank: 1 for the most likely token.
        top: (token id, log-probability) of the most likely tokens, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@attrs.frozen
class TokenDelta:
    """What is new in one completion since the delta before.

    Attributes:
        text: New text; may be empty while characters or stop strings are incomplete.
        token_ids: New tokens.
        finish_reason: "stop", "length", "abort" or "error" in the last delta, else None.
        stop_reason: The stop string or token id that ended it, "deadline" if it was aborted when
            its deadline came, else None.
        index: Which of the `n` completions.
        request_id: Whose it is.
        logprobs: One entry per new token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    index: int = 0
    request_id: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None


@attrs.frozen
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: Which of the `n` completions.
        text: The text so far; without the stop string unless it was asked for.
        token_ids: The tokens so far, the one that ended it included.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_reason: The stop string or token id that ended it, "deadline" if it was aborted when
            its deadline came, else None.
        logprobs: One entry per token, if asked for.
        cumulative_logprob: Sum of the tokens' log-probabilities, if asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None


@attrs.frozen
class RequestMetrics:
    """When things happened, in seconds on the clock of `time.perf_counter`.

    Attributes:
        arrival_s: The request was queued.
        first_scheduled_s: Its first step began.
        first_token_s: Its first token was known.
        finished_s: It ended.
        num_preemptions: How often it lost its blocks.
        num_tokens: Tokens of its first completion.
        last_token_s: The last of these was known; None until the request ends.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_tokens: int = 0
    last_token_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def mean_itl_s(self) -> float | None:
        """Mean time between the tokens of the first completion; needs two."""
        if self.last_token_s is None or self.first_token_s is None or self.num_tokens < 2:
            return None
        # -1: n tokens have n - 1 times between them.
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)


@attrs.frozen
class RequestOutput:
    """A request, as far as it has come.

    Attributes:
        request_id: As given or made at `add_request`.
        prompt: The prompt as text, if it came as text.
        prompt_token_ids: The prompt as tokens.
        outputs: One entry per completion.
        finished: Whether all of them ended.
        num_cached_tokens: Prompt tokens whose K/V were found in the prefix cache.
        metrics: When things happened.
        error: Why a completion ended with "error", or that its deadline came; else None.
        prompt_logprobs: If asked for, one entry per prompt token, None for the first, before which
            there is nothing. As many as are known, all from the first completion's first token on.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first completion."""
        return self.outputs[0].finish_reason

    def __getitem__(self, key: str) -> Any:
        """`output["text"]` and `output["token_ids"]`, as nano-vllm's outputs are read."""
        if key not in ("text", "token_ids"):
            raise KeyError(f"{key!r}; an output has 'text' and 'token_ids'")
        return getattr(self.outputs[0], key)
