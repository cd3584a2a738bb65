"""Training and sampling work without network, key, compiler, GPU, HOME or terminal.

Sampling settings give a text or a one-line error, whatever their values are.
"""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, TINY
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from processes import drop_privileges, rows

from cli.config_file import read_config
from cli.sample_config import SampleConfig
from common.errors import UserError
from sample import sample

pytestmark = pytest.mark.slow
BARE_ENVIRONMENT = {
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
def test_training_and_sampling_work_in_a_bare_environment(new_command, tmp_path, text_file, home):
    (tmp_path / "home").mkdir(mode=0o555)
    env = BARE_ENVIRONMENT | {"HOME": str(tmp_path / "home") if home == "read-only" else home}
    more = {"env": env, "preexec_fn": drop_privileges}
    argv = [word for word in QUICK if word != "compile=false"]
    done = new_command("train.py", *argv, f"data.path={text_file}", **more)
    assert done.returncode == 0, done.stderr
    assert not read_config(tmp_path / "run" / "config.yaml").compile
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert rows(tmp_path / "run")[-1]["step"] == 1
    sampled = new_command("sample.py", "run_dir=run", "max_new_tokens=5", **more)
    assert sampled.returncode == 0 and sampled.stdout, sampled.stderr


@pytest.mark.soak
def test_a_run_finishes_with_stdout_and_stderr_closed(tmp_path, text_file):
    argv = " ".join(f"'{word}'" for word in [*QUICK, f"data.path={text_file}"])
    done = subprocess.run(
        f"exec '{sys.executable}' '{ROOT}/train.py' {argv} <&- >&- 2>&-",
        shell=True,
        cwd=tmp_path,
        env=os.environ,
    )
    assert done.returncode == 0 and rows(tmp_path / "run")[-1]["step"] == 1


temperatures = st.floats(0, 1e308) | st.sampled_from([5e-324, 1e-30, 1.0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(options={"temperature": 1e30, "top_k": 3, "top_p": 0.5, "min_p": 0.5})
@example(options={"top_p": 1e-300, "seed": 2**63})
@example(options={"prompt": "the glass " * 500})
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "temperature": temperatures,
            "top_k": st.integers(1, 10**18),
            "top_p": st.floats(0, 1),
            "min_p": st.floats(0, 1),
            "seed": st.integers(0, 2**63),
            "prompt": st.text(max_size=80).filter(lambda text: text != "-"),  # which is stdin
        },
    )
)
def test_any_sampling_options_give_a_text_or_a_one_line_error(finished_run, capsys, options):
    config = SampleConfig(run_dir=str(finished_run), max_new_tokens=4, checkpoint="last", **options)
    try:
        config.check()
        sample(config)
    except UserError as e:
        assert "\n" not in str(e)
    else:
        assert len(capsys.readouterr().out) == 5
