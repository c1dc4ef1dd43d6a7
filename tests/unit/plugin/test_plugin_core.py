# SPDX-License-Identifier: Apache-2.0
"""The plugin fails closed: with it as planned, or not at all. SGLang's loader, which does not, is a stand-in here."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
from llmfleet_plugin import EX_CONFIG
from llmfleet_plugin._feature import Context, Feature, FeatureError, wanted
from llmfleet_plugin._hooks import signature
from llmfleet_plugin._install import install_wanted

PLUGIN = Path(__file__).parents[3] / "files" / "plugin"
STAND_IN = Path(__file__).parent / "stand_in_engine"

# A feature on the stand-in's scheduler, in place of the plugin's own, and then what an engine does in each process.
PROGRAM = """
import sys
from types import SimpleNamespace
from llmfleet_plugin import __main__, _feature, _install

TARGET = "sglang.srt.managers.scheduler.Scheduler.add"

def install(context, hooks):
    {install}
    return {{"limit": 3}}

feature = _feature.Feature("test", "LLMFLEET_TEST", ("on",), {{"0.5.16": {{TARGET: "{signature}"}}}}, install)
_install.FEATURES = __main__.FEATURES = (feature,)
if len(sys.argv) > 1:
    sys.exit(__main__.main())
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.managers.scheduler import Scheduler
scheduler = Scheduler(SimpleNamespace(enable_metrics=False), None, 0, 1, 0, 0, 0, 0, None)
print("served:", scheduler.add("a request"))
"""
AROUND = "hooks.around(TARGET, lambda original, *args, **kwargs: original(*args, **kwargs).upper())"
FITS = "(self, request, *, urgent=)"


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def run(
    tmp_path: Path,
    *arguments: str,
    install: str = AROUND,
    fits: str = FITS,
    version: str = "0.5.16",
    entry_point: str = "llmfleet_plugin:load",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Start the stand-in with a plugin, or look at the plugin when there are arguments."""
    site = tmp_path / "site"
    site.mkdir()
    distribution(site, "sglang", version)
    points = f"[sglang.srt.plugins]\nllmfleet = {entry_point}\n" if entry_point else ""
    distribution(site, "llmfleet-plugin", "0.1.0", points)
    (tmp_path / "features").mkdir()
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(install=install, signature=fits), *arguments],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{site}:{PLUGIN}:{STAND_IN}",
            "LLMFLEET_FEATURES_DIR": str(tmp_path / "features"),
            "LLMFLEET_TEST": "on",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def reports(tmp_path: Path) -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text())["features"] for path in (tmp_path / "features").glob("*.json")}


def test_a_feature_is_active_and_every_process_tells_so(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.stdout == "served: A REQUEST QUEUED\n", result.stderr
    active = {"test": {"value": "on", "limit": 3}}
    assert reports(tmp_path) == {"main": active, "tp1-pp0-dp0": active}


def test_nothing_is_touched_when_nothing_is_asked_for(tmp_path: Path) -> None:
    result = run(tmp_path, LLMFLEET_TEST="off", version="9.9")
    assert result.stdout == "served: a request queued\n"
    assert reports(tmp_path) == {}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fits": "(self, request)"}, "has the signature (self, request, *, urgent=); expected (self, request)"),
        ({"version": "0.6.0"}, "SGLang is 0.6.0; the hooks were written for 0.5.16 and 0.5.23"),
        ({"LLMFLEET_TEST": "loud"}, "LLMFLEET_TEST is 'loud'; expected off or one of on"),
        ({"install": "raise RuntimeError('no such pool')"}, "no such pool"),
        ({"install": "sys.exit(0)"}, "the engine is not started"),
        ({"install": "pass"}, "is in the feature's table and was not hooked"),
        ({"install": 'hooks.around("os.getpid", print)'}, "is hooked and not in the feature's table"),
    ],
    ids=["signature", "version", "value", "exception", "exit", "forgotten-hook", "unlisted-hook"],
)
def test_a_plugin_that_fails_ends_the_process(tmp_path: Path, changes: dict[str, str], why: str) -> None:
    result = run(tmp_path, **changes)
    assert result.returncode == EX_CONFIG
    assert why in result.stderr
    assert "served" not in result.stdout
    assert reports(tmp_path) == {}


