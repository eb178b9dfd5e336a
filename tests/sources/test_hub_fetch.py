"""Downloads from a Hub that refuses, stalls, lies and hangs up; full disks; several processes."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlxserve.errors import ModelError
from mlxserve.sources import hub, hub_fetch
from mlxserve.sources.hub_cache import RepoCache
from mlxserve.sources.hub_errors import HubUnavailableError
from mlxserve.sources.hub_names import parse
from mlxserve.sources.pull import locked
from mlxserve.sources.removal import removal
from tests.sources.making import one_line, write_gguf
from tests.support.hub_server import digest, serving

# Starts a process or a server per test, too long for `make check`.
pytestmark = pytest.mark.full

WEIGHTS = random.Random(0).randbytes(2_000_000)
SMALL = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
MODEL = SMALL | {"model.safetensors": WEIGHTS}

CHILD = """
import json, resource, sys
from pathlib import Path
from mlxserve.sources import hub, hub_fetch
from mlxserve.sources.hub_names import parse
hub_fetch.PAUSES_S = (0, 0)
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
seen = []
try:
    path = hub_fetch.fetch(hub.look_up(parse("o/n")), lambda *a: seen.append(a))
except Exception as e:
    print(json.dumps({"error": type(e).__name__, "text": str(e)}))
else:
    print(json.dumps({"path": str(path), "waited": ("wait", 0, None) in seen}))
