# SPDX-License-Identifier: Apache-2.0
"""The program is a folder that is run; its modules are found as they are when it runs."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Appended: a module of the collection that is installed beside them.
sys.path.insert(0, str(ROOT / "files" / "lifecycle"))
sys.path.append(str(ROOT / "plugins" / "module_utils"))
