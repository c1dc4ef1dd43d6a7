# SPDX-License-Identifier: Apache-2.0
"""Unit tests touch no network and no host: an attempt to open a connection fails the test."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to anywhere but this machine."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in {"127.0.0.1", "::1", "localhost"}:
            raise AssertionError(f"a unit test tried to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
