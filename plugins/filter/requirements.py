# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
# Runs inside Ansible, so it may also be used under the GNU General Public License version 3 or later.
"""Filter ``llmfleet.sglang.requirements``: the pinned requirements of one set of the artefact manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llmfleet.sglang.plugins.module_utils import _artefacts


def requirements(manifest: Mapping[str, Any], set_name: str) -> list[str]:
    """Lines of a requirements file; see the filter's documentation."""
    if not isinstance(manifest, Mapping) or not isinstance(manifest.get("artefacts"), list):
        raise AnsibleFilterError(
            f"llmfleet.sglang.requirements: found {type(manifest).__name__}, "
            "expected the content of files/artefacts.yml"
        )
    try:
        return _artefacts.requirements(manifest, set_name)
    except _artefacts.UnknownSetError as error:
        raise AnsibleFilterError(f"llmfleet.sglang.requirements: {error}") from error


class FilterModule:
    """Filters of this file, by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Called by Ansible."""
        return {"requirements": requirements}
