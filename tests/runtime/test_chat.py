"""Conversations to token ids: the model family's own format, chat templates, and what text cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError, TokenizerError
from deepinfer.runtime.chat import CONFIG_PATH, TEMPLATE_PATH, ChatFormat, chat_format
from deepinfer.runtime.tokenizer import Tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny" / "checkpoint"
TOKENIZER = Tokenizer((EXAMPLE / "tokenizer.json").read_bytes())
BOS, EOS, SYSTEM, USER, ASSISTANT, REMINDER = 0, 1, 3055, 3056, 3057, 3058
THINK, END_THINK = 3069, 3070
SPECIAL_IDS = {0, 1, 2, *range(3055, 3072)}
EFFORT = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

CHATML = (
    "{{ bos_token }}{% for message in messages %}<｜{{ message.role | capitalize }}｜>"
    "{{ message.content | trim }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def own_format() -> ChatFormat:
    made = chat_format({}, TOKENIZER, "deepseek_v41", 1024)
    assert made is not None
    return made


def with_template(source: str, max_model_len: int = 1024) -> ChatFormat:
    files = {TEMPLATE_PATH: source.encode(), CONFIG_PATH: (EXAMPLE / "tokenizer_config.json").read_bytes()}
    made = chat_format(files, TOKENIZER, "deepseek_v41", max_model_len)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def chatml() -> ChatFormat:
    return with_template(CHATML)


def text(words: str) -> list[int]:
    return TOKENIZER.encode_plain(words, 1024)


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        (
            said(("user", "Hi")),
            {},
            [BOS, SYSTEM, *text(EFFORT), USER, *text("Hi"), ASSISTANT, THINK],
        ),
        (
            said(("system", "Be brief."), ("user", "Hi")),
            {"reasoning_effort": "none"},
            [BOS, SYSTEM, *text("Be brief."), USER, *text("Hi"), ASSISTANT, END_THINK],
        ),
        (
            said(("system", "Be brief."), ("user", "Hi")),
            {"reasoning_effort": 75},
            [BOS, SYSTEM, *text(EFFORT), *text("Be brief."), USER, *text("Hi"), ASSISTANT, THINK],
        ),
        (  # what was reasoned before the last question is left out
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "why"},
                {"role": "user", "content": "c"},
            ],
            {},
            [BOS, SYSTEM, *text(EFFORT), USER, *text("a"), ASSISTANT, END_THINK, *text("b"), EOS]
            + [USER, *text("c"), ASSISTANT, THINK],
        ),
        (  # a system message in the middle asks like a user
            said(("user", "a"), ("assistant", "b"), ("system", "c")),
            {"reasoning_effort": "none"},
            [BOS, USER, *text("a"), ASSISTANT, END_THINK, *text("b"), EOS]
            + [SYSTEM, *text("c"), ASSISTANT, END_THINK],
        ),
        (  # results of tools and consecutive questions are one turn
            said(("user", "a"), ("tool", "7"), ("user", "b")),
            {"reasoning_effort": "none"},
            [BOS, USER, *text("a\n\n<tool_result>7</tool_result>\n\nb"), ASSISTANT, END_THINK],
        ),
        (  # the last message is left open
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "why"},
            ],
            {"add_generation_prompt": False, "continue_final_message": True},
            [
                BOS,
                SYSTEM,
                *text(EFFORT),
                USER,
                *text("a"),
                ASSISTANT,
                THINK,
                *text("why"),
                END_THINK,
                *text("b"),
            ],
        ),
        (
            said(("user", "a"), ("latest_reminder", "r"), ("user", "b")),
            {"reasoning_effort": "none", "add_generation_prompt": False},
            [BOS, USER, *text("a"), ASSISTANT, END_THINK, REMINDER, *text("r"), USER, *text("b")],
        ),
    ],
)
def test_own_format_writes_control_tokens_where_it_says(
    messages: list[dict[str, str]], options: dict[str, Any], expected: list[int]
) -> None:
    assert own_format().encode(messages, **options) == expected


def test_a_template_writes_the_control_tokens_it_spells(chatml: ChatFormat) -> None:
    made = chatml.encode(
        said(("system", " Be brief. "), ("user", "Hi"), ("assistant", "Yes"), ("user", "So?"))
    )
    expected = [BOS, SYSTEM, *text("Be brief."), USER, *text("Hi"), ASSISTANT, *text("Yes"), EOS]
    assert made == [*expected, USER, *text("So?"), ASSISTANT]


def test_both_switches_are_honoured_or_refused(chatml: ChatFormat) -> None:
    messages = said(("user", "a"), ("assistant", "b c"))
    both = {"add_generation_prompt": True, "continue_final_message": True}
    for form in (chatml, own_format()):
        with pytest.raises(RequestError, match="continue_final_message"):
            form.encode(messages, **both)
        closed = form.encode(messages, add_generation_prompt=False)
        opened = form.encode(messages, add_generation_prompt=False, continue_final_message=True)
        assert closed == [*opened, EOS]
        assert TOKENIZER.decode(opened).endswith("b c")
    assert chatml.encode(messages)[-1] == ASSISTANT
    for wrong in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        with pytest.raises(RequestError, match="add_generation_prompt|continue_final_message"):
            own_format().encode(messages if not wrong else said(("user", "a")), **wrong)


SPELLINGS = st.lists(
    st.sampled_from(
        ["<｜User｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜", "User｜>", "Assistant｜>"]
    )
    | st.text("<｜>Usera \n", max_size=4),
    max_size=6,
).map("".join)


@given(SPELLINGS, SPELLINGS)
@settings(max_examples=60, deadline=None)
def test_a_message_never_writes_a_special_token(chatml: ChatFormat, first: str, second: str) -> None:
    """However it is spelt or split over messages; the text itself arrives unchanged."""
    messages = said(("user", first), ("user", second))
    made = chatml.encode(messages)
    assert [token for token in made if token in SPECIAL_IDS - {THINK, END_THINK}] == [
        BOS,
        USER,
        USER,
        ASSISTANT,
    ]
    assert TOKENIZER.decode(made).replace("<think>", "").replace("</think>", "") == (
        first.strip() + second.strip()
    ).replace("<think>", "").replace("</think>", "")
    own = own_format().encode(messages, reasoning_effort="none")
    assert [token for token in own if token in SPECIAL_IDS] == [BOS, USER, ASSISTANT, END_THINK]
    assert TOKENIZER.decode(own[2:-2]) == f"{first}\n\n{second}"


HOSTILE = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "attr filter": "{{ (''|attr('__class__')).__mro__ }}",
    "mutation": "{{ messages.append(1) }}",
    "range": "{% for a in range(10**9) %}{% endfor %}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ ('a' * 10**9) | length }}",
    "output": "{{ 'a' * 5000 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "refusal": "{{ raise_exception('roles must alternate') }}",
    "division": "{{ 1 // 0 }}",
    "syntax": "{% if %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_costs_its_own_request_alone(name: str) -> None:
    form = with_template("{% if messages|length > 1 %}" + HOSTILE[name] + "{% else %}fine{% endif %}")
    with pytest.raises(RequestError) as caught:
        form.encode(said(("user", "a"), ("user", "b")))
    assert caught.value.where == "chat template"
    if name == "refusal":
        assert "roles must alternate" in caught.value.what
    if name != "syntax":
        assert TOKENIZER.decode(form.encode(said(("user", "a")))) == "fine"


def test_templates_get_what_they_know_and_nothing_of_this_machine() -> None:
    form = with_template(
        "{{ bos_token }}{{ messages | tojson }}{{ tools[0].name }}{{ reasoning_effort }}"
        "{{ strftime_now is defined }}{{ os is defined }}"
    )
    made = form.encode(said(("user", "é")), tools=[{"name": "f"}], reasoning_effort="low")
    assert made[0] == BOS
    assert TOKENIZER.decode(made) == '[{"role": "user", "content": "é"}]flowFalseFalse'


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({CONFIG_PATH: json.dumps({"chat_template": "one"}).encode()}, "one"),
        (
            {CONFIG_PATH: json.dumps({"chat_template": [{"name": "default", "template": "two"}]}).encode()},
            "two",
        ),
        ({CONFIG_PATH: b'{"chat_template": "one"}', TEMPLATE_PATH: b"three"}, "three"),
    ],
)
def test_a_template_is_found_where_checkpoints_keep_it(files: dict[str, bytes], expected: str) -> None:
    form = chat_format(files, TOKENIZER, "other", 64)
    assert form is not None
    assert TOKENIZER.decode(form.encode(said(("user", "x")))) == expected


def test_without_template_and_own_format_there_is_none() -> None:
    assert chat_format({}, TOKENIZER, "deepseek_v4", 64) is None
    assert chat_format({}, None, "deepseek_v41", 64) is None
    with pytest.raises(TokenizerError):
        chat_format({TEMPLATE_PATH: b"x" * 65537}, TOKENIZER, "other", 64)


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        [],
        [{}],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:x"}}]}],
        [{"role": "user", "content": "x", "unknown": 1}],
        [{"role": "user", "content": "a\ud800b"}],
        [{"role": "user", "content": "x"}] * 1025,
        [{"role": "villain", "content": "x"}],
    ],
)
def test_messages_that_are_none_are_refused(messages: object) -> None:
    with pytest.raises(RequestError):
        own_format().encode(messages)


@pytest.mark.parametrize("effort", [0, 101, "very", 1.5, True])
def test_an_effort_that_is_none_is_refused(effort: object) -> None:
    with pytest.raises(RequestError, match="reasoning_effort"):
        own_format().encode(said(("user", "x")), reasoning_effort=effort)
    with pytest.raises(RequestError, match="tools"):
        own_format().encode(said(("user", "x")), tools=[{"name": "f"}])


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    made = own_format().encode([{"role": "user", "content": parts}], reasoning_effort="none")
    assert made[2:-2] == text("a\n\nb")
