# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""What every module that only reads says of itself."""

from __future__ import annotations


class ModuleDocFragment:
    """The fragment ``llmfleet.sglang.reads_only``."""

    DOCUMENTATION = r"""
attributes:
  check_mode:
    support: full
    description: Reads only.
  diff_mode:
    support: none
    description: Reads only.
"""
