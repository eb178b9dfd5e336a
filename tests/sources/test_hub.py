"""Models of a Hub (a server on loopback): what is asked for, what arrives, what is refused."""

import json
import logging
import os
import random
from pathlib import Path

import pytest

from mlxserve.errors import ModelError
from mlxserve.sources import hub, hub_fetch, hub_local
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.hub_errors import HubUnavailableError
from mlxserve.sources.hub_names import HubRef, parse
from mlxserve.sources.resolve import find, locate, resolve
from tests.sources.making import one_line
from tests.support.hub_server import serving

GGUF = random.Random(1).randbytes(300_000)
SMALL = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
MODEL = SMALL | {"model.safetensors": random.Random(0).randbytes(500_000)}
OTHERS = {
    "README.md": b"hello",
    "pytorch_model.bin": b"pickle",
    "model.onnx": b"onnx",
    "original/consolidated.safetensors": b"twice",
    "training_args.bin": b"pickle",
    "evil.py": b"import os",
}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(hub_fetch, "PAUSES_S", (0, 0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving() as running:
        yield running


@pytest.fixture
def where(server, tmp_path):
    """Arguments that lead to this Hub and to a cache of its own."""
    return {"endpoint": server.url, "cache": tmp_path / "hub"}


@pytest.fixture
def get(where):
    def run(text, on_progress=None, **options):
        model = hub.look_up(parse(text), **where)
        return hub_fetch.fetch(model, on_progress, **options)

    return run


def names(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def partials(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def test_only_what_is_needed(server, where, get, capfd):
    extra = {"generation_config.json": b"{}", "chat_template.jinja": b"x"}
    extra["additional_chat_templates/rag.jinja"] = b"y"
    commit = server.add("o/n", MODEL | OTHERS | extra | {"vocab.json": b"{}"})
    stages = []
    path = get("o/n", lambda *a: stages.append(a))
    assert path == where["cache"] / "models--o--n" / "snapshots" / commit
    assert names(path) == sorted(MODEL | extra)
    assert all((path / n).read_bytes() == d for n, d in (MODEL | extra).items())
    assert all((path / n).is_symlink() for n in MODEL)
    assert server.downloads()[-1] == "config.json"  # with it, the snapshot is whole
    total = sum(map(len, (MODEL | extra).values()))
    assert stages[-1] == ("download", total, total)
    assert [s[1] for s in stages] == sorted(s[1] for s in stages)
    assert partials(where["cache"]) == []
    assert capfd.readouterr() == ("", "")


def test_huggingface_hub_finds_what_we_downloaded(server, where, get):
    from huggingface_hub import hf_hub_download, scan_cache_dir

    commit = server.add("o/n", MODEL)
    path = get("o/n")
    for name in MODEL:
        found = hf_hub_download("o/n", name, cache_dir=where["cache"], local_files_only=True)
        assert Path(found) == path / name
    asked = len(server.asked)
    options = {"revision": commit, "endpoint": server.url, "cache_dir": where["cache"]}
    hf_hub_download("o/n", "model.safetensors", **options)
    assert len(server.asked) == asked
    [repo] = scan_cache_dir(where["cache"]).repos
    assert repo.repo_id == "o/n"
    assert list(repo.refs) == ["main"]


def test_we_find_what_huggingface_hub_downloaded(server, where):
    from huggingface_hub import hf_hub_download

    commit = server.add("o/n", MODEL)
    for name in MODEL:
        hf_hub_download("o/n", name, endpoint=server.url, cache_dir=where["cache"])
    asked = len(server.asked)
    found = hub.find(HubRef("o/n"), cache=where["cache"])
    assert found == where["cache"] / "models--o--n" / "snapshots" / commit
    assert len(server.asked) == asked


def test_only_the_shards_of_the_index(server, get):
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    shards = {"x-1.safetensors": b"1", "x-2.safetensors": b"22", "x-3.safetensors": b"333"}
    server.add("o/n", SMALL | shards | {hub.directory.INDEX: json.dumps(index).encode()})
    wanted = {*SMALL, hub.directory.INDEX, "x-1.safetensors", "x-2.safetensors"}
    assert names(get("o/n")) == sorted(wanted)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b'{"weight_map": {"a": "../evil.safetensors"}}', "don't trust"),
        (b'{"weight_map": {"a": "/etc/x.safetensors"}}', "don't trust"),
        (b'{"weight_map": {"a": "pytorch_model.bin"}}', "don't trust"),
        (b'{"weight_map": {"a": 1}}', "don't trust"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', "not in the repo"),
        (b'{"weight_map": {"a": ["x"]}}', "damaged"),
    ],
)
def test_an_index_that_is_damaged_or_hostile(server, where, get, index, why):
    server.add("o/n", SMALL | OTHERS | {hub.directory.INDEX: index})
    with pytest.raises(ModelError, match=why) as e:
        get("o/n")
    assert one_line(e.value, "o/n")
    assert not list(where["cache"].rglob("*"))


def test_old_tokenizers_only_where_there_is_no_tokenizer_json(server, get):
    old = {"tokenizer.model": b"spm", "merges.txt": b"m"}
    server.add("o/new", MODEL | old)
    assert "tokenizer.model" not in names(get("o/new"))
    server.add("o/old", {n: d for n, d in MODEL.items() if n != "tokenizer.json"} | old)
    assert {"tokenizer.model", "merges.txt"} <= set(names(get("o/old")))


GGUFS = {
    "m.Q4_0.gguf": b"4",
    "m-Q4_K_M.gguf": GGUF,
    "sub/m-q8_0.gguf": b"88",
    "mmproj-f16.gguf": b"no",
    "imatrix.gguf": b"no",
}


@pytest.mark.parametrize(
    ("one", "file"),
    [
        (":Q4_K_M", "m-Q4_K_M.gguf"),
        (":q4_0", "m.Q4_0.gguf"),
        (":Q8_0", "sub/m-q8_0.gguf"),
        ("/sub/m-q8_0.gguf", "sub/m-q8_0.gguf"),
    ],
)
def test_one_of_several_gguf_files(server, where, get, one, file):
    server.add("o/n", GGUFS | OTHERS)
    path = get("o/n" + one)
    assert path.as_posix().endswith(file)
    assert path.read_bytes() == GGUFS[file]
    assert server.downloads() == [file]
    assert hub.find(parse("o/n" + one), cache=where["cache"]) == path
    assert hub.find(parse("o/n"), cache=where["cache"]) == path
    assert resolve("o/n", **where) == path  # the only one that is here


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "o/n",
            ["several GGUF files", "m-Q4_K_M.gguf (300.0 kB)", "sub/m-q8_0.gguf", "o/n:Q4_K_M"],
        ),
        ("o/n:Q5_0", ["has no 'Q5_0'", "m.Q4_0.gguf"]),
        ("o/n:Q4", ["has no 'Q4'"]),
        ("o/n/other.gguf", ["has no 'other.gguf'", "m.Q4_0.gguf"]),
        ("o/n/mmproj-f16.gguf", ["has no 'mmproj-f16.gguf'"]),
    ],
)
def test_the_choice_is_listed(server, get, text, parts):
    server.add("o/n", GGUFS)
    with pytest.raises(ModelError) as e:
        get(text)
    assert one_line(e.value, *parts), str(e.value)
    assert "mmproj-f16.gguf (" not in str(e.value)


