"""A local HTTP server of files, which can be told to misbehave, and to speak as much of the Hub's API as is used."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

COMMIT = "c0ffee" * 6 + "c0de"


@dataclass
class FileServer:
    """What a server serves, and what it was asked.

    `break_after` ends an answer after so many bytes, once for each name in it; `stall_after` holds it there until
    `go_on` is set. `redirects` maps a path to a URL; `models` are the Hub's, by id.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    break_after: dict[str, int] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    stall_after: dict[str, int] = field(default_factory=dict)
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    ranges: bool = True
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range of each request."""
    tokens: list[str | None] = field(default_factory=list)
    """What each request had as Authorization."""

    def publish(self, repo: str, files: dict[str, bytes]) -> None:
        """Makes a model of the Hub."""
        self.models[repo] = files
        self.files.update({f"/{repo}/resolve/{COMMIT}/{name}": data for name, data in files.items()})

    def gets(self) -> list[str]:
        """The last parts of the paths that were read."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET"]

    def answer_api(self, path: str) -> bytes | None:
        """What the Hub says of a model."""
        repo = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        files = self.models.get(repo.partition("?")[0])
        if not path.startswith("/api/models/") or files is None:
            return None
        siblings = []
        for name, data in files.items():
            sibling = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if name.endswith((".safetensors", ".gguf", ".bin")):
                sha256 = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 134}
            siblings.append(sibling)
        return json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}).encode()


class _Handler(BaseHTTPRequestHandler):
    served: ClassVar[FileServer]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.served.requests.append((self.command, self.path, self.headers.get("Range")))
        self.served.tokens.append(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        if path in self.served.redirects:
            self._send(302, b"", {"Location": self.served.redirects[path]}, body=body)
            return
        data = self.served.files.get(path, self.served.answer_api(self.path))
        if data is None or path in self.served.status:
            status = self.served.status.get(path, 404)
            self._send(status, b"no", {"X-Error-Code": "RepoNotFound"} if status == 404 else {}, body=body)
            return
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"', "Content-Type": "application/json"}
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        if start and self.served.ranges:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], headers, body=body)
        else:
            self._send(200, data, headers, body=body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        stall = self.served.stall_after.pop(self.path.rpartition("/")[2], None)
        if stall is not None:
            self.wfile.write(data[:stall])
            self.served.stalled.set()
            self.served.go_on.wait(120)
            self.close_connection = True
            return
        limit = self.served.break_after.pop(self.path.rpartition("/")[2], None)
        self.wfile.write(data if limit is None else data[:limit])
        if limit is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serve_files() -> Iterator[FileServer]:
    """Serves on a free port of this machine."""
    served = FileServer()
    handler = type("Handler", (_Handler,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        served.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def keep_snapshot(hub_cache: Path, repo: str, files: Mapping[str, bytes]) -> Path:
    """Puts a model into the cache of huggingface_hub, laid out as it does itself; returns the snapshot."""
    root = hub_cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for name, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot
