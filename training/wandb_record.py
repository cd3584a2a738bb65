"""A run's record in Weights & Biases, online or offline."""

import netrc
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from cli import first_line
from config import Config
from files import ASIDE, atomic_write, is_scored, ordinary

LINES, POINTS = 32, 10_000  # heads in a chart, and rows of the table behind it, at most
MAPPED = 64  # heads of a model whose table shows the map of each
START, FINISH = 20, 30  # seconds that W&B is waited for, at most


class WandbRecord:
    """The record of a run. Whatever W&B raises is printed once; training goes on without it."""

    def __init__(self, config: Config, run_dir: Path, experiment: str, say: Callable[[str], None],
                 rows: list[dict]):
        """rows: the run's metrics, of the row that is logged too."""
        self.config, self.run_dir, self.say, self.rows = config, run_dir, say, rows
        self._run = start(config, run_dir, experiment, say)
        self._half = bool(rows) and self._half_way(rows[-1])  # whether the page of the middle is in

    def log(self, row: dict, images: dict[str, Path | np.ndarray]) -> None:
        """Record a step's metrics, and images under their keys; with images, each head's scores: in
        a chart for each score, and in a table."""
        self._do(lambda run: run.log(
            without_heads(row) | {key: _image(key, image, row["step"])
                                  for key, image in images.items()}
            | (self._of_heads(row) if images else {})))

    def _of_heads(self, row: dict) -> dict:
        import wandb

        found = {f"heads/{score}/lines": wandb.plot.line_series(
            steps, list(lines.values()), list(lines), score.replace("_", " "), "step")
            for score, (steps, lines) in stories(self.rows).items()}
        columns, data = head_table(row)
        maps = self._maps(row["step"]) if data else {}
        if maps:
            columns = ["head", "map", *columns[1:]]
            data = [[head, maps.get(head), *values] for head, *values in data]
        return found | ({"heads/table": wandb.Table(columns=columns, data=data)} if data else {})

    def _maps(self, step: int) -> dict:
        """Of a small model each head's map of the text, as an image."""
        import wandb

        path = self.run_dir / "attention" / f"step_{step:08d}.npz"
        maps = np.load(path)["text"] if path.exists() else np.empty((0, 0))
        L, H = maps.shape[:2]
        if L * H > MAPPED:
            return {}
        grey = (255 * np.sqrt(np.nan_to_num(maps).astype(np.float32))).astype(np.uint8)
        return {f"L{layer}H{head}": wandb.Image(grey[layer, head])
                for layer in range(L) for head in range(H)}

    def _half_way(self, row: dict) -> bool:
        return 2 * row["step"] >= self.config.max_steps

    def page(self, path: Path, row: dict, last: bool) -> None:
        """Record the run's page: the first, the one of the middle and the last, as each holds all
        before."""
        middle = self._half_way(row) and not self._half
        self._half |= middle
        if last or middle or row["step"] == 0:
            self._do(lambda run: run.log({"step": row["step"], "attention/explorer": _html(path)}))

    def conclude(self, row: dict, best_step: int) -> None:
        """Record what is known at the end: births, artifacts."""
        self._do(lambda run: self._conclude(run, without_aside(row), best_step))

    def _conclude(self, run, row: dict, best_step: int) -> None:
        import wandb

        run.summary.update({key: value for key, value in row.items() if key.startswith("births/")})
        if self.config.wandb.log_artifacts:
            model = wandb.Artifact(f"{run.id}-model", type="model")
            model.add_dir(str(self.run_dir / "checkpoints" / f"step_{best_step:08d}"))
            report = wandb.Artifact(f"{run.id}-report", type="report")
            report.add_file(str(self.run_dir / "report.html"))
            for artifact in (model, report):
                run.log_artifact(artifact)

    def finish(self, failed: bool) -> None:
        self._do(lambda run: run.finish(exit_code=int(failed)))

    def _do(self, call: Callable) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as e:  # whatever W&B raises, training goes on: metrics.jsonl is the record
            self.say(f"W&B stopped recording ({_brief(e)}); metrics.jsonl goes on")
            self._run = None


def without_aside(row: dict) -> dict:
    """The row without the errors of scores, and the like."""
    return {key: value for key, value in row.items()
            if not any(part.endswith(ASIDE) for part in key.split("/"))}


def without_heads(row: dict) -> dict:
    """The row with the greatest score of the heads, `heads/<score>/max`, in place of each."""
    row, most = without_aside(row), {}
    for key, value in row.items():
        if key.startswith("heads/"):
            name = f"{key.rpartition('/')[0]}/max"
            most[name] = max(value, most.get(name, value))
    return {key: value for key, value in row.items()
            if not key.startswith(("heads/", "births/"))} | most


