#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: read where the memory of systemd units is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_info
short_description: Read on which NUMA nodes the memory of systemd units is, and what the engine said of it
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Reads bytes by NUMA node from a unit's cgroup and from C(numa_maps) of its processes, each once.
  - Counted is memory that processes made themselves, not the page cache of files.
  - A unit that does not run is reported with its state and without memory.
options:
  numa_maps:
    description:
      - Whether to read C(/proc/PID/numa_maps). It sees hugepages, which a unit's cgroup does not count.
      - The kernel visits every page of a process for it, and holds up the process's own memory calls meanwhile.
    type: bool
    default: true
  numa_maps_timeout_s:
    description: Seconds after which no more of C(numa_maps) is read, for all units together.
    type: int
    default: 20
  log:
    description: Whether to read from the journal what the engine said of its KV cache when this process started.
    type: bool
    default: false
  proc_root:
    description: Where procfs is mounted, or where a captured tree lies.
    type: path
    default: /proc
  sysfs_root:
    description: Where sysfs is mounted, or where a captured tree lies.
    type: path
    default: /sys
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
  - llmfleet.sglang.units
"""

EXAMPLES = r"""
- name: Read where the memory is
  llmfleet.sglang.memory_info:
    units: [llmfleet-prefill.service]
    log: true
  register: memory
"""

RETURN = r"""
units:
  description: Memory by unit name.
  returned: success
  type: dict
  contains:
    active_state:
      description: State of the unit.
      type: str
      returned: success
    invocation_id:
      description: The systemd invocation that runs; empty where none does.
      type: str
      returned: success
    main_pid:
      description: The unit's main process, 0 where none runs.
      type: int
      returned: success
    pids:
      description: The processes of the unit's cgroup, in order.
      type: list
      elements: int
      returned: success
    by_node:
      description: Bytes by node that are charged to the unit's cgroup; null where the kernel does not tell.
      type: dict
      returned: success
    hugetlb_counted:
      description: Whether C(by_node) has the unit's hugepages too. Without a hugetlb controller it has not.
      type: bool
      returned: success
    maps_by_node:
      description: Bytes by node that the unit's processes map; null where that was not asked for.
      type: dict
      returned: success
    numa_maps_incomplete:
      description: What of C(numa_maps) could not be read and why, one entry a process. C(maps_by_node) lacks it.
      type: list
      elements: str
      returned: success
    log:
      description:
        - What the engine said of its KV cache. C(max_total_tokens) is null and C(ranks) empty where it said nothing.
        - Null where that was not asked for, or where the unit does not run.
      type: dict
      returned: success
  sample:
    llmfleet-prefill.service:
      active_state: active
      by_node: {"0": 149999872000, "1": 0}
      hugetlb_counted: false
      invocation_id: 0123456789abcdef0123456789abcdef
      log:
        max_total_tokens: 1000192
        ranks: {"TP0": [{"name": "swa", "bytes": 5023549440, "exact": true, "tokens": null}]}
      main_pid: 4711
      maps_by_node: {"0": 149999872000}
      numa_maps_incomplete: []
      pids: [4711, 4712]
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils import _proof
from ansible_collections.llmfleet.sglang.plugins.module_utils._systemd import parse_show

PROPERTIES = ("ActiveState", "MainPID", "ControlGroup", "InvocationID")
# Where a unit's cgroup lies: cgroup v2, then the hybrid and the legacy hierarchies of systemd.
PROCESS_TREES = ("fs/cgroup", "fs/cgroup/unified", "fs/cgroup/systemd")
MEMORY_TREES = ("fs/cgroup", "fs/cgroup/memory")
# The kernel fills at least one mapping into a read of any size. So small a buffer makes it visit the pages of a mapping
# or two at a time, and the deadline is looked at in between.
READ_SIZE = 64


def read_text(path: str) -> str | None:
    """The text of a file; None where there is none, for a unit may stop while it is looked at."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return None


def folders_of(sysfs_root: str, control_group: str, trees: Sequence[str]) -> list[str]:
    """The folders of a unit's cgroup that exist, in the order of ``trees``."""
    paths = [os.path.join(sysfs_root, tree, control_group.lstrip("/")) for tree in trees]
    return [path for path in paths if control_group.strip("/") and os.path.isdir(path)]


def pids_of(folders: Sequence[str]) -> list[int]:
    """The processes of a cgroup and of those below it, from the first folder that has any."""
    for folder in folders:
        pids: set[int] = set()
        for path, _folders, _files in os.walk(folder):
            pids.update(int(pid) for pid in (read_text(os.path.join(path, "cgroup.procs")) or "").split())
        if pids:
            return sorted(pids)
    return []


