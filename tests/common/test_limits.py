"""Limits of a container in control groups, as files of a folder."""

from math import inf
from pathlib import Path

import pytest

import training.device
from common.limits import memory_limit, processor_limit

GIB = 1 << 30


@pytest.mark.parametrize(
    "groups, files, memory, processors",
    [
        ("0::/", {"memory.max": "max\n", "cpu.max": "150000 100000\n"}, inf, 1.5),
        # The smallest limit counts, on whatever level, also beside groups of version 1
        (
            "1:name=systemd:/pod/box\n0::/pod/box",
            {
                "memory.max": f"{9 * GIB}",
                "pod/memory.max": f"{GIB}",
                "pod/box/memory.max": f"{2 * GIB}",
                "pod/cpu.max": "400000 100000",
                "pod/box/cpu.max": "max 100000",
            },
            GIB,
            4,
        ),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(
    tmp_path, groups, files, memory, processors
):
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    assert memory_limit(tmp_path) == memory
    assert processor_limit(tmp_path) == processors


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path):
    assert memory_limit(tmp_path) == processor_limit(tmp_path) == inf


def test_a_device_and_its_threads_have_what_a_container_may_use(monkeypatch):
    monkeypatch.setattr("common.limits.processor_limit", lambda: 1.5)
    monkeypatch.setattr("training.device.memory_limit", lambda: GIB)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert training.device.device_memory("cpu", processes=1) == GIB
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # the user's choice
    assert training.device.pick_threads("auto", processes=1) == 8
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert training.device.pick_threads("auto", processes=1) == 1
    assert training.device.pick_threads(3, processes=1) == 3
