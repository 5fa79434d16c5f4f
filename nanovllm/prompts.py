"""From what a caller passes to `generate` to checked token ids, before anything is queued."""

import sys
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as ReadOnlySequence
from typing import Any

import attrs

from nanovllm.core.admission import check_prompt_length
from nanovllm.core.sequence import check_token_ids
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.structured import StructureCompiler, TokenMatcher
from nanovllm.text.tokenizer import Tokenizer


@attrs.frozen
class Prompt:
    """A checked prompt with its parameters.

    Attributes:
        text: None if the prompt came as token ids.
        token_ids: The prompt.
        params: What is asked for.
        matcher: Stands at the start of the structure that the text is to have; None if any will do.
        priority: The lower, the more urgent.
        deadline_s: Seconds from its arrival until it must have ended; None: whenever.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    matcher: TokenMatcher | None = None
    priority: int = 0
    deadline_s: float | None = None


@attrs.frozen
class PromptReader:
    """Reads prompts for one engine.

    Attributes:
        tokenizer: None if there is none.
        vocab_size: Ids that the model has an embedding for; may exceed the tokenizer's.
        max_model_len: Most tokens of a request.
        structures: Compiles what a text has to look like; None without a tokenizer.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    structures: StructureCompiler | None = None

    def read(
        self,
        prompts: Any,
        params: SamplingParams | ReadOnlySequence[SamplingParams] | None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[Prompt]:
        """Read one prompt or a list of prompts, with one set of parameters or one for each.

        `priority` and `deadline_s` hold for all of them.

        Raises:
            RequestError: Any of them is invalid; the message says which.
        """
        items = [prompts] if is_single(prompts) else _as_list(prompts)
        many_params = _spread(params, len(items))
        _check_urgency(priority, deadline_s)
        read = []
        for index, (item, one_params) in enumerate(zip(items, many_params, strict=True)):
            try:
                read.append(
                    self.read_one(item, one_params, priority=priority, deadline_s=deadline_s)
                )
            except RequestError as error:
                if len(items) == 1:
                    raise
                raise RequestError(f"Prompt {index} of {len(items)}: {error}") from error
        return read

    def read_one(
        self,
        prompt: Any,
        params: SamplingParams | None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Prompt:
        """Read one prompt: text, or token ids.

        Raises:
            RequestError: It is invalid, or one of the other arguments is.
        """
        _check_urgency(priority, deadline_s)
        checked = self._check_params(SamplingParams() if params is None else params)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "The prompt is text, but the engine has no tokenizer "
                    "(`skip_tokenizer_init`); pass token ids."
                )
            token_ids = tuple(self.tokenizer.encode(prompt))
            text: str | None = prompt
        elif _is_list(prompt):
            text, token_ids = None, tuple(prompt)
        else:
            raise RequestError(
                f"A prompt is {prompt!r} of type {type(prompt).__name__}; "
                "it must be text or a list of token ids."
            )
        check_token_ids(token_ids, self.vocab_size - 1)
        check_prompt_length(len(token_ids), self.max_model_len)
        matcher = self._matcher(checked)
        return Prompt(text, token_ids, checked, matcher, priority, deadline_s)

    def chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """A conversation as token ids, through the model's chat template."""
        if self.tokenizer is None:
            raise RequestError(
                "A chat needs the tokenizer, which `skip_tokenizer_init` left out; pass token ids."
            )
        return self.tokenizer.chat(messages, **template_kwargs)

    def _matcher(self, params: SamplingParams) -> TokenMatcher | None:
        if params.structure is None:
            return None
        name, value = params.structure
        if self.structures is None:
            raise RequestError(
                f"`{name}` is given, but the engine has no tokenizer to tell what a token spells "
                "(`skip_tokenizer_init`)."
            )
        return self.structures.compile(name, value)

    def chats(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        **template_kwargs: Any,
    ) -> list[list[int]]:
        """One conversation, or each of a list of them, as token ids."""
        return [self.chat(each, **template_kwargs) for each in _conversations(messages)]

    def _check_params(self, params: Any) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"`sampling_params` is {params!r} of type {type(params).__name__}; "
                "it must be a SamplingParams."
            )
        biased = (token_id for token_id, _ in params.logit_bias or ())
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", biased)):
            for token_id in ids:
                if token_id >= self.vocab_size:
                    raise RequestError(
                        f"`{name}` names token id {token_id}; the model's ids are 0 to "
                        f"{self.vocab_size - 1}."
                    )
        if params.stop and self.tokenizer is None:
            raise RequestError(
                f"`stop` is {params.stop!r}, but the engine has no tokenizer to make text with "
                "(`skip_tokenizer_init`); use `stop_token_ids`."
            )
        return params


def _check_urgency(priority: Any, deadline_s: Any) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(
            f"`priority` is {priority!r} but must be an integer; the lower, the more urgent."
        )
    if deadline_s is None:
        return
    # Not so NaN and infinity.
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not is_number or not 0 < deadline_s <= sys.float_info.max:
        raise RequestError(
            f"`deadline_s` is {deadline_s!r} but must be None or a number of seconds over 0, "
            "counted from when the request arrives."
        )


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt rather than a list of them: text, or a list of ids."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, list | tuple) or not prompts:
        return False
    return not any(isinstance(item, str | list | tuple) for item in prompts)


def _is_list(value: Any) -> bool:
    """Whether it gives things in an order of their own: no set or mapping, and no bytes."""
    return isinstance(value, Iterable) and not isinstance(
        value, bytes | bytearray | memoryview | Set | Mapping
    )


def _as_list(prompts: Any) -> list[Any]:
    if _is_list(prompts):
        return list(prompts)
    raise RequestError(
        f"`prompts` is {prompts!r} of type {type(prompts).__name__}; "
        "it must be text, token ids, or a list of either."
    )


def _spread(
    params: SamplingParams | ReadOnlySequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One set of parameters for each prompt."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise RequestError(
            f"`sampling_params` is {params!r} of type {type(params).__name__}; "
            "it must be a SamplingParams or a list of them."
        )
    if len(params) != count:
        raise RequestError(
            f"`sampling_params` has {len(params)} entries for {count} prompts; "
            "give one for all, or one for each."
        )
    return list(params)


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation, or a list of them, as a list of them."""
    if isinstance(messages, list) and messages and not isinstance(messages[0], list):
        return [messages]
    if isinstance(messages, list):
        return messages
    raise RequestError(
        f"`messages` is {messages!r} of type {type(messages).__name__}; it must be a list of "
        'messages such as {"role": "user", "content": "Hi"}, or a list of such lists.'
    )
