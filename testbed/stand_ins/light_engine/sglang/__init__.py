# SPDX-License-Identifier: Apache-2.0
"""STAND-IN for the package sglang on virtual machines, where the real engine is too slow: see launch_server.py."""
