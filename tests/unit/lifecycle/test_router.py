# SPDX-License-Identifier: Apache-2.0
"""The router gets its keys inside of its own process, and does not run without them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

router = importlib.import_module("router")
LIFECYCLE = Path(__file__).parents[3] / "files" / "lifecycle"
# As long as it is looked at, the stand-in of the router's package tells what it was given and what its /proc shows.
CLI = """
import sys
def main():
    print(sys.argv)
    print(open("/proc/self/cmdline").read().split("\\0"), open("/proc/self/environ").read().split("\\0"))
    print([entry for entry in sys.path if entry.endswith("lifecycle")])
"""


def run(tmp_path: Path, keys: str | None) -> subprocess.CompletedProcess[str]:
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "cli.py").write_text(CLI)
    if keys is not None:
        (tmp_path / "api-keys").write_text(keys)
    # A path file takes the place of the router's own environment, which -I keeps.
    program = f"import sys; sys.path += [{str(LIFECYCLE)!r}, {str(tmp_path)!r}]; import router; "
    program += "sys.exit(router.main(['launch', '--port', '1']))"
    return subprocess.run(
        [sys.executable, "-I", "-B", "-c", program],
        env={"CREDENTIALS_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_keys_are_in_its_arguments_and_in_no_command_line(tmp_path: Path) -> None:
    done = run(tmp_path, "own-key\nclient-key\nthird:key\n")
    arguments, shown, path = done.stdout.splitlines()
    assert arguments == str(
        ["smg", "launch", "--port", "1", "--api-key=own-key",
         "--tenant-api-key=clients:client-key", "--tenant-api-key=clients:third:key"]
    )  # fmt: skip
    assert [key for key in ("own-key", "client-key", "third:key") if key in shown] == []
    assert path == "[]"
    assert done.returncode == 0


@pytest.mark.parametrize("keys", [None, "", "\n"])
def test_without_a_key_it_does_not_run(tmp_path: Path, keys: str | None) -> None:
    done = run(tmp_path, keys)
    assert (done.returncode, done.stdout) == (1, "")
    assert "found no key in the credential api-keys" in done.stderr


def test_what_is_no_text_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "api-keys").write_bytes(b"own-key-\xff\n")
    done = run(tmp_path, None)
    assert (done.returncode, done.stdout) == (1, "")
    assert "own-key" not in done.stderr
    assert "UnicodeDecodeError" in done.stderr
