# SPDX-License-Identifier: Apache-2.0
"""Fixtures: exporter processes on a host without NVML and on one with eight GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.gpu_exporter.harness import SOURCE, Exporter, build_stand_in

sys.path.insert(0, str(SOURCE))


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the compiled stand-in."""
    folder = tmp_path_factory.mktemp("nvml")
    build_stand_in(folder)
    return folder


@pytest.fixture
def bare_exporter(tmp_path: Path) -> Iterator[Exporter]:
    """An exporter, not started, on a host without libnvidia-ml.so.1."""
    exporter = Exporter(tmp_path)
    yield exporter
    exporter.kill()


@pytest.fixture
def exporter(bare_exporter: Exporter, stand_in: Path) -> Exporter:
    """An exporter, not started, on a host with the eight GPUs of the example state."""
    (bare_exporter.library / "libnvidia-ml.so.1").hardlink_to(stand_in / "libnvidia-ml.so.1")
    return bare_exporter
