# SPDX-License-Identifier: Apache-2.0
"""The part of ``tools.capture`` that runs on the host: sent over stdin, answers on stdout with an archive.

Standard library of Python 3.7 only. This file is the whitelist: what is not named here does not leave the host.
"""

from __future__ import annotations

import glob
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from typing import Any

# Relative to sysfs_root.
NODE_FILES = (
    "devices/system/node/online",
    "devices/system/node/node[0-9]*/cpulist",
    "devices/system/node/node[0-9]*/distance",
    "devices/system/node/node[0-9]*/meminfo",
    "devices/system/node/node[0-9]*/hugepages/hugepages-*kB/nr_hugepages",
    "devices/system/node/node[0-9]*/hugepages/hugepages-*kB/free_hugepages",
    "module/nvidia/version",
)
PCI_FILES = ("vendor", "device", "class", "numa_node", "local_cpulist")
# PCI base class 03.
DISPLAY_CONTROLLER = "0x03"
LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
STATUS_LINES = ("Cpus_allowed_list:", "Mems_allowed_list:")
# Where a model was trained or saved: the one key of a config.json that names a folder or a user.
PRIVATE_KEY = "_name_or_path"


def read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()


def expand(root: str, pattern: str) -> list[str]:
    """Paths below a root, relative to it, that match a pattern and are there."""
    return [os.path.relpath(path, root) for path in sorted(glob.glob(os.path.join(glob.escape(root), pattern)))]


def wanted_devices(root: str, gpu_ids: list[str]) -> list[str]:
    """Folders of the PCI devices to take, relative to the root."""
    wanted = []
    for folder in expand(root, "bus/pci/devices/*"):
        vendor, device, kind = (
            read(os.path.join(root, folder, name)).strip() for name in ("vendor", "device", "class")
        )
        identity = f"{vendor[2:]}:{device[2:]}".lower()
        if kind.startswith(DISPLAY_CONTROLLER) or identity in gpu_ids:
            wanted.append(folder)
    return wanted


def collect(request: Mapping[str, Any]) -> dict[str, str]:
    """Name in the archive -> content."""
    root, proc = request["sysfs_root"], request["proc_root"]
    names = [name for pattern in NODE_FILES for name in expand(root, pattern)]
    names += [f"{folder}/{name}" for folder in wanted_devices(root, request["gpu_ids"]) for name in PCI_FILES]
    # cgroup v1 has a hierarchy for each controller, v2 has one.
    v1 = os.path.isdir(os.path.join(root, "fs/cgroup/memory"))
    v1 = v1 and not os.path.exists(os.path.join(root, "fs/cgroup/cgroup.controllers"))
    base = "fs/cgroup/memory" if v1 else "fs/cgroup"
    names += [os.path.join(base, folder, name) for folder in request["slice_folders"] for name in LIMIT_FILES]
    files = {
        f"sys/{name}": read(os.path.join(root, name)) for name in names if os.path.exists(os.path.join(root, name))
    }
    zoneinfo, status = os.path.join(proc, "zoneinfo"), os.path.join(proc, "self/status")
    if os.path.exists(zoneinfo):
        files["proc/zoneinfo"] = read(zoneinfo)
    if os.path.exists(status):
        lines = read(status).splitlines(keepends=True)
        files["proc/self/status"] = "".join(line for line in lines if line.startswith(STATUS_LINES))
    if request["model"]:
        config = json.loads(read(os.path.join(request["model"], "config.json")))
        files["model/config.json"] = json.dumps(without_paths(config), indent=2, sort_keys=True) + "\n"
    return files


def without_paths(value: Any) -> Any:
    """A configuration without the key that tells where it came from, at any depth."""
    if isinstance(value, dict):
        return {key: without_paths(own) for key, own in value.items() if key != PRIVATE_KEY}
    return [without_paths(own) for own in value] if isinstance(value, list) else value


def main() -> None:
    request = json.loads(sys.argv[1])
    try:
        files = collect(request)
    except (OSError, ValueError) as error:
        sys.exit(f"cannot capture this host: {error}")
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for name, text in sorted(files.items()):
            content = text.encode()
            # No owner and no time: an archive of the same host is the same.
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    main()