@pytest.mark.parametrize("entry_point", ["", "llmfleet_plugin_that_went:load"], ids=["missing", "unimportable"])
def test_a_plugin_that_is_not_loaded_is_caught_before_the_start(tmp_path: Path, entry_point: str) -> None:
    result = run(tmp_path, "check", entry_point=entry_point)
    assert result.returncode == EX_CONFIG
    assert "the entry point llmfleet of sglang.srt.plugins" in result.stderr


def test_the_stock_engine_runs_without_it_and_reports_nothing(tmp_path: Path) -> None:
    """Why the check before the start and the reports after it are needed: SGLang itself goes on."""
    result = run(tmp_path, entry_point="llmfleet_plugin_that_went:load")
    assert result.stdout == "served: a request queued\n"
    assert reports(tmp_path) == {}


def test_a_plugin_that_sglang_is_told_to_skip_is_caught_before_the_start(tmp_path: Path) -> None:
    result = run(tmp_path, "check", SGLANG_PLUGINS="other")
    assert result.returncode == EX_CONFIG
    assert "SGLANG_PLUGINS is 'other'" in result.stderr


def test_a_sound_plugin_passes_the_check(tmp_path: Path) -> None:
    result = run(tmp_path, "check", SGLANG_PLUGINS="other, llmfleet")
    assert (result.returncode, result.stdout) == (0, "llmfleet plugin: asked for: test=on\n"), result.stderr


def test_the_hooks_of_a_build_are_compared(tmp_path: Path) -> None:
    result = run(tmp_path, "hooks")
    assert (result.returncode, result.stdout) == (0, "llmfleet plugin: the hooks of test fit SGLang 0.5.16\n")


def test_hooks_that_do_not_fit_fail_a_build(tmp_path: Path) -> None:
    result = run(tmp_path, "hooks", fits="(self)")
    assert result.returncode == EX_CONFIG
    assert "expected (self)" in result.stderr


def plain(a: int, b: int = 1) -> None:
    """Two names, one with a default."""


def mixed(a: int, *rest: int, key: int, other: int = 2, **more: int) -> None:
    """Every kind."""


def keyword(a: int, *, key: int) -> None:
    """Keyword only."""


@pytest.mark.parametrize(
    ("function", "text"),
    [(plain, "(a, b=)"), (mixed, "(a, *rest, key, other=, **more)"), (keyword, "(a, *, key)")],
)
def test_signatures(function: object, text: str) -> None:
    assert signature(function) == text  # type: ignore[arg-type]


def test_a_feature_needs_what_it_needs() -> None:
    def install(_context: Context, _hooks: object) -> dict[str, object]:
        return {}

    reader = Feature("reader", "READER", ("triton",), {}, install)
    keys = Feature("keys", "KEYS", ("bf16",), {}, install, {"reader": "triton"})
    assert wanted((keys, reader), {"KEYS": "bf16", "READER": "triton"}) == {"keys": "bf16", "reader": "triton"}
    with pytest.raises(FeatureError, match="expected reader: triton with it"):
        wanted((keys, reader), {"KEYS": "bf16", "READER": "off"})


def run_detokenizer_process(answers: SimpleQueue[dict[str, object]]) -> None:
    answers.put(install_wanted({"LLMFLEET_QUEUE_BOUND": "on"}))


def test_a_process_that_no_feature_changes_is_left_alone() -> None:
    """SGLang is not installed here: looking for anything to hook would raise."""
    context = multiprocessing.get_context("spawn")
    answers: SimpleQueue[dict[str, object]] = context.SimpleQueue()
    process = context.Process(target=run_detokenizer_process, args=(answers,))
    process.start()
    process.join()
    assert (process.exitcode, answers.get()) == (0, {})
