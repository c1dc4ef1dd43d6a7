# SPDX-License-Identifier: Apache-2.0
"""Programs that run on a host find each other as they do there."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]

sys.path[:0] = [str(TESTS / folder) for folder in ("on_host", "load")]
