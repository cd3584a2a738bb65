"""    python -m report             the runs in runs/, newest first; runs/index.html compares them
    python -m report FOLDER      those of another folder
    python -m report A B to=compare.html
                                 two runs side by side, or two checkpoints of runs, such as
                                 RUN/checkpoints/step_00000400
    python -m report run_dir=RUN prompt="…" prompt="…" to=compare.html
                                 one model on two prompts
"""

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import cli
from config import UserError
from report.compare import compare_folders, compare_prompts
from report.page import read_look
from report.runs import read_runs, run_of, state, table, write_index
from report.sweep import shell_quoted

MOST_SHOWN = 40  # runs in the terminal
ROOT = Path(__file__).parents[1]
KEYS = ("to", "run_dir", "prompt")


def main() -> None:
    folders, given = arguments(sys.argv[1:])
    prompts, to = given["prompt"], Path(*given["to"][-1:] or ["compare.html"]).expanduser()
    if len(prompts) == 2 and len(given["run_dir"]) == 1 and not folders:
        path = compare_prompts(prompts, look_at(given["run_dir"][0], prompts), to)
    elif len(folders) == 2 and not prompts and not given["run_dir"]:
        path = compare_folders(folders, to)
    elif len(folders) < 2 and not any(given.values()):
        list_runs(*folders or [Path("runs")])
        return
    else:
        raise UserError("give no folder or one to list runs, two to compare them, or run_dir=RUN "
                        "and two prompts: python -m report --help shows how")
    cli.printer(cli.Terminal())(f"open {path}")


def arguments(typed: list[str]) -> tuple[list[Path], dict[str, list[str]]]:
    """What is typed: folders, and what is given under a key."""
    folders, given = [], defaultdict(list)
    for argument in typed:
        key, is_given, value = argument.partition("=")
        if argument.startswith("-"):
            raise UserError(f"{argument} is no option here: python -m report --help shows all")
        if is_given and key in KEYS:
            given[key].append(value)
        else:
            folders.append(Path(argument).expanduser())
    return folders, given


def look_at(run_dir: str, prompts: list[str]) -> list[tuple[dict, dict, int]]:
    """What the model of a run, or of a folder of Hugging Face's, makes of each prompt, by
    sample.py, which says what is wrong with them."""
    looks = []
    with tempfile.TemporaryDirectory() as folder:
        for prompt in prompts:
            path = Path(folder, "look.npz")
            command = [sys.executable, str(ROOT / "sample.py"), f"run_dir={run_dir}",
                       f"prompt={prompt}", "max_new_tokens=1", f"attention={path}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr, end="", file=sys.stderr)
                sys.exit(done.returncode)
            looks.append(read_look(path))
    return looks


def list_runs(folder: Path) -> None:
    """Print the runs of a folder and write the page that compares them; of a folder that is one
    run, name that run's page."""
    run = run_of(folder)
    if (run / "config.yaml").exists():
        page = run / "report.html"
        if not page.exists():
            raise UserError(f"{run} is one run, and has no page yet")
        cli.printer(cli.Terminal())(f"{run} is one run: open {page}")
        return
    if folder.is_file():
        raise UserError(f"{folder} is a file: open it in a browser, or give a folder of runs")
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
    unfinished = next((run.path for run in runs if state(run) == "unfinished"), None)
    if unfinished:
        say(f"go on          python train.py run_dir={shell_quoted(str(unfinished))} resume=true")


if __name__ == "__main__":
    cli.start(main, lambda: __doc__)
