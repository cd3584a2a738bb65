"""`python -m interop run_dir=RUN to=FOLDER`: a run for Hugging Face's tools."""

import sys
from dataclasses import dataclass

import cli
from common.errors import UserError
from common.paths import expand_home
from common.settings import check_settings, setting
from interop import save_hf
from training.checkpoint import load_run


@dataclass
class ExportConfig:
    """What `python -m interop` takes."""

    run_dir: str | None = setting(None, "folder of the run")
    to: str | None = setting(None, "folder to write, new or empty")
    checkpoint: str = setting("best", "best, last, or a step's number")

    def check(self) -> None:
        check_settings(self)
        for key in ("run_dir", "to"):
            if getattr(self, key) is None:
                raise UserError(f"{key}= is missing: python -m interop run_dir=RUN to=FOLDER")


def main() -> None:
    """Write a run's model and tokenizer as a folder of Hugging Face's format."""
    config = cli.read_settings(sys.argv[1:], ExportConfig, "python -m interop")
    run_dir, to = expand_home("run_dir", config.run_dir), expand_home("to", config.to)
    model, tokenizer, _ = load_run(run_dir, config.checkpoint, cli.print_stderr)
    save_hf(model, to, tokenizer)
    cli.print_stderr(f"wrote {to}: {model.num_parameters():,} parameters")


def help() -> str:
    return cli.settings_help(
        """Write a run's model for transformers, and what loads its format
(vLLM).

  python -m interop run_dir=runs/X to=exported""",
        ExportConfig,
    )


if __name__ == "__main__":
    cli.start(main, help)
