"""Models by their name on the Hugging Face hub, from the hub's cache on this machine."""

import pytest
from huggingface_hub import constants
from models import lively

from common.errors import UserError
from config import GPTConfig
from data.tokenizer import train_bpe
from interop import load, save_hf
from interop.loading import find_path, pin_model
from variants import build_model

COMMIT, NAME = "0123456789abcdef" * 2 + "01234567", "owner/small"


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """The folder of a model in the hub's cache, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    tokenizer = train_bpe(["a glass model"], 300)
    shape = {"block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 16}
    model = lively(build_model(GPTConfig(tokenizer.vocab_size, **shape)))
    save_hf(model, repository / "snapshots" / COMMIT, tokenizer)
    return repository / "snapshots" / COMMIT


def test_a_name_is_pinned_to_its_commit(downloaded):
    url = f"https://huggingface.co/{NAME}/tree/main"
    for name in (NAME, f"{NAME}/", url, f"hf://{NAME}"):
        assert pin_model(name) == f"{NAME}@{COMMIT}"
    assert find_path(f"{NAME}@{COMMIT}") == downloaded
    model, tokenizer = load(NAME)
    original, _ = load(downloaded)
    assert all((a == b).all() for a, b in zip(model.parameters(), original.parameters()))
    assert tokenizer.encode("a glass")


def test_a_model_that_cannot_be_downloaded_gives_one_sentence_with_the_cause(downloaded):
    with pytest.raises(UserError) as error:
        pin_model("owner/other")
    message = str(error.value)
    assert "init_from=owner/other " in message and "LocalEntryNotFoundError" in message
    assert "\n" not in message
