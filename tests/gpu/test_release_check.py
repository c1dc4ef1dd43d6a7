# SPDX-License-Identifier: Apache-2.0
"""The release's own check of its kernels (``python -m llmfleet_kernels``) on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from llmfleet_kernels import __main__ as check  # noqa: E402

KERNELS = {"paged_logits": "indexer logits", "index_query": "index query", "sparse_mla_decode": "sparse MLA"}


def test_every_kernel_is_within_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(line.endswith(": ok") for line in lines), lines


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_is_a_tenth_off_fails(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right: Callable[..., Any] = getattr(check, name)

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        return (found[0] * 1.1, found[1]) if isinstance(found, tuple) else found * 1.1

    monkeypatch.setattr(check, name, wrong)
    assert check.main() == 1
    for line in capsys.readouterr().out.splitlines():
        assert line.endswith(": WRONG" if line.startswith(KERNELS[name]) else ": ok"), line
