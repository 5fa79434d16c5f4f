import datetime

import pytest

from nanovllm.errors import RequestError
from nanovllm.text.chat_template import ChatTemplates, render

HI = [{"role": "user", "content": "Hi"}]


def show(template, messages=HI, *, add_generation_prompt=False, **variables):
    return render(
        template, messages, add_generation_prompt=add_generation_prompt, variables=variables
    )


# What templates can do


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].role }}:{{ messages[0]['content'] }}", "user:Hi"),
        ("{% for m in messages %}\n  {% if m.role %}\nx\n  {% endif %}\n{% endfor %}\n", "x\n"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, {'b': 2}] | tojson(indent=1) }}", '[\n 1,\n {\n  "b": 2\n }\n]'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aHib"),
        ("{{ tools is none }} {{ documents is none }} {{ absent is defined }}", "True True False"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ bos_token }}", "<s>"),
    ],
)
def test_follows_the_conventions_of_hugging_face(template, expected):
    assert show(template, bos_token="<s>") == expected


def test_knows_the_time():
    year = str(datetime.datetime.now().astimezone().year)

    assert show("{{ strftime_now('%Y') }}") == year


def test_says_whether_an_answer_is_to_follow():
    template = "{% if add_generation_prompt %}go{% endif %}"

    assert show(template, add_generation_prompt=True) == "go"
    assert show(template, add_generation_prompt=False) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ messages[0].update({'role': 'root'}) }}",
    ],
)
def test_runs_templates_in_a_sandbox(template):
    with pytest.raises(RequestError, match="refuses the messages"):
        show(template)


def test_the_callers_messages_stay_as_they_are():
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}]

    show("{{ messages }}", messages)

    assert messages == [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}]


# Messages


def test_text_parts_become_one_text():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"text": "c"}]}]

    assert show("{{ messages[0].content }}", messages) == "abc"


def test_a_tool_call_needs_no_content_and_gives_the_template_none():
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    template = "{{ messages[0].content is defined }} {{ messages[0].tool_calls[0].name }}"

    assert show(template, messages) == "False f"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "`messages` is 'Hi' but must be a list of messages"),
        ({"role": "user", "content": "Hi"}, "must be a list of messages"),
        (None, "must be a list of messages"),
        ([], "at least one message"),
        (["Hi"], r"`messages\[0\]` is 'Hi' but must be a mapping"),
        ([*HI, None], r"`messages\[1\]` is None"),
        ([{"content": "Hi"}], r"`messages\[0\]`\['role'\] is None"),
        ([{"role": 3, "content": "Hi"}], r"\['role'\] is 3"),
        ([{"role": "", "content": "Hi"}], r"\['role'\] is ''"),
        ([{"role": "user"}], r"\['content'\] is None but must be text"),
        ([{"role": "user", "content": None}], r"\['content'\] is None"),
        ([{"role": "user", "content": 3}], r"\['content'\] is 3"),
        ([{"role": "user", "content": b"Hi"}], "must be text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a list of parts that have a 'text'"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages, message):
    with pytest.raises(RequestError, match=message):
        show("{{ messages[0].content }}", messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate: ' + messages[0].role) }}", "alternate: user"),
        ("{{ messages[0].content + 1 }}", "refuses the messages"),
        ("{{ messages[7].content }}", "refuses the messages"),
        ("{{ 1 / 0 }}", "refuses the messages"),
        ("{% for %}", "template is not valid"),
    ],
)
def test_what_the_template_says_reaches_the_caller(template, message):
    with pytest.raises(RequestError, match=message):
        show(template)


# Choosing a template


@pytest.mark.parametrize(
    ("value", "default", "tool_use"),
    [
        (None, None, None),
        ("a", "a", None),
        ({"default": "a", "tool_use": "b"}, "a", "b"),
        ([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}], "a", "b"),
        ([{"name": "rag", "template": "c"}], None, None),
    ],
)
def test_reads_one_template_or_named_ones(value, default, tool_use):
    assert ChatTemplates.from_config(value) == ChatTemplates(default, tool_use)


def test_tools_get_their_own_template_if_there_is_one():
    both, one = ChatTemplates("a", "b"), ChatTemplates("a")

    assert [both.choose(with_tools=tools) for tools in (True, False)] == ["b", "a"]
    assert one.choose(with_tools=True) == "a"


def test_no_template_is_a_clear_error():
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplates().choose(with_tools=False)
