# SPDX-License-Identifier: Apache-2.0
"""Common to all tests: one Hypothesis profile, the same on every machine and in every run."""

from __future__ import annotations

from hypothesis import settings

# Derandomised, so that a red run can be run again; no deadline, because tests share the machine with builds.
settings.register_profile("llmfleet", derandomize=True, deadline=None, database=None)
settings.load_profile("llmfleet")
