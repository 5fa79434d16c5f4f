"""`AsyncLLM`: the engine for asyncio. One background thread, no child process, any event loop."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable
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
    from nanovllm.engine_thread import EngineThread
    from nanovllm.prompts import Prompt, PromptReader
    from nanovllm.request import Request
    from nanovllm.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model that runs in this process, in a thread of its own.

        async with AsyncLLM("smollm2-135m") as llm:
            async for delta in llm.stream("Once upon a time"):
                print(delta.text, end="")

    May be used from any event loop, from several at once, and beside other engines. Cancelling the
    task that waits for an answer aborts the request.
    """

    @documents_options
    def __init__(
        self,
        model: str | PathLike[str],
        *,
        on_step: StepHook | None = None,
        **options: Any,
    ) -> None:
        """Load a model; arguments and errors as of `LLM`. This takes a while, and blocks."""
        config = EngineConfig(**options)
        # Delayed: this loads torch, and `import nanovllm` must stay quick.
        from nanovllm.build import build_engine
        from nanovllm.engine_thread import EngineThread

        self._engine: Engine
        self._prompts: PromptReader
        self._engine, self._prompts = build_engine(model, config, on_step=on_step)
        self._thread: EngineThread = EngineThread(self._engine)
        # Dropped without `close`: the thread, which keeps the engine alive, ends by itself.
        weakref.finalize(self, self._thread.stop)

    async def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | ReadOnlySequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; arguments, result and errors as of `LLM.generate`."""
        read = self._prompts.read(
            prompts, sampling_params, priority=priority, deadline_s=deadline_s
        )
        streams = [_Stream(self._thread) for _ in read]
        try:
            await self._enter(read, streams)
            for stream in streams:
                async for _ in stream:
                    pass
        finally:
            for stream in streams:
                stream.abort()
        return [stream.output() for stream in streams]

    async def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | ReadOnlySequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer conversations; arguments, result and errors as of `LLM.chat`."""
        prompts = self._prompts.chats(messages, **template_kwargs)
        return await self.generate(
            prompts, sampling_params, priority=priority, deadline_s=deadline_s
        )

    async def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncIterator[TokenDelta]:
        """Complete one prompt, as it comes; other arguments as of `LLM.generate`.

        Deltas that were not looked at in time come merged into one. Leaving the loop, closing the
        iterator or cancelling the task aborts the request.

        Raises:
            RequestError: The prompt, its parameters or the id are invalid.
            QueueFullError: `max_queued_requests` wait already.
        """
        read = self._prompts.read_one(
            prompt, sampling_params, priority=priority, deadline_s=deadline_s
        )
        stream = _Stream(self._thread)
        try:
            await self._enter([read], [stream], request_id)
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    async def preview(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Preview:
        """When a request would get its first token if it came now; as `LLM.preview`."""
        try:
            read = self._prompts.read_one(
                prompt, sampling_params, priority=priority, deadline_s=deadline_s
            )
        except RequestError as error:
            return Preview(obstacle=str(error))
        # In a thread, since it waits for a step to end and then computes for a while.
        return await asyncio.to_thread(self._engine.preview, read)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; requests in flight go on."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.reset_prefix_cache()))

    async def abort(self, request_id: str) -> bool:
        """End a request and free its blocks; False if it is not live."""
        return await asyncio.wrap_future(self._thread.call(lambda engine: engine.abort(request_id)))

    def chat_token_ids(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """A conversation as a prompt for `generate` or `stream`."""
        return self._prompts.chat(messages, **template_kwargs)

    @property
    def config(self) -> ResolvedConfig:
        """What runs, with every option decided."""
        return self._engine.config

    @property
    def state(self) -> "EngineState":
        """The scheduler's current state: a value, safe to keep."""
        return self._engine.state

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer, None with `skip_tokenizer_init`."""
        return self._prompts.tokenizer

    def stats(self) -> EngineStats:
        """Totals since the engine was made. May wait for a step to end."""
        return self._engine.stats()

    def describe(self) -> dict[str, Any]:
        """Engine, model, device, configuration and memory, in values that JSON can hold."""
        return self._engine.describe()

    def subscribe(self, hook: StepHook) -> Callable[[], None]:
        """Call a hook in the engine's thread after every step from now on; returns what ends it.

        May wait for a step to end, as may the function that it returns.
        """
        return self._engine.subscribe(hook)

    def close(self) -> None:
        """Abort what runs, end the thread, give the memory back. May be called twice."""
        if "_thread" in vars(self):  # it is not after a construction that failed
            self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In a thread, since the engine may be in the middle of a step.
        await asyncio.to_thread(self.close)

    async def _enter(
        self,
        prompts: "list[Prompt]",
        streams: "list[_Stream]",
        request_id: str | None = None,
    ) -> None:
        """Queue prompts, all of them or none, each for its stream."""

        def enter(engine: "Engine") -> None:
            if any(stream.was_left for stream in streams):
                return
            requests = engine.add(prompts, request_id)
            for stream, request in zip(streams, requests, strict=True):
                stream.attach(request)

        await asyncio.wrap_future(self._thread.call(enter))


class _Stream:
    """One request's way from the engine's thread to a coroutine."""

    def __init__(self, thread: "EngineThread") -> None:
        self.was_left = False
        self._thread = thread
        self._request: Request | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()  # held for moments only, by either side
        self._unread: list[TokenDelta] = []
        self._has_ended = False

    def abort(self) -> None:
        """End the request if it still runs, also one that is still in the inbox."""
        self.was_left = True
        if not self._has_ended:
            self._thread.call(self._leave)

    def output(self) -> RequestOutput:
        """The request as it ended."""
        assert self._request is not None
        return self._request.output()

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        while True:
            await self._arrived.wait()
            with self._lock:
                unread, self._unread = self._unread, []
                self._arrived.clear()
                has_ended = self._has_ended
            for delta in _merge(unread):
                yield delta
            if has_ended:
                return

    # In the engine's thread.

    def attach(self, request: "Request") -> None:
        """Deliver what is new in this request from now on."""
        self._request = request
        self._thread.subscribe(request, self._deliver)

    def _leave(self, engine: "Engine") -> None:
        if self._request is not None:
            engine.abort_request(self._request)

    def _deliver(self, deltas: list[TokenDelta], has_ended: bool) -> None:
        with self._lock:
            is_first = not self._unread
            self._unread += deltas
            self._has_ended = has_ended
        if is_first or has_ended or self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:
                self._thread.call(self._leave)  # the loop is closed: nobody will ever look


def _merge(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Deltas of the same completion as one."""
    by_index: dict[int, list[TokenDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [
        TokenDelta(
            text="".join(delta.text for delta in several),
            token_ids=tuple(token_id for delta in several for token_id in delta.token_ids),
            finish_reason=several[-1].finish_reason,
            stop_reason=several[-1].stop_reason,
            index=index,
            request_id=several[-1].request_id,
            logprobs=None
            if several[-1].logprobs is None
            else tuple(entry for delta in several for entry in delta.logprobs or ()),
        )
        for index, several in by_index.items()
    ]
