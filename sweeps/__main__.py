"""Summarize a sweep, or compare any runs.

python -m sweeps DIR                   print a sweep's table; rewrite its sweep.csv and sweep.html
python -m sweeps RUN RUN … [out=DIR]   compare runs, finished or not: print a table, and write
                                       comparison.csv and comparison.html into DIR (comparison/)
python -m sweeps runs/ [out=DIR]       compare all runs in a folder
"""

from common.signals import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()  # without a traceback from an import below

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cli.command_line import SETTINGS
from common.errors import UserError
from common.files import exists, is_folder, list_folder
from common.paths import expand_home, require_output_folder
from common.settings import format_settings
from common.terminal import Terminal, run_main
from run.config_file import PER_COMMAND
from run.run_dir import RunDir
from sweeps.jobs import rewrite_results
from sweeps.page import write_results
from sweeps.runs import RUN, Run, is_sweep, read_run
from sweeps.table import print_sweep


def read_comparison(paths: Sequence[Path]) -> list[Run]:
    """Read the runs at some paths, with their names and the settings that differ between them.

    A path is the folder of a run, or one that holds runs or sweeps. A run is named by its path
    relative to the deepest folder that contains all of them.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        found = _find_runs(Path(os.path.abspath(path)))
        if not found:
            problem = "holds no run" if exists(path) else "does not exist"
            raise UserError(f"{path} {problem}: give folders of runs, or a folder that holds runs")
        folders |= dict.fromkeys(found)
    parent = os.path.commonpath([folder.parent for folder in folders])
    runs = [read_run(folder) for folder in folders]
    settings = [format_settings(run.config) if run.config else {} for run in runs]
    differing = [
        key
        for key in SETTINGS
        if key not in PER_COMMAND and len({each[key] for each in settings if each}) > 1
    ]
    return [
        replace(
            run,
            settings={RUN: run.path.relative_to(parent).as_posix()}
            | {key: each[key] for key in differing if each},
        )
        for run, each in zip(runs, settings)
    ]


def _find_runs(folder: Path, depth: int = 2) -> list[Path]:
    """Return the folder if it is that of a run, else the runs in it, including jobs of sweeps."""
    if not is_folder(folder):
        return []
    run = RunDir(folder)
    if run.has_begun or exists(run.job_file):
        return [folder]
    inner = list_folder(folder) if depth else []
    return [run for path in inner for run in _find_runs(path, depth - 1)]


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
    if not paths or len(outs) > 1 or "" in outs or any(str(path)[0] == "-" for path in paths):
        raise UserError(
            "give the folder of a sweep (python -m sweeps DIR), or those of the runs to compare "
            "(python -m sweeps RUN RUN … [out=DIR])"
        )
    if len(paths) > 1 or outs or not is_folder(paths[0]) or not is_sweep(paths[0]):
        compare(paths, outs[0] if outs else "comparison")
        return
    require_output_folder(f"the folder {paths[0]}", paths[0])
    print_sweep(Terminal(), paths[0], rewrite_results(paths[0]))


if __name__ == "__main__":
    run_main(main, lambda: __doc__)
