#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: read what paths are and how much room there is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: path_info
short_description: Read whether paths exist, whether a user can read them, and how much room is there
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - For a path that does not exist, the free space is that of the folder in which it would be created.
options:
  paths:
    description: Absolute paths.
    type: list
    elements: path
    required: true
  user:
    description: The user that has to read the paths. One that does not exist yet has what everybody has.
    type: str
    default: root
extends_documentation_fragment:
  - llmfleet.sglang.reads_only
"""

EXAMPLES = r"""
- name: Read the model's folder
  llmfleet.sglang.path_info:
    paths: [/srv/models/tiny]
    user: llmfleet
  register: model
"""

RETURN = r"""
paths:
  description: What was found, by path. Sizes in bytes; C(unreadable) names the part of the path that stops the user.
  returned: success
  type: dict
  sample:
    /srv/models/tiny:
      device: 65024
      exists: true
      free: 1073741824
      is_dir: true
      size: 870000
      unreadable: ""
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils._paths import read_path


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "path", "required": True},
            "user": {"type": "str", "default": "root"},
        },
        supports_check_mode=True,
    )
    relative = [path for path in module.params["paths"] if not path.startswith("/")]
    if relative:
        module.fail_json(msg=f"path {relative[0]!r} is not absolute; expected a path that starts with /")
    paths = {path: read_path(path, module.params["user"]) for path in module.params["paths"]}
    module.exit_json(changed=False, paths=paths)


if __name__ == "__main__":
    main()
