# SPDX-License-Identifier: Apache-2.0
"""Look at the plugin without starting a server.

    python -m llmfleet_plugin check     before a start: would SGLang load the plugin, is what is asked for known?
    python -m llmfleet_plugin hooks     after a build: does every hook of every feature fit the installed engine?

``check`` reads the environment of the unit and imports no engine (0.1 s); ``hooks`` imports it. Exit status 0, or
EX_CONFIG with what was found, what was expected and what to do.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

from llmfleet_plugin import EX_CONFIG, load
from llmfleet_plugin._feature import FeatureError, check_version, wanted
from llmfleet_plugin._features import FEATURES
from llmfleet_plugin._hooks import check_targets
from llmfleet_plugin._install import SCHEDULER, SCHEDULER_INIT

GROUP, NAME = "sglang.srt.plugins", "llmfleet"


def check() -> str:
    asked = wanted(FEATURES, os.environ)
    if not asked:
        return "no feature is asked for"
    check_version(_engine_version())
    found = [point.value for point in entry_points(group=GROUP) if point.name == NAME]
    if found != [f"{load.__module__}:{load.__name__}"]:
        raise FeatureError(
            f"the entry point {NAME} of {GROUP} is {', '.join(found) or 'missing'}; "
            f"expected {load.__module__}:{load.__name__} once; rebuild the release"
        )
    # SGLang skips every plugin that this variable does not name.
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and NAME not in [name.strip() for name in allowed.split(",")]:
        raise FeatureError(f"SGLANG_PLUGINS is {allowed!r}, which leaves {NAME} out; add {NAME} to it or unset it")
    return f"asked for: {', '.join(f'{name}={value}' for name, value in asked.items())}"


def hooks() -> str:
    installed = _engine_version()
    check_version(installed)
    for feature in FEATURES:
        check_targets(feature.hooks[installed])
    check_targets({SCHEDULER: SCHEDULER_INIT[installed]})
    return f"the hooks of {', '.join(feature.name for feature in FEATURES)} fit SGLang {installed}"


def _engine_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError as error:
        raise FeatureError("SGLang is not installed beside the plugin; rebuild the release") from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m llmfleet_plugin", description="Look at the plugin.")
    parser.add_argument("what", choices=("check", "hooks"))
    what = parser.parse_args().what
    try:
        print(f"llmfleet plugin: {check() if what == 'check' else hooks()}")
    except FeatureError as error:
        print(f"llmfleet plugin: {error}", file=sys.stderr)
        return EX_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
