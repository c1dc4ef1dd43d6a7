# SPDX-License-Identifier: Apache-2.0
"""What ansible-test runs to get pip into a new environment, in place of the script it would download.

That script comes from a host that is no package registry. Python brings a pip of its own; that one installs the version
that ansible-test asks for.
"""

from __future__ import annotations

import os
import subprocess
import sys

arguments = [word for word in sys.argv[1:] if word not in {"--no-setuptools", "--no-wheel"}]
environment = {key: value for key, value in os.environ.items() if key != "GET_PIP"}
bring = [sys.executable, "-m", "ensurepip", "--default-pip"]
subprocess.run(bring, env=environment, stdout=subprocess.DEVNULL, check=True)
install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", *arguments]
sys.exit(subprocess.run(install, env=environment, check=False).returncode)
