"""Who gets in: host names, origins, keys; and what one tenant can learn of another."""

import hashlib
import logging
import socket

import openai
import pytest

from mlxserve.config import ServerConfig
from mlxserve.errors import RequestError
from mlxserve.server import run
from mlxserve.server.tenants import Tenants
from tests.server.test_problems import error_of
from tests.support.serving import NAME, serving

KEYS = ("first-secret-key", "second-secret-key")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:123", "127.0.0.1", "[::1]:8080", "localhost.", "localhost.:1"]
)
def test_this_machine_by_its_own_names(server, host):
    assert server.http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[::", "", "a@b"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/nowhere"])
def test_a_page_cannot_reach_it_by_another_name(server, host, path):
    error = error_of(server.http.get(path, headers={"Host": host}), 403)
    assert error["type"] == "permission_error"
    assert "--allowed-host" in error["message"]


def test_a_request_of_old_without_a_host(server):
    status, _ = server.answer(b"GET /health HTTP/1.0\r\n\r\n")
    assert status == 200


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/health", 200),
        ("HTTP://localhost:1/v1/models/tiny?a=b", 200),
        ("http://localhost", 404),
        ("http://evil.example/health", 403),
    ],
)
def test_a_target_that_is_a_whole_url(server, target, status):
    """RFC 9112, 3.2.2: the target's host counts, whatever the Host header says."""
    for host in ("localhost", "evil.example"):
        head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"
        assert server.answer(head.encode())[0] == status


def test_names_that_are_let_in(llm):
    with serving(llm, allowed_hosts=("My.Example",)) as server:
        for host, status in (("my.example:1", 200), ("localhost", 200), ("evil.example", 403)):
            assert server.http.get("/health", headers={"Host": host}).status_code == status
    with serving(llm, allowed_hosts=("*",)) as server:
        assert server.http.get("/health", headers={"Host": "any.thing"}).status_code == 200


def test_a_server_for_other_machines_goes_by_any_name(llm):
    with serving(llm, host="0.0.0.0") as server:
        assert server.http.get("/health", headers={"Host": "my-mac.local"}).status_code == 200


def test_an_address_that_another_process_takes_meanwhile(llm):
    """Some systems let two sockets have one address, until one of them listens."""

    def late(config, first):
        with run.bind(config) as second:
            first.listen()
            run.serve(llm, config, second)

    with run.bind(ServerConfig(names=(NAME,), port=0)) as first:
        config = ServerConfig(names=(NAME,), port=first.getsockname()[1])
        with pytest.raises(RequestError, match=r"can't listen at 127.0.0.1:\d+: Address already"):
            late(config, first)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *[(name, True) for name in ("localhost", "127.0.0.1", "127.1.2.3", "::1")],
        *[
            (name, False)
            for name in ("0.0.0.0", "::", "192.168.1.2", "my-mac.local", "127.evil.example")
        ],
    ],
)
def test_addresses_of_this_machine_only(host, local):
    assert ServerConfig(names=(NAME,), host=host).local == local


def test_an_address_of_the_sixth_version():
    try:
        at = run.bind(ServerConfig(names=(NAME,), host="::1", port=0))
    except RequestError:
        pytest.skip("only on machines with IPv6")
    with at:
        assert at.family == socket.AF_INET6


PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


def test_pages_may_not_ask_unless_told(server):
    asked = server.http.options("/v1/chat/completions", headers=PREFLIGHT)
    for origin in ("https://app.example", "null", "http://localhost:3000"):
        # A browser sends this without asking, and the model would work for a page it never saw.
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        sent = server.http.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers)
        for got in (asked, sent):
            error = error_of(got, 403)
            assert "--cors-origin" in error["message"]
            assert "access-control-allow-origin" not in got.headers
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.http.get("/v1/models", headers=own).status_code == 200


