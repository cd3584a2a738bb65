"""What `init_from` and `run_dir` name is decided by content, however it is named."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hf_models import WEIGHTS, write_model, write_model_and_tokenizer
from models import lively
from run_folders import SHAPE, TEXT, write_run
from safetensors.torch import load_file, save_file
from test_gguf_export import MODELS, make_bpe, make_model
from test_nanogpt import nanogpt_tensors

import cli
import interop
from cli.explore_config import ExploreConfig
from cli.sample_config import SampleConfig
from common.errors import UserError
from config import GPTConfig
from glass.live.session import load_session
from interop import save_gguf
from interop.__main__ import main as export
from run.checkpoints import MANIFEST_FILE, MODEL_FILE
from run.run_dir import find_newest_run
from sample import sample
from variants import build_model

LFS_POINTER = "version https://git-lfs.github.com/spec/v1"


def write_nanogpt(path: Path) -> None:
    """Write a checkpoint as nanoGPT does, with the vocabulary of a text."""
    config = GPTConfig(len(TEXT), **SHAPE, bias=True)
    tensors = nanogpt_tensors(lively(build_model(config)))
    state = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    state["_orig_mod.lm_head.weight"] = state["_orig_mod.transformer.wte.weight"]
    torch.save({"model": state, "model_args": asdict(config)}, path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    """A folder with a model of each kind: gpt2, llama, shards, m.gguf, ckpt.pt and runs/x."""
    root = tmp_path_factory.mktemp("intact")
    write_model_and_tokenizer("gpt2", root / "gpt2")
    write_model_and_tokenizer("llama", root / "llama")
    write_model_and_tokenizer("llama", root / "shards")
    (root / "shards" / WEIGHTS).unlink()
    write_model("llama", root / "shards", max_shard_size="70KB")
    tokenizer = make_bpe()
    save_gguf(make_model(tokenizer, MODELS["llama"]), root / "m.gguf", tokenizer)
    write_nanogpt(root / "ckpt.pt")
    write_run(root / "runs" / "x")
    return root


@pytest.fixture
def here(intact, tmp_path, monkeypatch) -> Path:
    """A copy of `intact`, which is the current folder and the home folder."""
    shutil.copytree(intact, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def rename(old: str, new: str):
    return lambda: Path(old).rename(new)


def change_weights(path: str, change):
    def apply():
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def add_tokens(*tokens: dict):
    """Return a function that adds tokens, from id 420 on, to the tokenizer of gpt2."""

    def apply():
        path = Path("gpt2/tokenizer.json")
        content = json.loads(path.read_text())
        for id, token in enumerate(tokens, 420):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            content["added_tokens"].append({"id": id, **flags, **token})
            content["model"]["vocab"][token["content"]] = id
        path.write_text(json.dumps(content))

    return apply


def rename_tensors(path: str, rename_one):
    def change(tensors):
        for name in list(tensors):
            tensors[rename_one(name)] = tensors.pop(name)

    return change_weights(path + WEIGHTS, change)


def pickle_weights(folder: str, **options):
    """Return a function that saves weights as older versions of transformers did."""

    def apply():
        for file in Path(folder).glob("model*.safetensors"):
            tensors = load_file(file)
            tensors["h.0.attn.bias"] = torch.ones(2, 2, dtype=torch.bool)  # a causal mask
            torch.save(tensors, file.with_name(f"pytorch_{file.stem}.bin"), **options)
            file.unlink()
        for file in Path(folder).glob("model.safetensors.index.json"):
            content = (
                file.read_text().replace(".safetensors", ".bin").replace("model-", "pytorch_model-")
            )
            file.rename(file.with_name("pytorch_model.bin.index.json")).write_text(content)

    return apply


def save_pickle(content):
    """Return a function that replaces the weights of gpt2 by a pickle."""

    def apply():
        Path("gpt2/model.safetensors").unlink()
        torch.save(content, "gpt2/pytorch_model.bin")

    return apply


def nothing():
    pass


STEP_3, STEP_6 = (f"runs/x/checkpoints/step_0000000{step}" for step in (3, 6))
# What is done to the models, the name of one, and the original that it is.
ACCEPTED = [
    (nothing, "gpt2/", "gpt2"),
    (nothing, "~/gpt2", "gpt2"),
    (nothing, "file://{here}/gpt2/", "gpt2"),
    (nothing, "gpt2/model.safetensors", "gpt2"),
    (rename("gpt2/model.safetensors", "gpt2/any name.safetensors"), "gpt2", "gpt2"),
    (pickle_weights("gpt2"), "gpt2", "gpt2"),
    (pickle_weights("gpt2"), "gpt2/pytorch_model.bin", "gpt2"),
    (pickle_weights("gpt2", _use_new_zipfile_serialization=False), "gpt2", "gpt2"),
    (pickle_weights("shards"), "shards", "shards"),
    # Safetensors are preferred
    (lambda: Path("gpt2/pytorch_model.bin").touch(), "gpt2", "gpt2"),
    (rename_tensors("gpt2/", lambda name: name.removeprefix("transformer.")), "gpt2", "gpt2"),
    (add_tokens({"content": "<pad>", "special": True}), "gpt2", "gpt2"),
    (nothing, "shards/model-00001-of-00003.safetensors", "shards"),
    (rename("m.gguf", "m.pt"), "m.pt", "m.gguf"),
    (nothing, "runs/x/", STEP_3),
    (nothing, "runs/x/checkpoints/best", STEP_3),
    (nothing, "runs/x/checkpoints/last", STEP_6),
    (nothing, STEP_6 + "/", STEP_6),
    (nothing, STEP_6 + "/model.safetensors", STEP_6),
    (lambda: Path("runs/x/config.yaml").unlink(), "runs/x", STEP_3),
]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(interop.load(path)[0].named_parameters())


@pytest.mark.parametrize(("prepare", "name", "original"), ACCEPTED)
def test_a_model_is_loaded_by_whatever_names_it(prepare, name, original, here, intact):
    prepare()
    name = name.format(here=here)
    expected = weights_of(intact / original)

    model, tokenizer = interop.load(name)
    weights = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    if original in (STEP_3, STEP_6):
        assert model.source.endswith(f"runs/x at step {original[-1]}")
    vocab_size = model.config.vocab_size
    assert all(id < vocab_size for id in [*tokenizer.encode(TEXT), tokenizer.end_of_text or 0])

    # Training starts from the same weights
    start = interop.read_starting_model(name)
    assert vocab_size == start.model.vocab_size
    copy = build_model(GPTConfig.from_settings(start.model))
    interop.open_pinned(start.init_from).copy_to(copy)
    copied = dict(copy.named_parameters())
    assert all(torch.equal(copied[key], expected[key].float()) for key in expected)


# What is done to the models, the name of one, and what the message names.
REFUSED = [
    (lambda: Path("gpt2/tokenizer.json").unlink(), "gpt2", ["tokenizer.json"]),
    (rename("gpt2/model.safetensors", "gpt2/other.bin"), "gpt2", ["pytorch_model.bin"]),
    (save_pickle(torch.nn.Linear(2, 2)), "gpt2", ["pytorch_model.bin", "nn.modules.linear.Linear"]),
    (save_pickle({"h": torch.ones(2, dtype=torch.int8)}), "gpt2", ["h", "int8"]),
    (save_pickle({"h": {"nested": torch.ones(2)}}), "gpt2", ["h", "dict"]),
    (save_pickle([torch.ones(2)]), "gpt2", ["gpt2", "0 tensors"]),
    (lambda: Path("t.txt").write_text("text"), "t.txt", ["t.txt"]),
    (lambda: Path("t").write_text(LFS_POINTER), "t", ["lfs"]),
    (
        lambda: torch.save(torch.nn.Linear(2, 2), "m.pt"),
        "m.pt",
        ["code", "nn.modules.linear.Linear"],
    ),
    (lambda: Path("shards/model-00002-of-00003.safetensors").unlink(), "shards", ["00002"]),
    (add_tokens({"content": "word", "special": False}), "gpt2", ["421", "420"]),
    (nothing, "runs/x/checkpoints/step_00000009", ["step_00000009"]),
    (nothing, "runs/mine", ["path_or_name=runs/mine"]),
    (nothing, "https://example.com/m.gguf", ["https://example.com"]),
]


@pytest.mark.parametrize(("prepare", "name", "named"), REFUSED)
def test_what_is_not_a_model_is_refused_with_what_it_is(prepare, name, named, here):
    prepare()
    with pytest.raises((UserError, OSError)) as error:
        interop.load(name)
    message = str(error.value)
    assert all(part in message for part in named) and "\n" not in message


def test_a_checkpoint_of_nanogpt_may_have_any_name_and_settings_left_out(here):
    write_nanogpt(here / "mine")
    saved = torch.load("mine")
    for name in ("bias", "dropout"):  # which older versions do not save
        del saved["model_args"][name]
    torch.save(saved, "mine")
    model = interop.load_hf("mine")
    original = interop.load_hf("ckpt.pt")
    assert model.config.tie_embeddings and model.config.bias is True
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters()))


@pytest.mark.parametrize(
    "key, name",
    [("run_dir", "~/m.gguf"), ("init_from", "runs/x/checkpoints/last"), ("run_dir", "gpt2/")],
)
def test_the_commands_take_every_kind_of_model(key, name, here, capsys, monkeypatch):
    sample(SampleConfig(**{key: name}, prompt="a", max_new_tokens=2))
    assert capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["interop", f"run_dir={name}", "to=out"])
    export()
    exported, original = weights_of(Path("out")), weights_of(Path(name))
    name = "token_embedding.weight"
    assert torch.equal(exported[name], original[name].float())
    missing = SampleConfig(**{key: "runs/y"})
    with pytest.raises(UserError, match=f"{key}=runs/y"):
        missing.check()
        sample(missing)


def test_a_step_is_only_taken_of_a_run(here):
    for name in (STEP_3, "gpt2"):
        with pytest.raises(UserError) as error:
            interop.load(name, 6)
        assert "checkpoint=6" in str(error.value)
    assert interop.load(STEP_3, 3) and interop.load(STEP_3, "last")


@pytest.mark.parametrize("damaged", [MANIFEST_FILE, MODEL_FILE])
def test_the_note_about_a_damaged_best_checkpoint_reaches_who_opens_the_run(damaged, here, capsys):
    folder = here / "runs" / "x" / "checkpoints" / "step_00000003"
    (folder / damaged).write_bytes(b"")
    notes = []
    assert interop.find_model("runs/x", "best", notes.append).step == 6
    assert interop.open_pinned("runs/x", log=notes.append).manifest.step == 6
    interop.load("runs/x")
    notes += capsys.readouterr().err.splitlines()
    assert [folder.name in note for note in notes] == [True, False] * 3
    assert all("step 6" in note for note in notes[1::2])


@pytest.mark.parametrize(
    "use",
    [
        find_newest_run,
        lambda: sample(SampleConfig(run_dir="runs/y")),
        lambda: load_session(ExploreConfig(run_dir="runs/y"), print),
        lambda: interop.read_starting_model("runs/y"),
        lambda: cli.read_job(["run_dir=runs/y", "eval_only=true"], interop.read_starting_model),
        lambda: cli.read_job(["run_dir=runs/y", "resume=true"], interop.read_starting_model),
    ],
)
def test_a_run_that_stopped_before_its_first_checkpoint_is_named_with_how_to_start_it(here, use):
    (here / "runs" / "x").rename(here / "runs" / "y")
    shutil.rmtree(here / "runs" / "y" / "checkpoints")
    with pytest.raises(UserError, match=r"checkpoint.* run_dir=runs/y resume=auto"):
        use()
