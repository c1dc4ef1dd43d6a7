# SPDX-License-Identifier: Apache-2.0
"""The requirements filter: what a playbook sees of the artefact manifest."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.llmfleet.sglang.plugins.filter.requirements import FilterModule

DIGEST = "c" * 64
MANIFEST = {
    "schema": 1,
    "artefacts": [
        {"name": "smg", "version": "1.13.0", "kind": "wheel", "arch": "x86_64", "sha256": DIGEST, "sets": ["router"]}
    ],
}
requirements = FilterModule().filters()["requirements"]


def test_lines_of_a_set() -> None:
    assert requirements(MANIFEST, "router") == [f"smg==1.13.0 --hash=sha256:{DIGEST}"]


def test_unknown_set_becomes_an_error_of_the_play() -> None:
    with pytest.raises(AnsibleFilterError, match="no wheels for the set 'rooter'; expected one of router"):
        requirements(MANIFEST, "rooter")


@pytest.mark.parametrize("manifest", [None, "text", {}, {"artefacts": None}])
def test_something_else_than_the_manifest_is_refused(manifest: Any) -> None:
    with pytest.raises(AnsibleFilterError, match=r"expected the content of files/artefacts\.yml"):
        requirements(manifest, "router")
