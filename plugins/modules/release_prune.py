#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: remove releases that nothing uses."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release_prune
short_description: Remove old releases and overlays that no unit names and no process uses
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Of the complete releases below C(root), those that a unit or an environment file names, that a process uses, or
    that C(protect) lists stay. Of the others the newest C(keep) stay, and the rest is removed, with its caches.
  - Folders without C(manifest.json), which are overlays of a model's folder and what an interrupted build left, are
    removed whenever nothing uses them, unless a build is going on.
options:
  root:
    description: The folder of all releases of one kind, or of all overlays.
    type: path
    required: true
  keep:
    description: How many releases that nothing uses stay, for going back.
    type: int
    default: 2
  protect:
    description: Names of releases that stay whatever uses them.
    type: list
    elements: str
    default: []
  references:
    description:
      - Folders of unit and environment files, those in use and those of a PD group's records. A release stays when one
        of these files names its folder.
    type: list
    elements: path
    default: [/etc/systemd/system, /etc/llmfleet, /var/lib/llmfleet/groups]
  caches:
    description: The folder with a cache folder for each release. Empty means none.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Says what would be removed.
  diff_mode:
    support: none
    description: What is removed is returned.
"""

EXAMPLES = r"""
- name: Remove engine releases that nothing uses
  llmfleet.sglang.release_prune:
    root: /opt/llmfleet/releases
    keep: 2

- name: Remove overlays of models that nothing uses
  llmfleet.sglang.release_prune:
    root: /opt/llmfleet/overlays
    keep: 0
"""

RETURN = r"""
removed:
  description: Folders that were removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [/opt/llmfleet/releases/0123456789ab]
used:
  description: Why each release in use stays, by its folder.
  returned: success
  type: dict
  sample:
    /opt/llmfleet/releases/ba9876543210: /etc/systemd/system/llmfleet-prefill.service
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._release import BusyError, Prune, prune


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "keep": {"type": "int", "default": 2},
            "protect": {"type": "list", "elements": "str", "default": []},
            "references": {
                "type": "list",
                "elements": "path",
                "default": ["/etc/systemd/system", "/etc/llmfleet", "/var/lib/llmfleet/groups"],
            },
            "caches": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    if module.params["keep"] < 0:
        module.fail_json(msg=f"keep is {module.params['keep']}; expected 0 or more")
    try:
        removed, used = prune(Prune(**module.params), dry=module.check_mode)
    except BusyError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"cannot remove what nothing uses below {module.params['root']}: {error}")
    module.exit_json(changed=bool(removed), removed=removed, used=used)


if __name__ == "__main__":
    main()
