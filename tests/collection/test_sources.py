# SPDX-License-Identifier: Apache-2.0
"""What is true of every source file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import ROOT, source_files

#: Kinds of files that can carry a comment, and are written by hand or by our tools.
COMMENTED = {".py", ".sh", ".yml", ".yaml", ".cfg", ".toml", ".c", ".h", ".in", ".txt", ".service", ".j2"}
NAMED = {"Makefile", ".gitignore", ".yamllint", ".ansible-lint"}
#: Written by other programs in a form of their own; Prometheus exposition and saved output are data.
NOT_OURS = ("LICENSE", "tests/fixtures/", "tests/unit/fixtures/", "changelogs/changelog.yaml")
#: Folders of the machine on which something was built or written.
MACHINE = re.compile(r"(?<![\w.$}])/(?:work|tmp/w|root/\.pyenv|opt/(?:wheels|pypi))(?:/[\w.-]+|\b)")

SOURCES = [name for name in source_files() if not (ROOT / name).is_symlink() and not str(name).startswith(NOT_OURS)]


def text_of(name: Path) -> str:
    return (ROOT / name).read_bytes().decode(errors="replace")


def carries_spdx(name: Path) -> bool:
    if not text_of(name):
        return False
    return name.suffix in COMMENTED or name.name in NAMED or text_of(name).startswith("#!")


@pytest.mark.parametrize("name", [name for name in SOURCES if carries_spdx(name)], ids=str)
def test_spdx_header(name: Path) -> None:
    """Near the top: after a shebang or a copyright line at the latest."""
    lines = text_of(name).splitlines()[:5]
    assert any("SPDX-License-Identifier: Apache-2.0" in line for line in lines)


def test_no_errors_are_ignored() -> None:
    bad = re.compile(
        r"^\s*(?:ignore_errors|ignore_unreachable):|^\s*failed_when:\s*(?:false|no)\b", re.MULTILINE | re.IGNORECASE
    )
    playing = [n for n in SOURCES if n.suffix in {".yml", ".yaml"} and n.parts[0] in {"roles", "playbooks", "molecule"}]
    assert playing != []
    assert [str(name) for name in playing if bad.search(text_of(name))] == []


def test_no_path_of_a_build_machine() -> None:
    found = {f"{name}: {hit}" for name in SOURCES for hit in MACHINE.findall(text_of(name))}
    assert found == set()


def test_links_stay_inside_the_tree() -> None:
    links = [name for name in source_files() if (ROOT / name).is_symlink()]
    assert [
        str(n) for n in links if not (ROOT / n).resolve().is_relative_to(ROOT) or (ROOT / n).readlink().is_absolute()
    ] == []
