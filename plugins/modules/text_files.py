#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: hold text files in a folder."""

from __future__ import annotations

DOCUMENTATION = r"""
module: text_files
short_description: Text files in a folder, all written by one run and on the disk before it ends
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Makes the folder, mode 0755, and the files in it, mode 0644, owned by the user who runs the module. A file is
    written whole or not at all.
  - What else is in the folder stays.
options:
  path:
    description: The folder.
    type: path
    required: true
  files:
    description: Contents by file name, without folders in the name. They are not logged.
    type: dict
    required: true
attributes:
  check_mode:
    support: full
    description: Says which files would be written.
  diff_mode:
    support: partial
    description: Names the files that are written, without their content.
"""

EXAMPLES = r"""
- name: Install a program that is named by its content
  llmfleet.sglang.text_files:
    path: /opt/llmfleet/lifecycle/0123456789ab
    files:
      __main__.py: "{{ lookup('ansible.builtin.file', 'lifecycle/__main__.py', rstrip=false) }}"
"""

RETURN = r"""
written:
  description: Names of the files that were written, or would be in check mode; C(.) is the folder itself.
  returned: success
  type: list
  elements: str
  sample: [., __main__.py]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils import _text_files


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            # Modules log what they are given to the journal, which has no use for whole programs.
            "files": {"type": "dict", "required": True, "no_log": True},
        },
        supports_check_mode=True,
    )
    path, files = module.params["path"], module.params["files"]
    for name, content in files.items():
        if name in ("", ".", "..") or "/" in name or not isinstance(content, str):
            found = f"a {type(content).__name__}" if not isinstance(content, str) else "no plain file name"
            module.fail_json(msg=f"files has {found} at {name!r}; expected texts by file name, without folders")
    try:
        written = _text_files.differing(path, files)
        if written and not module.check_mode:
            _text_files.write(path, files)
    except OSError as error:
        module.fail_json(msg=f"cannot write the files of {path}: {error}")
    after = "".join(f"{name} is written\n" for name in written)
    module.exit_json(changed=bool(written), written=written, diff={"before": "", "after": after})


if __name__ == "__main__":
    main()
