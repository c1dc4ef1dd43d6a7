# SPDX-License-Identifier: Apache-2.0
"""An overlay holds the checkpoint and the operator's defaults; the checkpoint stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _overlay
from hypothesis import given
from hypothesis import strategies as st

CHANGES = {"generation_config.json": {"temperature": 0.6}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 1.0}')
    return folder


def test_everything_is_linked_and_the_defaults_are_replaced(checkpoint: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    entries = _overlay.wanted(str(checkpoint), CHANGES)
    _overlay.write(str(overlay), entries)
    assert _overlay.current(str(overlay)) == entries
    assert (overlay / "config.json").resolve() == checkpoint / "config.json"
    assert json.loads((overlay / "generation_config.json").read_text()) == {"eos_token_id": 1, "temperature": 0.6}
    assert json.loads((checkpoint / "generation_config.json").read_text())["temperature"] == 1.0


def test_a_checkpoint_without_defaults_gets_some(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").unlink()
    text = _overlay.wanted(str(checkpoint), CHANGES)["generation_config.json"]
    assert json.loads(text) == {"temperature": 0.6}


def test_a_new_file_of_the_checkpoint_is_linked_too(checkpoint: Path, tmp_path: Path) -> None:
    overlay = str(tmp_path / "overlay")
    _overlay.write(overlay, _overlay.wanted(str(checkpoint), CHANGES))
    (checkpoint / "tokenizer.json").write_text("{}")
    after = _overlay.wanted(str(checkpoint), CHANGES)
    assert set(after) - set(_overlay.current(overlay)) == {"tokenizer.json"}
    _overlay.write(overlay, after)
    assert _overlay.current(overlay) == after


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_broken_checkpoint_is_told(checkpoint: Path, text: str) -> None:
    (checkpoint / "generation_config.json").write_text(text)
    with pytest.raises(_overlay.OverlayError, match="repair the checkpoint"):
        _overlay.wanted(str(checkpoint), CHANGES)


NUMBERS = st.dictionaries(st.sampled_from(_overlay.GENERATION_KEYS), st.floats(0, 10))


@given(own=NUMBERS, changes=NUMBERS)
def test_what_is_asked_for_wins_and_the_rest_stays(own: dict[str, float], changes: dict[str, float]) -> None:
    assert json.loads(_overlay.merged(json.dumps(own), changes, "x")) == {**own, **changes}
