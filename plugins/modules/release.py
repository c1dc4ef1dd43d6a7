#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: build an immutable release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release
short_description: Build an immutable release folder from pinned requirements
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Builds C(root/id/venv) from requirements with digests, installs own packages, applies patches, and runs checks. A
    complete release is never touched again; whether its own files are still what was built is looked at each time.
  - A failed build leaves nothing but its log, and whatever runs untouched.
options:
  root:
    description: The folder of all releases of one kind.
    type: path
    required: true
  id:
    description: The name of this release; a hash over everything that goes into it.
    type: str
    required: true
  requirements:
    description: Lines of the form C(name==version --hash=sha256:...); complete, nothing is resolved.
    type: list
    elements: str
    required: true
  installer:
    description: The same for uv, which then installs the requirements. Without it pip does.
    type: list
    elements: str
    default: []
  wheelhouse:
    description: A folder of wheels on the host. When set, no index is asked.
    type: str
    default: ""
  index_url:
    description: The package index to ask when there is no wheelhouse. Empty means the host's own setting.
    type: str
    default: ""
  python:
    description: The interpreter of the virtual environment.
    type: path
    default: /usr/bin/python3
  sources:
    description: Texts by their path in C(src) of the release.
    type: dict
    default: {}
  packages:
    description: Folders of C(src) that are Python packages to install. Needs C(installer).
    type: list
    elements: str
    default: []
  patches:
    description: The folder of C(src) that holds patches and their C(manifest.json). Empty means none.
    type: str
    default: ""
  checks:
    description:
      - Commands that have to end with status 0 before the release is complete. C({release}) in an argument or a value
        is the release's folder.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: What is checked, for people.
        type: str
        required: true
      argv:
        description: The command.
        type: list
        elements: str
        required: true
      environment:
        description: Variables beside those of the module.
        type: dict
        default: {}
      user:
        description: Who runs it. Empty means who runs the module.
        type: str
        default: ""
attributes:
  check_mode:
    support: full
    description: Says whether the release would be built.
  diff_mode:
    support: none
    description: A release is built whole or not at all.
"""

EXAMPLES = r"""
- name: Build the router's release
  llmfleet.sglang.release:
    root: /opt/llmfleet/router
    id: 0123456789ab
    requirements: "{{ manifest | llmfleet.sglang.requirements('router') }}"
    wheelhouse: /var/cache/llmfleet/wheels
"""

RETURN = r"""
path:
  description: The release's folder.
  returned: always
  type: str
  sample: /opt/llmfleet/router/0123456789ab
"""

import os
import re

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._release import (
    BuildError,
    BusyError,
    Check,
    Release,
    build,
    changed_files,
    is_complete,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "id": {"type": "str", "required": True},
            "requirements": {"type": "list", "elements": "str", "required": True},
            "installer": {"type": "list", "elements": "str", "default": []},
            "wheelhouse": {"type": "str", "default": ""},
            "index_url": {"type": "str", "default": ""},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "sources": {"type": "dict", "default": {}},
            "packages": {"type": "list", "elements": "str", "default": []},
            "patches": {"type": "str", "default": ""},
            "checks": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "argv": {"type": "list", "elements": "str", "required": True},
                    "environment": {"type": "dict", "default": {}},
                    "user": {"type": "str", "default": ""},
                },
            },
        },
        supports_check_mode=True,
    )
    checks = [Check(**check) for check in module.params.pop("checks")]
    release = Release(**module.params, checks=checks)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", release.id):
        module.fail_json(
            msg=f"id is {release.id!r}; expected letters, digits, dots, hyphens (it becomes a folder's name)"
        )
    if not release.requirements:
        module.fail_json(msg="requirements is empty; expected at least one pinned line from the artefact manifest")
    if release.packages and not release.installer:
        module.fail_json(
            msg="packages are to be installed without an installer; expected uv's pinned line in installer"
        )
    if is_complete(release.path):
        if changed := changed_files(release.path):
            module.fail_json(
                msg=f"{release.path} is no longer what was built: {', '.join(changed)} changed or went; expected the "
                "files of its manifest.json. Remove that folder when nothing runs from it, and run again: it will be "
                "built anew."
            )
        module.exit_json(changed=False, path=release.path)
    if module.check_mode:
        module.exit_json(changed=True, path=release.path)
    if release.wheelhouse and not os.path.isdir(release.wheelhouse):
        module.fail_json(msg=f"wheelhouse {release.wheelhouse} does not exist; expected a folder of wheels on the host")
    try:
        build(release)
    except BuildError as error:
        module.fail_json(msg=f"{error}. Its last lines:\n{error.tail}", log=error.log)
    except BusyError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"cannot build {release.path}: {error}")
    module.exit_json(changed=True, path=release.path)


if __name__ == "__main__":
    main()
