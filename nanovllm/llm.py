"""`LLM`: text in, text out, in the caller's own thread. Wires the parts together, and no more."""

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ReadOnlySequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nanovllm.config import EngineConfig, ResolvedConfig, documents_options
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput, TokenDelta
from nanovllm.preview import Preview
from nanovllm.records import EngineStats, StepHook
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.core import EngineState
    from nanovllm.engine import Engine
    from nanovllm.prompts import Prompt, PromptReader
    from nanovllm.request import Request
    from nanovllm.text.tokenizer import Tokenizer

Message = dict[str, Any]


class LLM:
    """A model that runs in this process.

        with LLM("smollm2-135m") as llm:
            print(llm.generate("The capital of France is")[0].text)

    Any thread may use it, several at once too: each gets its own answers.

    A request may have a `priority` (0; the lower, the more urgent, as in vLLM) and a `deadline_s`.
    Requests are served by priority, among equals those with the earliest deadline first, then the
    oldest; one that waits takes the place of running ones of a lower priority, which go on later
    where they stopped. So a lower priority waits for as long as higher ones keep the engine full.
    """

    @documents_options
    def __init__(
        self,
        model: str | PathLike[str],
        *,
        on_step: StepHook | None = None,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: A folder in Hugging Face layout, a `.gguf` file, a hub id, or the built-in
                "smollm2-135m".
            on_step: Called after each step with a `StepRecord`, in the thread that ran it. What
                it raises comes out of the call that ran the step; the engine stays whole.
            **options: See below, or `EngineConfig`.

        Raises:
            TypeError: An option that does not exist.
            ConfigError: An option that can't work, or a model that can't be found.
            WeightsError: A model that can't be loaded.
        """
        # Checked before torch is loaded, so a mistake shows at once.
        config = EngineConfig(**options)
        # Delayed: this loads torch, and `import nanovllm` must stay quick.
        from nanovllm.build import build_engine

        self._engine: Engine
        self._prompts: PromptReader
        self._engine, self._prompts = build_engine(model, config, on_step=on_step)
        self._manual: dict[str, Request] = {}

    # Whole answers.

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | ReadOnlySequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: Text, a list of token ids, or a list of either.
            sampling_params: One for all prompts, or one for each.
            use_tqdm: Show a progress bar. Default: if standard error is a terminal.
            priority: Of each of them; the lower, the more urgent.
            deadline_s: Seconds from now until each must have ended. One that has not by then ends
                before the next step, with `finish_reason` "abort", `stop_reason` "deadline", what
                it has so far, and an `error` that says so.

        Returns:
            One `RequestOutput` per prompt, in order. A request that failed in the engine has
            `finish_reason` "error" and says why in `error`; the others are not affected.

        Raises:
            RequestError: A prompt or its parameters are invalid. Nothing was queued.
            QueueFullError: More prompts than `max_queued_requests` leaves room for; this holds
                for the list as a whole, also if nothing runs. Nothing was queued.
        """
        read = self._prompts.read(
            prompts, sampling_params, priority=priority, deadline_s=deadline_s
        )
        return self._run(read, sys.stderr.isatty() if use_tqdm is None else use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | ReadOnlySequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "Hi"}, ...]`, or a list of such lists.
            sampling_params: As in `generate`.
            use_tqdm: As in `generate`.
            priority: As in `generate`.
            deadline_s: As in `generate`.
            **template_kwargs: Passed on to the template.

        Returns:
            One `RequestOutput` per conversation, in order.
        """
        prompts = self._prompts.chats(messages, **template_kwargs)
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, deadline_s=deadline_s
        )

    def chat_token_ids(self, messages: list[Message], **template_kwargs: Any) -> list[int]:
        """A conversation as the prompt that `chat` sends, for `stream` or `add_request`."""
        return self._prompts.chat(messages, **template_kwargs)

    # Answers as they come.

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> "DeltaStream":
        """Complete one prompt, token by token; arguments and errors as of `generate`.

        The prompt is checked and queued at once, not at the first `next`.

        Returns:
            An iterator of `TokenDelta`. Closing or dropping it aborts the request.
        """
        read = self._prompts.read_one(
            prompt, sampling_params, priority=priority, deadline_s=deadline_s
        )
        (request,) = self._engine.add([read])
        return DeltaStream(self._engine, request)

    # The manual loop.

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> str:
        """Queue a request for `step`; returns its id. Arguments as of `generate`.

        Raises:
            RequestError: The prompt, its parameters or the id are invalid. Nothing was queued.
            QueueFullError: `max_queued_requests` wait already.
        """
        # Delayed, as in `__init__`.
        from nanovllm.intake import check_request_id

        check_request_id(request_id)
        if request_id in self._manual:
            raise RequestError(
                f"`request_id` is {request_id!r}, whose output `step` has not returned yet; use "
                "another, or call `step` first."
            )
        read = self._prompts.read_one(
            prompt, sampling_params, priority=priority, deadline_s=deadline_s
        )
        (request,) = self._engine.add([read], request_id)
        self._manual[request.request_id] = request
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests of `add_request` that changed since the last call."""
        self._engine.step()
        outputs = []
        for request in list(self._manual.values()):
            has_ended = request.finished  # before, as in `DeltaStream`
            if self._engine.take_deltas(request):
                outputs.append(request.output())
            if has_ended:
                self._manual.pop(request.request_id, None)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do or to return."""
        return self._engine.has_unfinished_requests() or bool(self._manual)

    def abort(self, request_id: str) -> bool:
        """End a request and free its blocks; False if it is not live."""
        return self._engine.abort(request_id)

    # What is there, and what would be.

    def preview(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Preview:
        """When a request would get its first token if it came now. Queues and computes nothing.

        Runs the scheduler ahead on a copy of its state, with the step times measured so far; takes
        well under a second. Arguments as of `generate`; what makes a request invalid is told as
        the preview's `obstacle`.
        """
        try:
            read = self._prompts.read_one(
                prompt, sampling_params, priority=priority, deadline_s=deadline_s
            )
        except RequestError as error:
            return Preview(obstacle=str(error))
        return self._engine.preview(read)

    @property
    def config(self) -> ResolvedConfig:
        """What runs, with every option decided."""
        return self._engine.config

    @property
    def state(self) -> "EngineState":
        """The scheduler's state between steps: a value, safe to keep."""
        return self._engine.state

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer, None with `skip_tokenizer_init`."""
        return self._prompts.tokenizer

    def stats(self) -> EngineStats:
        """Totals since the engine was made."""
        return self._engine.stats()

    def describe(self) -> dict[str, Any]:
        """Engine, model, device, configuration and memory, in values that JSON can hold."""
        return self._engine.describe()

    def subscribe(self, hook: StepHook) -> Callable[[], None]:
        """Call a hook after every step from now on, as `on_step`; returns what ends it."""
        return self._engine.subscribe(hook)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; requests in flight go on."""
        self._engine.reset_prefix_cache()

    # Its end.

    def close(self) -> None:
        """Abort what runs and give the memory back. May be called twice."""
        if "_engine" in vars(self):  # it is not after a construction that failed
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, prompts: "list[Prompt]", show_progress: bool) -> list[RequestOutput]:
        requests: list[Request] = []
        try:
            self._engine.add(prompts, into=requests)
            with _progress(len(requests), shown=show_progress and bool(requests)) as advance:
                for request in requests:
                    while not request.finished:
                        self._engine.step()
                    advance()
        finally:
            # After an exception, such as KeyboardInterrupt, nothing of this call stays behind.
            for request in requests:
                self._engine.abort_request(request)
        return [request.output() for request in requests]


class DeltaStream:
    """The deltas of one request, each made by stepping the engine when it is asked for."""

    def __init__(self, engine: "Engine", request: "Request") -> None:
        self._engine = engine
        self._request = request
        self._ready: deque[TokenDelta] = deque()

    @property
    def request_id(self) -> str:
        """For `abort`."""
        return self._request.request_id

    @property
    def output(self) -> RequestOutput:
        """The request as far as it has come, metrics included."""
        return self._request.output()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenDelta:
        while not self._ready:
            has_ended = self._request.finished  # before: else another thread's step might fall in
            self._ready.extend(self._engine.take_deltas(self._request))
            if self._ready:
                break
            if has_ended:
                raise StopIteration
            self._engine.step()
        return self._ready.popleft()

    def close(self) -> None:
        """Abort the request, if it still runs."""
        self._engine.abort_request(self._request)

    def __del__(self) -> None:
        self._engine.abort_soon(self._request)


@contextlib.contextmanager
def _progress(count: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error; gives the function that moves it on by one."""
    if not shown:
        yield lambda: None
        return
    # Delayed: only needed when somebody looks.
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("generate", total=count)
        yield lambda: bar.advance(task)
