"""A run on two machines, as docs/distributed.md starts it, survives the loss of one of them.

A machine is an agent of torchrun with its processes.
"""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

from conftest import ROOT
from processes import assert_same_run
from ranks import free_port, odd, trained


def documented_command(port: int) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the options of torchrun that docs/distributed.md gives machines.

    The number of processes and the meeting point are those of this test.
    """
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    section = page.partition("## Two machines")[2]
    script = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1].replace("\\\n", " ")
    variables = dict(re.findall(r"^export (\w+)=(\S+)", script, re.MULTILINE))
    command = re.search("^torchrun (.*) train.py .*", script, re.MULTILINE)[1]
    replaced = {"--nproc-per-node": "1", "--rdzv-endpoint": f"localhost:{port}"}
    options = [option.partition("=") for option in shlex.split(command)]
    return variables, [f"{name}={replaced.get(name, value)}" for name, _, value in options]


def test_the_documented_command_of_two_machines_survives_the_loss_of_one(
    request, tmp_path, text_file
):
    changed = ("run_dir=", "data.", "tokenizer.", "max_steps=", "eval.every=", "checkpoint.every=")
    settings = [setting for setting in odd(text_file) if not setting.startswith(changed)]
    argv = [*settings, "data=text", f"data.path={text_file}", "tokenizer=char"]
    argv += ["max_steps=400", "eval.every=50", "checkpoint.every=50"]
    variables, options = documented_command(free_port())

    def start(is_host: bool) -> subprocess.Popen:
        """Both agents are on this machine, so that host names do not tell which one hosts."""
        host = [f"{option},is_host={is_host}" for option in options if "--rdzv-conf" in option]
        training_command = [str(ROOT / "train.py"), *argv, "run_dir=run", "resume=auto"]
        agent = subprocess.Popen(
            ["torchrun", *options, *host, *training_command],
            cwd=tmp_path,
            env=os.environ | variables,
        )
        request.addfinalizer(agent.terminate)
        return agent

    first, lost = start(is_host=True), start(is_host=False)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 100:
        assert first.poll() is None and lost.poll() is None
        time.sleep(0.01)
    workers = Path(f"/proc/{lost.pid}/task/{lost.pid}/children").read_text().split()
    for pid in [lost.pid, *map(int, workers)]:
        os.kill(pid, signal.SIGKILL)

    replacement = start(is_host=False)
    assert [first.wait(300), replacement.wait(300)] == [0, 0]
    trained(tmp_path, 2, *argv, "run_dir=undisturbed", script=True)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "run", 400)
