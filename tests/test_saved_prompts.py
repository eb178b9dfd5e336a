"""Prompts kept in a file: saved by one LLM, loaded by another, through Python and the program."""

import os
import re
import threading

import pytest

import mlxserve
from mlxserve.errors import DamagedError, EngineDead, ModelError, RequestError
from tests.cli.conftest import Cli
from tests.support.model_dir import END_ID, VOCAB_SIZE, write_model_dir
from tests.support.tiny import tiny_gemma3, tiny_llama

pytestmark = pytest.mark.full

BOOK = "The quick brown fox jumps over the lazy dog. " * 5  # 225 tokens: three pages and a half
QUESTION = BOOK + "Who is lazy?"
PACKED = [None, 16, 8, 4, "8/4"]
TINY = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048, "eos_token_id": END_ID}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request, tmp_path_factory):
    """Full attention, and with windows of 32."""
    tiny = {"llama": tiny_llama, "gemma3": tiny_gemma3}[request.param](**TINY)
    return write_model_dir(tmp_path_factory.mktemp(request.param), tiny)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "book.st"


@pytest.fixture
def saved(tiny_model_dir, path):
    with mlxserve.load(tiny_model_dir) as llm:
        llm.save_cache(path, BOOK)
    return path


def answer(llm, prompt=QUESTION):
    """Tokens and their log-probabilities, all bits of them, and how many were in the cache."""
    got = llm.generate(prompt, max_tokens=12, ignore_eos=True, top_logprobs=3)
    return got.logprobs, got.usage.cached_tokens


@pytest.mark.parametrize("kv_bits", PACKED, ids=str)
def test_an_answer_is_the_same_from_a_file(model, path, kv_bits):
    with mlxserve.load(model, kv_bits=kv_bits) as llm:
        tokens = llm.save_cache(path, BOOK)
    with mlxserve.load(model, kv_bits=kv_bits) as llm:
        expected, cached = answer(llm)
    assert cached == 0
    with mlxserve.load(model, kv_bits=kv_bits) as llm:
        assert llm.load_cache(path) == tokens
        assert answer(llm) == (expected, tokens)
    packed = kv_bits in (8, 4, "8/4")
    assert tokens == (192 if packed else len(BOOK))


def test_a_prompt_that_only_begins_so_takes_what_agrees(saved, tiny_model_dir):
    other = BOOK[:150] + "But then" * 20
    with mlxserve.load(tiny_model_dir) as llm:
        expected, _ = answer(llm, other)
    with mlxserve.load(tiny_model_dir) as llm:
        llm.load_cache(saved)
        assert answer(llm, other) == (expected, 150)
        assert answer(llm, "Something else")[1] == 0


def test_a_prompt_shorter_than_a_page(path, tiny_model_dir):
    with mlxserve.load(tiny_model_dir) as llm:
        assert llm.save_cache(path, "Hello") == 5
    with mlxserve.load(tiny_model_dir) as llm:
        assert llm.load_cache(path) == 5
        assert answer(llm, "Hello you")[1] == 5
    with (
        mlxserve.load(tiny_model_dir, kv_bits=8) as llm,
        pytest.raises(mlxserve.CapacityError, match="keeps whole pages of 64"),
    ):
        llm.save_cache(path, "Hello")


def test_messages_and_ids_are_prompts_too(path, tiny_model_dir):
    chat = [{"role": "user", "content": BOOK}]
    with mlxserve.load(tiny_model_dir) as llm:
        assert llm.save_cache(path, chat) == len(BOOK) + 3  # user, end, assistant
        assert llm.save_cache(path, list(range(70))) == 70
    with mlxserve.load(tiny_model_dir) as llm:
        llm.load_cache(path)
        assert answer(llm, list(range(80)))[1] == 70


def test_several_files_are_kept_side_by_side(saved, tmp_path, tiny_model_dir):
    """Also twice the same, and one that goes on where another ends."""
    longer = tmp_path / "longer.st"
    with mlxserve.load(tiny_model_dir) as llm:
        assert llm.save_cache(longer, QUESTION) == len(QUESTION)
    with mlxserve.load(tiny_model_dir) as llm:
        for file, prompt in ((saved, BOOK), (longer, QUESTION), (saved, BOOK)):
            assert llm.load_cache(file) == len(prompt)
        assert answer(llm, QUESTION + "?")[1] == len(QUESTION)


