# SPDX-License-Identifier: Apache-2.0
"""What is remembered of hosts, and how a process that is no longer ours is told apart."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from testbed import commands, host
from testbed.host import Host, Snapshot
from testbed.layout import Layout
from testbed.shell import TestbedError


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(root=tmp_path / "testbed", cache=tmp_path)


def test_a_host_is_read_back_as_it_was_saved(layout: Layout) -> None:
    saved = Host(name="gpu1", backend="nspawn", index=11, image="abc", faults=["hang"], forwards=["1:2"])
    saved.save(layout)
    assert host.load(layout, "gpu1") == saved
    assert host.load_all(layout) == [saved]
    assert host.load(layout, "gpu2") is None


def test_a_damaged_record_is_named(layout: Layout) -> None:
    path = layout.hosts / "gpu1" / "host.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "gpu1"')
    with pytest.raises(TestbedError, match=r"host\.json cannot be read"):
        host.load(layout, "gpu1")


def test_addresses_by_backend() -> None:
    bridged = Host(name="a", backend="nspawn", index=11, image="")
    assert (bridged.address, bridged.port) == ("10.88.0.11", 22)
    shared = Host(name="a", backend="nspawn", index=11, image="", host_network=True)
    assert (shared.address, shared.port) == ("127.0.0.1", 22011)
    machine = Host(name="a", backend="tcg", index=31, image="")
    assert (machine.address, machine.port) == ("127.0.0.1", 22031)


def test_a_host_runs_while_its_own_process_lives() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        one = Host(name="a", backend="nspawn", index=11, image="")
        one.started(process.pid)
        assert one.running()
        process.kill()
        process.wait()
        assert not one.running()


def test_another_process_with_the_old_pid_is_not_the_host() -> None:
    reused = Host(name="a", backend="nspawn", index=11, image="", pid=os.getpid(), pid_start=1)
    assert not reused.running()
    reused.signal(signal.SIGKILL)  # must not reach this very process


def test_a_host_that_never_started_is_not_running() -> None:
    assert not Host(name="a", backend="nspawn", index=11, image="").running()


def test_an_unknown_host_error_lists_those_there_are(layout: Layout) -> None:
    Host(name="gpu1", backend="nspawn", index=11, image="").save(layout)
    with pytest.raises(TestbedError, match="no host 'gpu2'; there are: gpu1"):
        commands.existing(layout, "gpu2")


def test_an_unknown_snapshot_error_lists_those_there_are(layout: Layout) -> None:
    Snapshot(id="gpu1/ready", kind="nspawn", image="abc", layers=["gpu1/ready"]).save(layout)
    with pytest.raises(TestbedError, match=r"no snapshot 'gpu1/other'.*there are: gpu1/ready"):
        host.load_snapshot(layout, "gpu1/other")
    assert host.load_snapshot(layout, "gpu1/ready").layers == ["gpu1/ready"]


def test_the_inventory_holds_running_hosts_only(layout: Layout) -> None:
    Host(name="gone", backend="nspawn", index=12, image="").save(layout)
    assert commands.inventory(layout) == "---\nall:\n  hosts: {}\n"
    here = Host(name="gpu1", backend="nspawn", index=11, image="")
    here.started(os.getpid())
    here.save(layout)
    lines = commands.inventory(layout).splitlines()
    assert "    gpu1:" in lines
    assert "      ansible_host: 10.88.0.11" in lines
    assert not any("gone" in line for line in lines)
