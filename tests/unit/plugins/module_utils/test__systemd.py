# SPDX-License-Identifier: Apache-2.0
"""What is written for systemd is what systemd reads. A real systemd proves it byte for byte in the default scenario."""

from __future__ import annotations

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._systemd import (
    environment_file,
    exec_line,
    parse_show,
    quote_argument,
    unit_state,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("argument", "quoted"),
    [
        ("--port=1", "--port=1"),
        ("", '""'),
        ("a b", '"a b"'),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ('{"a":"b"}', '"{\\"a\\":\\"b\\"}"'),
        ("back\\slash", '"back\\\\slash"'),
        ("two\nlines", '"two\\nlines"'),
        (";", '";"'),
    ],
)
def test_arguments(argument: str, quoted: str) -> None:
    assert quote_argument(argument) == quoted


def test_a_line_for_each_argument() -> None:
    assert exec_line(["/bin/echo", "a b"]) == '/bin/echo \\\n    "a b"'


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0")))
def test_no_argument_leaves_its_quotes(argument: str) -> None:
    quoted = quote_argument(argument)
    assert "\n" not in quoted
    if quoted.startswith('"'):
        inside = quoted[1:-1].replace("\\\\", "").replace('\\"', "")
        assert '"' not in inside
        assert inside.replace("$$", "").count("$") == 0
        assert inside.replace("%%", "").count("%") == 0


def test_environment_files_are_sorted_and_quoted() -> None:
    text = environment_file({"B": 'x "y" $z `w` \\', "A": "1"})
    assert text == 'A="1"\nB="x \\"y\\" \\$z \\`w\\` \\\\"\n'


@pytest.mark.parametrize("environment", [{"A B": "1"}, {"1A": "1"}, {"": "1"}, {"A": "x\0"}])
def test_what_cannot_be_written_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"environment variable|NUL"):
        environment_file(environment)
    with pytest.raises(ValueError, match="NUL"):
        quote_argument("\0")


SHOW = """\
Id=a.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
MainPID=42
NRestarts=3
NeedDaemonReload=no
Result=success
RuntimeDirectory=llmfleet/a llmfleet/a/metrics

Id=b.service
LoadState=not-found
ActiveState=inactive
MainPID=0
"""


def test_units_are_read_with_what_their_start_has_noted() -> None:
    first, second = parse_show(SHOW)
    state = unit_state(first, {"/run/llmfleet/a/fingerprint": "abc\n"}.__getitem__)
    assert state["fingerprint"] == "abc"
    assert (state["loaded"], state["enabled"], state["restarts"], state["main_pid"]) == (True, True, 3, 42)
    missing = unit_state(second, {}.__getitem__)
    assert (missing["loaded"], missing["fingerprint"], missing["active_state"]) == (False, "", "inactive")


def test_a_note_counts_only_while_a_process_runs() -> None:
    stopped = parse_show(SHOW)[0] | {"MainPID": "0"}
    assert unit_state(stopped, lambda _path: "abc")["fingerprint"] == ""
