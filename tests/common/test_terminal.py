"""Lines in a terminal."""

import pytest

from common.terminal import wrap

PATH = "file:///home/user/glassgpt/runs/2026-01-01_12-00-00_default/report.html"
RESUME = "python train.py run_dir='my runs/a' -m resume=true"


@pytest.mark.parametrize("width", range(20, 100, 7))
@pytest.mark.parametrize(
    ("line", "whole"),
    [
        (f"page     {PATH}", PATH),
        (f"stopped after 12 steps; to resume: {RESUME}", RESUME),
        (f"stopped; {RESUME} resumes the run after its newest checkpoint", RESUME),
        ("next     python sample.py a b c d e f g h", "python sample.py a b c d e f g h"),
        ("offline; upload it with: wandb sync runs/x/offline-*", "wandb sync runs/x/offline-*"),
    ],
)
def test_a_line_is_broken_at_spaces_but_in_no_path_or_command(line, whole, width):
    lines = wrap(line, width).split("\n")
    assert any(whole in each for each in lines)
    assert " ".join(lines).split() == line.split()
    assert all(len(each) <= max(width, len(whole)) for each in lines)


def test_only_what_a_line_begins_with_is_a_label():
    text = "a text of a reader  with two spaces, which is long enough to be broken"
    assert wrap(f"error: {text}", 40).split("\n")[1][0] != " "
    assert wrap(f"note     {text}", 40).split("\n")[1].startswith(" " * 9)
