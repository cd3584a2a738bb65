"""A W&B server that hangs, fails or dies neither stops nor slows training."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from processes import Process, fault_at_call, rows, tiny_arguments

import training.device

BUCKET = {
    "id": "b",
    "name": "r",
    "displayName": "r",
    "config": "{}",
    "summaryMetrics": "{}",
    "sweepName": None,
    "historyLineCount": 0,
    "project": {"id": "p", "name": "glassgpt", "entity": {"id": "e", "name": "me"}},
}
INFO = {"cliVersionInfo": {"max_cli_version": "0.99"}, "features": []}
VIEWER = {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}


class Answer(BaseHTTPRequestHandler):
    """A server that answers well, with status 500 (broken) or never (silent): see `manner`."""

    def _answer(self):
        self.server.asked += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.manner == "silent":
            time.sleep(600)
        self.send_response(200 if self.server.manner == "well" else 500)
        answer = {"viewer": VIEWER, "serverInfo": INFO, "model": {"bucket": None}, "project": None}
        if b"mutation" in body:
            answer["upsertBucket"] = {"bucket": BUCKET, "inserted": True}
        text = json.dumps({"data": answer} if self.path.startswith("/graphql") else {}).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = _answer

    def log_message(self, *args):
        pass


@contextmanager
def serving(manner: str):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.manner, server.asked = manner, 0
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        yield server
        server.shutdown()


def train_online(tmp_path, text_file, monkeypatch, port, fault=lambda: None) -> None:
    """Train with a server, and check that nothing is missing and that the run was not slowed."""
    for name, value in (
        ("WANDB_API_KEY", "0" * 40),
        ("WANDB_BASE_URL", f"http://127.0.0.1:{port}"),
        ("no_proxy", "127.0.0.1"),
        ("WANDB_INIT_TIMEOUT", "1"),
        ("WANDB_FINISH_TIMEOUT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE")

    process = Process(
        tmp_path,
        *tiny_arguments(text_file, "wandb.mode=online", "attention.every=0"),
        fault=fault,
    )
    assert process.wait(120) == 0 and "Traceback" not in process.output(), process.output()
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(13))
    assert rows(tmp_path / "run")[-1]["train_seconds"] < 30  # waiting for the server takes longer


@pytest.mark.parametrize("manner", ["silent", "broken", "absent"])
def test_a_server_that_does_not_answer_delays_only_the_start(
    tmp_path, text_file, monkeypatch, manner
):
    with serving(manner) as server:
        port = 9 if manner == "absent" else server.server_port
        train_online(tmp_path, text_file, monkeypatch, port)
        assert server.asked or manner == "absent"
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("manner", ["silent", "broken"])
def test_a_server_that_dies_during_a_run_neither_stops_nor_slows_it(
    tmp_path, text_file, monkeypatch, manner
):
    with serving("well") as server:
        dies = tmp_path / "dies"

        def die():
            dies.touch()
            time.sleep(1)

        def watch():
            while not dies.exists():
                time.sleep(0.05)
            server.manner = manner

        threading.Thread(target=watch, daemon=True).start()
        train_online(
            tmp_path,
            text_file,
            monkeypatch,
            server.server_port,
            fault_at_call(training.device, "seed_micro_step", 5, die),
        )
    assert not list((tmp_path / "run" / "wandb").glob("offline-run-*"))
