"""Summarize a sweep, or compare any runs.

python -m sweeps DIR                   print a sweep's table; rewrite its sweep.csv and sweep.html
python -m sweeps RUN RUN … [out=DIR]   compare runs, finished or not: print a table, and write
                                       comparison.csv and comparison.html into DIR (comparison/)
python -m sweeps runs/ [out=DIR]       compare all runs in a folder
"""

from common.signals import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()  # without a traceback from an import below

import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from common.files import is_folder
from common.paths import expand_home, require_output_folder
from common.terminal import Terminal, command
from run.run_dir import RunDir
from sweeps.jobs import rewrite_results
from sweeps.page import write_results
from sweeps.runs import is_sweep, read_comparison
from sweeps.table import print_sweep


def compare(paths: Sequence[Path], out: str) -> None:
    """Compare the runs at some paths, and write the results into the folder `out`."""
    runs = read_comparison(paths)
    folder = expand_home("out", out)
    require_output_folder(f"out={out}", folder)
    for parent in (folder.absolute(), *folder.absolute().parents):
        if RunDir(parent).has_begun:
            raise UserError(f"out={out} is in the folder of a run, {parent}: choose another")
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder, runs)
    print_sweep(Terminal(), folder, runs)


def main() -> None:
    """Summarize the sweep, or compare the runs, whose folders are typed."""
    outs = [argument[4:] for argument in sys.argv[1:] if argument.startswith("out=")]
    paths = [expand_home("DIR", path) for path in sys.argv[1:] if not path.startswith("out=")]
    if not paths:
        raise UserError(
            "give the folder of a sweep (python -m sweeps DIR), or those of the runs to compare "
            "(python -m sweeps RUN RUN … [out=DIR])"
        )
    if len(paths) > 1 or outs or not is_folder(paths[0]) or not is_sweep(paths[0]):
        compare(paths, outs[-1] if outs else "comparison")
        return
    require_output_folder(f"the folder {paths[0]}", paths[0])
    print_sweep(Terminal(), paths[0], rewrite_results(paths[0]))


if __name__ == "__main__":
    with command(lambda: __doc__):
        main()
