"""`Intake`: from a checked prompt to its sequences in the queue and its completions."""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlySequence

import attrs
from xxhash import xxh64_intdigest

from nanovllm.core import EngineState, SchedulerLimits, Sequence, admit
from nanovllm.errors import QueueFullError, RequestError
from nanovllm.prompts import Prompt
from nanovllm.request import Completion, Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import IncrementalDetokenizer
from nanovllm.text.tokenizer import Tokenizer


def check_request_id(request_id: object) -> None:
    """Refuse what is no name.

    Raises:
        RequestError: Saying what was given.
    """
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise RequestError(
            f"`request_id` is {request_id!r} of type {type(request_id).__name__}; it must be None "
            "or a text that is not empty."
        )


def check_queue(live: Iterable[Request], num_new: int, max_queued: int | None) -> None:
    """Refuse requests that would make the queue longer than it may be.

    Args:
        live: The requests that have not ended; those that have begun do not count.
        num_new: Requests that come, all to be queued or none.
        max_queued: `max_queued_requests`; None: any number.

    Raises:
        QueueFullError: With the numbers.
    """
    if max_queued is None:
        return
    num_queued = sum(request.is_queued for request in live)
    if num_queued + num_new > max_queued:
        raise QueueFullError(
            f"{num_queued} requests wait and {num_new} more came, but `max_queued_requests` is "
            f"{max_queued}; try again later, send fewer at once, or raise the limit."
        )


def make_sequences(prompt: Prompt, seq_ids: Iterable[int], arrival_s: float) -> list[Sequence]:
    """The sequences of a prompt, one per completion, not admitted yet.

    Args:
        prompt: As it was read.
        seq_ids: Where to take their ids from.
        arrival_s: When it came, from which its deadline counts.
    """
    ids = list(itertools.islice(seq_ids, prompt.params.n))
    params = prompt.params
    sequences = []
    for seq_id in ids:
        sequences.append(
            Sequence.create(
                seq_id,
                prompt.token_ids,
                params,
                priority=prompt.priority,
                deadline_s=None if prompt.deadline_s is None else arrival_s + prompt.deadline_s,
                group_id=ids[0] if len(ids) > 1 else None,
            )
        )
        # The first completion reports on the prompt that they share.
        if params.prompt_logprobs is not None:
            params = attrs.evolve(params, prompt_logprobs=None)
    return sequences


class Intake:
    """Admits prompts to the scheduler, under ids that are never used twice."""

    def __init__(self, limits: SchedulerLimits, tokenizer: Tokenizer | None, seed: int) -> None:
        """`seed`: from which requests without one of their own get theirs."""
        self._limits = limits
        self._tokenizer = tokenizer
        self._seed = seed
        self._seq_ids = itertools.count()

    def admit(
        self, state: EngineState, prompt: Prompt, arrival_s: float
    ) -> tuple[EngineState, list[Completion]]:
        """The state with a prompt's sequences in it, and its completions, one for each.

        Raises:
            RequestError: It can never run.
        """
        completions: list[Completion] = []
        for index, seq in enumerate(make_sequences(prompt, self._seq_ids, arrival_s)):
            state = admit(state, seq, self._limits)
            params = seq.sampling_params
            detokenizer = self._detokenizer(prompt.token_ids, params)
            matcher = None
            if prompt.matcher is not None:
                admitted = state.find(seq.seq_id)
                assert admitted is not None
                matcher = prompt.matcher.fork(admitted.info.stop_token_ids)
            seed = self._seed_of(params, seq.seq_id, index)
            completions.append(Completion(index, seq.seq_id, seed, params, detokenizer, matcher))
        return state, completions

    def _seed_of(self, params: SamplingParams, seq_id: int, index: int) -> int:
        if params.seed is not None:
            return params.seed + index
        return xxh64_intdigest(seq_id.to_bytes(8, "little"), self._seed % 2**64)

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
