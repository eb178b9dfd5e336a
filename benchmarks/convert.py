"""How long a conversion takes beside mlx-lm's, from the same random model, and its memory.

    python -m benchmarks.convert --mlx-lm-python L/bin/python       # 1 GB, both, the ratio
    python -m benchmarks.convert --gigabytes 20                     # ours alone: peak memory

L is a virtual environment with mlx-lm; without it only ours is measured. Both run as a user would
run them, in a process of their own, alternately, and the best of --runs counts; ours measures the
error of each matrix, and compares no models. The model and what is made of it are deleted at the
end.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mlxserve.report import count_bytes

WIDTH, INNER, VOCABULARY = 2048, 5632, 32000
SHARD_LAYERS = 24  # 2.1 GB in bfloat16


class Run(NamedTuple):
    """seconds: from start to end of the process; peak_bytes: of its memory."""

    seconds: float
    peak_bytes: int


def main() -> None:
    """Make a model, convert it, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the source, in bfloat16")
    parser.add_argument("--mlx-lm-python", metavar="FILE")
    parser.add_argument("--modes", default="affine", help="affine,mxfp4,mxfp8,nvfp4")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--folder", default=None, help="where there is room (default: /tmp)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="convert-", dir=args.folder))
    try:
        source = make_model(folder / "source", args.gigabytes * 1e9)
        for mode in args.modes.split(","):
            compare(source, folder, mode, args.mlx_lm_python, args.runs)
    finally:
        shutil.rmtree(folder)


def compare(source: Path, folder: Path, mode: str, theirs: str | None, runs: int) -> None:
    """Print a line for each tool: time, memory, and the ratio."""
    flags = ["--q-mode", mode]
    ours = [sys.executable, "-m", "convert", "--from", str(source), "--quiet", "--no-quality"]
    ours += [*flags, "--to"]
    other = [theirs, "-m", "mlx_lm", "convert", "--hf-path", str(source), "-q", *flags]
    commands = {"mlxserve": ours}
    if theirs is not None:
        commands["mlx-lm"] = [*other, "--mlx-path"]
    best: dict[str, Run] = {}
    for _ in range(runs):
        for name, command in commands.items():
            run = timed([*command, str(folder / "out")])
            shutil.rmtree(folder / "out")
            best[name] = min(run, best.get(name, run))
    for name, run in best.items():
        ratio = run.seconds / best["mlxserve"].seconds
        print(
            f"{mode:8} {name:9} {run.seconds:7.1f} s  {count_bytes(run.peak_bytes):>9} of memory  "
            f"{ratio:.1f}x",
            flush=True,
        )


def timed(command: list[str]) -> Run:
    """Run a command to its end."""
    begin, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, memory_bytes(process.pid))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return Run(time.perf_counter() - begin, peak)


def memory_bytes(pid: int) -> int:
    """The most that a process has had, on Linux; its present memory elsewhere; 0 if it is gone."""
    status = Path(f"/proc/{pid}/status")
    try:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        ps = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
        return int(ps.stdout or 0) * 1024


def make_model(root: Path, size: float) -> Path:
    """A llama of about `size` bytes in bfloat16, in shards, with a tokenizer of single words."""
    per_layer = 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 4 + 3 * WIDTH * INNER)
    layers = max(1, round((size - 4 * VOCABULARY * WIDTH) / per_layer))
    root.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (root / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(root / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"}
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    groups = [
        [f"model.layers.{i}." for i in range(a, min(a + SHARD_LAYERS, layers))]
        for a in range(0, layers, SHARD_LAYERS)
    ]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups):
        shapes = {p + name: shape for p in group for name, shape in LAYER.items()}
        if number == 0:
            shapes |= TOP
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        write_random(root / file, shapes)
        weight_map |= dict.fromkeys(shapes, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


LAYER = {
    "self_attn.q_proj.weight": (WIDTH, WIDTH),
    "self_attn.k_proj.weight": (WIDTH // 4, WIDTH),
    "self_attn.v_proj.weight": (WIDTH // 4, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "mlp.gate_proj.weight": (INNER, WIDTH),
    "mlp.up_proj.weight": (INNER, WIDTH),
    "mlp.down_proj.weight": (WIDTH, INNER),
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
}
TOP = {
    "model.embed_tokens.weight": (VOCABULARY, WIDTH),
    "lm_head.weight": (VOCABULARY, WIDTH),
    "model.norm.weight": (WIDTH,),
}


def write_random(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16 numbers with a spread of 0.02."""
    header: dict[str, object] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    numbers = (rng.standard_normal(1 << 22, np.float32) * 0.02).view("<u4") >> 16
    data = numbers.astype("<u2").tobytes()
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        left = at
        while left:
            left -= f.write(data[: min(left, len(data))])


if __name__ == "__main__":
    main()
