# SPDX-License-Identifier: Apache-2.0
"""Run ``ansible-test sanity`` on what the collection ships: every test that can run, no ignore file.

ansible-test wants a git tree named ``ansible_collections/llmfleet/sglang`` and environments of its own; both lie in the
cache, under ``sanity/``. It passes nothing of this process's environment to pip but HOME, so its HOME is there too and
holds this machine's pip configuration. Arguments are handed on: ``python -m tools.sanity --test pep8``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import ROOT, cache_dir
from tools.collection import build

#: Tests that cannot run, with the reason. Everything else runs.
LEFT_OUT = {"pslint": "checks PowerShell, of which there is none, and needs pwsh"}


def pinned_pip() -> str:
    """Version of pip that the installed ansible-test wants, which is in the name of the script it looks for."""
    code = (
        "import sys; from ansible_test._internal.python_requirements import get_venv_packages\n"
        "from ansible_test._internal.host_configs import NativePythonConfig as Python\n"
        "print(get_venv_packages(Python(version='%d.%d' % sys.version_info[:2], path=sys.executable))['pip'])"
    )
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def prepare_home(home: Path) -> None:
    """What ansible-test and its pip look for in HOME."""
    script = home / ".ansible/test/cache" / f"get_pip_{pinned_pip().replace('.', '_')}.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "tools/get_pip.py", script)
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        name, _equals, value = line.partition("=")
        # Files come first and the environment last, as pip ranks them. Constraints are for the user's own installs.
        if (key := name.rsplit(".", 1)[-1]) != "constraint":
            settings[key] = value.strip("'").replace("\\n", " ")
    config = home / ".config/pip/pip.conf"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(settings.items())))


def main() -> int:
    """Entry point of ``python -m tools.sanity``."""
    home = cache_dir() / "sanity"
    prepare_home(home)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    # The environments are cached under HOME; the tree is new each time, so that nothing stale is checked.
    with tempfile.TemporaryDirectory(dir=home, prefix="tree-") as folder:
        tree = Path(folder) / "ansible_collections/llmfleet/sglang"
        tree.mkdir(parents=True)
        subprocess.run(["tar", "--extract", "--file", build(Path(folder))], cwd=tree, check=True)
        for command in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=tree, check=True)
        # ansible-test works inside the tree it checks, and would check what it puts there.
        (tree / ".git/info/exclude").write_text("/tests/output/\n")
        command = ["ansible-test", "sanity", "--color", "no", "--python", version]
        command += [word for test in LEFT_OUT for word in ("--skip-test", test)]
        env = {**os.environ, "HOME": str(home)}
        for name in ("ANSIBLE_HOME", "ANSIBLE_CONFIG", "ANSIBLE_COLLECTIONS_PATH", "PYTHONPYCACHEPREFIX"):
            env.pop(name, None)
        return subprocess.run([*command, *sys.argv[1:]], cwd=tree, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
