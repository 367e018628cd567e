"""A small stand-in for the Hugging Face Hub's HTTP interface, in a thread: what huggingface_hub calls to push and to load.

It checks what the real one checks: tokens and namespaces, visibility and gates, the sha256 and size of every large file as
its bytes arrive, that a commit names only large files that were uploaded, and that the model card's front matter is YAML.
Faults can be planted: `hub.fail("POST", "/commit/", 500, times=1)`. Every request is kept in `hub.requests`.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


@dataclass
class Repo:
    private: bool
    gated: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of those that are not main."""
    tags: dict[str, str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: [hashlib.sha1(b"root").hexdigest()])

    def of(self, branch: str) -> dict[str, bytes]:
        if branch != "main" and branch not in self.branches:
            raise _refuse(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        return self.files if branch == "main" else self.branches[branch]

    def oid(self, path: str, branch: str = "main") -> str:
        data = self.of(branch)[path]
        blob = b"blob %d\0" % len(data) + data
        return hashlib.sha256(data).hexdigest() if path in self.large else hashlib.sha1(blob).hexdigest()


class HubStandin:
    """`with HubStandin() as hub:` gives `hub.endpoint`. Tokens are given as {token: namespaces it may write}."""

    def __init__(self, tokens: dict[str, list[str]] | None = None):
        self.tokens = tokens or {"hf_goodtoken": ["me"]}
        self.repos: dict[str, Repo] = {}
        self.store: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[list] = []
        self.lock = threading.Lock()

    def fail(self, method: str, part: str, status: int, times: int = 1) -> None:
        self.faults.append([method, part, status, times])

    def __enter__(self) -> "HubStandin":
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Answer(Exception):
    def __init__(self, status: int, body=None, headers: dict | None = None):
        self.status, self.body, self.headers = status, body, headers or {}


def _refuse(status: int, code: str | None = None, message: str | None = None) -> _Answer:
    headers = {"X-Error-Code": code} if code else {}
    return _Answer(status, {"error": message or code}, headers | ({"X-Error-Message": message} if message else {}))


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandin
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_) -> None:
        pass

    def _serve(self) -> None:
        self.body = self._read_body()
        self.path_only = unquote(urlsplit(self.path).path)
        try:
            with self.hub.lock:
                self.hub.requests.append(f"{self.command} {self.path_only}")
                self._plant_fault()
                self._route()
        except _Answer as answer:
            self._reply(answer)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _reply(self, answer: _Answer) -> None:
        data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for key, value in ({"Content-Length": str(len(data))} | answer.headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _plant_fault(self) -> None:
        for fault in self.hub.faults:
            if fault[0] == self.command and fault[1] in self.path_only and fault[3] > 0:
                fault[3] -= 1
                raise _refuse(fault[2], message="planted fault")

    def _route(self) -> None:
        routes = [
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", self._validate_yaml),
            ("POST", r"/api/models/(.+)/preupload/([^/]+)", self._preupload),
            ("POST", r"/api/models/(.+)/branch/([^/]+)", self._branch),
            ("POST", r"/api/models/(.+)/tag/([^/]+)", self._tag),
            ("GET", r"/api/models/(.+)/refs", self._refs),
            ("POST", r"/(.+)\.git/info/lfs/objects/batch", self._batch),
            ("PUT", r"/store/([0-9a-f]{64})", self._put),
            ("POST", r"/store/([0-9a-f]{64})/verify", self._verify),
            ("POST", r"/api/models/(.+)/commit/([^/]+)", self._commit),
            ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", self._tree),
            ("GET", r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            ("HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            ("GET", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ]
        for method, pattern, answer in routes:
            match = re.fullmatch(pattern, self.path_only)
            if method == self.command and match:
                raise answer(*match.groups())
        raise _refuse(404, message=f"the stand-in has no {self.command} {self.path_only}")

    # who

    def _namespaces(self) -> list[str]:
        """What the caller may write; [] without a token. Answers 401 for a token that is not known."""
        header = self.headers.get("Authorization", "")
        if not header:
            return []
        token = header.removeprefix("Bearer ")
        if token not in self.hub.tokens:
            raise _refuse(401, message="Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    def _readable(self, repo_id: str, content: bool = False) -> Repo:
        mine = self._namespaces()
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and repo_id.split("/")[0] not in mine):
            raise _refuse(404 if mine else 401, "RepoNotFound", "Repository not found")
        if content and repo.gated and repo_id.split("/")[0] not in mine:
            raise _refuse(403 if mine else 401, "GatedRepo", f"Access to model {repo_id} is restricted.")
        return repo

    def _writable(self, repo_id: str) -> Repo:
        repo = self._readable(repo_id)
        if repo_id.split("/")[0] not in self._namespaces():
            raise _refuse(403, message="Forbidden: pass a token with write access")
        return repo

    # push

    def _create(self) -> _Answer:
        mine, asked = self._namespaces(), json.loads(self.body)
        if not mine:
            return _refuse(401, message="Invalid username or password.")
        owner = asked["organization"] or mine[0]
        repo_id = f"{owner}/{asked['name']}"
        url = {"url": f"{self.hub.endpoint}/{repo_id}"}
        if owner not in mine:
            return _refuse(403, message=f'You don\'t have the rights to create a model under the namespace "{owner}"')
        if repo_id in self.hub.repos:
            return _Answer(409, url | {"error": "You already created this model repo"})
        self.hub.repos[repo_id] = Repo(private=asked.get("visibility") == "private")
        return _Answer(200, url)

    def _validate_yaml(self) -> _Answer:
        content = json.loads(self.body)["content"]
        front = re.match(r"---\n(.*?)\n---\n", content, re.S)
        card = yaml.safe_load(front.group(1)) if front else {}
        bad = [key for key in ("tags",) if not isinstance(card.get(key), list)]
        errors = [{"message": f'"{key}" must be an array'} for key in bad]
        return _Answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _branch(self, repo_id: str, name: str) -> _Answer:
        repo = self._writable(repo_id)
        if name == "main" or name in repo.branches:
            return _refuse(409, message=f"Reference already exists: {name}")
        repo.branches[name] = dict(repo.files)
        return _Answer(200, {})

    def _tag(self, repo_id: str, commit: str) -> _Answer:
        repo, name = self._writable(repo_id), json.loads(self.body)["tag"]
        if name in repo.tags or commit not in repo.commits:
            return _refuse(409, message=f"Tag reference exists already or names no commit: {name}")
        repo.tags[name] = commit
        return _Answer(200, {})

    def _refs(self, repo_id: str) -> _Answer:
        repo = self._readable(repo_id)
        tags = [{"name": name, "ref": f"refs/tags/{name}", "targetCommit": commit} for name, commit in repo.tags.items()]
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": repo.commits[-1]} for name in ("main", *repo.branches)
        ]
        return _Answer(200, {"branches": branches, "tags": tags, "converts": []})

    def _preupload(self, repo_id: str, branch: str) -> _Answer:
        repo, files = self._writable(repo_id), json.loads(self.body)["files"]
        rows = []
        for file in files:
            path, large = file["path"], file["path"].endswith(".safetensors") or file["size"] > 10_000_000
            oid = repo.oid(path, branch) if path in repo.of(branch) else None
            rows.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid})
        return _Answer(200, {"files": rows})

    def _batch(self, repo_id: str) -> _Answer:
        self._writable(repo_id)
        rows = []
        for item in json.loads(self.body)["objects"]:
            href = f"{self.hub.endpoint}/store/{item['oid']}"
            actions = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            rows.append(item if item["oid"] in self.hub.store else item | {"actions": actions})
        return _Answer(200, {"transfer": "basic", "objects": rows})

    def _put(self, oid: str) -> _Answer:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return _refuse(400, message="BadDigest: the bytes do not have the sha256 that was announced")
        self.hub.store[oid] = self.body
        return _Answer(200, b"")

    def _verify(self, oid: str) -> _Answer:
        good = len(self.hub.store.get(oid, b"")) == json.loads(self.body)["size"]
        return _Answer(200, {}) if good else _refuse(400, message="size differs")

    def _commit(self, repo_id: str, branch: str) -> _Answer:
        repo = self._writable(repo_id)
        rows = [json.loads(line) for line in self.body.splitlines() if line]
        assert rows[0]["key"] == "header" and rows[0]["value"]["summary"]
        files, large = dict(repo.of(branch)), set(repo.large)
        for row in rows[1:]:
            path = row["value"]["path"]
            if row["key"] == "lfsFile":
                oid = row["value"]["oid"]
                if oid not in self.hub.store:
                    return _refuse(400, message=f"{path} points to a large file that was never uploaded")
                files[path] = self.hub.store[oid]
                large.add(path)
            elif row["key"] == "file":
                files[path] = base64.b64decode(row["value"]["content"])
            else:
                return _refuse(400, message=f"unknown operation {row['key']}")
        repo.of(branch).update(files)
        repo.large = large
        repo.commits.append(hashlib.sha1(repo.commits[-1].encode() + self.body).hexdigest())
        return _Answer(
            200, {"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{repo.commits[-1]}", "commitOid": repo.commits[-1]}
        )

    # load

    def _revision(self, repo: Repo, revision: str | None) -> str:
        if revision in (None, "main", repo.commits[-1], *repo.branches):
            return repo.commits[-1]
        raise _refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def _info(self, repo_id: str, revision: str | None = None) -> _Answer:
        repo = self._readable(repo_id)
        info = {"_id": "0", "id": repo_id, "modelId": repo_id, "sha": self._revision(repo, revision), "private": repo.private}
        gate = "manual" if repo.gated else False
        return _Answer(200, info | {"gated": gate, "tags": [], "siblings": [{"rfilename": path} for path in repo.files]})

    def _tree(self, repo_id: str, revision: str, folder: str) -> _Answer:
        repo = self._readable(repo_id, content=True)
        self._revision(repo, revision)
        if folder and not any(path.startswith(folder + "/") for path in repo.files):
            return _refuse(404, "EntryNotFound", f"{folder} does not exist")
        rows = []
        for path, data in repo.files.items():
            row = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            lfs = {"lfs": {"oid": repo.oid(path), "size": len(data), "pointerSize": 130}} if path in repo.large else {}
            rows += [row | lfs] if path.startswith(folder) else []
        return _Answer(200, rows)

    def _resolve(self, repo_id: str, revision: str, path: str) -> _Answer:
        repo = self._readable(repo_id, content=True)
        commit = {"X-Repo-Commit": self._revision(repo, revision)}
        if path not in repo.files:
            answer = _refuse(404, "EntryNotFound", "Entry not found")
            return _Answer(404, answer.body, answer.headers | commit)
        return _Answer(200, repo.files[path], commit | {"ETag": f'"{repo.oid(path)}"', "Accept-Ranges": "none"})
