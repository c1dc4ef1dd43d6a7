# Copyright (c) 2026, llmfleet developers
# Apache License 2.0, or GNU General Public License v3.0+ (https://www.gnu.org/licenses/gpl-3.0.txt), at your choice
# SPDX-License-Identifier: Apache-2.0 OR GPL-3.0-or-later
"""The option of every module that looks at systemd units."""

from __future__ import annotations


class ModuleDocFragment:
    """The fragment ``llmfleet.sglang.units``."""

    DOCUMENTATION = r"""
options:
  units:
    description: Unit names with their suffix.
    type: list
    elements: str
    required: true
"""
