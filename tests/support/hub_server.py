"""A Hugging Face Hub on the loopback interface that can refuse, stall, lie and hang up."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".gguf", ".bin")


class HubServer(ThreadingHTTPServer):
    """Serves repos: `add` one, then break it.

    statuses: status (and headers) to answer with, by a part of the path; the first that matches.
    cut_after: bytes of a file after which the connection is dropped, `cuts` times. go: cleared, a
    download stops half way (`half` is set) until it is set again. content: bytes to send instead,
    by file name. listed: entries to add to each list of files. asked: (method, path, Range).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.statuses: dict[str, tuple[int, dict[str, str]]] = {}
        self.content: dict[str, bytes] = {}
        self.listed: list[dict[str, Any]] = []
        self.sha: str | None = None
        self.cut_after, self.cuts = 0, 0
        self.ranges = True
        self.asked: list[tuple[str, str, str | None]] = []
        self.tokens: list[str | None] = []
        self.go, self.half = threading.Event(), threading.Event()
        self.go.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def env(self, home: Path) -> dict[str, str]:
        """What makes a child process use this Hub, and a cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "",
            "HF_TOKEN": "",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def add(self, repo: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Publish files as what the revision now is; returns the commit."""
        text = (
            repo + revision + "".join(f"{n}{hashlib.sha1(d).hexdigest()}" for n, d in files.items())
        )
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.repos.setdefault(repo, {})[commit] = dict(files)
        self.refs.setdefault(repo, {})[revision] = commit
        return commit

    def add_directory(self, repo: str, path: Path) -> str:
        """Publish a model directory."""
        return self.add(repo, {p.name: p.read_bytes() for p in sorted(path.iterdir())})

    def downloads(self) -> list[str]:
        """The files that were asked for, by name."""
        return [
            p.split("/resolve/")[1].split("/", 1)[1] for _, p, _ in self.asked if "/resolve/" in p
        ]


def digest(name: str, data: bytes) -> str:
    """What the Hub calls the file's content by."""
    if name.endswith(LFS):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        self.server.tokens.append(self.headers.get("Authorization"))
        for part, (status, headers) in self.server.statuses.items():
            if part in path:
                return self.answer(status, b'{"error": "injected"}', headers)
        if path.startswith("/api/models/"):
            return self.listing(*path.removeprefix("/api/models/").split("/revision/"))
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        commit, _, name = rest.partition("/")
        files = self.files(repo, commit)
        if files is None or name not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self.file(name, files[name], self.server.refs[repo].get(commit, commit))

    def files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        commit = self.server.refs.get(repo, {}).get(revision, revision)
        return self.server.repos.get(repo, {}).get(commit)

    def listing(self, repo: str, revision: str = "main") -> None:
        if repo not in self.server.repos:  # as the Hub: who has no token can't know
            return self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        files = self.files(repo, revision)
        if files is None:
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        siblings = [*self.server.listed]
        for name, data in files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
            if name.endswith(LFS):
                sha256 = digest(name, data)
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            else:
                entry["blobId"] = digest(name, data)
            siblings.append(entry)
        commit = self.server.sha or self.server.refs[repo].get(revision, revision)
        body = json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
        return self.answer(200, body, {"Content-Type": "application/json"})

    def file(self, name: str, data: bytes, commit: str) -> None:
        headers = {
            "ETag": f'"{digest(name, data)}"',
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{digest(name, data)}"',
            "X-Linked-Size": str(len(data)),
        }
        data, status = self.server.content.get(name, data), 200
        if (wanted := self.headers.get("Range")) and self.server.ranges:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            last = min(int(end) if end else len(data), len(data) - 1)
            if int(start) >= len(data):
                self.answer(416, b"", headers)
                return
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            data, status = data[int(start) : last + 1], 206
        if len(data) > 1000 and not self.server.go.is_set():
            half = len(data) // 2
            self.answer(status, data[:half], headers, length=len(data))
            self.wfile.flush()
            self.server.half.set()
            self.server.go.wait(60)
            self.wfile.write(data[half:])
        elif self.server.cuts and len(data) > self.server.cut_after:
            self.server.cuts -= 1
            self.answer(status, data[: self.server.cut_after], headers, length=len(data))
            self.close_connection = True
        else:
            self.answer(status, data, headers)

    def answer(
        self, status: int, body: bytes, headers: Mapping[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[HubServer]:
    """A Hub without repos, as long as the block runs."""
    with HubServer() as server:
        server.handle_error = lambda *args: None  # a client that hangs up is part of the tests
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.go.set()
            server.shutdown()
            thread.join()