def test_one_gguf_needs_no_choice(server, get):
    server.add("o/n", {"m.gguf": GGUF, "mmproj.gguf": b"no"} | OTHERS)
    assert get("o/n").read_bytes() == GGUF


def test_a_gguf_in_parts_is_refused(server, get):
    server.add("o/n", {f"m-Q8_0-0000{i}-of-00002.gguf": b"x" for i in (1, 2)})
    with pytest.raises(ModelError, match="one part of several"):
        get("o/n:Q8_0")


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (OTHERS | SMALL, ["pickled", "'pytorch_model.bin'", "no pickle is ever"]),
        ({"a.pt": b"x"}, ["pickled"]),
        ({"a.ckpt": b"x"}, ["pickled"]),
        (SMALL, ["no model.safetensors"]),
        (SMALL | {"unet.safetensors": b"x"}, ["only 'unet.safetensors'"]),
        ({"README.md": b"x"}, ["no GGUF file"]),
        ({"model.safetensors": b"x"}, ["no config.json"]),
    ],
)
def test_repos_without_weights_for_us(server, where, get, files, parts):
    files = {n: d for n, d in files.items() if n != "original/consolidated.safetensors"}
    server.add("o/n", files)
    with pytest.raises(ModelError) as e:
        get("o/n")
    assert one_line(e.value, "o/n", *parts), str(e.value)
    assert server.downloads() == []
    with pytest.raises(ModelError, match=r"no \.gguf file|has no"):
        get("o/n:Q4_0")


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil.json", "a\\..\\b", "x\0y"])
def test_a_list_with_a_name_that_leads_out(server, where, get, name):
    server.add("o/n", MODEL)
    server.listed = [{"rfilename": name, "size": 1, "blobId": "a" * 40}]
    with pytest.raises(ModelError, match="leads out of the repo") as e:
        get("o/n")
    assert one_line(e.value, "o/n")
    assert not list(where["cache"].rglob("*"))


