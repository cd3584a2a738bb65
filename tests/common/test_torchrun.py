"""What the environment says about the processes of a run."""

import pytest

from common.torchrun import count_processes, process_rank


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", None])
def test_a_process_is_one_of_several_only_if_both_variables_say_so(monkeypatch, missing):
    variables = {"RANK": "1", "WORLD_SIZE": "2"}
    variables.pop(missing, None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = count_processes(alone=False), process_rank(), count_processes(alone=True)
    assert found == ((1, 0, 1) if missing else (2, 1, 1))
