"""Summarize a sweep, or compare any runs.

python -m sweeps DIR                   print a sweep's table; rewrite its sweep.csv and sweep.html
python -m sweeps RUN RUN … [out=DIR]   compare runs, finished or not: print a table, and write
                                       comparison.csv and comparison.html into DIR (comparison/)
python -m sweeps runs/ [out=DIR]       compare all runs in a folder
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.checkpoints import contains_run
from common.errors import UserError
from common.files import is_folder
from common.paths import expand_home, require_output_folder
from common.terminal import Terminal, run_main
from sweeps.comparison import read_comparison
from sweeps.jobs import summarize
from sweeps.page import write_results
from sweeps.runs import is_sweep
from sweeps.table import print_sweep


def compare(paths: Sequence[Path], out: str) -> None:
    """Compare the runs at some paths, and write the results into the folder that out=DIR names."""
    runs = read_comparison(paths)
    folder = expand_home("out", out.removeprefix("out="))
    require_output_folder(out, folder)
    for parent in (folder.absolute(), *folder.absolute().parents):
        if contains_run(parent):
            raise UserError(f"{out} is in the folder of a run, {parent}: choose another out=DIR")
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder, runs)
    print_sweep(Terminal(), folder, runs)


def main() -> None:
    """Summarize the sweep, or compare the runs, whose folders are typed."""
    typed_out = [argument for argument in sys.argv[1:] if argument.startswith("out=")]
    typed = [argument for argument in sys.argv[1:] if argument not in typed_out]
    is_usable = len(typed_out) < 2 and "out=" not in typed_out
    if not typed or not is_usable or any(path.startswith("-") for path in typed):
        raise UserError(
            "give the folder of a sweep (python -m sweeps DIR), or those of the runs to compare "
            "(python -m sweeps RUN RUN … [out=DIR])"
        )
    paths = [expand_home("DIR", path) for path in typed]
    folder = paths[0]
    if len(paths) > 1 or typed_out or not is_folder(folder) or not is_sweep(folder):
        compare(paths, typed_out[0] if typed_out else "out=comparison")
        return
    require_output_folder(f"the folder {folder}", folder)
    print_sweep(Terminal(), folder, summarize(folder))


if __name__ == "__main__":
    run_main(main, lambda: __doc__)
