# SPDX-License-Identifier: Apache-2.0
"""Addresses, ports and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import layout
from testbed.layout import Layout
from testbed.shell import TestbedError


def test_paths_come_from_the_environment() -> None:
    assert Layout.from_environment({"HOME": "/home/a"}).root == Path("/home/a/.cache/llmfleet/testbed")
    assert Layout.from_environment({"HOME": "/home/a", "LLMFLEET_CACHE": "/c"}).root == Path("/c/testbed")
    both = Layout.from_environment({"LLMFLEET_CACHE": "/c", "LLMFLEET_TESTBED_DIR": "/t"})
    assert (both.root, both.wheels, both.ssh_key) == (Path("/t"), Path("/c/wheels"), Path("/t/id_ed25519"))


def test_an_index_becomes_addresses_and_ports() -> None:
    assert layout.nspawn_address(11) == "10.88.0.11"
    assert layout.vm_lan_address(31) == "10.77.0.31"
    assert layout.ssh_port(31) == 22031
    assert layout.mac("wan", 31) == "52:54:00:aa:00:1f"
    assert layout.mac("lan", 254) == "52:54:00:bb:00:fe"


@pytest.mark.parametrize("index", [-1, 0, 1, 255, 1000])
def test_an_index_that_is_no_host_address_is_refused(index: int) -> None:
    with pytest.raises(TestbedError, match=f"host index {index}: expected 2 to 254"):
        layout.nspawn_address(index)


@pytest.mark.parametrize("name", ["", "Gpu1", "1gpu", "gpu_1", "../x", "a" * 33, "gpu-"])
def test_a_bad_host_name_is_refused(name: str) -> None:
    with pytest.raises(TestbedError, match="host name"):
        layout.check_name(name)


@pytest.mark.parametrize("tag", ["", "a/b", "..", ".hidden", "a b"])
def test_a_bad_snapshot_tag_is_refused(tag: str) -> None:
    with pytest.raises(TestbedError, match="snapshot tag"):
        layout.check_tag(tag)


def test_a_machine_id_belongs_to_one_name() -> None:
    assert len(layout.machine_id("gpu1")) == 32
    assert layout.machine_id("gpu1") == layout.machine_id("gpu1") != layout.machine_id("gpu2")
