#!/usr/bin/python
# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""Ansible module: overlay a model's folder."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_overlay
short_description: A model's folder with some JSON files changed, the checkpoint left as it is
version_added: 0.1.0
author: llmfleet developers (@llmfleet)
description:
  - Makes a folder of links to the entries of a checkpoint. A file that is changed is written anew there, as the
    checkpoint's own JSON object with some keys replaced.
options:
  path:
    description: The folder to make.
    type: path
    required: true
  source:
    description: The checkpoint's folder.
    type: path
    required: true
  changes:
    description: Keys and values to replace, by file name.
    type: dict
    required: true
attributes:
  check_mode:
    support: full
    description: Says whether the folder would be made or changed.
  diff_mode:
    support: full
    description: Shows the changed files and links.
"""

EXAMPLES = r"""
- name: Serve with a default temperature
  llmfleet.sglang.model_overlay:
    path: /opt/llmfleet/overlays/0123456789ab
    source: /srv/models/flash
    changes:
      generation_config.json: {temperature: 0.6}
"""

RETURN = r"""
path:
  description: The overlay.
  returned: success
  type: str
  sample: /opt/llmfleet/overlays/0123456789ab
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmfleet.sglang.plugins.module_utils import _overlay


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "source": {"type": "path", "required": True},
            "changes": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    path, source = module.params["path"], module.params["source"]
    if module.check_mode and not os.path.isdir(source):
        # An empty host gets its checkpoint in the same run.
        module.exit_json(changed=True, path=path)
    try:
        before, after = _overlay.current(path), _overlay.wanted(source, module.params["changes"])
        if before != after and not module.check_mode:
            _overlay.write(path, after)
    except _overlay.OverlayError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"cannot overlay {source} as {path}: {error}")
    shown = [
        {name: entries[name] for name in entries if before.get(name) != after.get(name)} for entries in (before, after)
    ]
    module.exit_json(changed=before != after, path=path, diff={"before": _text(shown[0]), "after": _text(shown[1])})


def _text(entries: dict[str, str]) -> str:
    return "".join(f"{name}: {content.rstrip()}\n" for name, content in entries.items())


if __name__ == "__main__":
    main()