"""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(hub_fetch, "PAUSES_S", (0, 0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "")
    with serving() as running:
        yield running


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "home" / "hub"


@pytest.fixture
def get(server, cache):
    def run(text="o/n", on_progress=None, **options):
        model = hub.look_up(parse(text), endpoint=server.url, cache=cache)
        return hub_fetch.fetch(model, on_progress, **options)

    return run


@pytest.fixture
def child(server, tmp_path):
    def start(limit=0):
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(limit)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | server.env(tmp_path / "home"),
        )

    return start


def partials(cache: Path) -> dict[str, int]:
    return {p.name.split(".")[0]: p.stat().st_size for p in cache.rglob("*.incomplete")}


def ranges(server) -> list[str | None]:
    return [r for _, p, r in server.asked if p.endswith("model.safetensors")]


@pytest.mark.parametrize(
    ("status", "headers", "kind", "parts"),
    [
        (
            401,
            {"X-Error-Code": "RepoNotFound"},
            ModelError,
            ["no public model o/n", "hf auth login"],
        ),
        (401, {"X-Error-Code": "GatedRepo"}, ModelError, ["gated", "{url}/o/n", "HF_TOKEN"]),
        (
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            ModelError,
            ["refused the token", "hf auth login"],
        ),
        (403, {"X-Error-Code": "GatedRepo"}, ModelError, ["gated", "{url}/o/n", "no access yet"]),
        (403, {"X-Error-Message": "Not\nyours"}, ModelError, ["(403: 'Not", "HF_TOKEN"]),
        (404, {"X-Error-Code": "RepoNotFound"}, ModelError, ["no public model o/n", "private"]),
        (404, {"X-Error-Code": "RevisionNotFound"}, ModelError, ["no revision 'main'"]),
        (404, {}, ModelError, ["not found (404)", "private"]),
        (429, {"Retry-After": "17"}, HubUnavailableError, ["rate limit", "in 17 s"]),
        (429, {"RateLimit": '"api";r=0;t=55'}, HubUnavailableError, ["in 55 s"]),
        (429, {}, HubUnavailableError, ["in a few minutes"]),
        (500, {}, HubUnavailableError, ["(500)", "try again later"]),
        (503, {}, HubUnavailableError, ["(503)"]),
        (418, {"X-Error-Message": "teapot"}, ModelError, ["418: 'teapot'"]),
        (400, {}, ModelError, ["answered 400"]),
    ],
)
@pytest.mark.parametrize("at", ["/api/", "/resolve/"])
def test_answers_that_are_no_success(server, cache, get, at, status, headers, kind, parts):
    server.add("o/n", MODEL)
    headers = {k: v.replace("\n", " ") for k, v in headers.items()}
    server.statuses = {at: (status, headers)}
    with pytest.raises(ModelError) as e:
        get()
    assert type(e.value) is kind
    assert one_line(e.value, "o/n", *(p.replace("{url}", server.url) for p in parts)), str(e.value)
    assert hub.find(parse("o/n"), cache=cache) is None


def test_a_failure_that_passes_is_not_noticed(server, get, monkeypatch):
    server.add("o/n", MODEL)
    server.statuses = {"model.safetensors": (503, {})}
    monkeypatch.setattr(hub_fetch.time, "sleep", lambda s: server.statuses.clear())
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_token_is_sent_and_never_shown(server, get, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.add("o/n", MODEL)
    get()
    assert set(server.tokens) == {"Bearer hf_secret"}
    server.statuses = {"/": (403, {})}
    with pytest.raises(ModelError) as e:
        get()
    assert "hf_secret" not in str(e.value)


def test_a_connection_that_is_cut_is_taken_up_again(server, cache, get):
    server.add("o/n", MODEL)
    server.cut_after, server.cuts = 600_000, 2
    stages = []
    path = get(on_progress=lambda *a: stages.append(a))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(server) == [None, "bytes=600000-", "bytes=1200000-"]
    assert partials(cache) == {}
    assert [s[1] for s in stages] == sorted(s[1] for s in stages)


def test_a_hub_that_keeps_hanging_up_is_given_up_and_resumed_by_the_next_pull(server, cache, get):
    server.add("o/n", MODEL)
    server.cut_after, server.cuts = 600_000, 1
    server.statuses = {}
    original = hub_fetch._try

    def fails_after_the_first(model, file, part, report):
        failure = original(model, file, part, report)
        if part.size and file.name == "model.safetensors":
            server.statuses = {"model.safetensors": (500, {})}
        return failure

    hub_fetch._try = fails_after_the_first
    try:
        with pytest.raises(HubUnavailableError, match="what was downloaded is kept") as e:
            get()
    finally:
        hub_fetch._try = original
    assert one_line(e.value, "o/n/model.safetensors")
    assert partials(cache) == {hashlib.sha256(WEIGHTS).hexdigest(): 600_000}
    assert hub.find(parse("o/n"), cache=cache) is None
    server.statuses = {}
    server.asked.clear()
    model = hub.look_up(parse("o/n"), endpoint=server.url, cache=cache)
    assert model.missing_bytes() == len(SMALL["config.json"]) + len(WEIGHTS) - 600_000 + (
        0 if model.has(model.files[0]) else model.files[0].size_bytes
    )
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(server) == ["bytes=600000-"]


def test_a_dropped_connection_says_so(server, cache, get):
    server.add("o/n", MODEL)
    server.cut_after, server.cuts = 0, 1000
    with pytest.raises(HubUnavailableError, match=r"connection to .* failed") as e:
        get()
    assert one_line(e.value, "check the network", "goes on from there")


def test_a_server_without_ranges_starts_over(server, get):
    server.add("o/n", MODEL)
    server.ranges = False
    server.cut_after, server.cuts = 600_000, 1
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("left", [b"x" * 100, WEIGHTS[:1000], WEIGHTS, WEIGHTS + b"more", b""])
def test_what_an_earlier_pull_left(server, cache, get, left):
    server.add("o/n", MODEL)
    part = (
        cache
        / "models--o--n"
        / "blobs"
        / (digest("model.safetensors", WEIGHTS) + ".mlxserve.incomplete")
    )
    part.parent.mkdir(parents=True)
    part.write_bytes(left)
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert partials(cache) == {}


@pytest.mark.parametrize(
    "sent",
    [WEIGHTS[:-1] + b"!", WEIGHTS + b"more", bytes(len(WEIGHTS)), WEIGHTS[:1000], b""],
    ids=["one byte", "longer", "zeros", "shorter", "nothing"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_content_other_than_listed(server, cache, get, name, sent):
    server.add("o/n", MODEL)
    server.content = {name: sent if name == "model.safetensors" else sent[:5]}
    with pytest.raises(ModelError, match=r"not what the Hub lists|ends after|connection") as e:
        get()
    assert one_line(e.value, name)
    assert hub.find(parse("o/n"), cache=cache) is None
    server.content = {}
    assert (get() / name).read_bytes() == MODEL[name]


def test_verify_downloads_what_is_damaged_again(server, get):
    server.add("o/n", MODEL)
    path = get()
    blob = (path / "model.safetensors").resolve()
    blob.write_bytes(bytes(len(WEIGHTS)))
    server.asked.clear()
    assert get() == path
    assert server.downloads() == []
    stages = []
    get(on_progress=lambda *a: stages.append(a), verify=True)
    assert server.downloads() == ["model.safetensors"]
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert {s[0] for s in stages} == {"check", "download"}


def test_a_file_that_two_revisions_share_is_downloaded_once(server, get):
    server.add("o/n", MODEL)
    get()
    server.add("o/n", MODEL | {"config.json": b'{"a": 1}'}, "v1")
    server.asked.clear()
    get("o/n@v1")
    assert server.downloads() == ["config.json"]


def test_an_empty_file(server, get):
    server.add("o/n", MODEL | {"chat_template.jinja": b""})
    assert (get() / "chat_template.jinja").read_bytes() == b""


def test_too_little_space_is_said_before_the_download(server, cache, get, monkeypatch):
    server.add("o/n", MODEL)
    usage = hub_fetch.shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(hub_fetch.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match="HF_HOME") as e:
        get()
    assert one_line(e.value, "o/n needs 2.0 MB more", "1.0 MB are free", cache)
    assert server.downloads() == []


def test_a_file_too_large_for_http_names_the_program_for_it(server, get, monkeypatch):
    monkeypatch.setattr(hub_fetch, "MAX_HTTP_BYTES", 1000)
    server.add("o/n", MODEL)
    with pytest.raises(ModelError, match=r"hf download o/n model\.safetensors") as e:
        get()
    assert one_line(e.value)


def test_a_disk_that_fills_up(server, cache, child):
    server.add("o/n", MODEL)
    result = json.loads(child(limit=1_000_000).communicate(timeout=60)[0])
    assert result["error"] == "ModelError"
    assert one_line(ModelError(result["text"]), str(cache), "full", "are missing; free some space")
    assert hub.find(parse("o/n"), cache=cache) is None
    assert set(partials(cache)) == {digest("model.safetensors", WEIGHTS)}
    done = json.loads(child().communicate(timeout=60)[0])
    assert (Path(done["path"]) / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(server)[-1].startswith("bytes=")


def test_a_cache_that_cannot_be_written(server, tmp_path):
    server.add("o/n", MODEL)
    (tmp_path / "file").write_bytes(b"")
    model = hub.look_up(parse("o/n"), endpoint=server.url, cache=tmp_path / "file" / "hub")
    with pytest.raises(ModelError, match="set HF_HOME") as e:
        hub_fetch.fetch(model)
    assert one_line(e.value)


def test_two_at_once_download_once(server, cache, child):
    server.add("o/n", MODEL)
    server.go.clear()
    first = child()
    assert server.half.wait(60)
    second = child()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(8)  # to start, and then to wait
    server.go.set()
    results = [json.loads(p.communicate(timeout=60)[0]) for p in (first, second)]
    assert [r["waited"] for r in results] == [False, True]
    assert len({r["path"] for r in results}) == 1
    assert sorted(server.downloads()) == sorted(MODEL)
    assert partials(cache) == {}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pull_goes_on_where_it_was(server, cache, child, how):
    server.add("o/n", MODEL)
    server.go.clear()
    process = child()
    assert server.half.wait(60)
    [part] = _until(lambda: [p for p in cache.rglob("*.incomplete") if p.stat().st_size > 500_000])
    process.send_signal(how)
    process.communicate(timeout=60)
    assert hub.find(parse("o/n"), cache=cache) is None
    kept = part.stat().st_size
    assert kept > 500_000
    server.go.set()
    server.asked.clear()
    done = json.loads(child().communicate(timeout=60)[0])
    assert (Path(done["path"]) / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(server) == [f"bytes={kept}-"]
    assert partials(cache) == {}


def _until(found, seconds=20):
    import time

    end = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


def test_an_error_in_the_callback_keeps_what_there_is(server, cache, get):
    server.add("o/n", MODEL)

    def interrupt(stage, done, total):
        if done > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(on_progress=interrupt)
    [size] = partials(cache).values()
    assert size > 900_000
    server.asked.clear()
    get()
    assert ranges(server) == [f"bytes={size}-"]


def test_the_config_is_known_before_the_download(server, cache):
    server.add("o/n", MODEL)
    model = hub.look_up(parse("o/n"), endpoint=server.url, cache=cache)
    assert hub_fetch.read_config(model) == ({"model_type": "llama"}, {})
    assert not cache.exists()
    server.add("o/bad", MODEL | {"config.json": b"[]"})
    with pytest.raises(ModelError, match="no JSON object"):
        hub_fetch.read_config(hub.look_up(parse("o/bad"), endpoint=server.url, cache=cache))


def test_a_gguf_header_is_read_before_the_download(server, cache, smollm2_gguf, monkeypatch):
    data = smollm2_gguf.read_bytes()
    server.add("o/n", {"m.gguf": data})
    model = hub.look_up(parse("o/n"), endpoint=server.url, cache=cache)
    config, elements = hub_fetch.read_config(model)
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 30
    assert set(elements) >= {"Q4_1", "F32"}
    assert sum(elements.values()) == 134_515_008
    assert [r for _, p, r in server.asked if p.endswith(".gguf")] == ["bytes=0-8388607"]
    monkeypatch.setattr(hub_fetch, "HEADER_BYTES", (1000, 8 << 20))
    assert hub_fetch.read_config(model) == (config, elements)
    assert not cache.exists()


def test_a_gguf_that_cannot_be_run_is_refused_before_the_download(
    server, cache, tmp_path, monkeypatch
):
    file = write_gguf(tmp_path / "m.gguf", arch="mamba")
    server.add("o/n", {"m.gguf": file.read_bytes() + bytes(5000)})
    model = hub.look_up(parse("o/n"), endpoint=server.url, cache=cache)
    monkeypatch.setattr(hub_fetch, "HEADER_BYTES", (1000, 4000))
    with pytest.raises(ModelError, match="'mamba' is not supported") as e:
        hub_fetch.read_config(model)
    assert one_line(e.value, "o/n/m.gguf")
    assert str(tmp_path) not in str(e.value)
    assert [r for _, p, r in server.asked if p.endswith(".gguf")] == ["bytes=0-999"]


@pytest.mark.parametrize("name", ["o/n", "o/g:Q4_0", "o/n@v1"])
def test_rm_waits_for_a_pull(server, cache, get, name):
    server.add("o/n", MODEL)
    server.add("o/n", MODEL | {"config.json": b'{"model_type": "bert"}'}, "v1")
    server.add("o/g", {"m.Q4_0.gguf": b"a", "m.Q8_0.gguf": b"b"})
    paths = [get(text) for text in ("o/n", "o/n@v1", "o/g:Q4_0", "o/g:Q8_0")]
    gone = paths[["o/n", "o/n@v1", "o/g:Q4_0"].index(name)]
    removing = threading.Thread(target=removal(name, cache=cache).run)
    with locked(RepoCache(cache, parse(name).repo).lock, lambda *_: None):
        removing.start()
        removing.join(0.5)
        assert removing.is_alive()
        assert gone.exists()
    removing.join(20)
    assert not gone.exists()
