"""`mlxserve cache`: what is shown of a file, what its exit codes say, and what is refused."""

import json

import pytest

from mlxserve.cache import file
from mlxserve.cache.file_header import layout
from tests.cache.saved import FINGERPRINT, small, small_tensors


@pytest.fixture
def path(tmp_path):
    """A cache file of 7 tokens, in pages of 2."""
    path = tmp_path / "c.safetensors"
    file.write(path, small(), small_tensors(small()))
    return path


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon a time\n")
    return path


def break_at(path, tensor: str) -> None:
    data = bytearray(path.read_bytes())
    data[layout(small()).entries[tensor].offset] ^= 4
    path.write_bytes(data)


def assert_refused(done, *words) -> None:
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words)


def test_inspect(here, path):
    done = here("cache", "inspect", str(path))
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "model: tiny",
        "dtype: float32",
        "kv_bits: 0",
        "tokens: 7, the last page holds 1 of 2",
        f"size: {path.stat().st_size / 1000:.1f} kB",
        "layers 0, 3: pages 0 to 3",
        "  k: float32 [1, 2, 1]",
        "  v: float32 [1, 2, 1]",
        "layer 1: pages 0, 2 to 3",
        "  k: bfloat16 [2, 2, 1]",
        "  v: bfloat16 [2, 2, 1]",
        "layer 2: states",
        "  state.0: bfloat16 [3]",
        "  state.1: float32 []",
    ]


def test_inspect_for_scripts(here, path):
    shown = json.loads(here("cache", "inspect", str(path), "--json").stdout)
    assert shown["path"] == str(path)
    assert shown["bytes"] == path.stat().st_size
    assert shown["fingerprint"] == FINGERPRINT
    assert (shown["tokens"], shown["page_tokens"]) == (7, 2)
    assert shown["groups"][1]["pages"] == [0, 2, 3]
    assert shown["groups"][2]["pages"] is None
    assert shown["groups"][0]["parts"]["k"] == {"dtype": "float32", "shape": [1, 2, 1]}


def test_inspect_sends_no_control_characters_to_the_terminal(here, path):
    header = small(fingerprint={"model": "a\x1b[2Jb"})
    file.write(path, header, small_tensors(header))
    assert here("cache", "inspect", str(path)).stdout.startswith("model: a[2Jb\n")


def test_verify_of_a_sound_file(here, path):
    size = f"{path.stat().st_size / 1000:.1f} kB"
    assert here("cache", "verify", str(path)) == (0, f"{path}: sound, 7 tokens, {size}\n", "")


def test_verify_names_what_is_damaged(here, path):
    break_at(path, "layers.3.k")
    break_at(path, "layers.2.state.1")
    done = here("cache", "verify", str(path))
    assert done.code == 1
    assert done.stdout.splitlines() == [
        f"{path}: page 0 (tokens 0 to 1) of layers 0, 3 isn't as it was written",
        f"{path}: state 1 of layer 2 isn't as it was written",
    ]
    assert done.stderr == "the file is damaged; build it again with `mlxserve cache build`\n"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: break_at(path, "tokens"), "its tokens aren't as they were written"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes and should have"),
    ],
)
def test_verify_of_a_file_that_cannot_be_read_for_damage(here, path, damage, words):
    damage(path)
    done = here("cache", "verify", str(path))
    assert (done.code, done.stderr) == (1, "")
    assert done.stdout.startswith(f"{path}: ")
    assert words in done.stdout
    assert_refused(here("cache", "inspect", str(path)), words, "mlxserve cache build")
    assert_refused(here("cache", "diff", str(path), str(path)), words)


def test_diff(here, path, tmp_path):
    assert here("cache", "diff", str(path), str(path)) == (0, "", "")
    other = tmp_path / "other"
    header = small(7, FINGERPRINT | {"dtype": "bfloat16"})
    file.write(other, header, small_tensors(header))
    done = here("cache", "diff", str(path), str(other))
    assert done == (1, "dtype: 'float32' and 'bfloat16'\n", "")


def test_files_that_are_none(here, path, tmp_path):
    missing = str(tmp_path / "no")
    for args in (["inspect", missing], ["verify", missing], ["diff", str(path), missing]):
        assert_refused(here("cache", *args), f"{missing}: No such file or directory")
    assert_refused(here("cache", "verify", str(tmp_path)), "it is not a regular file")
    assert_refused(here("cache", "verify", __file__), "it is not a prompt cache")
    assert_refused(here("cache", "verify", b"\xff"), "FILE isn't valid UTF-8")


def test_build_refuses_before_it_loads_a_model(here, prompt_file, tmp_path):
    def build(*args, prompt=prompt_file, out=tmp_path / "c"):
        model = ("--model", str(tmp_path / "no-such-model"))
        return here(
            "cache", "build", "--prompt-file", str(prompt), "--out", str(out), *model, *args
        )

    assert_refused(build("--raw", "--system", "x"), "--system needs the chat template")
    missing = tmp_path / "no"
    assert_refused(build(prompt=missing), f"--prompt-file {missing}: No such file or directory")
    assert_refused(build(out=tmp_path), "is a directory; give the name of a file")
    assert_refused(build(out=missing / "c"), f"there is no directory {missing}; make it first")
    assert_refused(build(out=prompt_file), "is there and no prompt cache")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert_refused(build(prompt=empty), "empty is empty; give --prompt-file some text")
    empty.write_bytes(b"caf\xe9")
    assert_refused(build(prompt=empty), "isn't valid UTF-8: byte 0xe9 at offset 3")
    assert_refused(build(), "no-such-model")
