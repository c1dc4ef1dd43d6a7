# SPDX-License-Identifier: Apache-2.0
"""What an answer of a PD group has to be like. PRIVATE to the collection."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# The same few characters, at least four times and nothing else, is what broken weights, kernels or caches answer.
_REPEATED = re.compile(r"(.{1,16}?)(?:\s*\1){3,}\s*", re.DOTALL)
_SHOWN = 60


def answer_text(answer: Any) -> str | None:
    """All that a chat completion says, its thoughts before its content; None where it has no such shape."""
    try:
        message = answer["choices"][0]["message"]
        parts = [message.get("reasoning_content"), message.get("content")]
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    texts = [part for part in parts if part is not None]
    return "".join(texts) if texts and all(isinstance(part, str) for part in texts) else None


def _answer_problem(answer: Any, tokens: int) -> tuple[str, str] | None:
    """What is wrong with one answer, as found and expected."""
    text = answer_text(answer)
    if text is None:
        return f"an answer of another shape: {json.dumps(answer)[:200]}", "one choice whose message holds text"
    if not text.strip():
        return "an empty answer", "text"
    if _REPEATED.fullmatch(text.strip()):
        return f"the same again and again: {text.strip()[:_SHOWN]!r}", "text that is more than one repeated token"
    usage = answer.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if not isinstance(counted, int) or not 1 <= counted <= tokens:
        return f"usage that counts {counted!r} tokens", f"1 to {tokens} completion tokens"
    return None


def answer_findings(
    asked: Sequence[Mapping[str, Any]],
    questions: Sequence[Mapping[str, Any]],
    tokens: int,
    known: Mapping[str, str] | None = None,
) -> list[dict[str, str]]:
    """What is wrong with the answers of a PD group: ``[{router, prompt, found, expected}]``, empty when nothing is.

    ``asked`` are answers ``{router, prompt, answer}``, those of one prompt and router asked several times at
    temperature 0; ``questions`` what the operator knows: ``{prompt, answer}``, an answer that has to be contained, or
    none. ``known`` are the texts of the last good revision by prompt, given where they have to stay the same.
    """
    found: list[dict[str, str]] = []

    def tell(router: str, prompt: str, seen: str, expected: str) -> None:
        finding = {"router": router, "prompt": prompt, "found": seen, "expected": expected}
        if finding not in found:
            found.append(finding)

    first: dict[tuple[str, str], str] = {}
    for entry in asked:
        router, prompt = str(entry["router"]), str(entry["prompt"])
        problem = _answer_problem(entry["answer"], tokens)
        if problem is not None:
            tell(router, prompt, *problem)
            continue
        text = str(answer_text(entry["answer"]))
        if (router, prompt) in first:
            if text != first[router, prompt]:
                tell(
                    router,
                    prompt,
                    f"two answers at temperature 0: {first[router, prompt][:_SHOWN]!r} and {text[:_SHOWN]!r}",
                    "the same twice",
                )
            continue
        first[router, prompt] = text
        wanted = next((str(q.get("answer") or "") for q in questions if str(q["prompt"]) == prompt), "")
        if wanted not in text:
            tell(router, prompt, repr(text[:_SHOWN]), f"an answer with {wanted!r} in it")
        before = (known or {}).get(prompt)
        if before is not None and text != before:
            tell(router, prompt, repr(text[:_SHOWN]), f"{before[:_SHOWN]!r}, as the last good revision answered")
    return found


def answer_texts(asked: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The first text for each prompt, of answers that have one; ``asked`` as ``answer_findings`` takes it."""
    found: dict[str, str] = {}
    for entry in asked:
        text = answer_text(entry["answer"])
        if text is not None:
            found.setdefault(str(entry["prompt"]), text)
    return found
