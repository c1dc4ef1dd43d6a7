# SPDX-License-Identifier: Apache-2.0
"""Makes the kernels package and the modules of the lifecycle program importable."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

sys.path[:0] = [str(ROOT / "files" / "kernels"), str(ROOT / "files" / "lifecycle")]
# Appended, as for the unit tests: a module of the collection that is installed beside the program.
sys.path.append(str(ROOT / "plugins" / "module_utils"))