def test_saved_and_loaded_while_others_run(path, tiny_model_dir):
    prompts = [f"{i} bottles" for i in range(3)]
    how = {"max_tokens": 150, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    with mlxserve.load(tiny_model_dir) as llm:
        expected = [c.token_ids for c in llm.generate(prompts, **how)]
        logprobs, _ = answer(llm)
    with mlxserve.load(tiny_model_dir) as llm:
        got = []
        others = threading.Thread(target=lambda: got.extend(llm.generate(prompts, **how)))
        others.start()
        assert llm.save_cache(path, BOOK) == len(BOOK)
        others.join()
        assert [c.token_ids for c in got] == expected
    with mlxserve.load(tiny_model_dir) as llm:
        got = []
        others = threading.Thread(target=lambda: got.extend(llm.generate(prompts, **how)))
        others.start()
        llm.load_cache(path)
        assert answer(llm) == (logprobs, len(BOOK))
        others.join()
        assert [c.token_ids for c in got] == expected


# What is refused.


def refuses(model, path, error, message, **options):
    with mlxserve.load(model, **options) as llm:
        with pytest.raises(error, match=message) as caught:
            llm.load_cache(path)
        assert "\n" not in str(caught.value)
        assert llm.generate("Hello", max_tokens=2).usage.completion_tokens > 0
        assert llm.stats().pages_used == 0


def test_a_file_of_another_model(saved, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_model_dir(other, tiny_llama(seed=9, **TINY))
    refuses(other, saved, RequestError, "it was made with model '.*', not '.*'; build it again")


def test_a_file_of_another_tokenizer(saved, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_model_dir(other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer + " ")
    refuses(other, saved, RequestError, "it was made with tokenizer '.*', not '.*'; build it again")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bits": 8}, "kv_bits 'plain', not '8/8'"),
        ({"kv_bits": "16/8"}, "kv_bits 'plain', not 'plain/8'"),
        ({"kv_bits": 16}, "dtype 'float32', not 'float16'"),
        ({"max_kv_size": 128}, "layers '.*FullKV.*', not '.*window=128"),
    ],
)
def test_a_file_of_other_settings(saved, tiny_model_dir, options, message):
    refuses(tiny_model_dir, saved, RequestError, f"it was made with .*{message}", **options)


def test_without_a_prefix_cache(saved, tmp_path, tiny_model_dir):
    message = "prefix_cache is off, and saved prompts need it; leave it on"
    refuses(tiny_model_dir, saved, RequestError, message, prefix_cache=False)
    with (
        mlxserve.load(tiny_model_dir, prefix_cache=False) as llm,
        pytest.raises(RequestError, match=message),
    ):
        llm.save_cache(tmp_path / "new", BOOK)
    assert not (tmp_path / "new").exists()


def test_a_damaged_file(saved, tiny_model_dir):
    data = bytearray(saved.read_bytes())
    data[-100] ^= 1
    saved.write_bytes(data)
    refuses(tiny_model_dir, saved, DamagedError, "isn't as it was written")
    saved.write_bytes(data[:-1])
    refuses(tiny_model_dir, saved, DamagedError, "bytes and should have")
    saved.unlink()
    refuses(tiny_model_dir, saved, ModelError, "No such file")


def test_a_prompt_or_a_place_that_cannot_be_saved(path, tiny_model_dir):
    with mlxserve.load(tiny_model_dir) as llm:
        before = llm.stats().prompt_tokens
        for prompt, target, message in (
            ("", path, "the prompt is empty"),
            ([999], path, "prompt token id 999"),
            ("x" * 5000, path, "it has 5000 tokens"),
            (BOOK, path.parent, "is a directory"),
            (BOOK, path / "no" / "c", "there is no directory"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.save_cache(target, prompt)
        assert llm.stats().prompt_tokens == before
        assert os.listdir(path.parent) == []
    for call in (lambda: llm.save_cache(path, BOOK), lambda: llm.load_cache(path)):
        with pytest.raises((EngineDead, ModelError)):
            call()


# The program.


@pytest.mark.full
def test_from_the_command_line(tmp_path, tiny_model_dir):
    cli = Cli(tmp_path / "home")
    book, saved = tmp_path / "book.txt", str(tmp_path / "book.st")
    book.write_text(BOOK + "\n")
    model = ("--model", str(tiny_model_dir))

    def generate(*args):
        return cli("generate", *model, "-n", "8", "--prompt", QUESTION, *args)

    # Raw, the file's newline counts, and the question goes on without it; as messages, the
    # question goes on where the other one ends.
    for raw, tokens, agreed in (["--raw"], 226, 225), ([], 228, 226):
        done = cli("cache", "build", *model, "--prompt-file", str(book), "--out", saved, *raw)
        assert (done.code, done.stdout) == (0, "")
        assert re.fullmatch(rf"{re.escape(saved)}: {tokens} tokens, [\d.]+ kB\n", done.stderr)
        plain, started = generate(*raw), generate(*raw, "--prompt-cache", saved)
        assert started.stdout == plain.stdout
        assert "cached" not in plain.stderr
        assert f" prompt tokens, {agreed} cached, 8 new" in started.stderr
    asked = f"{QUESTION}\n/stats\n".encode()
    chat = cli("chat", str(tiny_model_dir), "-n", "8", "--prompt-cache", saved, stdin=asked)
    assert chat.stdout == plain.stdout
    assert f" prompt tokens, {agreed} cached, 8 new" in chat.stderr

    def refused(done, *words):
        assert (done.code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {saved}: ")
        assert done.stderr.count("\n") == 1
        assert all(word in done.stderr for word in words)

    refused(generate("--prompt-cache", saved, "--kv-bits", "8"), "kv_bits", "build it again")
    packed = ("--kv-bits", "8", "--prompt-file", str(book), "--out", saved)
    assert ": 192 tokens" in cli("cache", "build", *model, *packed).stderr
    refused(generate("--prompt-cache", saved), "kv_bits")
    assert "192 cached" in generate("--prompt-cache", saved, "--kv-bits", "8").stderr
    data = bytearray((tmp_path / "book.st").read_bytes())
    data[-5] ^= 1
    (tmp_path / "book.st").write_bytes(data)
    refused(generate("--prompt-cache", saved, "--kv-bits", "8"), "isn't as it was written")
    (tmp_path / "book.st").write_bytes(data[:-5])
    refused(generate("--prompt-cache", saved, "--model", "no-such"), "bytes and should have")
