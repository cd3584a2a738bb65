"""Text that a terminal shows: hidden characters are replaced, and commands can be copied."""

import subprocess

from hypothesis import given
from hypothesis import strategies as st

from common.text import shell_command

HIDDEN = "\u202e\u2066\u200b\ufeff\x1b\x9b"
names = st.text(st.sampled_from(HIDDEN + "aé '\"\\$!`\n\u200d"), min_size=1)


@given(st.lists(names, min_size=1, max_size=3))
def test_a_shell_reads_a_copied_command_as_the_same_arguments(arguments):
    command = shell_command(arguments)
    assert command.isprintable()
    shell = ["bash", "-c", f"printf '%s\\0' {command}"]
    done = subprocess.run(shell, capture_output=True, env={"LC_ALL": "C.UTF-8"}, check=True)
    assert done.stdout.decode().split("\0")[:-1] == arguments
