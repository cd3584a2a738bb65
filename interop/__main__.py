"""Export a run for transformers or llama.cpp: `python -m interop run_dir=RUN to=FOLDER`."""

import sys
from dataclasses import dataclass

import cli
from cli.command_line import LoadConfig
from common.errors import UserError
from common.paths import expand_home
from common.settings import setting
from common.terminal import command, print_stderr
from common.text import pluralize
from interop import find_model, save_gguf, save_hf
from interop.export import require_empty_folder
from interop.gguf_export import require_new_file


@dataclass
class ExportConfig(LoadConfig):
    """Settings of `python -m interop`."""

    to: str | None = setting(
        None, "folder to write, new or empty, or a new file of llama.cpp's format: PATH.gguf"
    )

    def check(self) -> None:
        """Raise `UserError` if a setting is missing or invalid."""
        super().check()
        if not self.to or not (self.run_dir or self.init_from):
            raise UserError("set to=FOLDER, and run_dir=RUN or init_from=MODEL")


def main() -> None:
    """Write a run's model and tokenizer as a folder of Hugging Face's format or a .gguf file."""
    config = cli.read_settings(sys.argv[1:], ExportConfig, "python -m interop")
    assert config.to is not None  # check requires it
    to = expand_home("to", config.to)
    is_gguf = to.suffix.lower() == ".gguf"
    (require_new_file if is_gguf else require_empty_folder)(to)
    name = config.run_dir or config.init_from
    assert name is not None  # as above
    model, tokenizer = find_model(name, config.checkpoint).load()
    (save_gguf if is_gguf else save_hf)(model, to, tokenizer)
    print_stderr(f"wrote {to}: {pluralize(model.num_parameters(), 'parameter')}")


if __name__ == "__main__":
    with command(lambda: cli.settings_help("export", ExportConfig())):
        main()
