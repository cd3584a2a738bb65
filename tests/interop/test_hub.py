"""Models by their name on the Hugging Face hub, from a local server with the hub's API."""

import json
import re
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants
from models import lively

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import train_bpe
from interop import load, save_hf
from interop.folder import DOWNLOADED_FILES, WEIGHTS_FILE
from interop.loading import find_path, pin_model
from variants import build_model

pytestmark = pytest.mark.slow
COMMIT, NAME = "0123456789abcdef" * 2 + "01234567", "owner/small"


class HubHandler(BaseHTTPRequestHandler):
    """Answers the requests with which huggingface_hub downloads one model."""

    def __init__(self, folder, requests, *args):
        self.folder = folder
        self.requests = requests
        super().__init__(*args)

    def do_GET(self):
        self.requests.append(self.path)
        path = self.path.partition("?")[0]
        file = re.fullmatch(rf"/{NAME}/resolve/{COMMIT}/([\w.-]+)", self.path)
        if file and (self.folder / file[1]).is_file():
            self.answer_file(file[1])
        elif path in (f"/api/models/{NAME}/revision/main", f"/api/models/{NAME}/revision/{COMMIT}"):
            self.answer_json(self.describe_model())
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            self.answer_json(self.list_files())
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def describe_model(self):
        return {
            "id": NAME,
            "sha": COMMIT,
            "siblings": [{"rfilename": file.name} for file in self.folder.iterdir()],
            "tags": [],
            "private": False,
            "downloads": 0,
            "likes": 0,
        }

    def list_files(self):
        return [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
            for file in self.folder.iterdir()
        ]

    def answer_file(self, name):
        body = (self.folder / name).read_bytes()
        self.answer(200, body, {"ETag": f'"{len(body):040x}"', "X-Repo-Commit": COMMIT})

    def answer_json(self, content):
        self.answer(200, json.dumps(content).encode())

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A folder to serve: a model with its tokenizer, and files that are not downloaded."""
    folder, tokenizer = tmp_path_factory.mktemp("hub") / "repo", train_bpe(["a glass model"], 300)
    save_hf(
        lively(
            build_model(
                GPTConfig(tokenizer.vocab_size, block_size=16, n_layer=1, n_head=2, n_embd=16)
            )
        ),
        folder,
        tokenizer,
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("pytorch_model.bin", "modeling.py", "consolidated.safetensors"):
        (folder / name).write_bytes(b"not downloaded")
    return folder


@pytest.fixture
def serve_hub(repository, tmp_path, monkeypatch):
    """Return a context manager that runs the server and gives a list of its requests."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def use_port(port):
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )

    use_port(9)  # where no server is

    @contextmanager
    def serve():
        requests = []
        handler = partial(HubHandler, repository, requests)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            use_port(server.server_port)
            Thread(target=server.serve_forever, daemon=True).start()
            yield requests
            server.shutdown()

    return serve


def test_a_name_is_pinned_to_its_commit_and_only_the_necessary_files_are_downloaded(
    serve_hub, repository, monkeypatch
):
    with serve_hub() as requests:
        pinned = pin_model(NAME)
        for name in (
            pinned,
            f"{NAME}/",
            f"https://huggingface.co/{NAME}/tree/main",
            f"hf://{NAME}",
        ):
            assert pin_model(name) == pinned == f"{NAME}@{COMMIT}"
    files = {path.name for path in find_path(pinned).iterdir()}
    texts = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files == {WEIGHTS_FILE, *texts} <= set(DOWNLOADED_FILES)
    assert not any(".bin" in path or ".py" in path for path in requests)
    model, tokenizer = load(pinned)
    original, _ = load(repository)
    assert all((a == b).all() for a, b in zip(model.parameters(), original.parameters()))
    assert tokenizer.encode("a glass")
    for offline in (False, True):  # the downloaded files suffice without the server
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert pin_model(NAME) == pinned == pin_model(pinned)


def test_a_model_that_the_hub_lacks_gives_one_sentence_with_the_cause(serve_hub):
    with serve_hub(), pytest.raises(UserError) as error:
        pin_model("owner/other")
    message = str(error.value)
    assert "init_from=owner/other " in message and "RepositoryNotFoundError" in message
    assert "\n" not in message
