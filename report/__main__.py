"""    python -m report             the runs in runs/, newest first; runs/index.html compares them
    python -m report FOLDER      those of another folder
"""

import sys
from pathlib import Path

import cli
from config import UserError
from report.runs import read_runs, table, write_index
from report.sweep import shell_quoted

MOST_SHOWN = 40  # runs in the terminal


def main() -> None:
    if len(sys.argv) > 2 or any(argument.startswith("-") for argument in sys.argv[1:]):
        raise UserError("give one folder that holds runs, or none for runs/: "
                        "python -m report FOLDER")
    folder = Path(sys.argv[1] if sys.argv[1:] else "runs").expanduser()
    runs, troubles = read_runs(folder)
    console = cli.Terminal()
    say = cli.printer(console)
    for trouble in troubles:
        say(f"left out: {trouble}")
    if runs:
        console.print(table(folder, runs[:MOST_SHOWN]))
    if len(runs) > MOST_SHOWN:
        say(f"… and {len(runs) - MOST_SHOWN} more, in the page")
    say(f"\ncompare them   open {write_index(folder, runs)}")
    say(f"one run        open {folder}/RUN/report.html")
    unfinished = next((run.path for run in runs if run.status == "unfinished"), None)
    if unfinished:
        say(f"go on          python train.py run_dir={shell_quoted(str(unfinished))} resume=true")


if __name__ == "__main__":
    cli.start(main, lambda: __doc__)
