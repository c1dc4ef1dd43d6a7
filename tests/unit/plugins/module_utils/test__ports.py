# SPDX-License-Identifier: Apache-2.0
"""Who listens: from tables as the kernel prints them, and from this machine's own sockets."""

from __future__ import annotations

import os
import socket

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._ports import parse_listeners, read_ports, unit_of_cgroup

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000   990        0 4711 1 0 100 0 0 10 0
   1: 0100007F:7530 0100007F:A001 01 00000000:00000000 00:00000000 00000000   990        0 4712 1 0 100 0 0 10 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 99
"""


def test_only_listening_sockets_count() -> None:
    assert parse_listeners(TCP) == [("127.0.0.1", 30000, "4711")]
    assert [entry[:2] for entry in parse_listeners(TCP6)] == [("::", 22)]


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/llmfleet.slice/llmfleet-prefill.service\n", "llmfleet-prefill.service"),
        ("2:memory:/\n1:name=systemd:/system.slice/ssh.service\n0::/x.scope\n", "ssh.service"),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/a.scope\n", "a.scope"),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_the_unit_of_a_process(cgroup: str, unit: str) -> None:
    assert unit_of_cgroup(cgroup) == unit


def test_this_process_is_found_as_owner() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        entry = read_ports()[str(port)]
    assert entry["pid"] == os.getpid()
    assert entry["addresses"] == ["127.0.0.1"]
    assert "python" in entry["command"] or "pytest" in entry["command"]
