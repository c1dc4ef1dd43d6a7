# SPDX-License-Identifier: Apache-2.0
"""What the release's own check says and how it ends; what it measures is tested in ``tests/gpu``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from llmfleet_kernels import __main__ as check


@pytest.mark.parametrize(
    ("error", "status", "verdict"), [(1e-3, 0, "ok"), (1.1e-3, 1, "WRONG"), (float("nan"), 1, "WRONG")]
)
def test_a_kernel_beyond_its_bound_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: float, status: int, verdict: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(check, "checks", lambda: iter([("first", error, 1e-3), ("second", 0.0, 1e-3)]))
    assert check.main() == status
    assert capsys.readouterr().out.splitlines() == [
        f"first: relative error {error:.1e}, at most 1.0e-03 expected: {verdict}",
        "second: relative error 0.0e+00, at most 1.0e-03 expected: ok",
    ]


def test_without_a_gpu_nothing_is_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check.main() == 0
    assert "nothing was compiled and nothing compared" in capsys.readouterr().out
