# SPDX-License-Identifier: Apache-2.0
"""Build, boot, break and remove the hosts that the project is tested on. Run it as ``python -m testbed``."""
