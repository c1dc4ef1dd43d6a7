# SPDX-License-Identifier: Apache-2.0
"""A release is complete or not there at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _release
from ansible_collections.llmfleet.sglang.plugins.module_utils._release import BuildError, Release, build, is_complete

PINNED = ["six==1.16.0 --hash=sha256:8abb2f1d86890a2dfb989f9a77cfcfd3e47c2a354b01111771326f8aa26e0254"]


def release(root: Path, **changes: object) -> Release:
    values: dict[str, object] = {"root": str(root), "id": "abc", "requirements": PINNED, "python": sys.executable}
    return Release(**(values | changes))  # type: ignore[arg-type]


def test_the_steps_pin_digests_and_resolve_nothing(tmp_path: Path) -> None:
    for wanted in (release(tmp_path), release(tmp_path, installer=["uv==1 --hash=sha256:00"], wheelhouse="/w")):
        installs = [command for name, command in _release.steps(wanted) if name != "create the virtual environment"]
        for command in installs:
            assert {"--no-deps", "--require-hashes"} <= set(command)
    assert "--no-index" in installs[0]
    assert installs[1][0].endswith("/uv/bin/uv")


def test_an_index_is_named_only_when_asked_for(tmp_path: Path) -> None:
    flat = [
        word for _name, command in _release.steps(release(tmp_path, index_url="http://i/simple")) for word in command
    ]
    assert "--index-url=http://i/simple" in flat
    assert not [
        word
        for _n, command in _release.steps(release(tmp_path))
        for word in command
        if word.startswith(("--index", "--no-index"))
    ]


def test_a_build_that_succeeds_writes_its_manifest_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        _release, "steps", lambda wanted: [("look", ["test", "!", "-e", f"{wanted.path}/manifest.json"])]
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("1")
    wanted = release(tmp_path, source=str(source))
    build(wanted)
    seen.append(json.loads((tmp_path / "abc/manifest.json").read_text()))
    assert seen == [{"id": "abc", "python": sys.executable, "requirements": PINNED}]
    assert (tmp_path / "abc/src/a.py").read_text() == "1"
    assert is_complete(wanted.path)
    assert not Path(wanted.log).exists()


def test_a_build_that_fails_leaves_only_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("break", ["sh", "-c", "echo no room; exit 3"])])
    wanted = release(tmp_path)
    with pytest.raises(BuildError, match="break failed") as caught:
        build(wanted)
    assert caught.value.tail.splitlines()[-1] == "no room"
    assert not Path(wanted.path).exists()
    assert "no room" in Path(wanted.log).read_text()


def test_a_program_that_is_missing_is_a_failed_step(tmp_path: Path) -> None:
    wanted = release(tmp_path, python="/nowhere/python3")
    with pytest.raises(BuildError) as caught:
        build(wanted)
    assert "No such file" in caught.value.tail


def test_the_rest_of_an_interrupted_build_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("nothing", ["true"])])
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc/half").write_text("")
    assert not is_complete(str(tmp_path / "abc"))
    build(release(tmp_path))
    assert not (tmp_path / "abc/half").exists()
