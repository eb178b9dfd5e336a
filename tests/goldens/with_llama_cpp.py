"""What the makers of goldens share: token ids and log-probabilities of a GGUF file, by llama.cpp.

Needs `pip install llama-cpp-python==0.3.36`, which builds llama.cpp (set CMAKE_ARGS to
-DGGML_NATIVE=OFF where the result dies of an illegal instruction). Nothing of mlxserve runs here.

NAME_tokens.json: `cases`, pairs of a text and its ids (no BOS, special tokens recognised).

NAME_logprobs.json: `texts`, each with its ids and, for every position but the first, the natural
logarithm of the probability of the id there given those before it, from a log-softmax in float64:
    `logprobs`: the file as llama.cpp runs it, quantising activations to 8 bits for each matmul;
    `logprobs_f32`: the same weights turned back to float32 by llama.cpp, in float32 throughout.
The first shows how far quantised arithmetic strays; exact arithmetic should meet the second.
Keys and values are kept in float32 for both.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
F32 = 0  # both ggml's type and llama.cpp's file type


def tokenise(path: Path, strings: Iterable[str]) -> dict[str, object]:
    """The content of NAME_tokens.json."""
    model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    cases = [[text, _ids(model, text)] for text in dict.fromkeys(strings)]
    return {"engine": _engine(), "model": path.name, "cases": cases}


def score(path: Path, scored: Mapping[str, str], *, add_bos: bool = False) -> dict[str, object]:
    """The content of NAME_logprobs.json. scored: texts by name; add_bos: ids begin with BOS."""
    with tempfile.TemporaryDirectory() as scratch:
        exact = Path(scratch) / "f32.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = F32
        params.allow_requantize = True
        if llama_cpp.llama_model_quantize(str(path).encode(), str(exact).encode(), params):
            raise SystemExit("llama.cpp could not write the weights as float32")
        as_run, as_f32 = _logprobs(path, scored, add_bos), _logprobs(exact, scored, add_bos)
    texts = [
        {"name": name, "text": text, "ids": as_run[name][0], "logprobs": as_run[name][1]}
        | {"logprobs_f32": as_f32[name][1]}
        for name, text in scored.items()
    ]
    return {"engine": _engine(), "model": path.name, "texts": texts}


def write(name: str, value: Mapping[str, object]) -> None:
    """Write a golden file beside this one, a case or text a line, so that a change shows as one."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for before in ('["', '{"name"'):
        text = text.replace(f",{before}", f",\n{before}").replace(f"[{before}", f"[\n{before}")
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def _logprobs(
    path: Path, scored: Mapping[str, str], add_bos: bool
) -> dict[str, tuple[list[int], list[float]]]:
    model = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=512,
        n_batch=512,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        verbose=False,
    )
    results = {}
    for name, text in scored.items():
        ids = _ids(model, text, add_bos)
        model.reset()
        model.eval(ids)
        logits = np.asarray(model.scores[: len(ids)], dtype=np.float64)
        peak = logits.max(axis=-1, keepdims=True)
        logprobs = logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
        chosen = logprobs[np.arange(len(ids) - 1), ids[1:]]
        results[name] = ids, [round(float(value), 7) for value in chosen]
    return results


def _ids(model: llama_cpp.Llama, text: str, add_bos: bool = False) -> list[int]:
    # llama-cpp-python takes an empty text for a mistake.
    return model.tokenize(text.encode(), add_bos=add_bos, special=True) if text else []


def _engine() -> str:
    return f"llama-cpp-python {llama_cpp.__version__}"
