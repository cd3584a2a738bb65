"""Training from, and exporting to, the formats of other libraries, as a user does it."""

import shutil

import pytest
from conftest import soak
from hf_models import SENTENCE, max_difference, transformers, write_model_and_tokenizer
from processes import run_to_end
from run_folders import load_run

from data.tokenizer import encode_prompt
from run.run_dir import RunDir

EXPORT = "interop/__main__.py"
QUICK = [
    "attention.every=0",
    "batch_size=4",
    "model.block_size=32",
    "compile=false",
    "precision=fp32",
    "run_dir=run",
]


def assert_equal_in_transformers(folder, model, tokenizer, text):
    """Compare a model and its tokenizer with what transformers loads from its export."""
    exported_model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    exported_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = exported_tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == encode_prompt(tokenizer, text)
    assert max_difference(exported_model, model, ids) < 1e-5
    assert exported_tokenizer.eos_token_id == tokenizer.end_of_text
    ends = exported_model.generation_config.eos_token_id
    assert (ends if isinstance(ends, list) else [ends]) == [*tokenizer.end_of_text_ids]


@pytest.mark.slow
@pytest.mark.parametrize("family", [soak("gpt2"), "llama"])
def test_a_model_of_the_hub_is_fine_tuned_resumed_and_exported(family, text_file, tmp_path):
    write_model_and_tokenizer(family, tmp_path / "hf")
    run_to_end(
        tmp_path,
        "init_from=hf",
        "data=text",
        f"data.path={text_file}",
        "max_steps=4",
        "eval.every=2",
        "checkpoint.every=2",
        "optim.warmup_share=0",
        "optim=adamw",
        *QUICK,
    )
    shutil.rmtree(tmp_path / "hf")  # the run does not need it any more
    run_to_end(tmp_path, "run_dir=run", "resume=true", "max_steps=6")
    rows = RunDir(tmp_path / "run").rows()
    assert rows[-1]["step"] == 6 and rows[-1]["val/loss"] < rows[0]["val/loss"]
    model, tokenizer, config = load_run(tmp_path / "run", "best")
    assert config.tokenizer.name == "hf" and config.model.block_size == 32
    assert config.model.vocab_size == 420 > tokenizer.vocab_size
    assert tokenizer.end_of_text_ids == ((0,) if family == "gpt2" else (2, 0))
    run_to_end(tmp_path, "run_dir=run", "to=out", script=EXPORT)
    assert_equal_in_transformers(tmp_path / "out", model, tokenizer, SENTENCE)
