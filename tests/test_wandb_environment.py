"""Variables of W&B that name one run, or give it values, never make its record differ from it."""

import pytest
import yaml
from conftest import TINY

import cli
from cli.wandb_environment import ONE_RUN
from common.errors import UserError

SETTINGS = [
    *TINY,
    "wandb.mode=offline",
    "optim.lr=0.002",
    "wandb.project=None",
    "model=nanogpt_cpu",
    "data=shakespeare",
]


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Return a function that chooses values as a W&B sweep agent does."""

    def choose(values: dict) -> None:
        content = {"wandb_version": 1} | {key: {"value": value} for key, value in values.items()}
        (tmp_path / "chosen.yaml").write_text(yaml.safe_dump(content))
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(tmp_path / "chosen.yaml"))

    return choose


@pytest.mark.parametrize(
    "chosen", [{}, {"optim.lr": 0.002, "model": "nanogpt_cpu", "wandb.project": None}]
)
def test_a_run_begins_if_it_has_what_its_agent_chose(agent, chosen):
    agent(chosen)
    cli.read_job(SETTINGS, pytest.fail)


@pytest.mark.parametrize(
    "chosen",
    [
        {"optim.lr": 0.003},
        {"compile": None},
        {"model": "small"},
        {"learning_rate": 0.002},
        {"wandb.mode": "offline", "batch_size": 7},
    ],
)
def test_what_an_agent_chose_is_refused_unless_the_run_has_it(agent, chosen):
    agent(chosen)
    with pytest.raises(UserError, match=[*chosen][-1]):
        cli.read_job(SETTINGS, pytest.fail)


def test_what_an_agent_chose_does_not_matter_if_nothing_is_recorded(agent):
    agent({"seed": 1})
    for records_nothing in ("wandb.mode=disabled", "dry_run=true"):
        cli.read_job([*SETTINGS[:-4], records_nothing], pytest.fail)


@pytest.mark.parametrize("variable", ONE_RUN)
def test_a_variable_for_one_run_is_refused_in_a_sweep(
    offline_wandb, variable, monkeypatch, tmp_path, run_hydra, capsys
):
    monkeypatch.setenv(variable, "mine?_step=1" if variable.endswith("FROM") else "mine")
    monkeypatch.chdir(tmp_path)
    assert run_hydra("-m", "seed=1,2", "wandb.mode=offline", task=pytest.fail) == 1
    assert variable in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
