"""`python -m interop run_dir=RUN to=FOLDER`: a run's model and tokenizer for Hugging Face's tools;
to=FILE.gguf for llama.cpp."""

import sys
from dataclasses import dataclass

import cli
from config import UserError, check_fields, field, home
from interop import save_hf
from interop.to_gguf import save_gguf
from training.checkpoint import load_run


@dataclass
class ExportConfig:
    """What `python -m interop` takes."""

    run_dir: str | None = field(None, "folder of the run")
    to: str | None = field(None, "folder to write, new or empty; or a file named .gguf")
    dtype: str | None = field(None, "of the matrices in a .gguf; null: f16",
                             choices=("f16", "q8_0"))
    checkpoint: str = field("best", "best, last, or a step's number")

    def check(self) -> None:
        check_fields(self)
        for key in ("run_dir", "to"):
            if getattr(self, key) is None:
                raise UserError(f"{key}= is missing: python -m interop run_dir=RUN to=FOLDER")
        if self.dtype and not self.to.endswith(".gguf"):
            raise UserError(f"dtype={self.dtype} is for a .gguf file; a folder has the weights as "
                            "they are: leave it out")


def main() -> None:
    """Write a run's model and tokenizer as a folder of Hugging Face's format, or as a .gguf."""
    config = cli.read_settings(sys.argv[1:], ExportConfig, "python -m interop")
    run_dir, to = home("run_dir", config.run_dir), home("to", config.to)
    model, tokenizer, _ = load_run(run_dir, config.checkpoint, cli.tell)
    if to.suffix == ".gguf":
        save_gguf(model, to, tokenizer, config.dtype or "f16")
    else:
        save_hf(model, to, tokenizer)
    cli.tell(f"wrote {to}: {model.num_parameters():,} parameters")


def help() -> str:
    return cli.settings_help("""Write a run's model for transformers, and what loads its format
(vLLM), or as one file for llama.cpp and Ollama.

  python -m interop run_dir=runs/X to=exported
  python -m interop run_dir=runs/X to=model.gguf dtype=q8_0""", ExportConfig)


if __name__ == "__main__":
    cli.start(main, help)
