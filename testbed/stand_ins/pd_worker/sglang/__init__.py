# SPDX-License-Identifier: Apache-2.0
"""STAND-IN for the package sglang where rollouts are tested, many starts in few minutes: see launch_server.py."""
