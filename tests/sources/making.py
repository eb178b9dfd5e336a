"""Small model files, written with the formats' own packages."""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from mlxserve.sources.catalog import CatalogEntry, Wheel

HIDDEN, FF, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 16, 40


def quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    return gguf.quants.quantize(values.astype(np.float32), kind)


def write_gguf(
    path: Path,
    arch: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
) -> Path:
    """A GGUF file. metadata: full keys; None as a value leaves a key out. tensors: float values."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata or {}).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, (values, kind) in (tensors or {}).items():
        writer.add_tensor(name, quantised(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_metadata(arch: str = "llama", **extra: Any) -> dict[str, Any]:
    """extra: `attention__key_length=8` is `<arch>.attention.key_length`."""
    plain = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
        "rope.dimension_count": HEAD_DIM,
        "vocab_size": VOCAB,
    } | {k.replace("__", "."): v for k, v in extra.items()}
    tokens = [f"t{i}" for i in range(VOCAB)]
    return {f"{arch}.{k}": v for k, v in plain.items()} | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def llama_tensors(kind: Kind = Kind.Q8_0, seed: int = 0) -> dict[str, tuple[np.ndarray, Kind]]:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> tuple[np.ndarray, Kind]:
        return rng.standard_normal(shape).astype(np.float32), kind

    def vector(n: int) -> tuple[np.ndarray, Kind]:
        return rng.standard_normal(n).astype(np.float32), Kind.F32

    tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN), "output_norm.weight": vector(HIDDEN)}
    for i in range(LAYERS):
        tensors |= {
            f"blk.{i}.attn_norm.weight": vector(HIDDEN),
            f"blk.{i}.attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": vector(HIDDEN),
            f"blk.{i}.ffn_gate.weight": matrix(FF, HIDDEN),
            f"blk.{i}.ffn_up.weight": matrix(FF, HIDDEN),
            f"blk.{i}.ffn_down.weight": matrix(HIDDEN, FF),
        }
    return tensors


def write_directory(
    root: Path,
    shards: Mapping[str, Mapping[str, np.ndarray]],
    config: Mapping[str, Any] | None = None,
    *,
    index: bool | None = None,
) -> Path:
    """A model directory; an index is written for several shards, or as told."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": "llama"} | dict(config or {})))
    for name, tensors in shards.items():
        save_file(dict(tensors), root / name, metadata={"format": "mlx"})
    if index or (index is None and len(shards) > 1):
        names = {t: shard for shard, tensors in shards.items() for t in tensors}
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return root


def write_wheel(
    folder: Path, content: bytes, *, name: str = "tiny_model"
) -> tuple[Path, CatalogEntry]:
    """A wheel that holds `content` as `<name>/model.gguf`, and the catalog's entry for it."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr(f"{name}/model.gguf", content)
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    return wheel, CatalogEntry(
        file_name="model.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        license="CC0-1.0",
        wheels=(
            Wheel(
                package=name.replace("_", "-"),
                version="1.0",
                sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
                size_bytes=wheel.stat().st_size,
                member=f"{name}/model.gguf",
            ),
        ),
    )


def write_wheels(folder: Path, *contents: bytes) -> tuple[list[Path], CatalogEntry]:
    """A wheel for each part of a model, and the catalog's entry for the whole."""
    parts = [write_wheel(folder, c, name=f"tiny_part{i}") for i, c in enumerate(contents, 1)]
    whole = b"".join(contents)
    return [path for path, _ in parts], CatalogEntry(
        file_name="model.gguf",
        sha256=hashlib.sha256(whole).hexdigest(),
        size_bytes=len(whole),
        license="CC0-1.0",
        wheels=tuple(wheel for _, entry in parts for wheel in entry.wheels),
    )


def one_line(error: BaseException, *parts: object) -> bool:
    """Whether an error is one line that names all of these."""
    text = str(error)
    return "\n" not in text and all(str(p) in text for p in parts)
