# SPDX-License-Identifier: Apache-2.0
"""bf16 index keys without an engine: what is refused, what is counted, what peers and HiCache are told."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmfleet_plugin import index_keys, index_queries, indexer_logits
from llmfleet_plugin._feature import VERSIONS, FeatureError, wanted

ENGINE = Path(__file__).parents[3] / "files" / "engine"
FEATURES = (indexer_logits.FEATURE, index_keys.FEATURE)


class Pages:
    """Of a tensor [pages, bytes] what the hooks use: shape, stride, a cut of each page, and a view by strides."""

    def __init__(self, pages: int, width: int, stride: int) -> None:
        self.shape = (pages, width)
        self._stride = stride

    def stride(self, dimension: int) -> int:
        return (self._stride, 1)[dimension]

    def __getitem__(self, key: tuple[slice, slice]) -> Pages:
        assert key[0] == slice(None), "whole columns are cut"
        return Pages(self.shape[0], len(range(self.shape[1])[key[1]]), self._stride)

    def as_strided(self, shape: tuple[int, int], strides: tuple[int, int]) -> Pages:
        assert strides == (self._stride, 1), "pages stay where they are"
        return Pages(shape[0], shape[1], strides[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_digest_is_that_of_the_patched_source_of_the_release(version: str) -> None:
    (patch,) = json.loads((ENGINE / version / "manifest.json").read_text())["patches"]
    name, digest = index_keys.PATCHED[version]
    assert (patch["file"], patch["after"]) == (f"sglang/{name}", digest)


@pytest.mark.parametrize("content", [None, b"stock"])
def test_source_that_is_not_patched_is_refused(tmp_path: Path, content: bytes | None) -> None:
    source = tmp_path / index_keys.PATCHED["0.5.16"][0]
    found = "No such file"
    if content is not None:
        source.parent.mkdir(parents=True)
        source.write_bytes(content)
        found = hashlib.sha256(content).hexdigest()
    with pytest.raises(FeatureError, match=rf"{source.name} is not patched.*{found}.*build the release"):
        index_keys.check_patched(tmp_path, "0.5.16")


def test_patched_source_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "store.cuh"
    (tmp_path / name).write_bytes(b"patched")
    monkeypatch.setitem(index_keys.PATCHED, "0.5.16", (name, hashlib.sha256(b"patched").hexdigest()))
    index_keys.check_patched(tmp_path, "0.5.16")


def test_package_that_is_not_installed_is_refused() -> None:
    with pytest.raises(FeatureError, match=r"no_such_engine is not installed.*rebuild the release"):
        index_keys.find_package("no_such_engine")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"LLMFLEET_INDEX_KEYS": "bf16"}, "indexer_logits is off"),
        ({"LLMFLEET_INDEX_KEYS": "fp4", "LLMFLEET_INDEXER_LOGITS": "triton"}, "LLMFLEET_INDEX_KEYS is 'fp4'"),
    ],
)
def test_keys_are_refused_without_their_reader_and_in_other_formats(environment: dict[str, str], found: str) -> None:
    with pytest.raises(FeatureError, match=found):
        wanted(FEATURES, environment)


def test_keys_are_had_with_their_reader() -> None:
    environment = {"LLMFLEET_INDEX_KEYS": "bf16", "LLMFLEET_INDEXER_LOGITS": "triton"}
    assert wanted(FEATURES, environment) == {"indexer_logits": "triton", "index_keys": "bf16"}


@pytest.mark.parametrize("name", sorted(index_keys.REFUSED_FLAGS))
def test_flag_that_cannot_be_had_is_refused(name: str) -> None:
    with pytest.raises(FeatureError, match=f"--{name.replace('_', '-')} is given.*leave the flag out"):
        index_keys.refuse_flags(SimpleNamespace(**{name: "file" if name.endswith("backend") else True}))


def test_flags_that_are_off_or_unknown_to_the_version_are_taken() -> None:
    index_keys.refuse_flags(SimpleNamespace(enable_hisparse=False, hicache_storage_backend=None))


def test_a_storage_attached_later_is_refused_for_the_same_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = SimpleNamespace(AttachHiCacheStorageReqOutput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", answers)
    answer = index_keys._refuse_storage("scheduler", SimpleNamespace(hicache_storage_backend="file"))
    assert answer.success is False
    assert index_keys.REFUSED_FLAGS["hicache_storage_backend"] in answer.message
    assert "attach no storage or turn index_keys off" in answer.message


def test_a_key_takes_256_bytes_everywhere() -> None:
    assert index_keys._count_key(132, None) == 256
    assert index_keys._count_shared(132, 128, False) == 256


def test_fp4_pools_keep_their_size() -> None:
    assert index_keys._count_shared(68, 128, use_fp4_indexer=True) == 68


# The engine's figure for the model of docs/benchmarks/engine_h200.json (2 layers of ratio 4) and for V4-Flash (21).
@pytest.mark.parametrize(("layers", "fp8", "bf16"), [(2, 845.525, 907.525), (21, 7086.75, 7737.75), (0, 10.0, 10.0)])
def test_budget_counts_a_key_for_four_tokens_and_layer(layers: int, fp8: float, bf16: float) -> None:
    assert index_keys._count_budget(fp8, SimpleNamespace(num_layers_ca4=layers)) == pytest.approx(bf16)


@given(pages=st.integers(1, 100), page_bytes=st.sampled_from([64 * 132, 64 * 256]))
def test_reader_sees_a_page_of_fp8_keys_and_the_whole_page_is_found_behind_it(pages: int, page_bytes: int) -> None:
    shown: Any = index_keys._show_reader(Pages(pages, page_bytes, page_bytes), None, layer_id=2)
    assert shown.shape == (pages, 64 * 132)
    assert indexer_logits.whole_pages(shown).shape == (pages, page_bytes)


def test_index_keys_are_stored_as_bf16_in_whole_pages() -> None:
    stored: dict[str, Any] = {}
    shown = Pages(5, 64 * 132, 64 * 256)
    index_keys._store(lambda _backend, **a: stored.update(a), None, is_indexer=True, kv_cache=shown, bf16_store=False)
    assert stored["bf16_store"] is True
    assert stored["kv_cache"].shape == (5, 64 * 256)


def test_the_compressed_kv_is_stored_as_it_was() -> None:
    stored: dict[str, Any] = {}
    arguments = {"is_indexer": False, "kv_cache": "the KV", "bf16_store": False}
    index_keys._store(lambda _backend, **a: stored.update(a), None, **arguments)
    assert stored == arguments


def test_peers_of_0_5_16_are_told_in_the_kv_dtype_and_the_server_is_not_changed() -> None:
    server_args = SimpleNamespace(kv_cache_dtype="fp8_e4m3", host="127.0.0.1")
    told: list[Any] = []
    index_keys._announce(lambda *a, **k: told.append((a, k)), "manager", "args", "mode", server_args, is_mla_backend=1)
    ((manager, arguments, mode, announced), options) = told[0]
    assert (manager, arguments, mode, options) == ("manager", "args", "mode", {"is_mla_backend": 1})
    assert (announced.kv_cache_dtype, announced.host) == ("fp8_e4m3,index_keys:bf16", "127.0.0.1")
    assert server_args.kv_cache_dtype == "fp8_e4m3"


def test_peers_of_0_5_23_are_told_in_the_layout() -> None:
    assert index_keys._announce_layout("v4,c4:v4,c128:v4", None) == "v4,c4:v4,c128:v4,index_keys:bf16"


def test_hicache_moves_whole_pages_only() -> None:
    @dataclasses.dataclass(frozen=True)
    class Region:
        item_bytes: int
        page_aligned_only: bool

    assert index_keys._move_whole_pages([Region(16384, False)], None, 256) == [Region(16384, True)]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_query_is_hooked_where_it_is_called(version: str) -> None:
    target = "sglang.srt.layers.attention.dsv4.indexer.fused_q_indexer_rope_hadamard_quant"
    assert index_queries.HOOKS[version] == {target: "(q_input, weight, weight_scale, freqs_cis, positions)"}
    assert index_queries.FEATURE.needs == {"index_keys": "bf16"}
