# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what cannot exist without the hardware; each says what it stands for and how it fails like it."""
