"""From what a caller passes to `generate` to checked token ids, before anything is queued."""

from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as ReadOnlySequence
from typing import Any

import attrs

from nanovllm.core.sequence import check_token_ids
from nanovllm.core.state import check_prompt_length
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer


@attrs.frozen
class Prompt:
    """A checked prompt with its parameters."""

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams


@attrs.frozen
class PromptReader:
    """Reads prompts for one engine.

    Attributes:
        tokenizer: None if there is none.
        vocab_size: Ids that the model has an embedding for; may exceed the tokenizer's.
        max_model_len: Most tokens of a request.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int

    def read(
        self, prompts: Any, params: SamplingParams | ReadOnlySequence[SamplingParams] | None
    ) -> list[Prompt]:
        """Read one prompt or a list of prompts, with one set of parameters or one for each.

        Raises:
            RequestError: Any of them is invalid; the message says which.
        """
        items = [prompts] if is_single(prompts) else _as_list(prompts)
        many_params = _spread(params, len(items))
        read = []
        for index, (item, one_params) in enumerate(zip(items, many_params, strict=True)):
            try:
                read.append(self.read_one(item, one_params))
            except RequestError as error:
                if len(items) == 1:
                    raise
                raise RequestError(f"Prompt {index} of {len(items)}: {error}") from error
        return read

    def read_one(self, prompt: Any, params: SamplingParams | None) -> Prompt:
        """Read one prompt: text, or token ids."""
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
        return Prompt(text, token_ids, checked)

    def chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """A conversation as token ids, through the model's chat template."""
        if self.tokenizer is None:
            raise RequestError(
                "A chat needs the tokenizer, which `skip_tokenizer_init` left out; pass token ids."
            )
        return self.tokenizer.chat(messages, **template_kwargs)

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
