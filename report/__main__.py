"""    python -m report             the runs in runs/, newest first; runs/index.html compares them
    python -m report FOLDER      those of another folder
"""

import sys

import cli
from config import UserError, home
from report.runs import read_runs, table, write_index


def main() -> None:
    """Print the runs of a folder, and write the page that compares them."""
    if len(sys.argv) > 2:
        raise UserError("give one folder at most, of which the runs are listed: "
                        "python -m report FOLDER")
    folder, console = home("FOLDER", *sys.argv[1:] or ["runs"]), cli.Terminal()
    log, page = cli.printer(console), folder / "report.html"
    if (folder / "config.yaml").exists():
        if not page.exists():
            raise UserError(f"{folder} is one run, and has no page yet")
        log(f"{folder} is one run: open {page}")
        return
    runs, troubles = read_runs(folder)
    for trouble in troubles:
        log(f"left out: {trouble}")
    if not runs:
        raise UserError(f"no run of {folder} can be read")
    log(table(folder, runs))
    log(f"\ncompare them   open {write_index(folder, runs)}")
    log(f"one run        open {folder}/RUN/report.html")


if __name__ == "__main__":
    cli.start(main, lambda: __doc__)
