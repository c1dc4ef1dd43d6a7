# SPDX-License-Identifier: Apache-2.0
"""The exporter as a process, against the compiled NVML stand-in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.unit.gpu_exporter.harness import SOURCE, Exporter, Metrics, build_stand_in

UUID = "GPU-5eed0000-0000-4000-8000-00000000000{}"
PLAN = {
    "instances": [
        {"name": "prefill-0", "gpus": [0, 1, 2, 3]},
        {"name": "decode-0", "gpus": [4, 5, 6, 7]},
        {"name": "router-0", "gpus": []},
    ]
}


def healthy(metrics: Metrics) -> bool:
    return metrics.down_reason == "" and metrics.get("llmfleet_gpus_visible") == 8


def test_every_field_in_base_units(exporter: Exporter) -> None:
    exporter.start()
    metrics = exporter.until(healthy)
    expected = {
        ("llmfleet_gpu_up", ""): 1,
        ("llmfleet_gpu_utilization_ratio", ""): 0.85,
        ("llmfleet_gpu_memory_utilization_ratio", ""): 0.45,
        ("llmfleet_gpu_memory_total_bytes", ""): 150754820096,
        ("llmfleet_gpu_memory_used_bytes", ""): 105 * 2**30,
        ("llmfleet_gpu_memory_reserved_bytes", ""): 629145600,
        ("llmfleet_gpu_temperature_celsius", ""): 60,
        ("llmfleet_gpu_power_watts", ""): 505,
        ("llmfleet_gpu_power_limit_watts", ""): 700,
        ("llmfleet_gpu_energy_joules_total", ""): 123461,
        ("llmfleet_gpu_clock_hertz", "clock=sm"): 1.83e9,
        ("llmfleet_gpu_clock_hertz", "clock=memory"): 3.201e9,
        ("llmfleet_gpu_ecc_errors_total", "type=corrected"): 5,
        ("llmfleet_gpu_ecc_errors_total", "type=uncorrected"): 0,
        ("llmfleet_gpu_pcie_link_generation", ""): 5,
        ("llmfleet_gpu_pcie_link_max_generation", ""): 5,
        ("llmfleet_gpu_pcie_link_width_lanes", ""): 16,
        ("llmfleet_gpu_pcie_link_max_width_lanes", ""): 16,
    }
    found = {
        (name, label): metrics.get(name, gpu="5", uuid=UUID.format(5), **dict([label.split("=")] if label else []))
        for name, label in expected
    }
    assert found == pytest.approx(expected)
    assert metrics.get("llmfleet_gpus_expected") is None


def test_info_joins_gpu_node_and_instance(exporter: Exporter) -> None:
    exporter.plan.write_text(json.dumps(PLAN))
    kernel = exporter.pci_devices / "0000:ed:00.0"
    kernel.mkdir(parents=True)
    (kernel / "numa_node").write_text("3\n")  # the kernel is believed before NVML's affinity, which says 1
    unknown = exporter.pci_devices / "0000:17:00.0"
    unknown.mkdir()
    (unknown / "numa_node").write_text("-1\n")
    exporter.start()
    metrics = exporter.until(healthy)
    info = {labels["gpu"]: labels for labels in metrics.all("llmfleet_gpu_info")}
    assert info["0"] == {
        "gpu": "0",
        "uuid": UUID.format(0),
        "pci_bus_id": "0000:17:00.0",
        "name": "NVIDIA H200",
        "driver": "580.95.05",
        "numa_node": "0",
        "instance_name": "prefill-0",
    }
    assert [info[str(i)]["numa_node"] for i in range(8)] == ["0", "0", "0", "0", "1", "1", "1", "3"]
    assert [info[str(i)]["instance_name"] for i in range(8)] == ["prefill-0"] * 4 + ["decode-0"] * 4
    assert metrics.get("llmfleet_gpus_expected") == 8


def test_plan_is_read_again(exporter: Exporter) -> None:
    exporter.plan.write_text("{ not json")
    exporter.start()
    assert exporter.until(healthy).get("llmfleet_gpus_expected") is None
    exporter.plan.write_text(json.dumps({"instances": [{"name": "unified-0", "gpus": [2]}]}))
    metrics = exporter.until(lambda metrics: metrics.get("llmfleet_gpus_expected") == 1)
    assert metrics.get("llmfleet_gpu_info", gpu="2", instance_name="unified-0") == 1
    assert exporter.log().count("no plan") == 1


def test_unsupported_field_is_absent_and_logged_once(exporter: Exporter) -> None:
    broken: dict[str, str | bytes | None] = {"3.power": None, "3.energy": "twelve", "3.utilization": "4294967295"}
    exporter.set_state(broken)
    exporter.start()
    exporter.until(healthy)
    exporter.set_state({**broken, "3.temperature": "77"})
    metrics = exporter.until(lambda metrics: metrics.get("llmfleet_gpu_temperature_celsius", gpu="3") == 77)
    for name in ("llmfleet_gpu_power_watts", "llmfleet_gpu_energy_joules_total", "llmfleet_gpu_utilization_ratio"):
        assert metrics.get(name, gpu="3") is None
        assert metrics.get(name, gpu="2") is not None
    assert metrics.get("llmfleet_gpu_up", gpu="3") == 1
    assert exporter.log().count("llmfleet_gpu_power_watts: not_supported") == 1
    assert exporter.log().count("llmfleet_gpu_energy_joules_total: unknown") == 1


def test_library_of_an_older_driver(bare_exporter: Exporter) -> None:
    build_stand_in(bare_exporter.library, "-DWITHOUT_MEMORY_V2", "-DWITHOUT_TEMPERATURE_V")
    bare_exporter.start()
    metrics = bare_exporter.until(healthy)
    assert metrics.get("llmfleet_gpu_memory_used_bytes", gpu="0") == 100 * 2**30 + 629145600
    assert metrics.get("llmfleet_gpu_memory_reserved_bytes", gpu="0") is None
    assert metrics.get("llmfleet_gpu_temperature_celsius", gpu="0") == 55


def test_memory_not_supported_at_all(exporter: Exporter) -> None:
    exporter.set_state({"0.memory_total": None})
    exporter.start()
    metrics = exporter.until(healthy)
    assert metrics.get("llmfleet_gpu_memory_used_bytes", gpu="0") is None
    assert metrics.get("llmfleet_gpu_memory_total_bytes", gpu="1") == 150754820096


def test_lost_gpu_is_down_and_the_others_stay(exporter: Exporter) -> None:
    exporter.plan.write_text(json.dumps(PLAN))
    exporter.start()
    exporter.until(healthy)
    exporter.set_state({"2.lost": "1"})
    metrics = exporter.until(lambda metrics: metrics.get("llmfleet_gpu_up", gpu="2") == 0)
    assert metrics.get("llmfleet_gpu_up", gpu="2", uuid=UUID.format(2)) == 0
    assert metrics.get("llmfleet_gpu_info", gpu="2", uuid=UUID.format(2), instance_name="prefill-0") == 1
    assert metrics.get("llmfleet_gpu_temperature_celsius", gpu="2") is None
    assert metrics.get("llmfleet_gpu_temperature_celsius", gpu="3") == 58
    assert metrics.get("llmfleet_gpus_visible") == 7
    assert metrics.get("llmfleet_gpus_expected") == 8
    assert metrics.down_reason == ""
    exporter.set_state({})
    assert exporter.until(healthy).get("llmfleet_gpu_temperature_celsius", gpu="2") == 57


def test_gpu_lost_in_the_middle_of_its_reading(exporter: Exporter) -> None:
    exporter.set_state({"4.error.nvmlDeviceGetPowerUsage": "gpu_is_lost"})
    exporter.start()
    metrics = exporter.until(lambda metrics: metrics.get("llmfleet_gpus_visible") == 7)
    assert metrics.get("llmfleet_gpu_up", gpu="4", uuid=UUID.format(4)) == 0
    assert metrics.get("llmfleet_gpu_temperature_celsius", gpu="4") is None


def test_gpus_that_never_answered(exporter: Exporter) -> None:
    """One that is lost from the start, and one of the plan that NVML does not count."""
    exporter.plan.write_text(json.dumps(PLAN))
    exporter.set_state({"count": "7", "1.lost": "1"})
    exporter.start()
    metrics = exporter.until(lambda metrics: metrics.get("llmfleet_gpus_visible") == 6)
    assert metrics.get("llmfleet_gpu_up", gpu="1", uuid="") == 0
    assert metrics.get("llmfleet_gpu_up", gpu="7", uuid="") == 0
    assert len(metrics.all("llmfleet_gpu_up")) == 8


def test_index_stays_when_nvml_counts_anew(exporter: Exporter) -> None:
    """Without GPU 0, NVML gives its index to the next: labels and instances stay with the UUID."""
    exporter.plan.write_text(json.dumps(PLAN))
    exporter.start()
    exporter.until(healthy)
    shifted: dict[str, str | bytes | None] = {"count": "1", "0.uuid": UUID.format(4), "0.temperature": "44"}
    exporter.set_state(shifted)
    metrics = exporter.until(lambda metrics: metrics.get("llmfleet_gpus_visible") == 1)
    assert metrics.get("llmfleet_gpu_up", gpu="4", uuid=UUID.format(4)) == 1
    assert metrics.get("llmfleet_gpu_info", gpu="4", instance_name="decode-0") == 1
    assert metrics.get("llmfleet_gpu_temperature_celsius", gpu="4") == 44
    assert metrics.get("llmfleet_gpu_up", gpu="0", uuid=UUID.format(0)) == 0


def test_missing_library_then_installed(bare_exporter: Exporter) -> None:
    bare_exporter.plan.write_text(json.dumps(PLAN))
    bare_exporter.start()
    metrics = bare_exporter.until(lambda metrics: metrics.down_reason == "library_not_found")
    assert metrics.get("llmfleet_gpus_visible") == 0
    assert [metrics.get("llmfleet_gpu_up", gpu=str(i)) for i in range(8)] == [0.0] * 8
    build_stand_in(bare_exporter.library)
    bare_exporter.until(healthy)


def test_mismatch_after_driver_upgrade_then_recovery(exporter: Exporter) -> None:
    exporter.start()
    exporter.until(healthy)
    exporter.set_state({"error.nvmlDeviceGetCount_v2": "driver_not_loaded", "init": "lib_mismatch"})
    metrics = exporter.until(lambda metrics: metrics.down_reason == "lib_rm_version_mismatch")
    assert metrics.get("llmfleet_gpu_up", gpu="6", uuid=UUID.format(6)) == 0
    assert metrics.all("llmfleet_gpu_temperature_celsius") == []
    exporter.set_state({"driver": "590.10.01"})
    metrics = exporter.until(healthy)
    assert metrics.get("llmfleet_gpu_info", gpu="6", driver="590.10.01") == 1


def test_replaced_library_is_loaded_anew(bare_exporter: Exporter) -> None:
    """The old file would answer a mismatch for ever; the one installed over it answers."""
    build_stand_in(bare_exporter.library, "-DWITHOUT_MEMORY_V2")
    bare_exporter.start()
    assert bare_exporter.until(healthy).get("llmfleet_gpu_memory_reserved_bytes", gpu="0") is None
    bare_exporter.set_state({"error.nvmlDeviceGetCount_v2": "lib_mismatch", "init": "lib_mismatch"})
    bare_exporter.until(lambda metrics: metrics.down_reason == "lib_rm_version_mismatch")
    build_stand_in(bare_exporter.library)
    bare_exporter.set_state({})
    assert bare_exporter.until(healthy).get("llmfleet_gpu_memory_reserved_bytes", gpu="0") == 629145600


def test_hung_call_is_reported_and_ends(exporter: Exporter) -> None:
    exporter.start(interval="1", fresh_intervals="3")
    exporter.until(healthy)
    exporter.set_state({"5.hang": "nvmlDeviceGetPowerUsage"})
    metrics = exporter.until(lambda metrics: metrics.get("llmfleet_nvml_collector_stuck") == 1)
    assert metrics.down_reason == "collector_stuck"
    assert (metrics.get("llmfleet_nvml_snapshot_age_seconds") or 0) > 3
    assert metrics.all("llmfleet_gpu_temperature_celsius") == []
    assert metrics.get("llmfleet_gpu_up", gpu="0") == 0
    exporter.set_state({})
    assert exporter.until(healthy).get("llmfleet_nvml_collector_stuck") == 0


def test_hung_initialisation_does_not_stop_metrics(exporter: Exporter) -> None:
    exporter.set_state({"hang": "nvmlInitWithFlags"})
    exporter.start(fresh_intervals="2")
    exporter.until(lambda metrics: metrics.down_reason == "collector_stuck")
    assert exporter.end() == 0


@pytest.mark.parametrize("field", ["name", "uuid"])
def test_text_that_is_not_utf8(exporter: Exporter, field: str) -> None:
    exporter.set_state({f"1.{field}": b'H\xff200 "\\x\x01', "driver": b"58\xfe"})
    exporter.start()
    metrics = exporter.until(healthy)
    assert metrics.get("llmfleet_gpu_info", gpu="1", driver="58\ufffd", **{field: 'H\ufffd200 "\\x\ufffd'}) == 1


def test_sigterm_ends_cleanly(exporter: Exporter) -> None:
    exporter.start()
    exporter.until(healthy)
    assert exporter.end() == 0
    assert "Traceback" not in exporter.log()


def test_listens_on_ipv6(exporter: Exporter) -> None:
    exporter.start(listen="[::1]:0")
    assert exporter.address.startswith("[::1]:")
    exporter.until(healthy)


def test_port_in_use_is_said(exporter: Exporter) -> None:
    exporter.start()
    port = exporter.address.rpartition(":")[2]
    second = subprocess.run(
        [sys.executable, "-m", "llmfleet_gpu_exporter", "--listen", f"127.0.0.1:{port}"],
        env={"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: " in second.stderr
    assert "Traceback" not in second.stderr
