"""explore.py serves the page of any model, and reports mistakes before it serves."""

import shlex
import shutil
import signal

import numpy as np
import pytest
from explore_process import SECONDS, exploring

import cli
from cli.explore_config import ExploreConfig, translate_model
from common.errors import UserError

TEXT = "the glass model attends"


def explore_config(*argv: str) -> ExploreConfig:
    return cli.read_settings(translate_model(argv), ExploreConfig, "python explore.py")


@pytest.mark.parametrize("argument", ["model.gguf", "owner/name", "~/models/x", "a=b/run"])
def test_a_model_needs_no_name_of_a_setting(argument, tmp_path, monkeypatch):
    (tmp_path / "a=b" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert explore_config(argument, "port=8000") == ExploreConfig(init_from=argument, port=8000)


def test_a_text_that_is_no_model_is_offered_as_the_prompt():
    for text in ("ROMEO:", "x = 1/2", 'He said "no"'):
        with pytest.raises(UserError) as error:
            explore_config(text)
        assert f"prompt={shlex.quote(text)}" in str(error.value)


@pytest.mark.parametrize(
    "argv, name",
    [
        ([], "runs/"),
        (["a.gguf", "b.gguf"], "b.gguf"),
        (["run_dir=run", "checkpoint=999"], "999"),
        (["run_dir=run", "prompt=日"], "日"),
        (["run_dir=run", "steps=99,"], "step 99"),
        (["run_dir=run", "steps=1"], "steps=1"),
        (["run_dir=run", "steps=all", "checkpoint=last"], "checkpoint=last"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_served(
    finished_run, command, tmp_path, argv, name
):
    shutil.copytree(finished_run, tmp_path / "run")
    done = command("explore.py", *argv, "browser=false")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and name in last
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_page_of_a_run_shows_its_last_checkpoint_and_scores(finished_run, tmp_path):
    with exploring(tmp_path, f"run_dir={finished_run}") as explorer:
        data = explorer.data()
        assert (data["kind"], data["title"]) == ("explore", "run")
        assert (data["step"], data["maxSteps"], data["shape"]) == (12, 12, [2, 2])
        assert data["scored"]["steps"] == [12] and not data["server"]["unmeasured"]
        snapshot = np.load(finished_run / "attention" / "step_00000012.npz")
        assert data["server"]["prompt"] == "".join(snapshot["text_tokens"])
        ids = explorer.ask("encode", text=TEXT)
        assert len(explorer.ask("read", ids=ids, step=12)["losses"]) == len(ids)


@pytest.mark.slow
def test_ctrl_c_ends_a_request_that_is_being_answered(finished_run, tmp_path):
    with exploring(tmp_path, f"run_dir={finished_run}") as explorer:
        ids = explorer.ask("encode", text=TEXT)
        body = {"request": "continue", "ids": ids, "step": 12, "maxTokens": 1000}
        with explorer.post(body) as response:
            assert response.read(8)
            explorer.signal(signal.SIGINT)
            assert explorer.wait(SECONDS) == 130