def test_pages_of_an_origin_that_is_let_in(llm):
    origins = ("https://app.example",)
    with serving(llm, cors_origins=origins, api_keys=KEYS) as server:
        got = server.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert got.status_code == 200
        assert got.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-stainless-os" in got.headers["access-control-allow-headers"]
        refused = server.http.post("/v1/completions", headers={"Origin": "https://app.example"})
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = {**PREFLIGHT, "Origin": "https://evil.example"}
        got = server.http.options("/v1/chat/completions", headers=other)
        assert "access-control-allow-origin" not in got.headers
    for let_in in (origins, ("*",)):
        with serving(llm, cors_origins=let_in) as server:
            headers = {"Origin": "https://app.example"}
            asked = server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] in ("https://app.example", "*")


def test_keys(llm):
    with serving(llm, api_keys=KEYS) as server:
        ask = {"prompt": "x", "max_tokens": 1}
        good = [bearer(KEYS[0]), bearer(KEYS[1]), {"X-Api-Key": KEYS[0]}]
        for headers in (*good, {"Authorization": f"bearer  {KEYS[0]}"}):
            got = server.http.post("/v1/completions", json=ask, headers=headers)
            assert got.status_code == 200
        near = [bearer(KEYS[0][:-1]), bearer(KEYS[0] + "x"), bearer(KEYS[0].upper())]
        other = [{"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"}]
        junk = [{}, bearer("wrong"), {"Authorization": "Bearer"}, {"X-Api-Key": ""}, bearer("ÿ")]
        for headers in (*near, *other, *junk):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            got = server.http.post("/v1/completions", json=ask, headers=encoded)
            error = error_of(got, 401)
            assert error["type"] == "authentication_error"
            assert got.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/nowhere", "/tokenize"):
            assert server.http.get(path).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/openapi.json"):
            assert server.http.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError) as caught:
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
        assert caught.value.code == "invalid_api_key"


def test_tenants_share_nothing(llm):
    prompt = "The same long prompt, from each of the tenants, over a page long. " * 3

    def cached(server, key):
        ask = {"model": NAME, "prompt": prompt, "max_tokens": 1}
        got = server.http.post("/v1/completions", json=ask, headers=bearer(key)).json()
        return got["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(llm, api_keys=KEYS) as server:
        assert cached(server, KEYS[0]) == 0
        assert cached(server, KEYS[1]) == 0
        assert cached(server, KEYS[0]) > 64
        assert cached(server, KEYS[1]) > 64


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_key_is_in_no_log(llm, caplog, log_format):
    caplog.set_level(logging.DEBUG)
    with serving(llm, api_keys=KEYS, log_format=log_format, log_prompts=True) as server:
        for key in (*KEYS, "a-wrong-secret"):
            headers = {**bearer(key), "X-Api-Key": key}
            server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            server.http.post("/v1/completions", json={"prompt": ""}, headers=headers)
        metrics = server.http.get("/metrics").text
    assert all(tenant in caplog.text for tenant in ("key-61f842a5", "key-4a66c71f"))
    for text in (caplog.text, metrics):
        assert "secret" not in text


@pytest.mark.parametrize("key", ["short", "", "umlaut-ö-key", "line\nbreak-key", "tab\tbed-key"])
def test_keys_that_are_none(llm, key):
    with pytest.raises(RequestError, match="API key") as caught, serving(llm, api_keys=(key,)):
        pass
    assert not key or key not in str(caught.value)


def test_a_key_is_found_by_its_hash():
    tenants = Tenants(KEYS, None, None)
    name = tenants.of(f"Bearer {KEYS[1]}", None).name
    assert name == "key-" + hashlib.sha256(KEYS[1].encode()).hexdigest()[:8]
    more = Tenants(("another-key", *KEYS), None, None)
    assert more.of(None, KEYS[1]).name == name  # whoever else there is
    assert not any(key.encode() in digest for key in KEYS for digest in tenants._by_digest)
