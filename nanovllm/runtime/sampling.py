"""What goes into the sampler and what comes out of it: values, no tensors."""

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from nanovllm.outputs import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0: float32 logits are no finer, so nothing else is left."""

LOGPROB_FLOOR = -9999.0
"""Stands for the log-probability of an impossible token, as JSON has no infinity."""


def _no_tokens() -> Sequence[int]:
    return ()


@attrs.frozen
class SamplingRow:
    """One row of logits, as the sampler needs to know it.

    Attributes:
        params: What the request asked for.
        seed: The request's seed, already resolved. Any integer; counts modulo 2**64.
        position: Index in the sequence of the token to be drawn: `num_tokens` before it.
        num_completion_tokens: Tokens generated so far, the one to be drawn not included.
        stop_token_ids: All ids that end the request, the model's own included. Banned while
            `num_completion_tokens < params.min_tokens`.
        prompt_token_ids: Gives the prompt. Called only if a penalty needs it.
        completion_token_ids: Gives the tokens generated so far. Called only if a penalty needs it.
        allowed_tokens: Gives the tokens that the request's structure allows, as a bitmask `[W]`
            int32: bit `i` of word `j` stands for the token `32 * j + i`, and what lies past its end
            is not allowed. None: all are.
    """

    params: SamplingParams
    seed: int
    position: int
    num_completion_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    prompt_token_ids: Callable[[], Sequence[int]] = _no_tokens
    completion_token_ids: Callable[[], Sequence[int]] = _no_tokens
    allowed_tokens: Callable[[], npt.NDArray[np.int32]] | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes its largest logit and draws nothing."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def bans_stop_tokens(self) -> bool:
        """Whether it is too early for the request to end."""
        return self.num_completion_tokens < self.params.min_tokens


@attrs.frozen
class Sampled:
    """One token per row.

    Attributes:
        token_ids: `[R]` the token of each row, or None where the row failed: its logits hold NaN
            or +inf, or are all -inf, or `failures` says what it was.
        logprobs: `[R]` of the rows that asked for them and did not fail, None in place of the
            others; None altogether if no row asked.
        failures: By row, the exception that it ended in.
        prompt_logprobs: `[P]` one for each of `Batch.scored_indices`; None where the logits hold
            NaN or +inf, or are all -inf.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None] | None
    failures: Mapping[int, str] = attrs.field(factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] = attrs.field(factory=list)


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the token of such a row is the largest logit as the model gave it, and no more."""
    return (
        params.temperature < GREEDY_BELOW
        and params.logprobs is None
        and params.min_tokens == 0
        and not params.logit_bias
        and params.repetition_penalty == 1
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.json_schema is None
        and params.regex is None
        and params.choice is None
        and params.grammar is None
    )
