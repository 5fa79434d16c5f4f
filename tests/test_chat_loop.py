"""`nanovllm chat`: what is sent to the model, line by line, and what is shown where."""

import functools
import sys

import pytest

from nanovllm import LLM, SamplingParams, chat_loop, cli
from nanovllm.chat_loop import HELP, run_chat
from nanovllm.llm import DeltaStream
from nanovllm.runtime.executor import TorchExecutor
from tests.command_line import quick, run
from tests.engines import is_idle
from tests.model_folder import tiny_model_folder, write_model_folder

__all__ = ["quick"]

TOO_LONG = "too long " * 40


class RecordingLLM(LLM):
    """Keeps every conversation that it is asked to go on with."""

    def __init__(self, *args, **options):
        self.asked = []
        super().__init__(*args, attention_backend="torch", **options)

    def chat_token_ids(self, messages, **template_kwargs):
        self.asked.append([(message["role"], message["content"]) for message in messages])
        return super().chat_token_ids(messages, **template_kwargs)


@pytest.fixture(scope="module")
def llm():
    with RecordingLLM(tiny_model_folder(), device="cpu", dtype="float32") as llm:
        yield llm


@pytest.fixture
def talk(monkeypatch, capsys, llm, quick):
    """Type lines; KeyboardInterrupt among them stands for Ctrl-C. Gives (asked, shown, hints)."""

    def type_lines(*lines, system=None):
        typed = iter([*lines, ""])

        class Input:
            def readline(self):
                line = next(typed)
                if line is KeyboardInterrupt:
                    raise KeyboardInterrupt
                return line

        llm.asked.clear()
        monkeypatch.setattr(sys, "stdin", Input())
        run_chat(llm, SamplingParams(temperature=0, max_tokens=6), system=system)
        said = capsys.readouterr()
        assert is_idle(llm)
        return list(llm.asked), said.out, said.err

    return type_lines


@pytest.fixture
def interrupt(monkeypatch):
    """Press Ctrl-C once, after so many deltas."""

    def after(num_deltas):
        following, calls = DeltaStream.__next__, []

        def interrupted(stream):
            calls.append(None)
            if len(calls) == num_deltas + 1:
                raise KeyboardInterrupt
            return following(stream)

        monkeypatch.setattr(DeltaStream, "__next__", interrupted)

    return after


def test_each_message_is_sent_with_all_that_was_said_before(talk):
    asked, shown, hints = talk("walk\n", "  jump \n")

    first, second = asked
    assert first == [("user", "walk")]
    assert second[:1] == [("user", "walk")]
    assert second[2:] == [("user", "jump")]
    role, answer = second[1]
    assert role == "assistant"
    assert answer
    assert shown.startswith(answer + "\n")
    assert shown.endswith("\n")
    assert hints == HELP + "\n" + "> " * 3


def test_answers_are_what_the_model_says_to_the_conversation(talk, llm):
    (asked,), shown, _ = talk("walk\n")
    messages = [{"role": role, "content": content} for role, content in asked]

    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6))

    assert shown == output.text + "\n"


def test_reset_forgets_all_but_the_system_message(talk):
    asked, _, hints = talk("walk\n", "/reset\n", "jump\n", system="Be brief.")

    assert asked == [
        [("system", "Be brief."), ("user", "walk")],
        [("system", "Be brief."), ("user", "jump")],
    ]
    assert "forgotten\n" in hints


def test_quit_ends_and_what_follows_is_not_read(talk):
    asked, shown, _ = talk("/quit\n", "walk\n")

    assert (asked, shown) == ([], "")


def test_the_end_of_the_input_ends_it_and_the_last_line_needs_no_line_end(talk):
    asked, _, _ = talk("walk")

    assert asked == [[("user", "walk")]]


@pytest.mark.parametrize("line", ["/help\n", "/\n", "/reset now\n", "/QUIT\n", "  /what \n"])
def test_an_unknown_command_is_answered_with_those_there_are(talk, line):
    asked, shown, hints = talk(line)

    assert (asked, shown) == ([], "")
    assert hints.count(HELP) == 2  # one of them at the start


