# SPDX-License-Identifier: Apache-2.0
"""The QEMU command line of a two-node machine."""

from __future__ import annotations

import itertools
from pathlib import Path

from testbed import vm
from testbed.host import Host
from testbed.layout import Layout

LAYOUT = Layout(root=Path("/t"), cache=Path("/c"))


def line(**settings: object) -> list[str]:
    host = Host(name="numa1", backend="tcg", index=31, image="abc", memory_mb=2048, gpus_per_node=2)
    for key, value in settings.items():
        setattr(host, key, value)
    return vm.argv(LAYOUT, host, Path("/t/stand_ins.raw"))


def values(argv: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(argv) if name == option]


def test_two_nodes_share_the_memory_and_the_processors() -> None:
    argv = line()
    assert values(argv, "-m") == ["2048"]
    assert values(argv, "-object") == [f"memory-backend-ram,id=m{node},size=1024M" for node in (0, 1)]
    assert values(argv, "-numa")[:2] == [f"node,nodeid={node},cpus={node},memdev=m{node}" for node in (0, 1)]
    assert values(argv, "-numa")[2:] == ["dist,src=0,dst=1,val=21", "dist,src=1,dst=0,val=21"]


def test_gpus_hang_below_a_bridge_of_their_node() -> None:
    devices = values(line(), "-device")
    assert "pxb-pcie,id=pxb0,bus_nr=64,bus=pcie.0,numa_node=0" in devices
    assert "pxb-pcie,id=pxb1,bus_nr=128,bus=pcie.0,numa_node=1" in devices
    assert [d for d in devices if d.startswith("edu")] == [f"edu,id=gpu{s},bus=rp{s}" for s in ("00", "01", "10", "11")]
    ports = [d for d in devices if d.startswith("pcie-root-port")]
    assert len({port.split("chassis=")[1].split(",")[0] for port in ports}) == 4


def test_sixteen_gpus_have_sixteen_chassis() -> None:
    ports = [d for d in values(line(gpus_per_node=8), "-device") if d.startswith("pcie-root-port")]
    assert len({port.split("chassis=")[1].split(",")[0] for port in ports}) == 16


def test_without_gpus_there_are_no_extra_buses() -> None:
    assert not any("pxb" in device or "edu" in device for device in values(line(gpus_per_node=0), "-device"))


def test_ports_of_the_build_machine_are_on_loopback_only() -> None:
    slirp = values(line(forwards=["9091:9090"]), "-netdev")[0]
    assert slirp == "user,id=n0,hostfwd=tcp:127.0.0.1:22031-:22,hostfwd=tcp:127.0.0.1:9091-:9090"


def test_the_accelerator_is_the_backend() -> None:
    assert values(line(), "-accel") == ["tcg,thread=multi,tb-size=512"]
    assert values(line(backend="kvm"), "-accel") == ["kvm"]


def test_the_kernel_is_told_who_the_machine_is() -> None:
    words = values(line(), "-append")[0].split()
    assert "systemd.hostname=numa1" in words
    assert "llmfleet.lan=10.77.0.31/24" in words
