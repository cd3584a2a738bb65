"""Models by their name on the hub, from a server here that speaks the hub's API."""

import json
import re
import shutil
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants
from models import lively

from cli.config_file import read_config
from common.errors import UserError
from config import GPTConfig
from data.tokenizer import train_bpe
from interop import load, save_hf
from interop.hub import FILES, WEIGHTS, fetched, folder_of
from model import GPT

pytestmark = pytest.mark.slow
COMMIT, NAME = "0123456789abcdef" * 2 + "01234567", "owner/small"


class Hub(BaseHTTPRequestHandler):
    """The calls of the hub's API by which a model is fetched, for one model."""

    def __init__(self, folder, asked, *args):
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def do_GET(self):
        self.asked.append(self.path)
        found = re.fullmatch(rf"/{NAME}/resolve/{COMMIT}/([\w.-]+)", self.path)
        path, files = self.path.partition("?")[0], list(self.folder.iterdir())
        if found and (self.folder / found[1]).is_file():
            self.give_file(found[1])
        elif path in (f"/api/models/{NAME}/revision/main", f"/api/models/{NAME}/revision/{COMMIT}"):
            self.answer(
                200,
                json.dumps(
                    {
                        "id": NAME,
                        "sha": COMMIT,
                        "siblings": [{"rfilename": f.name} for f in files],
                        "tags": [],
                        "private": False,
                        "downloads": 0,
                        "likes": 0,
                    }
                ).encode(),
            )
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            self.answer(
                200,
                json.dumps(
                    [
                        {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                        for f in files
                    ]
                ).encode(),
            )
        else:
            kind = (
                "GatedRepo"
                if "gated" in path
                else ("RevisionNotFound" if NAME in path else "RepoNotFound")
            )
            self.answer(403 if kind == "GatedRepo" else 404, b"{}", {"X-Error-Code": kind})

    do_HEAD = do_GET

    def give_file(self, name):
        body = (self.folder / name).read_bytes()
        self.answer(200, body, {"ETag": f'"{len(body):040x}"', "X-Repo-Commit": COMMIT})

    def answer(self, status, body, more=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(more or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """What the server has: a model with its tokenizer, and files that are not to be fetched."""
    folder, tokenizer = tmp_path_factory.mktemp("hub") / "repo", train_bpe(["a glass model"], 300)
    save_hf(
        lively(GPT(GPTConfig(tokenizer.vocab_size, block_size=16, n_layer=1, n_head=2, n_embd=16))),
        folder,
        tokenizer,
    )
    for name in ("pytorch_model.bin", "modeling.py", "consolidated.safetensors"):
        (folder / name).write_bytes(b"not for us")
    return folder


@pytest.fixture
def served(repository, tmp_path, monkeypatch):
    """served() runs the server, and gives the requests that came."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def ask(port):
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )

    ask(9)  # where nobody answers

    @contextmanager
    def serve():
        asked = []
        handler = partial(Hub, repository, asked)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            ask(server.server_port)
            Thread(target=server.serve_forever, daemon=True).start()
            yield asked
            server.shutdown()

    return serve


def test_a_name_becomes_the_commits_folder_and_only_what_is_needed_is_fetched(
    served, repository, monkeypatch
):
    with served() as asked:
        pinned = fetched(NAME)
        assert pinned == f"{NAME}@{COMMIT}" and fetched(pinned) == pinned
    got = {path.name for path in folder_of(pinned).iterdir()}
    assert got == {WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert got <= set(FILES) and not any(".bin" in line or ".py" in line for line in asked)
    model, tokenizer = load(pinned)
    again, _ = load(repository)
    assert all((a == b).all() for a, b in zip(model.parameters(), again.parameters()))
    assert tokenizer.encode("a glass")
    for offline in (False, True):  # the server is gone: what was fetched is enough
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert fetched(NAME) == pinned == fetched(pinned)


@pytest.mark.parametrize(
    "name, why",
    [
        ("owner/other", "RepositoryNotFoundError"),
        (f"{NAME}@{'f' * 40}", "RevisionNotFoundError"),
        ("owner/gated", "GatedRepoError"),
    ],
)
def test_what_the_hub_has_not_is_a_sentence(name, why, served):
    with served(), pytest.raises(UserError, match=why) as error:
        fetched(name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_without_a_network_a_name_is_a_sentence_and_a_folder_works(
    served, repository, monkeypatch, tmp_path
):
    with pytest.raises(UserError, match="is no folder here, and could not be fetched"):
        fetched(NAME)
    shutil.copytree(repository, tmp_path / "owner" / "small")
    monkeypatch.chdir(tmp_path)
    for typed in ("runs/mine", "./small", "owner/smal"):  # which are paths, and not on the hub
        with pytest.raises(UserError, match=rf"init_from={typed} does not exist"):
            fetched(typed)
    assert fetched(NAME) == NAME and load(folder_of(NAME))[0].config.n_layer == 1


@pytest.mark.soak
def test_a_run_from_a_name_keeps_the_commit_and_goes_on_without_the_hub(
    served, repository, text_file, new_command, tmp_path
):
    settings = [
        "data=text",
        f"data.path={text_file}",
        "run_dir=run",
        "batch_size=2",
        "attention.every=0",
        "compile=false",
        "optim.warmup_steps=0",
    ]
    with served():
        env = {
            "HF_ENDPOINT": constants.ENDPOINT,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": None,
        }
        done = new_command("train.py", f"init_from={NAME}", *settings, "max_steps=2", env=env)
        assert done.returncode == 0, done.stderr
        done = new_command("sample.py", f"init_from={NAME}", "prompt=a glass", env=env)
        assert done.returncode == 0 and f"{NAME}@{COMMIT}" in done.stderr, done.stderr
    assert read_config(tmp_path / "run" / "config.yaml").init_from == f"{NAME}@{COMMIT}"
    shutil.rmtree(tmp_path / "home")
    done = new_command("train.py", "run_dir=run", "resume=true", "max_steps=3", env=env)
    assert done.returncode == 0, done.stderr
