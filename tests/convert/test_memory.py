"""Memory doesn't grow with the model."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Linux counts the parent's memory in a child's ru_maxrss, but not in VmHWM.
MEASURED = """
import resource, sys
from mlxserve_convert import convert
convert(*sys.argv[1:3], mode=sys.argv[3], quality=False)
if sys.platform == "darwin":
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
else:
    status = dict(line.split(":") for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]) * 1024)
"""
WIDTH = 1024


def write_model(root: Path, layers: int) -> int:
    """A llama of random bfloat16 numbers, 25 MB a layer. Returns the bytes of its weights."""
    config = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 2816,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 1000, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }  # fmt: skip
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (1000, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        for part in "qkvo":
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (WIDTH, WIDTH)
        shapes[f"{layer}mlp.gate_proj.weight"] = (2816, WIDTH)
        shapes[f"{layer}mlp.up_proj.weight"] = (2816, WIDTH)
        shapes[f"{layer}mlp.down_proj.weight"] = (WIDTH, 2816)
        for norm in ("input", "post_attention"):
            shapes[f"{layer}{norm}_layernorm.weight"] = (WIDTH,)
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    numbers = (rng.standard_normal(1 << 20, np.float32).view("<u4") >> 16).astype("<u2")
    data = numbers.tobytes()
    with (root / "model.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        left = at
        while left:
            left -= f.write(data[: min(left, len(data))])
    return at


@pytest.mark.full
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_large_model_takes_no_more_memory_than_a_small_one(tmp_path, mode):
    peaks, sizes = [], []
    for layers in (2, 24):
        source = tmp_path / f"src{layers}"
        sizes.append(write_model(source, layers))
        command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / f"out{layers}")]
        done = subprocess.run([*command, mode], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert sizes[1] > 600e6
    assert peaks[1] - peaks[0] < 100e6
    assert peaks[1] < 500e6
