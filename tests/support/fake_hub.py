"""A small Hub on loopback that speaks the HTTP API which huggingface_hub uses for data sets, with faults on order.

Knows repositories, branches, commits, LFS objects and who may see what; everything is kept in memory.
"""

import base64
import hashlib
import json
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_test_token"
_LFS_BYTES = 100_000  # files above this size, and Parquet files, go to the large file storage


@dataclass(frozen=True)
class StoredFile:
    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def blob_id(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob_id

    def info(self, path: str) -> dict[str, Any]:
        record: dict[str, Any] = {"type": "file", "path": path, "size": len(self.data), "oid": self.blob_id}
        if self.lfs:
            record["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": 134}
        return record


@dataclass
class Repo:
    """Snapshots by commit; `branches` name the newest commit of each. `gated`: only owners may read it."""

    private: bool = False
    gated: bool = False
    snapshots: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, StoredFile], message: str) -> str:
        oid = hashlib.sha1(f"{branch} {len(self.snapshots)} {message}".encode()).hexdigest()
        self.snapshots[oid] = files
        self.branches[branch] = oid
        self.messages.append(message)
        return oid

    def find(self, revision: str) -> str | None:
        revision = revision.removeprefix("refs/heads/")
        return self.branches.get(revision) or (revision if revision in self.snapshots else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: file.data for path, file in self.snapshots[self.find(revision) or ""].items()}


@dataclass
class Fault:
    """The next `times` requests that fit get `status`; `drop` closes the connection in the middle of the body."""

    method: str
    path: str
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    drop: bool = False


