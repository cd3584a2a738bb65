"""`python -m interop run_dir=RUN to=FOLDER`: a run's model, tokenizer and a card for Hugging Face's
tools; to=FILE.gguf for llama.cpp."""

import json
import shlex
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import hydra
import yaml
from omegaconf import OmegaConf

import cli
from config import FETCHED, Config, UserError, check_fields, knob, knobs
from interop import PICTURE, save_hf
from interop.to_gguf import save_gguf


@dataclass
class ExportConfig:
    """What `python -m interop` takes."""

    run_dir: str | None = knob(None, "folder of the run")
    to: str | None = knob(None, "folder to write, new or empty; or a file named .gguf")
    dtype: str | None = knob(None, "of the matrices in a .gguf; null: f16",
                             choices=("f16", "q8_0"))
    checkpoint: str = knob("best", "best, last, or a step's number")

    def check(self) -> None:
        check_fields(self)
        for key in ("run_dir", "to"):
            if getattr(self, key) is None:
                raise UserError(f"{key}= is missing: python -m interop run_dir=RUN to=FOLDER")
        if self.dtype and not self.to.endswith(".gguf"):
            raise UserError(f"dtype={self.dtype} is for a .gguf file; a folder has the weights as "
                            "they are: leave it out")


def export(config: ExportConfig) -> None:
    """Write a run's model and its tokenizer as a folder of Hugging Face's format, with a card, or
    as a .gguf file."""
    from files import read_rows
    from training.checkpoint import find_checkpoint, load_run

    run_dir, to = (Path(path).expanduser() for path in (config.run_dir, config.to))
    _, manifest = find_checkpoint(run_dir, config.checkpoint, note)
    model, tokenizer, run = load_run(run_dir, str(manifest["step"]), note)
    if to.suffix == ".gguf":
        save_gguf(model, to, tokenizer, config.dtype or "f16")
    else:
        rows = read_rows(run_dir / "metrics.jsonl")
        losses = next((row for row in rows if row["step"] == manifest["step"]), {})
        drawn = [path for path in sorted((run_dir / "attention").glob("step_*.png"))
                 if path.stem <= f"step_{manifest['step']:08d}"]
        picture = drawn[-1] if drawn else None
        card = model_card(run, model.num_parameters(), manifest, losses, picture)
        save_hf(model, to, tokenizer, card, picture)
    note(f"wrote {to}: {model.num_parameters():,} parameters after {manifest['step']:,} steps")


def model_card(run: Config, parameters: int, manifest: dict, losses: dict,
               picture: Path | None) -> str:
    """The README.md of an exported model: what it is, what it reached, what its heads look at, and
    the command that trained it. Of paths it has the last name alone."""
    run = without_folders(run)
    measured = {"validation loss, nats per token": "val/loss",
                "validation, bits per byte": "val/bits_per_byte",
                "training loss, nats per token": "train/loss"}
    attention = ""
    if picture:
        attention = f"![Every head's attention after {int(picture.stem[5:]):,} steps]({PICTURE})"
    table = [f"| {words} | {losses[key]:.4f} |" for words, key in measured.items() if key in losses]
    # The last two blocks are indented, not fenced: no path or name in them can end one.
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [glassgpt]
---

# A model trained with GlassGPT

{parameters:,} parameters, a context of {run.model.block_size:,} tokens.

| | |
|---|---|
{chr(10).join(table)}
| steps | {manifest["step"]:,} |
| fingerprint of the text | `{manifest["fingerprint"]}` |

{attention}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
kinds = (AutoModelForCausalLM, AutoTokenizer)
model, tokenizer = (kind.from_pretrained("FOLDER") for kind in kinds)
```

Trained by

{textwrap.indent(training_command(run), "    ")}

with this configuration:

{textwrap.indent(yaml.safe_dump(asdict(run), sort_keys=False), "    ")}"""


def without_folders(run: Config) -> Config:
    """The configuration with names in place of paths, which belong to one machine."""
    def name(path):
        return path and (path if FETCHED.fullmatch(path) else Path(path).name)

    data = replace(run.data, path=name(run.data.path))
    if data.name and Path(data.name).is_absolute():
        data = replace(data, name=name(data.name))
    return replace(run, run_dir=None, resume=False, data=data, init_from=name(run.init_from))


def training_command(run: Config) -> str:
    """The `python train.py …` that has the settings of a run."""
    with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        composed = OmegaConf.to_object(hydra.compose("config"))
    default = {name: value for name, _, value in knobs(composed)}
    said_otherwise = ("run_dir", "resume", "eval_only", "accept_changed_data", "model.vocab_size")
    typed = {name: value for name, _, value in knobs(run)
             if value != default[name] and name not in said_otherwise}
    if run.init_from:  # which brings the rest
        typed = {name: value for name, value in typed.items()
                 if not name.startswith(("model.", "tokenizer."))}
        typed |= {"model.block_size": run.model.block_size, "model.dropout": run.model.dropout}
    typed = [f"{name}={value if isinstance(value, str) else json.dumps(value)}"
             for name, value in typed.items()]
    return shlex.join(["python", "train.py", *typed])


def note(line: str) -> None:
    print(line, file=sys.stderr)


def main() -> None:
    export(cli.read_settings(sys.argv[1:], ExportConfig, "python -m interop"))


def help() -> str:
    return cli.settings_help("""Write a run's model for transformers, and what loads its format
(vLLM), or as one file for llama.cpp and Ollama.

  python -m interop run_dir=runs/X to=exported
  python -m interop run_dir=runs/X to=model.gguf dtype=q8_0""", ExportConfig)


if __name__ == "__main__":
    cli.start(main, help)
