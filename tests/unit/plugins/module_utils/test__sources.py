# SPDX-License-Identifier: Apache-2.0
"""What is read of plugin, kernels and patches, and that each byte of it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._engine import ENGINES
from ansible_collections.llmfleet.sglang.plugins.module_utils._sources import PACKAGES, digests, read_sources

FILES = Path(__file__).parents[4] / "files"


@pytest.mark.parametrize("version", sorted(ENGINES))
def test_every_engine_has_its_sources(version: str) -> None:
    found = read_sources(str(FILES), version)
    assert {f"{package}/pyproject.toml" for package in PACKAGES} <= set(found)
    assert "engine/manifest.json" in found
    assert not [path for path in found if "__pycache__" in path or path.startswith("/")]
    assert list(found) == sorted(found)


def test_a_changed_byte_is_another_digest(tmp_path: Path) -> None:
    for folder in ("kernels", "plugin", "engine/1.0"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "plugin/a.py").write_text("1")
    (tmp_path / "plugin/a.pyc").write_text("x")
    first = digests(read_sources(str(tmp_path), "1.0"))
    assert list(first) == ["plugin/a.py"]
    (tmp_path / "plugin/a.py").write_text("2")
    assert digests(read_sources(str(tmp_path), "1.0")) != first


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/plugin does not exist"):
        read_sources(str(tmp_path), "1.0")