def stories(rows: list[dict]) -> dict[str, tuple[list[int], dict[str, list]]]:
    """Of each score that was measured more than once the steps, and head → its values there, of the
    LINES heads whose last are greatest."""
    found = {}
    scored = [row for row in map(without_aside, rows) if is_scored(row)]
    for key in [key for key in scored[-1] if key.startswith("heads/")] if scored else []:
        _, score, head = key.split("/")
        found.setdefault(score, {})[head] = key
    told = {}
    for score, keys in found.items():
        some = sorted(keys, key=lambda head: -scored[-1][keys[head]])[:LINES]
        shown = [row for row in scored if keys[some[0]] in row]
        stride = -(len(shown) * len(some) // -POINTS)
        shown = shown[::-stride][::-1]  # with the last
        if len(shown) > 1:
            told[score] = ([row["step"] for row in shown],
                           {head: [row.get(keys[head]) for row in shown] for head in some})
    return told


def head_table(row: dict) -> tuple[list[str], list[list]]:
    """Columns and a row for each head: its births, and its scores with their errors."""
    found = defaultdict(dict)
    for key, value in row.items():
        kind, _, rest = key.partition("/")
        if kind in ("heads", "births"):
            name, _, head = rest.partition("/")
            found[head][f"born: {name}" if kind == "births" else name] = value
    columns = sorted({name for of in found.values() for name in of})
    return ["head", *columns], [[head, *map(of.get, columns)] for head, of in found.items()]


def _image(key: str, image: Path | np.ndarray, step: int):
    import wandb

    if isinstance(image, Path):
        return wandb.Image(str(image), caption="every head's attention weights after "
                           f"{step} steps; row: the token that looks, column: where to")
    score = key.rpartition("/")[2].replace("_", " ")
    return wandb.Image(
        image, caption=f"{score} after {step} steps; row: layer, column: head, both from 0")


def _html(path: Path):
    import wandb

    return wandb.Html(path.read_text(encoding="utf-8"), inject=False)


def _brief(error: Exception) -> str:
    name, reason = type(error).__name__, first_line(error)
    return name if reason == name else f"{name}: {reason}"


def wandb_mode(mode: str) -> str:
    """online, offline or disabled: `mode`, or for auto WANDB_MODE, else whether a key is set."""
    if mode != "auto":
        return mode
    mode = os.environ.get("WANDB_MODE", "")
    mode = {"dryrun": "offline", "run": "online"}.get(mode, mode)
    if mode in ("online", "offline", "disabled"):
        return mode
    return "online" if has_wandb_key() else "offline"


def has_wandb_key() -> bool:
    """Whether a W&B key is set, in the environment or by `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = url.partition("://")[2].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def start(config: Config, run_dir: Path, experiment: str, say: Callable[[str], None]):
    """A W&B run, or None; offline where online does not start in time. Never raises or asks."""
    mode = wandb_mode(config.wandb.mode)
    if mode == "disabled":
        return None
    if mode == "online" and not has_wandb_key():
        say("W&B: no key is set (wandb login), so the record is kept offline")
        mode = "offline"
    id_file = run_dir / "wandb" / "glassgpt-run-id"
    try:
        (run_dir / "wandb").mkdir(exist_ok=True)
        id = known_id(id_file, say)
        try:
            run = init(config, run_dir, experiment, mode, id)
        except Exception as e:
            if mode == "offline":
                raise
            say(f"W&B did not start online ({_brief(e)}), so the record is kept offline")
            mode = "offline"
            run = init(config, run_dir, experiment, mode, id)
        with atomic_write(id_file) as part:
            part.write_text(run.id)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    except Exception as e:
        say(f"W&B could not start ({_brief(e)}): metrics.jsonl is the record")
        return None
    if mode == "offline":
        record = run_dir / "wandb" / Path(run.dir).parent.name
        say(f"W&B      recorded offline; to upload it: wandb sync {shlex.quote(str(record))}")
    return run


def known_id(path: Path, say: Callable[[str], None]) -> str | None:
    """The id of the W&B run that a resumed run had; None where there is none that can be read."""
    if not path.exists():
        return None
    id = ordinary(path, 100).read_bytes().decode("ascii", "replace").strip()
    if re.fullmatch(r"[\w-]{1,64}", id, re.ASCII):
        return id
    say(f"W&B: {path} is damaged, so the record begins anew")
    return None


def init(config: Config, run_dir: Path, experiment: str, mode: str, id: str | None):
    """Start a W&B run, or continue the one of this id."""
    import wandb  # a third of a second: only where it is used

    return wandb.init(
        project=config.wandb.project, name=os.environ.get("WANDB_NAME") or run_dir.name,
        dir=str(run_dir), mode=mode, id=id, resume="allow" if id and mode == "online" else None,
        config={**asdict(config), "experiment": experiment},
        settings=wandb.Settings(silent=True, console="off", init_timeout=START, login_timeout=START,
                                finish_timeout=FINISH))
