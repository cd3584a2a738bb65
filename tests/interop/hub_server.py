"""An imitation of the Hugging Face hub: one model, whose branches are folders."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

API = "/api/models/owner/model/"


class HubServer(ThreadingHTTPServer):
    """Serves the folder of each branch at owner/model; a branch's commit is a hash of its name."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.branches = {path.name: path for path in sorted(root.iterdir())}
        self.commits = {commit(name): path for name, path in self.branches.items()}
        self.sent: Counter[str] = Counter()  # bytes by branch/file
        self.breaks_off = ""  # a file of which only the half arrives

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def commit(branch: str) -> str:
    return hashlib.sha1(branch.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == f"{API}refs":
            refs = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit(name)}
                for name in self.server.branches
            ]
            self._send_json({"branches": refs, "converts": [], "tags": []})
        elif path.startswith(f"{API}revision/"):
            self._send_json({"id": "owner/model", "sha": commit(path.split("/")[-1])})
        elif path.startswith(f"{API}tree/"):
            files = self.server.commits[path.split("/")[-1]].iterdir()
            self._send_json([describe(file) for file in files])
        elif path.startswith("/api/"):
            self.send_error(404)
        else:
            self._send_file(*path.split("/")[-2:])

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, commit: str, name: str) -> None:
        file = self.server.commits[commit] / name
        content = file.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        key = f"{file.parent.name}/{name}"
        breaks_off = key == self.server.breaks_off
        if start and breaks_off:
            return self.send_error(403)
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{describe(file)["oid"]}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            body = content[start : len(content) // 2 if breaks_off else None]
            self.server.sent[key] += len(body)
            self.wfile.write(body)
        return None

    def log_message(self, *arguments: object) -> None:
        pass


def describe(file: Path) -> dict:
    content = file.read_bytes()
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": file.name, "size": len(content), "oid": oid}


@contextmanager
def serve_hub(root: Path, monkeypatch) -> Iterator[HubServer]:
    """Serve the branches in a folder as owner/model, with an empty cache beside the folder."""
    from huggingface_hub import constants

    server = HubServer(root)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.address)
    for name, value in {
        "ENDPOINT": server.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(root.with_name("cache")),
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": 1000,
    }.items():
        monkeypatch.setattr(constants, name, value)
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
