"""Export a run for Hugging Face's tools: `python -m interop run_dir=RUN to=FOLDER`."""

import sys
from dataclasses import dataclass

import cli
from common.errors import UserError
from common.paths import expand_home
from common.settings import check_settings, setting
from common.text import pluralize
from interop import load, save_hf
from interop.export import require_empty_folder

HELP = """Export a run's model for transformers, and for tools that load its format
(such as vLLM).

  python -m interop run_dir=runs/X to=exported"""


@dataclass
class ExportConfig:
    """Settings of `python -m interop`."""

    run_dir: str | None = setting(None, "folder of the run")
    to: str | None = setting(None, "folder to write, new or empty")
    checkpoint: str = setting("best", "best, last, or the number of a step")

    def check(self) -> None:
        """Raise `UserError` if a setting is missing or invalid."""
        check_settings(self)
        for key in ("run_dir", "to"):
            if not getattr(self, key):
                raise UserError(f"{key} is missing; use python -m interop run_dir=RUN to=FOLDER")


def main() -> None:
    """Write a run's model and tokenizer as a folder of Hugging Face's format."""
    config = cli.read_settings(sys.argv[1:], ExportConfig, "python -m interop")
    assert config.run_dir is not None and config.to is not None  # check requires them
    to = expand_home("to", config.to)
    require_empty_folder(to)
    model, tokenizer = load(config.run_dir, config.checkpoint, cli.print_stderr, "run_dir")
    save_hf(model, to, tokenizer)
    cli.print_stderr(f"wrote {to}: {pluralize(model.num_parameters(), 'parameter')}")


def export_help() -> str:
    """Return the text of `python -m interop --help`."""
    return cli.settings_help(HELP, ExportConfig())


if __name__ == "__main__":
    cli.start(main, export_help)
