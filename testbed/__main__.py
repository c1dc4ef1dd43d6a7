# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``python -m testbed``."""

from __future__ import annotations

import sys

from testbed.cli import main

sys.exit(main())
