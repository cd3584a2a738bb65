"""Save a workspace in Weights & Biases that shows what runs of GlassGPT record.

    python -m training.wandb_layout                    of the project glassgpt
    python -m training.wandb_layout ENTITY/PROJECT

Needs pip install wandb-workspaces, and a key (wandb login).
"""

import sys

import cli
from config import UserError
from training.wandb_record import has_wandb_key

SCORES = ("induction", "previous_token", "duplicate_token", "sink", "entropy", "distance",
          "copying")


def main() -> None:
    if len(sys.argv) > 2 or any(argument.startswith("-") for argument in sys.argv[1:]):
        raise UserError("give one project, as PROJECT or ENTITY/PROJECT, or none for glassgpt")
    entity, _, project = (sys.argv[1:] or ["glassgpt"])[0].rpartition("/")
    if not has_wandb_key():
        raise UserError("W&B: no key is set, so nothing can be saved there: wandb login sets one")
    try:
        workspace = layout(entity or default_entity(), project)
        workspace.save()
    except ImportError:
        raise UserError("wandb-workspaces is not installed: pip install wandb-workspaces") from None
    except Exception as e:  # whatever W&B raises
        raise UserError(f"W&B did not save the workspace: {cli.first_line(e)}") from e
    cli.printer(cli.Terminal())(f"open {workspace.url}")


def default_entity() -> str:
    import wandb

    return wandb.Api().default_entity


def layout(entity: str, project: str):
    """The workspace, not saved yet: loss beside repeat gain, the maps, a panel for each score, and
    what tells the runs of a sweep apart."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    def line(title: str, *keys: str):
        return wr.LinePlot(title=title, x="step", y=list(keys))

    def lines(score: str):  # what wandb.plot.line_series recorded
        key = f"heads/{score}/lines_table"
        return wr.CustomChart(
            query={"summaryTable": {"tableKey": key}}, chart_name="wandb/lineseries/v0",
            chart_fields={"step": "step", "lineKey": "lineKey", "lineVal": "lineVal"},
            chart_strings={"title": score.replace("_", " "), "xname": "step"})

    def section(name: str, *panels):
        return ws.Section(name=name, panels=list(panels), is_open=True)

    return ws.Workspace(entity=entity, project=project, name="GlassGPT", sections=[
        section("Learning", line("Loss, nats per token", "train/loss", "val/loss"),
                line("Repeat gain, nats", "probe/repeat_gain")),
        section("Attention", wr.MediaBrowser(media_keys=["attention/map"], num_columns=1)),
        section("Heads, each a line", *map(lines, SCORES)),
        section("The strongest head", *(line(score.replace("_", " "), f"heads/{score}/max")
                                        for score in SCORES)),
        section("Runs of a sweep", wr.RunComparer(diff_only=True),
                wr.ParameterImportancePlot(with_respect_to="val/loss"))])


if __name__ == "__main__":
    cli.start(main, lambda: __doc__)
