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
  - Builds C(root/id/venv) from requirements with digests. A complete release is never touched again.
  - A failed build leaves nothing but its log.
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
  source:
    description: A folder on the host that becomes C(src) in the release.
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
from ansible_collections.llmfleet.sglang.plugins.module_utils._release import BuildError, Release, build, is_complete


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
            "source": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    release = Release(**module.params)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", release.id):
        module.fail_json(
            msg=f"id is {release.id!r}; expected letters, digits, dots, hyphens (it becomes a folder's name)"
        )
    if not release.requirements:
        module.fail_json(msg="requirements is empty; expected at least one pinned line from the artefact manifest")
    if is_complete(release.path):
        module.exit_json(changed=False, path=release.path)
    if module.check_mode:
        module.exit_json(changed=True, path=release.path)
    if release.wheelhouse and not os.path.isdir(release.wheelhouse):
        module.fail_json(msg=f"wheelhouse {release.wheelhouse} does not exist; expected a folder of wheels on the host")
    try:
        build(release)
    except BuildError as error:
        module.fail_json(msg=f"{error}. Its last lines:\n{error.tail}", log=error.log)
    except OSError as error:
        module.fail_json(msg=f"cannot build {release.path}: {error}")
    module.exit_json(changed=True, path=release.path)


if __name__ == "__main__":
    main()