class FakeHub:
    """`requests`: (method, path) of everything asked, in order; `uploads`: sizes of LFS objects that were sent."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.uploads: list[int] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.endpoint = ""

    def add_repo(self, name: str, files: dict[str, bytes], gated: bool = False) -> Repo:
        stored = {path: StoredFile(data, _is_large(path, len(data))) for path, data in files.items()}
        repo = self.repos[name] = Repo(gated=gated)
        repo.commit("main", stored, "first")
        return repo

    def asked(self, method: str, part: str) -> int:
        """How many requests of a method had this in their path."""
        return sum(verb == method and part in path for verb, path in self.requests)

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None


def _is_large(path: str, size: int) -> bool:
    return path.endswith(".parquet") or size > _LFS_BYTES


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16  # head and body leave together
    hub: FakeHub

    def log_message(self, *arguments: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _serve(self) -> None:
        url = urlsplit(self.path)
        path = url.path
        self.hub.requests.append((self.command, path))
        fault = self.hub.fault_for(self.command, path)
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.drop:
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self._chunked() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(length)
        if fault is not None:
            self._send(fault.status, {"error": "on order"}, fault.headers)
            return
        for pattern, handler in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match is not None:
                handler(self, *(unquote(group or "") for group in match.groups()), query=parse_qs(url.query), body=body)
                return
        self._send(404, {"error": f"no such endpoint: {path}"})

    def _chunked(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(data)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repo(self, name: str) -> Repo | None:
        """The repository if the caller may see it; otherwise answers what the Hub answers."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._known):
            code = "RepoNotFound" if self._known else ""
            headers = {"X-Error-Message": "Repository not found", **({"X-Error-Code": code} if code else {})}
            self._send(404 if self._known else 401, {"error": "Repository not found"}, headers)
            return None
        if repo.gated and not self._known and self.command != "POST" and "/resolve/" in self.path:
            self._send(
                401, {"error": "gated"}, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            )
            return None
        return repo

    def _snapshot(self, name: str, revision: str) -> tuple[Repo, str] | None:
        repo = self._repo(name)
        if repo is None:
            return None
        oid = repo.find(revision)
        if oid is None:
            self._send(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repo, oid

    def whoami(self, query: Any, body: bytes) -> None:
        if self._known:
            self._send(200, {"name": "tester", "type": "user", "orgs": [], "auth": {}})
        else:
            self._send(401, {"error": "Invalid username or password."})

    def create(self, query: Any, body: bytes) -> None:
        asked = json.loads(body)
        if not self._known:
            self._send(401, {"error": "no token"})
            return
        name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        if name in self.hub.repos:
            self._send(409, {"error": "exists", "url": f"{self.hub.endpoint}/datasets/{name}"})
            return
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repos[name] = Repo(private=bool(private))
        self.hub.repos[name].commit("main", {".gitattributes": StoredFile(b"*.parquet filter=lfs\n", False)}, "initial")
        self._send(200, {"url": f"{self.hub.endpoint}/datasets/{name}", "name": name})

    def branch(self, name: str, branch: str, query: Any, body: bytes) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        if branch in repo.branches:
            self._send(409, {"error": "exists"})
            return
        repo.branches[branch] = repo.branches["main"]
        self._send(200, {})

    def info(self, name: str, revision: str, query: Any, body: bytes) -> None:
        found = self._snapshot(name, revision or "main")
        if found is not None:
            repo, oid = found
            files = [{"rfilename": path} for path in sorted(repo.snapshots[oid])]
            record = {
                "id": name,
                "sha": oid,
                "private": repo.private,
                "gated": repo.gated,
                "siblings": files,
                "tags": [],
            }
            self._send(200, {"_id": name, "disabled": False, "downloads": 0, "likes": 0, **record})

    def refs(self, name: str, query: Any, body: bytes) -> None:
        repo = self._repo(name)
        if repo is not None:
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": oid}
                for branch, oid in repo.branches.items()
            ]
            self._send(200, {"branches": branches, "tags": [], "converts": []})

    def tree(self, name: str, revision: str, folder: str, query: Any, body: bytes) -> None:
        found = self._snapshot(name, revision)
        if found is None:
            return
        files = found[0].snapshots[found[1]]
        prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = _entries(files, prefix, recursive)
        if prefix and not entries:
            self._send(404, {"error": "no such path"}, {"X-Error-Code": "EntryNotFound"})
            return
        self._send(200, entries)

    def paths_info(self, name: str, revision: str, query: Any, body: bytes) -> None:
        found = self._snapshot(name, revision)
        if found is None:
            return
        text = body.decode()
        asked = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        files = found[0].snapshots[found[1]]
        known = {entry["path"]: entry for entry in _entries(files, "", True)}
        self._send(200, [known[path] for path in asked if path in known])

    def preupload(self, name: str, revision: str, query: Any, body: bytes) -> None:
        found = self._snapshot(name, revision)
        if found is None:
            return
        files = found[0].snapshots[found[1]]
        answers = []
        for asked in json.loads(body)["files"]:
            mode = "lfs" if _is_large(asked["path"], asked["size"]) else "regular"
            known = files.get(asked["path"])
            answers.append(
                {
                    "path": asked["path"],
                    "uploadMode": mode,
                    "shouldIgnore": False,
                    "oid": None if known is None else known.etag,
                }
            )
        self._send(200, {"files": answers})

    def lfs_batch(self, name: str, query: Any, body: bytes) -> None:
        if self._repo(name) is None:
            return
        objects = []
        for asked in json.loads(body)["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                href = f"{self.hub.endpoint}/lfs-storage/{asked['oid']}"
                verify = f"{self.hub.endpoint}/lfs-verify"
                entry["actions"] = {"upload": {"href": href, "header": {}}, "verify": {"href": verify, "header": {}}}
            objects.append(entry)
        self._send(200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"})

    def lfs_put(self, oid: str, query: Any, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._send(400, {"error": "digest"})
            return
        self.hub.objects[oid] = body
        self.hub.uploads.append(len(body))
        self._send(200, b"", {"ETag": f'"{oid}"'})

    def lfs_verify(self, query: Any, body: bytes) -> None:
        self._send(200 if json.loads(body)["oid"] in self.hub.objects else 404, {})

    def validate_yaml(self, query: Any, body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def commit(self, name: str, revision: str, query: Any, body: bytes) -> None:
        found = self._snapshot(name, revision)
        if found is None:
            return
        repo, oid = found
        files = dict(repo.snapshots[oid])
        summary = ""
        for line in body.splitlines():
            record = json.loads(line)
            value = record["value"]
            if record["key"] == "header":
                summary = value["summary"]
            elif record["key"] == "file":
                files[value["path"]] = StoredFile(base64.b64decode(value["content"]), False)
            elif record["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    self._send(400, {"error": f"{value['path']}: its content was not uploaded"})
                    return
                files[value["path"]] = StoredFile(self.hub.objects[value["oid"]], True)
            elif record["key"] == "deletedFile":
                del files[value["path"]]
        new = repo.commit(revision, files, summary)
        url = f"{self.hub.endpoint}/datasets/{name}/commit/{new}"
        self._send(200, {"success": True, "commitOid": new, "commitUrl": url, "hookOutput": ""})

    def resolve(self, name: str, revision: str, path: str, query: Any, body: bytes) -> None:
        found = self._snapshot(name, revision)
        if found is None:
            return
        repo, oid = found
        file = repo.snapshots[oid].get(path)
        headers = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if file is None:
            self._send(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", **headers})
            return
        headers["ETag"] = f'"{file.etag}"'
        if file.lfs:
            headers |= {"X-Linked-Size": str(len(file.data)), "X-Linked-Etag": f'"{file.etag}"'}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            self._send(200, file.data, headers)
            return
        start, stop = int(match[1]), int(match[2] or len(file.data) - 1) + 1
        part = file.data[start:stop]
        headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(file.data)}"
        self._send(206, part, headers)


def _entries(files: dict[str, StoredFile], prefix: str, recursive: bool) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path, file in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        *folders, _ = path[len(prefix) :].split("/")
        for depth in range(1, len(folders) + 1):
            folder = prefix + "/".join(folders[:depth])
            if recursive or depth == 1:
                found[folder] = {"type": "directory", "path": folder, "oid": hashlib.sha1(folder.encode()).hexdigest()}
        if recursive or not folders:
            found[path] = file.info(path)
    return list(found.values())


_NAME = r"([^/]+/[^/]+)"
_ROUTES = [
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.validate_yaml),
    (rf"/api/datasets/{_NAME}", lambda self, name, **more: self.info(name, "main", **more)),
    (rf"/api/datasets/{_NAME}/revision/([^/]+)", _Handler.info),
    (rf"/api/datasets/{_NAME}/refs", _Handler.refs),
    (rf"/api/datasets/{_NAME}/branch/([^/]+)", _Handler.branch),
    (rf"/api/datasets/{_NAME}/tree/([^/]+)(/.*)?", _Handler.tree),
    (rf"/api/datasets/{_NAME}/paths-info/([^/]+)", _Handler.paths_info),
    (rf"/api/datasets/{_NAME}/preupload/([^/]+)", _Handler.preupload),
    (rf"/api/datasets/{_NAME}/commit/([^/]+)", _Handler.commit),
    (rf"/datasets/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"/lfs-storage/([0-9a-f]+)", _Handler.lfs_put),
    (r"/lfs-verify", _Handler.lfs_verify),
    (rf"/datasets/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
]


@contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN) -> Iterator[FakeHub]:
    """A running Hub that this process's huggingface_hub and datasets talk to; waiting is noted, not done."""
    import datasets
    import huggingface_hub
    from huggingface_hub.utils import close_session

    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    cache = tempfile.TemporaryDirectory(prefix="batchgen-hub-")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", f"{cache.name}/datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{cache.name}/hub")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", f"{cache.name}/token")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    close_session()
    try:
        yield hub
    finally:
        close_session()
        server.shutdown()
        server.server_close()
        cache.cleanup()
