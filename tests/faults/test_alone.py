"""No network, key, compiler, GPU, HOME or terminal, a read-only HOME, no stdout: training and
sampling finish. And whatever is asked of sampling is a text or a sentence."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, TINY
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from processes import drop_privileges, rows

from common.errors import UserError
from config import SampleConfig
from sample import sample

pytestmark = pytest.mark.slow
NOTHING = {
    "PATH": "",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "CUDA_VISIBLE_DEVICES": "",
    "WANDB_MODE": None,
    "CXX": None,
    "TERM": None,
    "XDG_CACHE_HOME": None,
    "XDG_CONFIG_HOME": None,
    "MPLCONFIGDIR": None,
    "TMPDIR": None,
}
QUICK = [
    *TINY,
    "data=text",
    "run_dir=run",
    "max_steps=1",
    "eval.every=0",
    "attention.every=0",
    "attention.tokens=16",
]


@pytest.mark.soak
@pytest.mark.parametrize("home", ["read-only", None, "/nowhere"])
def test_with_nothing_around_it_a_run_finishes_and_is_sampled_from(
    new_command, tmp_path, text_file, home
):
    (tmp_path / "home").mkdir(mode=0o555)
    env = NOTHING | {"HOME": str(tmp_path / "home") if home == "read-only" else home}
    more = {"env": env, "preexec_fn": drop_privileges}
    argv = [word for word in QUICK if word != "compile=false"]
    done = new_command("train.py", *argv, f"data.path={text_file}", **more)
    assert done.returncode == 0, done.stderr
    assert "eager" in done.stdout and "recorded offline" in done.stdout
    assert rows(tmp_path / "run")[-1]["step"] == 1
    said = new_command("sample.py", "run_dir=run", "max_new_tokens=5", **more)
    assert said.returncode == 0 and said.stdout, said.stderr


@pytest.mark.soak
def test_with_no_stdout_and_no_stderr_a_run_finishes(tmp_path, text_file):
    argv = " ".join(f"'{word}'" for word in [*QUICK, f"data.path={text_file}"])
    done = subprocess.run(
        f"exec '{sys.executable}' '{ROOT}/train.py' {argv} <&- >&- 2>&-",
        shell=True,
        cwd=tmp_path,
        env=os.environ,
    )
    assert done.returncode == 0 and rows(tmp_path / "run")[-1]["step"] == 1


numbers = st.floats(0, 1e308) | st.sampled_from([5e-324, 1e-30, 1.0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(asked={"temperature": 1e30, "top_k": 3, "top_p": 0.5, "min_p": 0.5})
@example(asked={"top_p": 1e-300, "seed": 2**63})
@example(asked={"prompt": "the glass " * 500})
@given(
    asked=st.fixed_dictionaries(
        {},
        optional={
            "temperature": numbers,
            "top_k": st.integers(1, 10**18),
            "top_p": st.floats(0, 1),
            "min_p": st.floats(0, 1),
            "seed": st.integers(0, 2**63),
            "prompt": st.text(max_size=80).filter(lambda text: text != "-"),
        },
    )
)  # which is stdin
def test_whatever_is_asked_for_is_a_text_or_a_sentence(finished_run, capsys, asked):
    config = SampleConfig(run_dir=str(finished_run), max_new_tokens=4, checkpoint="last", **asked)
    try:
        config.check()
        sample(config)
    except UserError as e:
        assert "\n" not in str(e)
    else:
        assert len(capsys.readouterr().out) == 5