@pytest.mark.parametrize(
    "entry",
    [
        {"rfilename": "x"},
        {"rfilename": "x", "size": -1, "blobId": "a" * 40},
        {"rfilename": "x", "size": "1", "blobId": "a" * 40},
        {"rfilename": "x", "size": 1, "blobId": "../../evil"},
        {"rfilename": "x", "size": 1, "blobId": "a" * 40, "lfs": {"sha256": "../x"}},
        {"size": 1},
        {"rfilename": None, "size": 1, "blobId": "a" * 40},
        "x",
        None,
    ],
)
def test_a_list_that_makes_no_sense(server, where, get, entry):
    server.add("o/n", MODEL)
    server.listed = [entry]
    with pytest.raises(ModelError) as e:
        get("o/n")
    assert one_line(e.value, "o/n")
    assert not list(where["cache"].rglob("*"))


@pytest.mark.parametrize("sha", ["../../x", "main", "", "A" * 40])
def test_a_commit_that_is_none(server, get, sha):
    server.add("o/n", MODEL)
    server.sha = sha or "0"
    with pytest.raises(ModelError, match="no list of files"):
        get("o/n")


def test_another_commit_than_the_pinned_one(server, get):
    commit = server.add("o/n", MODEL)
    server.sha = "b" * 40
    with pytest.raises(ModelError, match="no list of files"):
        get(f"o/n@{commit}")


def test_a_pinned_revision_that_is_here_needs_no_hub(server, where, get):
    commit = server.add("o/n", MODEL)
    server.add("o/n", MODEL | {"config.json": b"{}"})
    path = get(f"o/n@{commit}")
    server.asked.clear()
    assert locate(parse(f"o/n@{commit}"), **where) == (path, None)
    assert server.asked == []
    assert (path / "config.json").read_bytes() == MODEL["config.json"]


def test_a_branch_is_asked_for_once(server, where, get):
    server.add("o/n", MODEL)
    path = get("o/n")
    server.asked.clear()
    assert resolve("o/n", **where) == path
    assert [p for _, p, _ in server.asked] == ["/api/models/o/n/revision/main"]


def test_a_branch_that_moved_brings_only_what_changed(server, where, get):
    server.add("o/n", MODEL)
    old = get("o/n")
    commit = server.add("o/n", MODEL | {"config.json": b'{"model_type": "qwen3"}'})
    server.asked.clear()
    here, new = locate(parse("o/n"), **where)
    assert here == old
    assert new is not None
    assert new.missing_bytes() == 23
    path = resolve("o/n", **where)
    assert path.name == commit
    assert server.downloads() == ["config.json"]
    assert (old / "config.json").read_bytes() == MODEL["config.json"]
    assert resolve("o/n", **where) == path


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_a_hub_that_fails_leaves_what_is_here(server, where, get, status, caplog):
    server.add("o/n", MODEL)
    path = get("o/n")
    server.statuses = {"/api/": (status, {})}
    with caplog.at_level(logging.WARNING, "mlxserve"):
        assert resolve("o/n", **where) == path
    assert "using the copy of o/n that is here" in caplog.text


