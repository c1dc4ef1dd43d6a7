# SPDX-License-Identifier: Apache-2.0
"""Arguments that are refused, and what `up` asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed import cli, commands, shell
from testbed.host import Host
from testbed.layout import Layout
from testbed.shell import TestbedError


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.setenv("LLMFLEET_TESTBED_DIR", str(tmp_path / "testbed"))
    monkeypatch.setenv("LLMFLEET_CACHE", str(tmp_path))
    return Layout.from_environment()


def wanted(layout: Layout, *argv: str) -> Host:
    return cli.wanted_host(layout, cli.parser().parse_args(["up", *argv]))


def test_defaults_of_an_nspawn_host(layout: Layout) -> None:
    one = wanted(layout, "gpu1", "--index", "11")
    assert (one.backend, one.index, one.disk_gb, one.memory_mb, one.gpus_per_node) == ("nspawn", 11, 32, 0, 0)


def test_defaults_of_a_virtual_machine(layout: Layout) -> None:
    one = wanted(layout, "numa1", "--backend", "vm", "--index", "31", "--forward", "9091:9090")
    assert (one.backend, one.memory_mb, one.gpus_per_node, one.forwards) == ("vm", 1536, 2, ["9091:9090"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--memory", "2048"], "--memory is for virtual machines"),
        (["--gpus-per-node", "1"], "--gpus-per-node is for virtual machines"),
        (["--forward", "1:2"], "--forward is for virtual machines"),
        (["--disk", "0"], "--disk 0: expected at least 1"),
        (["--backend", "tcg", "--host-network"], "--host-network is for nspawn"),
        (["--backend", "tcg", "--memory", "100"], "--memory 100: expected at least 512"),
        (["--backend", "tcg", "--gpus-per-node", "9"], "--gpus-per-node 9: expected 0 to 8"),
        (["--backend", "tcg", "--forward", "80"], "--forward 80: expected HOST:GUEST"),
        (["--backend", "tcg", "--forward", "80:70000"], "--forward 80:70000: expected HOST:GUEST"),
    ],
)
def test_options_that_do_not_fit_are_refused(layout: Layout, argv: list[str], message: str) -> None:
    with pytest.raises(TestbedError, match=message):
        wanted(layout, "gpu1", "--index", "11", *argv)


def test_an_index_is_found_when_none_is_given(layout: Layout) -> None:
    assert wanted(layout, "gpu1").index == 100
    Host(name="gpu1", backend="nspawn", index=100, image="").save(layout)
    assert wanted(layout, "gpu1").index == 100
    assert wanted(layout, "gpu2").index == 101


def test_settings_of_an_existing_host_cannot_change(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "require_root", lambda: None)
    Host(name="gpu1", backend="nspawn", index=11, image="").save(layout)
    with pytest.raises(TestbedError, match=r"gpu1 exists with other settings .*index is 11, wanted 12"):
        commands.up(layout, wanted(layout, "gpu1", "--index", "12"))


def test_a_fault_of_another_backend_is_refused(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "require_root", lambda: None)
    Host(name="gpu1", backend="nspawn", index=11, image="").save(layout)
    Host(name="numa1", backend="tcg", index=31, image="", gpus_per_node=1).save(layout)
    with pytest.raises(TestbedError, match=r"gpu1 .nspawn. has no fault 'gpu-lost'; it has: network, hang"):
        commands.break_(layout, "gpu1", "gpu-lost", "00")
    with pytest.raises(TestbedError, match="slot '11'; numa1 has: 00, 10"):
        commands.break_(layout, "numa1", "gpu-lost", "11")
    with pytest.raises(TestbedError, match="gpu1 is not running"):
        commands.break_(layout, "gpu1", "hang")


def test_without_root_the_tool_says_so(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert cli.main(["up", "gpu1", "--index", "11"]) == 1
    assert "needs root" in capsys.readouterr().err
    assert not layout.hosts.exists()


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: None if name == "qemu-img" else f"/bin/{name}")
    with pytest.raises(TestbedError, match=r"missing programs: qemu-img; .*apt-get install qemu-utils"):
        shell.require_programs("ssh", "qemu-img")


@pytest.mark.parametrize("argv", [["down"], ["down", "gpu1", "--all"]])
def test_down_takes_one_host_or_all(layout: Layout, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    del layout
    assert cli.main(argv) == 1
    assert "either a host's name or --all" in capsys.readouterr().err


def test_list_as_json(layout: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    Host(name="gpu1", backend="nspawn", index=11, image="abc").save(layout)
    assert cli.main(["list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(h["name"], h["address"], h["running"]) for h in shown["hosts"]] == [("gpu1", "10.88.0.11", False)]


def test_a_wait_that_fails_shows_why() -> None:
    with pytest.raises(TestbedError, match="the host answers: not so after 0 s\nlast line"):
        shell.wait_until(lambda: False, "the host answers", seconds=0, interval=0.01, explain=lambda: "last line")
