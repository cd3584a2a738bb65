"""What a run asks of the machine."""

import subprocess
import sys

import pytest
from processes import ROOT

# A tensor of 16 MB: is it one more region that was asked of the system?
ONE_MORE = """
import ctypes, torch
from config import Config
from training.device import set_up

class Counts(ctypes.Structure):  # of glibc's malloc
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

count = ctypes.CDLL(None).mallinfo2
count.restype = Counts
{first}
before = count().hblks
tensor = torch.empty(4 << 20)
print(count().hblks - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc's")
def test_memory_that_a_run_freed_is_used_again():
    """Such a region would go back to the system as soon as it is freed."""
    regions = [int(subprocess.run([sys.executable, "-c", ONE_MORE.format(first=first)], cwd=ROOT,
                                  check=True, capture_output=True, text=True).stdout)
               for first in ("", 'set_up(Config(device="cpu", compile=False))')]
    assert regions == [1, 0]
