# SPDX-License-Identifier: Apache-2.0
"""``roles/rollout/tasks/room.yml``: a host with a full disk is refused by name, before any module runs there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HEAD = "Filesystem 1048576-blocks Used Available Capacity Mounted on\n"


def look(tmp_path: Path, *lines: str) -> str:
    """What the tasks say of disks as df tells them."""
    (tmp_path / "told").write_text(HEAD + "".join(lines))
    df = tmp_path / "df"
    df.write_text(f"#!/bin/sh\ncat {tmp_path}/told\n")
    df.chmod(0o755)
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROOT / "roles/rollout/vars/main.yml")],
        "tasks": [{"ansible.builtin.include_tasks": str(ROOT / "roles/rollout/tasks/room.yml")}],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        ["ansible-playbook", str(tmp_path / "play.yml"), "-i", "localhost,"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ANSIBLE_NOCOLOR": "true"},
    )
    return done.stdout if done.returncode else ""


@pytest.mark.parametrize(
    ("disks", "found"),
    [
        (["/dev/sda1 100000 90000 64 99% /"], ""),
        (["/dev/sda1 100000 90000 63 99% /"], "localhost: found 63 MiB free at /; expected 64 MiB"),
        (["/dev/sda1 9 9 9000 99% /", "tmpfs 10 10 0 100% /tmp"], "localhost: found 0 MiB free at /tmp; expected"),
        (["/dev/sda1 9 9 7 99% /", "/dev/sda1 9 9 7 99% /"], "localhost: found 7 MiB free at /; expected 64 MiB"),
    ],
)
def test_a_full_disk_is_named(tmp_path: Path, disks: list[str], found: str) -> None:
    said = look(tmp_path, *(f"{disk}\n" for disk in disks))
    assert (found in " ".join(said.split())) if found else said == ""
