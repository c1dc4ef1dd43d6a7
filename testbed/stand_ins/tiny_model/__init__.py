# SPDX-License-Identifier: Apache-2.0
"""Stand-in for a language model's checkpoint: a Qwen2 with random weights, 0.5 M parameters, float32.

It is a whole model directory in the usual format, so an engine loads and serves it like any other, and its answers
depend on all of the prompt, so a wrong KV transfer shows. It knows nothing: the output head is zero for everything
but the words below and the end token, so an answer is a string of words, and the same one for the same prompt.

Only the standard library is needed, and two builds give the same bytes.
"""

from __future__ import annotations

import array
import json
import random
import shutil
import struct
import sys
from pathlib import Path

NAME = "tiny-qwen2"
CONTEXT = 8192
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 128, 256, 2, 4, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, END = 0, 2
SEED = 20

WORDS = """
a and at batch binding cache cold decode fast first fleet free from full group GPU hello host in is it key last
layer limit load memory model near new node not of on one page pool port prefill queue ready request router run
rule same server slow socket step stream the then this to token topology two unit value warm we with work you
""".split()  # noqa: SIM905

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as, in the order of the bytes."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters, shifted = [], 0
    for byte in range(256):
        if byte in visible:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + shifted))
            shifted += 1
    return characters


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token -> id, and the merges: each word, with the space before it, is put together from left to right."""
    tokens = [*SPECIAL, *byte_alphabet()]
    merges: list[tuple[str, str]] = []
    known = set(tokens)
    for word in WORDS:
        left = byte_alphabet()[ord(" ")]
        for letter in word:
            if left + letter not in known:
                merges.append((left, letter))
                known.add(left + letter)
                tokens.append(left + letter)
            left += letter
    return {token: number for number, token in enumerate(tokens)}, merges


def tokenizer() -> dict[str, object]:
    """Content of tokenizer.json."""
    ids, merges = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token, **special} for token in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [list(pair) for pair in merges],
        },
    }


def config(vocabulary_size: int) -> dict[str, object]:
    """Content of config.json."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocabulary_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": LAYERS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": PAD,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def shapes(vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by its name in the checkpoint, in the order it is drawn."""
    kv = HIDDEN // HEADS * KV_HEADS
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary_size, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.q_proj.bias": (HIDDEN,),
            f"{prefix}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{prefix}.self_attn.k_proj.bias": (kv,),
            f"{prefix}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{prefix}.self_attn.v_proj.bias": (kv,),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocabulary_size, HIDDEN)}


def tensors() -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Every tensor as its shape and its float32 bytes, little-endian."""
    ids, _ = vocabulary()
    size = (len(ids) + 63) // 64 * 64
    speaks = {ids[byte_alphabet()[ord(" ")] + word] for word in WORDS} | {END}
    draw = random.Random(SEED)  # noqa: S311
    out = {}
    for name, shape in shapes(size).items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if name.endswith("norm.weight"):
            values = [1.0] * count
        elif name.endswith(".bias"):
            values = [0.0] * count
        else:
            # Large enough that attention, and so the whole prompt, decides the answer, not the last word alone.
            scale = 1.0 if name == "model.embed_tokens.weight" else 1.5 * shape[1] ** -0.5
            values = [draw.gauss(0.0, scale) for _ in range(count)]
        if name == "lm_head.weight":
            values = [value if at // HIDDEN in speaks else 0.0 for at, value in enumerate(values)]
        packed = array.array("f", values)
        if sys.byteorder == "big":
            packed.byteswap()
        out[name] = (shape, packed.tobytes())
    return out


def safetensors(content: dict[str, tuple[tuple[int, ...], bytes]]) -> bytes:
    """The tensors as a safetensors file: length of the header, header in JSON, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, data) in content.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, data in content.values())


def files() -> dict[str, bytes]:
    """Every file of the model directory: name -> content."""
    content = tensors()

    def as_json(value: object) -> bytes:
        return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()

    return {
        "config.json": as_json(config(content["lm_head.weight"][0][0])),
        "generation_config.json": as_json({"bos_token_id": PAD, "eos_token_id": END, "pad_token_id": PAD}),
        "model.safetensors": safetensors(content),
        "tokenizer.json": as_json(tokenizer()),
        "tokenizer_config.json": as_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": CONTEXT,
                "eos_token": SPECIAL[END],
                "pad_token": SPECIAL[PAD],
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            }
        ),
    }


def build(target: Path) -> bool:
    """Write the model directory; return whether anything changed. An interrupted build leaves no half of one."""
    wanted = files()
    if target.is_dir() and {p.name: p.read_bytes() for p in target.iterdir()} == wanted:
        return False
    unfinished = target.with_name(f".{target.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name, data in wanted.items():
        (unfinished / name).write_bytes(data)
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)
    return True
