"""    python -m report             the runs in runs/, newest first; runs/index.html compares them
    python -m report FOLDER      those of another folder
    python -m report A B to=compare.html
                                 two runs side by side
"""

import shlex
import sys
from pathlib import Path

import cli
from config import UserError
from report.compare import compare_runs
from report.runs import read_runs, state, table, write_index

MOST_SHOWN = 40  # runs in the terminal


def main() -> None:
    typed = sys.argv[1:]
    to = [argument.removeprefix("to=") for argument in typed if argument.startswith("to=")]
    folders = [Path(argument).expanduser() for argument in typed if not argument.startswith("to=")]
    if len(folders) == 2:
        path = compare_runs(folders, Path(*to[-1:] or ["compare.html"]).expanduser())
        cli.printer(cli.Terminal())(f"open {path}")
    elif len(folders) < 2 and not to:
        list_runs(*folders or [Path("runs")])
    else:
        raise UserError("give no folder or one to list runs, two to compare them: "
                        "python -m report --help shows how")


def list_runs(folder: Path) -> None:
    """Print the runs of a folder and write the page that compares them; of a folder that is one
    run, name that run's page."""
    console = cli.Terminal()
    log, page = cli.printer(console), folder / "report.html"
    if (folder / "config.yaml").exists():
        if not page.exists():
            raise UserError(f"{folder} is one run, and has no page yet")
        log(f"{folder} is one run: open {page}")
        return
    runs, troubles = read_runs(folder)
    for trouble in troubles:
        log(f"left out: {trouble}")
    if runs:
        console.print(table(folder, runs[:MOST_SHOWN]))
    if len(runs) > MOST_SHOWN:
        log(f"… and {len(runs) - MOST_SHOWN} more, in the page")
    log(f"\ncompare them   open {write_index(folder, runs)}")
    log(f"one run        open {folder}/RUN/report.html")
    unfinished = next((run.path for run in runs if state(run) == "unfinished"), None)
    if unfinished:
        log(f"go on          python train.py run_dir={shlex.quote(str(unfinished))} resume=true")


if __name__ == "__main__":
    cli.start(main, lambda: __doc__)
