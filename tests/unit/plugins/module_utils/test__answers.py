# SPDX-License-Identifier: Apache-2.0
"""What an answer has to be like before clients get one."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._answers import answer_findings, answer_text, answer_texts
from hypothesis import given
from hypothesis import strategies as st

QUESTIONS = [{"prompt": "Hello"}, {"prompt": "Count", "answer": "two"}]


def chat(content: Any, tokens: Any = 5, **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content, **message}}], "usage": {"completion_tokens": tokens}}


def asked(*answers: Any, prompt: str = "Hello", router: str = "router") -> list[dict[str, Any]]:
    return [{"router": router, "prompt": prompt, "answer": answer} for answer in answers]


def found(*answers: Any, **more: Any) -> list[str]:
    return [finding["found"] for finding in answer_findings(asked(*answers, **more), QUESTIONS, 16)]


def test_text_that_is_the_same_twice_is_good() -> None:
    assert found(chat("Good morning."), chat("Good morning.")) == []


def test_thoughts_without_content_are_text() -> None:
    assert answer_text(chat(None, reasoning_content="Let me see")) == "Let me see"
    assert answer_text(chat("so", reasoning_content="Hm, ")) == "Hm, so"


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"error": "x"}, chat(None), chat(["x"]), "text", None])
def test_another_shape_is_found(answer: Any) -> None:
    assert [text.split(":")[0] for text in found(answer)] == ["an answer of another shape"]


@pytest.mark.parametrize("content", ["", "  \n"])
def test_an_empty_answer_is_found(content: str) -> None:
    assert found(chat(content)) == ["an empty answer"]


@given(st.text(st.characters(codec="ascii", exclude_categories=["Z", "C"]), min_size=1, max_size=8), st.integers(4, 40))
def test_the_same_again_and_again_is_found(token: str, times: int) -> None:
    for content in (token * times, " ".join([token] * times)):
        assert [text[:26] for text in found(chat(content))] == ["the same again and again: "]


@pytest.mark.parametrize("content", ["no no no", "ha ha ha ha, she said", "1 2 3 4 5", "aaa b aaa b aaa", "!"])
def test_what_merely_repeats_something_is_not(content: str) -> None:
    assert found(chat(content)) == []


@pytest.mark.parametrize("tokens", [0, 17, None, "5"])
def test_usage_that_cannot_be_is_found(tokens: Any) -> None:
    assert found(chat("Good morning.", tokens)) == [f"usage that counts {tokens!r} tokens"]


def test_what_is_found_twice_is_told_once() -> None:
    assert found(chat("!!!!"), chat("!!!!")) == ["the same again and again: '!!!!'"]


def test_two_answers_to_one_question_are_found() -> None:
    assert found(chat("one"), chat("other")) == ["two answers at temperature 0: 'one' and 'other'"]


def test_routers_are_compared_with_themselves_only() -> None:
    both = asked(chat("one"), router="r1") + asked(chat("other"), router="r2")
    assert answer_findings(both, QUESTIONS, 16) == []


def test_a_known_answer_has_to_be_in_it() -> None:
    assert found(chat("one two three"), prompt="Count") == []
    assert answer_findings(asked(chat("five"), prompt="Count"), QUESTIONS, 16) == [
        {"router": "router", "prompt": "Count", "found": "'five'", "expected": "an answer with 'two' in it"}
    ]


def test_an_answer_has_to_stay_where_that_is_asked_for() -> None:
    known = {"Hello": "Good morning."}
    assert answer_findings(asked(chat("Good morning.")), QUESTIONS, 16, known) == []
    assert [f["expected"] for f in answer_findings(asked(chat("Hi")), QUESTIONS, 16, known)] == [
        "'Good morning.', as the last good revision answered"
    ]


def test_texts_are_the_first_for_each_prompt() -> None:
    both = asked({}, chat("one"), chat("other")) + asked(chat("1 2"), prompt="Count")
    assert answer_texts(both) == {"Hello": "one", "Count": "1 2"}
