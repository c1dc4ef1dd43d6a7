# SPDX-License-Identifier: Apache-2.0
"""The door of a server with API keys, without an engine: who comes in, and that no error has a key in it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmfleet_plugin import api_keys
from llmfleet_plugin._feature import VERSIONS, FeatureError
from llmfleet_plugin._features import FEATURES

KEYS = ["the-fleets-own-key", "the-key-of-clients"]
DOOR = api_keys.Door(KEYS, lambda _method, path: path == "/health")


def scope(shown: bytes | None, path: str = "/generate", kind: str = "http") -> dict[str, Any]:
    headers = [(b"host", b"x")] + ([] if shown is None else [(b"Authorization", shown)])
    return {"type": kind, "method": "POST", "path": path, "headers": headers}


@given(st.one_of(st.binary(), st.sampled_from(KEYS).flatmap(lambda key: st.sampled_from(
    [key.encode()[:-1], key.encode() + b" ", b" " + key.encode(), key.upper().encode(), b""]))))  # fmt: skip
def test_only_a_whole_key_opens(given_key: bytes) -> None:
    assert DOOR.opens(scope(b"Bearer " + given_key)) == (given_key in [key.encode() for key in KEYS])


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(key: str, kind: str) -> None:
    for scheme in ("Bearer", "bearer"):
        assert DOOR.opens(scope(f"{scheme} {key}".encode(), kind=kind))
    assert not DOOR.opens(scope(f"Basic {key}".encode(), kind=kind))
    assert not DOOR.opens(scope(key.encode(), kind=kind))


def test_what_needs_no_key() -> None:
    assert DOOR.opens(scope(None, path="/health"))
    assert DOOR.opens({"type": "lifespan"})
    assert not DOOR.opens(scope(None))
    assert not DOOR.opens(scope(None, path="/health", kind="websocket"))


def test_who_is_turned_away_is_told_so() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(api_keys.turn_away(scope(None), send))
    start, body = sent
    assert (start["status"], dict(start["headers"])[b"www-authenticate"]) == (401, b"Bearer")
    assert json.loads(body["body"]) == {"error": "Unauthorized"}
    sent.clear()
    asyncio.run(api_keys.turn_away(scope(None, kind="websocket"), send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_the_keys_are_the_units_credential(tmp_path: Path) -> None:
    (tmp_path / "api-keys").write_text("".join(f"{key}\n" for key in KEYS))
    assert api_keys.read_keys({"CREDENTIALS_DIRECTORY": str(tmp_path)}) == KEYS


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no line"),
        ("short-key\n", "has no key in line 1"),
        (f"{KEYS[0]}\n\n{KEYS[1]}\n", "has no key in line 2"),
    ],
)
def test_without_sound_keys_the_engine_is_not_started(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "api-keys").write_text(text)
    with pytest.raises(FeatureError, match=why) as caught:
        api_keys.read_keys({"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert [key for key in (*KEYS, "short-key") if key in str(caught.value)] == []


def test_without_a_credential_it_is_not_started() -> None:
    with pytest.raises(FeatureError, match="LoadCredential="):
        api_keys.read_keys({})


@pytest.mark.parametrize("version", VERSIONS)
def test_no_two_features_hook_the_same(version: str) -> None:
    """SGLang's registry applies the hooks of a target once; those of a second feature it would leave out."""
    targets = [target for feature in FEATURES for target in feature.hooks[version]]
    assert len(targets) == len(set(targets))