def charged_to(folders: Sequence[str], page_size: int) -> tuple[dict[str, int] | None, bool]:
    """Bytes by node from the first folder with a memory.numa_stat, and whether they have hugepages in them."""
    for folder in folders:
        text = read_text(os.path.join(folder, "memory.numa_stat"))
        if text is None:
            continue
        found = _proof.parse_numa_stat(text, page_size)
        names = [name for name in os.listdir(folder) if name.startswith("hugetlb.") and name.endswith(".numa_stat")]
        for name in names:
            _proof.add(found, _proof.parse_hugetlb_numa_stat(read_text(os.path.join(folder, name)) or ""))
        return found, bool(names)
    return None, False


def mapped_by(
    proc_root: str, pids: Sequence[int], deadline: float, clock: Callable[[], float] = time.monotonic
) -> tuple[dict[str, int], list[str]]:
    """Bytes by node that processes map, and what could not be read of them until ``deadline`` of ``clock``."""
    found: dict[str, int] = {}
    incomplete = []
    for pid in pids:
        try:
            with open(os.path.join(proc_root, str(pid), "numa_maps"), "rb", buffering=READ_SIZE) as stream:
                while True:
                    if clock() >= deadline:
                        incomplete.append(f"process {pid}: numa_maps was not read to its end within the time allowed")
                        break
                    line = stream.readline()
                    if not line:
                        break
                    _proof.add(found, _proof.mapping_bytes(line.decode("utf-8", "replace")))
        except OSError as error:
            incomplete.append(f"process {pid}: numa_maps cannot be read: {error.strerror}")
    return found, incomplete


def start_log(module: AnsibleModule, invocation: str) -> dict[str, Any]:
    """What the engine said when this invocation started. journalctl picks the lines, so that no journal is too long."""
    command = ["journalctl", "--quiet", "--no-pager", "--output=cat", f"--grep={_proof.START_LINES}"]
    rc, out, err = module.run_command([*command, f"_SYSTEMD_INVOCATION_ID={invocation}"])
    # 1 without a word is how journalctl says that no line matched.
    if rc != 0 and (rc != 1 or err.strip()):
        module.fail_json(
            msg=f"journalctl exited with {rc}: {err.strip()}. Expected the lines of invocation {invocation}. "
            "Read the journal as root, with a journalctl that has --grep (+PCRE2 in journalctl --version)."
        )
    return _proof.parse_log(out)


def observe(properties: Mapping[str, str], proc_root: str, sysfs_root: str, deadline: float | None) -> dict[str, Any]:
    """What the kernel tells of one unit. ``deadline`` None: numa_maps are not read."""
    group, main_pid = properties.get("ControlGroup", ""), int(properties.get("MainPID") or 0)
    unit: dict[str, Any] = {
        "active_state": properties.get("ActiveState", "inactive"),
        "main_pid": main_pid,
        "invocation_id": properties.get("InvocationID", "") if main_pid else "",
        "pids": pids_of(folders_of(sysfs_root, group, PROCESS_TREES)) or ([main_pid] if main_pid else []),
        "by_node": {},
        "hugetlb_counted": False,
        "maps_by_node": {},
        "numa_maps_incomplete": [],
        "log": None,
    }
    if unit["pids"]:
        folders = folders_of(sysfs_root, group, MEMORY_TREES)
        unit["by_node"], unit["hugetlb_counted"] = charged_to(folders, os.sysconf("SC_PAGE_SIZE"))
    if deadline is None:
        unit["maps_by_node"] = None
    else:
        unit["maps_by_node"], unit["numa_maps_incomplete"] = mapped_by(proc_root, unit["pids"], deadline)
    return unit


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "units": {"type": "list", "elements": "str", "required": True},
            "numa_maps": {"type": "bool", "default": True},
            "numa_maps_timeout_s": {"type": "int", "default": 20},
            "log": {"type": "bool", "default": False},
            "proc_root": {"type": "path", "default": "/proc"},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    deadline = time.monotonic() + wanted["numa_maps_timeout_s"] if wanted["numa_maps"] else None
    units = {}
    for name in wanted["units"]:
        command = ["systemctl", "show", f"--property={','.join(PROPERTIES)}", "--", name]
        _rc, out, _err = module.run_command(command, check_rc=True)
        unit = observe(parse_show(out)[0], wanted["proc_root"], wanted["sysfs_root"], deadline)
        if wanted["log"] and unit["invocation_id"]:
            unit["log"] = start_log(module, unit["invocation_id"])
        units[name] = unit
    module.exit_json(changed=False, units=units)


if __name__ == "__main__":
    main()
