"""Several processes under a real torchrun: restarts, and clean ends."""

import os
import signal
import sys

import pytest
from processes import Process, fault_at_call
from ranks import train_in_fork, trained
from test_distributed import assert_same_steps, odd
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import training.device


@pytest.mark.soak
def test_after_a_process_is_killed_torchrun_goes_on_from_the_last_checkpoint(tmp_path, text_file):
    """By its agent, whose processes are forks of this one."""
    argv = odd(text_file, "optim.name=muon", "resume=auto")

    def work():
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            fault_at_call(
                training.device, "seed_micro_step", 8, lambda: os.kill(os.getpid(), signal.SIGKILL)
            )()
        train_in_fork(argv)

    def launch():
        elastic_launch(
            LaunchConfig(
                1,
                1,
                2,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=1,
                start_method="fork",
            ),
            work,
        )()
        sys.exit()

    torchrun = Process(tmp_path, fault=launch)
    assert torchrun.wait() == 0, torchrun.output()
    assert torchrun.output().count("error: another process of the run has ended") == 1
    assert torchrun.output().count("resuming at step 5") == 1
    trained(tmp_path, 1, *argv, "run_dir=one")
    assert_same_steps(tmp_path / "one", tmp_path / "run")
