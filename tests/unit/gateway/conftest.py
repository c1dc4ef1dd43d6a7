# SPDX-License-Identifier: Apache-2.0
"""Routers and a gateway that are gone after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.harness import Gateway, Router

Start = Callable[..., Gateway]


@pytest.fixture
def routers() -> Iterator[tuple[Router, Router]]:
    pair = (Router("a:gpu1:router"), Router("b:gpu2:router"))
    yield pair
    for router in pair:
        router.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a gateway before some routers."""
    started: list[Gateway] = []

    def run(*told: Router, **changes: Any) -> Gateway:
        gateway = Gateway(tmp_path, *told, **changes)
        started.append(gateway)
        gateway.start()
        return gateway

    yield run
    for gateway in started:
        gateway.stop()
