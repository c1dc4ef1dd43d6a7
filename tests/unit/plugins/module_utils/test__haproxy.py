# SPDX-License-Identifier: Apache-2.0
"""HAProxy's runtime API, with answers as HAProxy 2.6.12 gives them. tests/unit/gateway asks a real one."""

from __future__ import annotations

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _haproxy

PROC = """\
#<PID>          <type>          <reloads>       <uptime>        <version>
100             master          1 [failed: 0]   0d00h00m02s     2.6.12-1+deb12u4
# workers
103             worker          0               0d00h00m02s     2.6.12-1+deb12u4
# old workers
102             worker          1               0d00h00m09s     2.6.12-1+deb12u4
# programs

"""
STATE = """\
1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight
2 routers 1 a:gpu1:router 127.0.0.1 2 8 256
2 routers 2 b:gpu2:router 127.0.0.1 0 0 256

"""


class Haproxy:
    """What each command is answered, and what was asked; ``sessions`` of server a by worker."""

    def __init__(self) -> None:
        self.sessions = {"@1": 0, "@!102": 0}
        self.asked: list[str] = []
        self.refusal = ""

    def __call__(self, command: str) -> str:
        self.asked.append(command)
        worker, _blank, rest = command.partition(" ")
        if command == "show proc":
            return PROC
        if rest.startswith("show servers state"):
            return STATE
        if rest.startswith("show stat"):
            return f"# pxname,svname,qcur,scur,\nrouters,a:gpu1:router,1,{self.sessions[worker]},\n\n"
        return self.refusal or "\n"


def test_requests_of_a_worker_from_before_a_reload_are_counted() -> None:
    haproxy = Haproxy()
    haproxy.sessions = {"@1": 2, "@!102": 3}
    assert _haproxy.servers(haproxy) == {
        "a:gpu1:router": {"drained": True, "up": True, "sessions": 7},
        "b:gpu2:router": {"drained": False, "up": False, "sessions": 0},
    }


def test_every_worker_is_told_and_only_the_present_one_may_object() -> None:
    haproxy = Haproxy()
    _haproxy.set_drained(haproxy, ["a:gpu1:router"], True)
    assert haproxy.asked[1:] == [
        "@1 set server routers/a:gpu1:router state drain",
        "@!102 set server routers/a:gpu1:router state drain",
    ]
    haproxy.refusal = "No such server.\n"
    with pytest.raises(_haproxy.RuntimeApiError, match=r"told to set x to ready, HAProxy says 'No such server\.'"):
        _haproxy.set_drained(haproxy, ["x"], False)


@pytest.mark.parametrize(
    ("names", "drained", "expected"),
    [
        (["a:gpu1:router", "b:gpu2:router", "unknown"], True, ["b:gpu2:router"]),
        (["a:gpu1:router", "b:gpu2:router", "unknown"], False, ["a:gpu1:router"]),
    ],
)
def test_what_changes(names: list[str], drained: bool, expected: list[str]) -> None:
    assert _haproxy.changes(_haproxy.servers(Haproxy()), names, drained) == expected


def test_it_waits_no_longer_than_told() -> None:
    time = iter(range(100))
    slept: list[float] = []
    left = _haproxy.wait(Haproxy(), ["a:gpu1:router"], True, 3, lambda: next(time), slept.append)
    assert left == {"a:gpu1:router": {"drained": True, "up": True, "sessions": 2}}
    assert slept == [0.5, 0.5]
    assert _haproxy.wait(Haproxy(), ["a:gpu1:router"], False, 3) == {}


def test_an_answer_that_is_none_is_told() -> None:
    with pytest.raises(_haproxy.RuntimeApiError, match="HAProxy says 'Permission denied'"):
        _haproxy.servers(lambda _command: "Permission denied\n")
