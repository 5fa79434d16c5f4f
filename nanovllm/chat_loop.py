"""`nanovllm chat`: a conversation at the terminal."""

import sys
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

HELP = "Type a message. /reset forgets the conversation, /quit ends, Ctrl-C stops an answer."


def run_chat(llm: LLM, params: SamplingParams, *, system: str | None) -> None:
    """Talk until the input ends or /quit. Prompts and hints go to standard error."""
    start: list[dict[str, Any]] = []
    if system is not None:
        start.append({"role": "system", "content": system})
    history = list(start)
    _hint(HELP)
    while (line := _ask()) is not None:
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            history = list(start)
            _hint("forgotten")
        elif text.startswith("/"):
            _hint(HELP)
        elif text:
            history.append({"role": "user", "content": text})
            try:
                answer = _answer(llm, params, history)
            except RequestError as error:
                history.pop()
                _hint(f"{error} (/reset starts anew)")
            else:
                history.append({"role": "assistant", "content": answer})


def _answer(llm: LLM, params: SamplingParams, history: list[dict[str, Any]]) -> str:
    """Print an answer as it comes; Ctrl-C ends it there."""
    deltas = llm.stream(llm.chat_token_ids(history), params)
    pieces = []
    try:
        for delta in deltas:
            pieces.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        _hint("\nstopped")
    finally:
        deltas.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
    if deltas.output.error is not None:
        _hint(f"failed: {deltas.output.error}")
    return "".join(pieces)


def _ask() -> str | None:
    """A line of input; None at its end. Ctrl-C at the prompt clears the line."""
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            continue
        except UnicodeDecodeError as error:
            _hint(f"What came on standard input is no text: {error}.")
            continue
        return line if line else None


def _hint(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
