# SPDX-License-Identifier: Apache-2.0
"""A release is complete or not there at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.llmfleet.sglang.plugins.module_utils import _overlay, _release
from ansible_collections.llmfleet.sglang.plugins.module_utils._release import (
    BuildError,
    BusyError,
    Check,
    Prune,
    Release,
    build,
    is_complete,
    prune,
)
from hypothesis import given
from hypothesis import strategies as st

PINNED = ["six==1.16.0 --hash=sha256:8abb2f1d86890a2dfb989f9a77cfcfd3e47c2a354b01111771326f8aa26e0254"]


def release(root: Path, **changes: object) -> Release:
    values: dict[str, object] = {"root": str(root), "id": "abc", "requirements": PINNED, "python": sys.executable}
    return Release(**(values | changes))  # type: ignore[arg-type]


def test_the_steps_pin_digests_and_resolve_nothing(tmp_path: Path) -> None:
    for wanted in (release(tmp_path), release(tmp_path, installer=["uv==1 --hash=sha256:00"], wheelhouse="/w")):
        installs = [command for name, command in _release.steps(wanted) if name != "create the virtual environment"]
        for command in installs:
            assert {"--no-deps", "--require-hashes"} <= set(command)
    assert "--no-index" in installs[0]
    assert installs[1][0].endswith("/uv/bin/uv")


def test_an_index_is_named_only_when_asked_for(tmp_path: Path) -> None:
    flat = [
        word for _name, command in _release.steps(release(tmp_path, index_url="http://i/simple")) for word in command
    ]
    assert "--index-url=http://i/simple" in flat
    assert not [
        word
        for _n, command in _release.steps(release(tmp_path))
        for word in command
        if word.startswith(("--index", "--no-index"))
    ]


def test_a_build_that_succeeds_writes_its_manifest_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _release, "steps", lambda wanted: [("look", ["test", "!", "-e", f"{wanted.path}/manifest.json"])]
    )
    wanted = release(tmp_path, sources={"plugin/a.py": "1"})
    build(wanted)
    manifest = json.loads((tmp_path / "abc/manifest.json").read_text())
    assert manifest == {
        "id": "abc",
        "python": sys.executable,
        "requirements": PINNED,
        "files": {"src/plugin/a.py": "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"},
        "checks": [],
    }
    assert (tmp_path / "abc/src/plugin/a.py").read_text() == "1"
    assert is_complete(wanted.path)
    assert not Path(wanted.log).exists()


def test_own_packages_are_installed_without_any_index(tmp_path: Path) -> None:
    wanted = release(tmp_path, installer=["uv==1 --hash=sha256:00"], packages=["kernels", "plugin"])
    name, command = _release.steps(wanted)[-1]
    assert name == "install our own packages"
    assert {"--offline", "--no-index", "--no-deps"} <= set(command)
    assert command[-2:] == [f"{tmp_path}/abc/src/kernels", f"{tmp_path}/abc/src/plugin"]


ORIGINAL = "one\ntwo\nthree\n"
PATCHED = "one\n2\nthree\n"
PATCH = "--- a/lib.cuh\n+++ b/lib.cuh\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def patched_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str) -> Release:
    """A release whose wheels install one file, and whose sources hold a patch of it."""
    site = tmp_path / "abc/venv/lib/python3.11/site-packages"
    script = f"mkdir -p {site} && printf %s '{installed}' > {site}/lib.cuh"
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("install", ["sh", "-c", script])])
    entry = {"file": "lib.cuh", "patch": "lib.patch", "before": sha256(ORIGINAL), "after": sha256(PATCHED)}
    sources = {"engine/manifest.json": json.dumps({"patches": [entry]}), "engine/lib.patch": PATCH}
    return release(tmp_path, sources=sources, patches="engine")


def test_patches_are_applied_and_their_files_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = patched_release(tmp_path, monkeypatch, ORIGINAL)
    build(wanted)
    assert (tmp_path / "abc/venv/lib/python3.11/site-packages/lib.cuh").read_text() == PATCHED
    noted = json.loads((tmp_path / "abc/manifest.json").read_text())["files"]
    assert noted["venv/lib/python3.11/site-packages/lib.cuh"] == sha256(PATCHED)
    assert _release.changed_files(wanted.path) == []


def test_a_changed_upstream_file_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = patched_release(tmp_path, monkeypatch, "one\ntwo!\nthree\n")
    with pytest.raises(BuildError, match=r"patch lib\.cuh failed") as caught:
        build(wanted)
    assert sha256(ORIGINAL) in caught.value.tail
    assert not Path(wanted.path).exists()


def test_a_release_that_was_tampered_with_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = patched_release(tmp_path, monkeypatch, ORIGINAL)
    build(wanted)
    (tmp_path / "abc/venv/lib/python3.11/site-packages/lib.cuh").write_text(ORIGINAL)
    (tmp_path / "abc/src/engine/lib.patch").unlink()
    assert _release.changed_files(wanted.path) == [
        "src/engine/lib.patch",
        "venv/lib/python3.11/site-packages/lib.cuh",
    ]


def test_a_check_that_fails_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("nothing", ["true"])])
    looked = Check("look", ["sh", "-c", 'test "$HOUSE" = {release}/x'], {"HOUSE": "{release}/x"})
    build(release(tmp_path, checks=[looked]))
    assert json.loads((tmp_path / "abc/manifest.json").read_text())["checks"] == ["look"]
    broken = release(tmp_path, id="def", checks=[looked, Check("fail", ["sh", "-c", "echo wrong number; exit 1"])])
    with pytest.raises(BuildError, match="fail failed") as caught:
        build(broken)
    assert caught.value.tail.splitlines()[-2:] == ["wrong number", "exit status 1"]
    assert not Path(broken.path).exists()


def test_the_wheels_toolkit_can_be_linked_against(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib = tmp_path / "abc/venv/lib/python3.11/site-packages/nvidia/cu13/lib"
    made = f"mkdir -p {lib} && touch {lib}/libcudart.so.13 {lib}/libnvrtc.so.13 {lib}/libnvrtc.so"
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("install", ["sh", "-c", made])])
    build(release(tmp_path))
    cuda = tmp_path / "abc/cuda"
    assert (cuda / "lib64/libcudart.so").resolve() == lib / "libcudart.so.13"
    assert not (cuda / "lib/libnvrtc.so").is_symlink()
    assert os.readlink(cuda / "lib/stubs/libcuda.so") == _release.DRIVER_LIBRARY


def test_two_builds_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("nothing", ["true"])])
    with _release._only_builder(str(tmp_path)), pytest.raises(BusyError, match="another run is building"):
        build(release(tmp_path))
    build(release(tmp_path))


@given(memory=st.integers(0, 2**45), cpus=st.integers(1, 1024))
def test_compilers_never_take_more_memory_than_there_is(memory: int, cpus: int) -> None:
    jobs = _release.jobs(memory, cpus)
    assert 1 <= jobs <= cpus
    assert jobs == 1 or jobs * _release.BYTES_A_JOB <= memory


PATHS = st.sampled_from(["/r/a", "/r/b", "/r/c", "/r/d", "/r/e"])


@given(
    found=st.dictionaries(PATHS, st.floats(0, 1e9), max_size=5),
    named=st.sets(PATHS, max_size=5),
    keep=st.integers(0, 6),
)
def test_what_is_named_stays_and_so_do_the_newest(found: dict[str, float], named: set[str], keep: int) -> None:
    removed = _release.unused(found, named, keep)
    assert not set(removed) & named
    idle = set(found) - named
    assert len(idle - set(removed)) == min(keep, len(idle))
    assert all(found[gone] <= found[stays] for gone in removed for stays in idle - set(removed))


def old_release(root: Path, name: str, age: int) -> None:
    (root / name).mkdir()
    (root / name / "manifest.json").write_text("{}")
    os.utime(root / name / "manifest.json", (1000 - age, 1000 - age))


def test_prune_keeps_what_is_used_and_the_newest(tmp_path: Path) -> None:
    root, units, proc, caches = (tmp_path / name for name in ("releases", "units", "proc", "caches"))
    for folder in (root, units, proc / "42/fd", proc / "self", caches / "d"):
        folder.mkdir(parents=True)
    for age, name in enumerate("abcdef"):
        old_release(root, name, age)
    (root / "rest-of-a-build").mkdir()
    (units / "x.service").write_text(f"ExecStart={root}/e/venv/bin/python\n")
    (units / "readme.txt").write_text(f"{root}/d/venv\n")
    (proc / "42/maps").write_text(f"7f00-7f01 r--p 0 0:0 1 {root}/f/venv/lib/x.so\n")
    (proc / "42/exe").symlink_to("/usr/bin/python3")
    wanted = Prune(str(root), 1, ["a"], [str(units)], str(caches), str(proc))
    expected = [str(root / name) for name in ("c", "d", "rest-of-a-build")]
    assert prune(wanted, dry=True)[0] == expected
    assert (root / "c/manifest.json").exists()
    removed, used = prune(wanted, dry=False)
    assert removed == expected
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["a", "b", "e", "f"]
    assert not (caches / "d").exists()
    assert used == {
        str(root / "a"): "protected",
        str(root / "e"): str(units / "x.service"),
        str(root / "f"): "process 42",
    }
    assert prune(wanted, dry=False)[0] == []


def test_prune_keeps_a_folder_that_a_unit_runs_itself(tmp_path: Path) -> None:
    root, units = tmp_path / "programs", tmp_path / "units"
    for folder in (root / "aaa", root / "aaab", units, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    (units / "x.service").write_text(f"ExecStartPre=+/usr/bin/python3 -I \\\n    {root}/aaab \\\n    ready\n")
    wanted = Prune(str(root), 0, references=[str(units)], proc=str(tmp_path / "proc"))
    assert prune(wanted, dry=False) == ([str(root / "aaa")], {str(root / "aaab"): str(units / "x.service")})


def test_prune_removes_overlays_that_nothing_uses_and_no_checkpoint(tmp_path: Path) -> None:
    root, units, proc, model = (tmp_path / name for name in ("overlays", "units", "proc", "model"))
    for folder in (root, units, proc / "42/fd", model):
        folder.mkdir(parents=True)
    for name in ("0a", "0ab", "0c", "0d", "0e", "0f"):
        _overlay.write(str(root / name), {"config.json": f"-> {model}/config.json", "generation_config.json": "{}"})
    (model / "config.json").write_text("{}")
    (units / "x.service").write_text(f"ExecStart=python \\\n    --model-path \\\n    {root}/0a \\\n    --host\n")
    (units / "x.env").write_text(f'MODEL="{root}/0e"\n')
    (proc / "42/maps").write_text(f"7f00-7f01 r--p 0 0:0 1 {model}/model.safetensors\n")
    (proc / "42/cmdline").write_text(f"python\0--model-path\0{root}/0c\0")
    (proc / "42/exe").symlink_to("/usr/bin/python3")
    (proc / "42/cwd").symlink_to("/")
    wanted = Prune(str(root), 0, ["0f"], [str(units)], proc=str(proc))
    expected = [str(root / name) for name in ("0ab", "0d")]
    assert prune(wanted, dry=True)[0] == expected
    assert prune(wanted, dry=False)[0] == expected
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["0a", "0c", "0e", "0f"]
    assert (model / "config.json").read_text() == "{}"
    assert prune(wanted, dry=False)[0] == []


@given(
    end=st.text(alphabet=st.sampled_from("abz09_-.")),
    more=st.sampled_from(["", "/", "/venv/bin", '"', "'", "\n", " \\"]),
)
def test_a_folder_is_named_by_its_whole_name(end: str, more: str) -> None:
    assert _release._names(f"--model-path=/opt/overlays/0a{end}{more}", "/opt/overlays/0a") == (end == "")


def test_prune_of_nothing(tmp_path: Path) -> None:
    assert prune(Prune(str(tmp_path / "none"), 1), dry=False) == ([], {})


def test_a_build_that_fails_leaves_only_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("break", ["sh", "-c", "echo no room; exit 3"])])
    wanted = release(tmp_path)
    with pytest.raises(BuildError, match="break failed") as caught:
        build(wanted)
    assert caught.value.tail.splitlines()[-2:] == ["no room", "exit status 3"]
    assert not Path(wanted.path).exists()
    assert "no room" in Path(wanted.log).read_text()


def test_a_full_disk_is_told_and_leaves_only_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_release: Release) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    usage = shutil.disk_usage(tmp_path)._replace(free=3 * 1024**2 + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    monkeypatch.setattr(_release, "_write_sources", full)
    wanted = release(tmp_path)
    with pytest.raises(
        BuildError, match=r"write the release failed; .*abc\.build\.log, whose disk had 3 MiB left"
    ) as caught:
        build(wanted)
    assert "No space left on device" in caught.value.tail
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "abc.build.log"]


def test_everything_is_on_the_disk_before_the_manifest_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[list[str], bool]] = []

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        done.append((command, (tmp_path / "abc/manifest.json").exists()))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("install", ["install"])])
    build(release(tmp_path, checks=[Check("check", ["check"])]))
    assert done == [
        (["install"], False),
        (["check"], False),
        (["sync", "--file-system", str(tmp_path / "abc")], False),
    ]
    assert is_complete(str(tmp_path / "abc"))


def test_a_program_that_is_missing_is_a_failed_step(tmp_path: Path) -> None:
    wanted = release(tmp_path, python="/nowhere/python3")
    with pytest.raises(BuildError) as caught:
        build(wanted)
    assert "No such file" in caught.value.tail


def test_the_rest_of_an_interrupted_build_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_release, "steps", lambda _wanted: [("nothing", ["true"])])
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc/half").write_text("")
    assert not is_complete(str(tmp_path / "abc"))
    build(release(tmp_path))
    assert not (tmp_path / "abc/half").exists()
