# SPDX-License-Identifier: Apache-2.0
"""Write ``docs/capability.md`` from the table of back-ends: ``python -m tools.capability``."""

from __future__ import annotations

from ansible_collections.llmfleet.sglang.plugins.module_utils._capability import (
    BACKENDS,
    CAPABILITIES,
    DRIVER_BRANCH,
    KINDS,
    RULES,
    refusal,
)

from tools import ROOT

PATH = ROOT / "docs" / "capability.md"
HEAD = f"""\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Made by `python -m tools.capability` from plugins/module_utils/_capability.py, not by hand. -->
# Back-ends and GPUs

What runs on a GPU of which compute capability. The plan refuses what is marked `no`, and what a note forbids to a
checkpoint; back-ends that are not listed are left to the engine. Read in the sources of each version; of all this,
only 0.5.16 on 9.0 was run on a GPU.

Both versions are built for CUDA 13.0, which needs a driver of branch {DRIVER_BRANCH} or newer
([NVIDIA](https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)); the plan refuses others.
"""


def text() -> str:
    """The whole page."""
    parts = [HEAD]
    for version, kinds in BACKENDS.items():
        parts.append(f"\n## SGLang {version}\n")
        for kind in (name for name in KINDS if name in kinds):
            title, flags = KINDS[kind].title, KINDS[kind].flags
            parts.append(f"\n### {version}: {title}\n\n")
            if flags:
                parts.append("Flag " + ", else ".join(f"`--{flag}`" for flag in flags) + ".\n\n")
            columns = (f"{number} ({name})" for number, name in CAPABILITIES.items())
            parts.append(f"| back-end | {' | '.join(columns)} | why |\n|{'---|' * (len(CAPABILITIES) + 2)}\n")
            parts += [row(version, kind, backend) for backend in kinds[kind]]
    return "".join(parts)


def row(version: str, kind: str, backend: str) -> str:
    """The line of one back-end. A rule for some experts only shows in the last column alone."""
    marks = ("yes" if refusal(version, number, kind, backend) is None else "no" for number in CAPABILITIES)
    notes = []
    for rule in (rule for rule in RULES[version][kind] if rule.backend == backend):
        where = f"{' or '.join(rule.experts)} experts on {', '.join(rule.on) or 'none'} only: " if rule.experts else ""
        notes.append(f"{where}{rule.reason} ({rule.source})")
    return f"| `{backend}` | {' | '.join(marks)} | {'; '.join(notes)} |\n"


if __name__ == "__main__":
    PATH.write_text(text())
