"""A small Hub on loopback: it serves one kernel repository, branch v1, from a folder with build variants.

It answers what `kernels` and huggingface_hub ask when they load or download a kernel, and notes every request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/optimizer"
COMMIT = hashlib.sha1(b"the only commit").hexdigest()
REVISIONS = (COMMIT, "v1", "refs/heads/v1", "main")


class Hub(ThreadingHTTPServer):
    """The server; `requests` counts (method, path), `url` is what HF_ENDPOINT has to name."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, build: Path, trusted: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.trusted = trusted
        self.requests: Counter = Counter()
        paths = [path for path in sorted(build.rglob("*")) if "__pycache__" not in path.parts]
        self.files = {f"build/{p.relative_to(build).as_posix()}": p.read_bytes() for p in paths if p.is_file()}

    def tree(self, folder: str, recursive: bool) -> list[dict]:
        """List `folder` ("" or "a/b") as the Hub does: files with size and oid, and directories."""
        prefix = f"{folder}/" if folder else ""
        entries = {}
        for path, data in self.files.items():
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts)):
                name = prefix + "/".join(parts[:depth])
                entries[name] = {"type": "directory", "path": name, "oid": _oid(name.encode()), "size": 0}
            entries[path] = {"type": "file", "path": path, "oid": _oid(data), "size": len(data)}
        return [entry for name, entry in entries.items() if recursive or "/" not in name[len(prefix) :]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path).strip("/")
        self.server.requests[self.command, path] += 1
        kernel = f"api/kernels/{REPOSITORY}"
        if path == f"api/organizations/{REPOSITORY.split('/')[0]}/overview":
            publisher = {"name": "org", "fullname": "org", "avatarUrl": ""}
            self._json({**publisher, "trustedKernelPublisher": self.server.trusted})
        elif path == f"{kernel}/refs":
            branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": COMMIT} for name in ("main", "v1")]
            self._json({"branches": branches, "converts": [], "tags": []})
        elif path.startswith(f"{kernel}/revision/"):
            self._json({"id": REPOSITORY, "sha": COMMIT, "private": False})
        elif path.startswith(f"{kernel}/tree/"):
            self._tree(path.removeprefix(f"{kernel}/tree/"), "recursive=true" in url.query.lower())
        elif path.startswith(f"kernels/{REPOSITORY}/resolve/"):
            self._file(path.removeprefix(f"kernels/{REPOSITORY}/resolve/"))
        else:
            self._error("RepoNotFound")

    do_HEAD = do_GET

    def _tree(self, rest: str, recursive: bool) -> None:
        revision, folder = _split_revision(rest)
        entries = self.server.tree(folder, recursive) if revision else []
        self._json(entries) if entries else self._error("EntryNotFound" if revision else "RevisionNotFound")

    def _file(self, rest: str) -> None:
        revision, path = _split_revision(rest)
        data = self.server.files.get(path)
        if revision is None or data is None:
            self._error("EntryNotFound" if revision else "RevisionNotFound")
        else:
            self._send(200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing: `requests` is the log."""


def _split_revision(rest: str) -> tuple[str | None, str]:
    for revision in REVISIONS:
        if rest == revision or rest.startswith(f"{revision}/"):
            return revision, rest.removeprefix(revision).strip("/")
    return None, ""


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def serve(build: Path, trusted: bool = True) -> Iterator[Hub]:
    """Serve the variants under `build` as org/optimizer, branch v1, from a trusted publisher or not."""
    hub = Hub(build, trusted)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
