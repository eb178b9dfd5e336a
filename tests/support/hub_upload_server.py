"""A Hub that takes uploads: repos are created, files arrive by git LFS or inside a commit."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support import hub_server
from tests.support.hub_server import LFS, HubServer

TOKEN = "hf_secret"


class UploadServer(HubServer):
    """Adds to HubServer what a client with TOKEN may write.

    who: the answer about the token. private: which repos were created so. stored: LFS objects by
    SHA-256. once: (part of a path, status) of requests to refuse, each once. posted: the paths of
    all that was sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _Handler
        self.who: dict[str, Any] = {
            "type": "user",
            "name": "me",
            "orgs": [{"name": "team"}],
            "auth": {"accessToken": {"role": "write"}},
        }
        self.private: dict[str, bool] = {}
        self.stored: dict[str, bytes] = {}
        self.once: list[tuple[str, int]] = []
        self.posted: list[str] = []

    def files(self, repo: str) -> dict[str, bytes]:
        """What the repo's newest commit holds."""
        return self.repos[repo][self.refs[repo]["main"]]


class _Handler(hub_server._Handler):
    server: UploadServer

    def do_GET(self) -> None:  # noqa: N802
        if self.path == "/api/whoami-v2":
            if self.refused():
                return None
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(401, b'{"error": "Invalid user token."}', {})
            return self.reply(self.server.who)
        return super().do_GET()

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append(self.path)
        if self.refused():
            return None
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"", {})
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if self.path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if self.path == "/verify":
            asked = json.loads(body)
            whole = len(self.server.stored.get(asked["oid"], b"")) == asked["size"]
            return self.answer(200 if whole else 404, b"{}", {})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        repo, _, rest = (
            self.path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        )
        if rest == "preupload":
            return self.preupload(json.loads(body))
        if rest == "commit":
            return self.commit(repo, [json.loads(line) for line in body.splitlines()])
        return self.answer(404, b"", {})

    def do_PUT(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append(self.path)
        oid = self.path.removeprefix("/lfs/")
        if self.refused():
            return None
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(400, b"", {})
        self.server.stored[oid] = body
        return self.answer(200, b"", {})

    def refused(self) -> bool:
        for i, (part, status) in enumerate(self.server.once):
            if part in self.path:
                del self.server.once[i]
                self.answer(status, b'{"error": "injected"}', {})
                return True
        return False

    def reply(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.server.repos:
            return self.answer(409, b'{"error": "You already created this model repo"}', {})
        self.server.add(repo, {})
        self.server.private[repo] = asked.get("visibility") == "private" or bool(
            asked.get("private")
        )
        return self.reply({"url": f"{self.server.url}/{repo}", "name": repo})

    def preupload(self, asked: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((*LFS, ".png")) else "regular",
                "shouldIgnore": False,
            }
            for file in asked["files"]
        ]
        self.reply({"files": files})

    def batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for each in asked["objects"]:
            found = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.server.stored:
                put, verify = f"{self.server.url}/lfs/{each['oid']}", f"{self.server.url}/verify"
                found["actions"] = {"upload": {"href": put}, "verify": {"href": verify}}
            objects.append(found)
        self.reply({"transfer": "basic", "objects": objects})

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
        oid = self.server.add(repo, files)
        self.reply({"commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid})


@contextmanager
def serving_uploads() -> Iterator[UploadServer]:
    """A Hub without repos, as long as the block runs."""
    with UploadServer() as server:
        server.handle_error = lambda *args: None
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
