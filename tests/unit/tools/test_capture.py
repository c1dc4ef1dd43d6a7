# SPDX-License-Identifier: Apache-2.0
"""Capturing a host: what is taken is what planning reads, and nothing else."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils._topology import read_topology

from tests.unit.plugins.module_utils.topology_cases import FIXTURES, gpu_files, load, read, square_host, write
from tools.capture import CaptureError, capture, unpack

#: Every name that a capture may hold.
WHITELIST = re.compile(
    r"""sys/devices/system/node/(
          online
        | node\d+/(cpulist|distance|meminfo|hugepages/hugepages-\d+kB/(nr|free)_hugepages)
      )
    | sys/bus/pci/devices/[0-9a-f:.]+/(vendor|device|class|numa_node|local_cpulist)
    | sys/fs/cgroup/(memory/)?([\w-]+\.slice/)*memory\.(max|high|limit_in_bytes)
    | proc/(zoneinfo|self/status)
    | model/config\.json""",
    re.VERBOSE,
)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def captured(root: Path, folder: Path, *more: str) -> str:
    return capture(["local", str(folder), "--sysfs-root", f"{root}/sys", "--proc-root", f"{root}/proc", *more])


def stable(topology: dict[str, Any]) -> dict[str, Any]:
    """What does not move from one reading to the next."""
    nodes = [
        {key: own for key, own in node.items() if key not in ("mem_free", "mem_available", "hugepages")}
        | {"hugepages": {size: pool["total"] for size, pool in node["hugepages"].items()}}
        for node in topology["nodes"]
    ]
    return topology | {"nodes": nodes}


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.json")))
def test_a_host_reads_the_same_from_its_capture(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "host", load(name))
    captured(root, tmp_path / "capture")
    found = read(tmp_path / "capture")
    assert found == read(root)
    assert found["nodes"] != []
    assert [file for file in names(tmp_path / "capture") if WHITELIST.fullmatch(file) is None] == []


def test_this_machine_reads_the_same_from_its_capture(tmp_path: Path) -> None:
    capture(["local", str(tmp_path / "capture")])
    assert stable(read(tmp_path / "capture")) == stable(read_topology("/sys"))
    assert [file for file in names(tmp_path / "capture") if WHITELIST.fullmatch(file) is None] == []


def test_what_is_private_or_not_read_stays_on_the_host(tmp_path: Path) -> None:
    files = square_host(1, gpus=1) | gpu_files("0000:02:00.0", 0, [0], "8086:1572", "020000")
    files |= {
        "sys/bus/pci/devices/0000:01:00.0/vpd": "serial 12345",
        "sys/bus/pci/devices/0000:01:00.0/uevent": "DRIVER=nvidia",
        "sys/devices/system/node/node0/numastat": "numa_hit 1",
        "sys/devices/system/node/node0/hugepages/hugepages-2048kB/surplus_hugepages": "0",
        "sys/class/dmi/id/product_serial": "12345",
        "sys/fs/cgroup/llmfleet.slice/memory.max": "1000\n",
        "sys/fs/cgroup/llmfleet.slice/cgroup.procs": "4711",
        "sys/fs/cgroup/llmfleet.slice/llmfleet-prefill.service/memory.max": "500\n",
        "sys/fs/cgroup/user.slice/memory.max": "500\n",
        "proc/self/status": "Name:\tsecret\nUid:\t0\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n",
        "proc/self/environ": "SECRET=1",
        "proc/zoneinfo": load("eight_gpus_two_nodes")["proc/zoneinfo"],
        "proc/sys/kernel/hostname": "secret",
        "model/config.json": "{}",
    }
    root = write(tmp_path / "host", files)
    line = captured(root, tmp_path / "capture")
    assert line == f"{tmp_path}/capture: 1 nodes, 1 GPUs, 1 memory limits, 14 files"
    node, pci = "sys/devices/system/node", "sys/bus/pci/devices/0000:01:00.0"
    assert names(tmp_path / "capture") == {
        f"{node}/online",
        *(f"{node}/node0/{name}" for name in ("cpulist", "distance", "meminfo")),
        *(f"{node}/node0/hugepages/hugepages-2048kB/{name}" for name in ("nr_hugepages", "free_hugepages")),
        *(f"{pci}/{name}" for name in ("vendor", "device", "class", "numa_node", "local_cpulist")),
        "sys/fs/cgroup/llmfleet.slice/memory.max",
        "proc/zoneinfo",
        "proc/self/status",
    }
    status = (tmp_path / "capture/proc/self/status").read_text()
    assert status == "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n"


def test_devices_that_the_operator_counts_as_gpus_are_taken(tmp_path: Path) -> None:
    files = square_host(1, gpus=0) | gpu_files("0000:02:00.0", 0, [0], "1AF4:1050", "ff0000")
    root = write(tmp_path / "host", files)
    assert ", 0 GPUs, " in captured(root, tmp_path / "without")
    assert ", 1 GPUs, " in captured(root, tmp_path / "with", "--gpu-id", "1af4:1050")


@pytest.mark.parametrize(
    "files",
    [
        {"memory/llm.slice/memory.limit_in_bytes": "7\n"},
        {"cgroup.controllers": "memory\n", "llm.slice/llm-a.slice/memory.high": "7\n", "memory/memory.max": "1\n"},
    ],
    ids=["v1", "v2"],
)
def test_limits_are_those_of_the_slice_that_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    root = write(tmp_path / "host", square_host(1, 0) | {f"sys/fs/cgroup/{name}": own for name, own in files.items()})
    captured(root, tmp_path / "capture", "--slice", "llm-a.slice")
    found = read(tmp_path / "capture", unit="llm-a.slice")["limits"]
    assert [limit["limit"] for limit in found] == [7]
    assert found == read(root, unit="llm-a.slice")["limits"]


def test_the_models_configuration_loses_where_it_came_from(tmp_path: Path) -> None:
    config = {"_name_or_path": "/home/me/m", "hidden_size": 8, "text_config": {"_name_or_path": "x", "layers": [1, {}]}}
    root = write(tmp_path / "host", square_host(1, 0) | {"m/config.json": json.dumps(config), "m/model.bin": "weights"})
    assert captured(root, tmp_path / "capture", "--model", f"{root}/m").endswith(" files, model/config.json")
    assert json.loads((tmp_path / "capture/model/config.json").read_text()) == {
        "hidden_size": 8,
        "text_config": {"layers": [1, {}]},
    }
    assert "model/model.bin" not in names(tmp_path / "capture")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(CaptureError, match="is not an empty folder: name one that is"):
        capture(["local", str(tmp_path)])
    with pytest.raises(CaptureError, match="is not an empty folder"):
        capture(["local", str(tmp_path / "kept")])
    assert names(tmp_path) == {"kept"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--slice", "../../etc"], "not the name of a slice"),
        (["--model", "/nowhere"], r"status 1: cannot capture this host: .* '/nowhere/config\.json'"),
        (["--sysfs-root", "/nowhere"], "cannot list .*/sys/devices/system/node: .* is not a host that can be planned"),
    ],
)
def test_a_host_that_cannot_be_captured_is_told(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(["local", str(tmp_path / "capture"), *more])


# --------------------------------------------------------------------------------------------------------------- ssh


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that notes its arguments and gives the last of them to a shell, as the real one does on the host."""
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "${{@:1:$#-1}}" > {tmp_path}/asked\nexec bash -c "${{@: -1}}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "asked"


