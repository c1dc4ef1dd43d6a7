# SPDX-License-Identifier: Apache-2.0
"""What the compile stage reads and what the recall report shows; compiling itself is the stage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.gpu import bench_recall
from tools import ROOT, kernels

BENCHMARKS = ROOT / "docs" / "benchmarks"


def test_skipped_tests_and_modules_are_found(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="ran"/>'
        '<testcase classname="a" name="b"><skipped message="why"/></testcase>'
        '<testcase classname="" name="m"><skipped message="collection skipped">no triton</skipped></testcase>'
        "</testsuite></testsuites>"
    )
    assert kernels.skipped(report) == ["a.b: why", ".m: no triton"]


def test_every_engine_with_patches_has_a_wheel() -> None:
    compilers, engines = kernels.wheels()
    assert {"torch", "triton", "nvidia-cuda-nvcc", "nvidia-nvvm", "apache-tvm-ffi"} <= {e["name"] for e in compilers}
    assert sorted(engines) == sorted(path.parent.name for path in kernels.ENGINES.glob("*/manifest.json"))


def test_an_engine_without_a_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "9.9.9").mkdir()
    (tmp_path / "9.9.9" / "manifest.json").touch()
    monkeypatch.setattr(kernels, "ENGINES", tmp_path)
    with pytest.raises(SystemExit, match=r"no wheel of sglang 9\.9\.9, which has patches here"):
        kernels.wheels()


@pytest.mark.parametrize(
    ("member", "wanted"),
    [
        ("sglang/kernels/jit/csrc/deepseek_v4/fused_norm_rope_v2.cuh", True),
        ("sglang/jit_kernel/include/sgl_kernel/tensor.h", True),
        ("sglang/jit_kernel/csrc/elementwise/add.cuh", False),
        ("sglang/srt/server_args.py", False),
    ],
)
def test_which_members_of_a_wheel_are_sources(member: str, wanted: bool) -> None:
    assert bool(kernels.SOURCES.match(member)) == wanted


def test_table_and_plot_of_the_recall_are_those_of_its_figures() -> None:
    """``tests/gpu/bench_recall.py --plot docs/benchmarks/recall_h200.json`` prints the one and draws the other."""
    report = json.loads((BENCHMARKS / "recall_h200.json").read_text())
    assert bench_recall.table(report) in (BENCHMARKS / "README.md").read_text()
    assert bench_recall.plot(report) == (BENCHMARKS / "recall_h200.svg").read_text()


def test_recorded_kernels_name_both_gpus() -> None:
    recorded = json.loads((BENCHMARKS / "compile.json").read_text())["kernels"]
    stems = {re.sub(r", sm_\d+$", "", name) for name in recorded}
    assert sorted(recorded) == sorted(f"{stem}, sm_{capability}" for stem in stems for capability in (90, 120))