@pytest.mark.parametrize("line", ["\n", "   \n", "\t\r\n"])
def test_an_empty_line_is_not_sent(talk, line):
    asked, shown, hints = talk(line, "walk\n")

    assert asked == [[("user", "walk")]]
    assert hints.count("> ") == 3


def test_a_message_too_long_for_the_model_is_not_kept(talk):
    asked, _, hints = talk("walk\n", TOO_LONG + "\n", "jump\n")

    assert [conversation[-1][1] for conversation in asked] == ["walk", TOO_LONG.strip(), "jump"]
    assert asked[2] == [*asked[1][:-1], ("user", "jump")]
    assert "`max_model_len` is 256" in hints
    assert "(/reset starts anew)" in hints


def test_a_conversation_that_has_become_too_long_can_start_anew(talk):
    long = "walk " * 10 + "\n"
    asked, _, hints = talk(*[long] * 8, "/reset\n", long)

    assert "(/reset starts anew)" in hints
    assert asked[-1] == [("user", long.strip())]


@pytest.mark.parametrize("num_deltas", [0, 3])
def test_ctrl_c_during_an_answer_stops_this_answer_only(talk, interrupt, num_deltas):
    (whole,) = talk("walk\n")[1:2]
    interrupt(num_deltas)

    asked, shown, hints = talk("walk\n", "jump\n")

    assert len(asked) == 2
    assert asked[1][0] == ("user", "walk")
    assert asked[1][2:] == [("user", "jump")]
    role, kept = asked[1][1]
    assert role == "assistant"
    assert whole.startswith(kept)
    assert len(kept) < len(whole.rstrip("\n"))
    assert bool(kept) == (num_deltas > 0)
    assert shown.startswith(kept + "\n")
    assert "stopped\n" in hints


def test_ctrl_c_at_the_prompt_clears_the_line_only(talk):
    asked, _, hints = talk(KeyboardInterrupt, "walk\n", KeyboardInterrupt, "jump\n")

    assert [conversation[-1] for conversation in asked] == [("user", "walk"), ("user", "jump")]
    assert hints.count("> \n> ") == 2


def test_an_answer_that_fails_says_why_and_the_next_one_does_not(talk, monkeypatch):
    run_step, calls = TorchExecutor.submit, []

    def run_once(executor, batch, rows):
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("out of cheese")
        return run_step(executor, batch, rows)

    monkeypatch.setattr(TorchExecutor, "submit", run_once)
    asked, _, hints = talk("walk\n", "jump\n")

    assert hints.count("failed: RuntimeError: out of cheese\n") == 1
    assert asked[1][-1] == ("user", "jump")


# The command


def test_the_command_shows_answers_on_standard_output_and_the_rest_on_standard_error(quick):
    result = run("chat", "--temperature", "0", "--system", "Be brief.", input="walk\n/quit\n")

    assert result.exit_code == 0
    assert result.stderr == f"{HELP}\n> > "
    with LLM(tiny_model_folder(), device="cpu", dtype="float32", attention_backend="torch") as llm:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "walk"},
        ]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))
    assert result.stdout == output.text + "\n"


def test_the_command_ends_well_when_there_is_nothing_to_read(quick):
    result = run("chat", input="")

    assert (result.exit_code, result.stdout) == (0, "")


def test_without_a_chat_template_each_message_is_answered_with_why(quick, tmp_path):
    folder = write_model_folder(tmp_path / "model", chat_template=None)

    result = run("chat", "--model", str(folder), input="walk\n")

    assert result.stdout == ""
    assert "no chat template" in result.stderr


def test_a_line_that_is_no_text_does_not_end_it_with_a_traceback(quick):
    result = run("chat", input=b"caf\xe9\nwalk\n")

    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "standard input" in result.stderr


def test_options_reach_the_sampler(quick, monkeypatch):
    taken = []
    monkeypatch.setattr(chat_loop, "run_chat", lambda llm, params, system: taken.append(params))
    monkeypatch.setattr(cli, "LLM", functools.partial(LLM, attention_backend="torch"))
    options = ["--temperature", "0.5", "--top-p", "0.25", "--top-k", "3", "--seed", "9"]

    assert run("chat", *options, "--min-p", "0.125", "--max-tokens", "77").exit_code == 0

    (params,) = taken
    assert params == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=9, max_tokens=77
    )