def test_a_host_is_captured_through_ssh(tmp_path: Path, ssh: Path) -> None:
    root = write(tmp_path / "a host's tree", load("unequal_nodes"))
    more = ["--ssh-option", "Port=2222", "--ssh-option", "User=admin", "--python", sys.executable]
    more += ["--sysfs-root", f"{root}/sys", "--proc-root", f"{root}/proc"]
    capture(["gpu-1.example", str(tmp_path / "capture"), *more])
    assert read(tmp_path / "capture") == read(root)
    assert ssh.read_text().split("\n") == ["-o", "Port=2222", "-o", "User=admin", "--", "gpu-1.example", ""]


def test_a_login_script_that_prints_is_told(tmp_path: Path, ssh: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\necho Welcome\n")
    python.chmod(0o755)
    with pytest.raises(CaptureError, match=r"answered b'Welcome\\n': expected an archive. A login script that prints"):
        capture(["gpu-1.example", str(tmp_path / "capture"), "--python", str(python)])
    assert ssh.exists()
    assert not (tmp_path / "capture").exists()


def test_a_host_that_is_not_reached_is_told(tmp_path: Path, ssh: Path) -> None:
    ssh.parent.joinpath("bin/ssh").write_text("#!/bin/bash\necho 'No route to host' >&2\nexit 255\n")
    with pytest.raises(CaptureError, match="ssh ended with status 255: No route to host"):
        capture(["gpu-1.example", str(tmp_path / "capture")])


def archive(*members: tuple[str, bytes, bytes]) -> bytes:
    """A tar of (name, type, content)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, content in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname = kind, len(content), "/etc/passwd"
            tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/etc/passwd", tarfile.REGTYPE),
        ("../passwd", tarfile.REGTYPE),
        ("sys/../../passwd", tarfile.REGTYPE),
        ("sys/./a", tarfile.REGTYPE),
        ("sys//a", tarfile.REGTYPE),
        ("sys/a/..", tarfile.REGTYPE),
        ("sys/a\nb", tarfile.REGTYPE),
        ("sys", tarfile.REGTYPE),
        ("etc/passwd", tarfile.REGTYPE),
        ("sys/link", tarfile.SYMTYPE),
        ("sys/link", tarfile.LNKTYPE),
        ("sys/folder", tarfile.DIRTYPE),
        ("sys/device", tarfile.CHRTYPE),
        ("sys/pipe", tarfile.FIFOTYPE),
    ],
)
def test_an_archive_with_anything_but_files_below_the_folder_is_refused(name: str, kind: bytes) -> None:
    good = ("sys/devices/system/node/online", tarfile.REGTYPE, b"0\n")
    with pytest.raises(CaptureError, match="expected files below sys, proc and model only"):
        unpack(archive(good, (name, kind, b"")))


def test_an_archive_is_read() -> None:
    name = "sys/fs/cgroup/a\\x2db.slice/memory.max"
    assert unpack(archive((name, tarfile.REGTYPE, b"max\n"))) == {name: b"max\n"}
