"""Time to nanoGPT's quality on tiny Shakespeare by characters: `experiment=nanogpt_cpu` against `experiment=speedrun`.

    python -m benchmarks.speedrun [pairs=3] [json=FILE] [data.path=FILE] [max_steps=N …]

Each pair trains both, one after the other, with the same seed and everything that is not training switched off.
Seconds are `train_seconds`: building batches, forward, backward, update. More settings go to both runs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TARGET = 1.886  # nanoGPT itself at its CPU setting, on the whole validation split
QUIET = ["eval.every=0", "attention.every=0", "checkpoint.every=0", "log.every=50", "wandb.mode=disabled"]


def measure(experiment: str, seed: int, settings: list[str]) -> dict:
    """Train an experiment in a process of its own; its last row of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, experiment)
        subprocess.run([sys.executable, str(ROOT / "train.py"), f"experiment={experiment}", f"seed={seed}", f"run_dir={run}", *QUIET, *settings],
                       check=True)
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def main(argv: list[str]) -> dict:
    own = {key: value for key, _, value in (arg.partition("=") for arg in argv) if key in ("pairs", "json")}
    settings = [arg for arg in argv if arg.partition("=")[0] not in own]
    pairs = [{name: measure(name, seed, settings) for name in ("nanogpt_cpu", "speedrun")} for seed in range(1, int(own.get("pairs", 1)) + 1)]

    table = Table(title=f"Time to quality: tiny Shakespeare, characters (nanoGPT: {TARGET})")
    for column in ("seed", "nanogpt_cpu: loss", "seconds", "speedrun: loss", "seconds", "ratio"):
        table.add_column(column, justify="right")
    for seed, pair in enumerate(pairs, 1):
        base, fast = pair["nanogpt_cpu"], pair["speedrun"]
        pair["ratio"] = base["train_seconds"] / fast["train_seconds"]
        table.add_row(str(seed), f"{base['val/loss']:.3f}", f"{base['train_seconds']:.1f}", f"{fast['val/loss']:.3f}", f"{fast['train_seconds']:.1f}",
                      f"{pair['ratio']:.1f}x")
    Console().print(table)
    result = {"target": TARGET, "pairs": pairs}
    if "json" in own:
        Path(own["json"]).write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