def test_no_network_leaves_what_is_here(server, where, get, caplog):
    server.add("o/n", MODEL)
    path = get("o/n")
    gone = where | {"endpoint": "http://127.0.0.1:9"}
    assert resolve("o/n", **gone) == path
    assert "the connection to http://127.0.0.1:9 failed" in caplog.text
    with pytest.raises(HubUnavailableError) as e:
        resolve("o/other", **gone)
    assert one_line(e.value, "o/other", "check the network")


def test_offline_asks_nobody(server, where, get, monkeypatch, caplog):
    from huggingface_hub import constants

    server.add("o/n", MODEL)
    path = get("o/n")
    server.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("o/n", **where) == path
    assert find("o/n", cache=where["cache"]) == path
    assert find("o/other", cache=where["cache"]) is None
    with pytest.raises(HubUnavailableError, match="HF_HUB_OFFLINE is set; unset it") as e:
        resolve("o/other", **where)
    assert one_line(e.value, "o/other")
    assert server.asked == []
    assert caplog.text == ""


def test_what_is_here_in_part_is_not_taken_for_whole(server, where, get):
    server.add("o/n", MODEL)
    path = get("o/n")
    for name in MODEL:
        (path / name).rename(path / "away")
        assert hub.find(HubRef("o/n"), cache=where["cache"]) is None
        (path / "away").rename(path / name)
    blob = (path / "model.safetensors").resolve()
    blob.unlink()
    assert hub.find(HubRef("o/n"), cache=where["cache"]) is None
    server.asked.clear()
    assert resolve("o/n", **where) == path
    assert server.downloads() == ["model.safetensors"]


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "extra.txt"])
def test_links_that_lead_out_of_the_repo(server, where, get, tmp_path, name):
    server.add("o/n", MODEL)
    path = get("o/n")
    (tmp_path / "secret").write_bytes(b"x")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="leads out of its repo") as e:
        resolve("o/n", **where)
    assert one_line(e.value, tmp_path / "secret")


def test_blobs_that_huggingface_hub_shares_between_repos(server, where, get, tiny_model_dir):
    server.add_directory("o/n", tiny_model_dir)
    path = get("o/n")
    blob = (path / "model.safetensors").resolve()
    store = where["cache"] / "blobs" / "ab" / "cdef"
    store.parent.mkdir(parents=True)
    blob.rename(store)
    blob.symlink_to(os.path.relpath(store, blob.parent))
    assert resolve("o/n", **where) == path
    assert open_checkpoint(path).size_bytes == store.stat().st_size


def test_names_paths_and_the_hub_in_this_order(server, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("o/n").mkdir(parents=True)
    assert resolve("o/n", **where) == Path("o/n")
    with pytest.raises(ModelError, match="no model that can be found here"):
        resolve(Path("o/other"), **where)
    assert server.asked == []


def test_installed_looks_at_each_index_once(server, where, get, monkeypatch):
    server.add("o/g", GGUFS)
    get("o/g:Q4_0")
    looked = []
    monkeypatch.setattr(hub_local, "whole", looked.append)
    assert len(hub_local.installed(cache=where["cache"])) == 1
    assert len(looked) == 1


def test_installed_lists_what_is_whole(server, where, get):
    server.add("o/n", MODEL)
    server.add("o/n", MODEL | {"config.json": b'{"model_type": "bert"}'}, "v1")
    server.add("o/g", GGUFS)
    server.add("o/part", MODEL)
    paths = [get(n) for n in ("o/g:Q4_0", "o/g:Q8_0", "o/n", "o/n@v1")]
    (get("o/part") / "config.json").unlink()
    found = hub_local.installed(cache=where["cache"])
    assert sorted((m.name, m.kind) for m in found) == [
        ("o/g/m.Q4_0.gguf", "gguf"),
        ("o/g/sub/m-q8_0.gguf", "gguf"),
        ("o/n", "llama"),
        ("o/n@v1", "bert"),
    ]
    assert {m.path for m in found} == set(paths)
    assert {m.size_bytes for m in found} == {1, 2, sum(map(len, MODEL.values())), 500_024}
    assert all(hub.find(parse(m.name), cache=where["cache"]) == m.path for m in found)


def test_installed_without_a_cache(tmp_path):
    assert hub_local.installed(cache=tmp_path / "none") == []
