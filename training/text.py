"""Prepare the text of a run, the same on all ranks and for all of its resumes."""

from dataclasses import replace

from common.errors import UserError
from config import Config
from data.tokenizer import Tokenizer
from data.tokens import Tokens, generate_tokens, prepare
from run.checkpoints import Start
from run.run_dir import Log
from training.stored_model import StoredModel
from training.world import World
from variants import count_ngrams


def prepare_text(config: Config, world: World, origin: StoredModel | None, start: Start) -> Tokens:
    """Prepare the text of a run, or open it in the cache, and describe it; all ranks together.

    It has the tokenizer of `origin`, the model whose weights the run begins with, and otherwise the
    configured one and, for a model that embeds them, its frequent n-grams.

    Raises:
        UserError: It is not the text on which a resumed run was trained, or differs between ranks.
    """
    tokenizer = origin.read_tokenizer() if origin else None
    with world.console.status("preparing the text …"):
        text = _prepare_on_all_ranks(config, world, tokenizer, start.manifest.fingerprint)
    for line in text.summary():
        world.log(line)
    vocab_size = text.tokenizer.vocab_size
    if origin is None and config.model.ngrams > 1:
        keys = world.on_rank_0(lambda: count_ngrams(text.train, vocab_size, config.model))
        text = replace(text, ngrams=keys)
    return text


def _prepare_on_all_ranks(
    config: Config, world: World, tokenizer: Tokenizer | None, fingerprint: str
) -> Tokens:
    text = None
    if world.rank == 0:
        text = _prepare_same_text(config, tokenizer, fingerprint, world.log)
    first = world.broadcast(text and text.fingerprint)
    # The others find it in the cache, which on another machine may lack it
    text = text or _prepare_same_text(config, tokenizer, fingerprint, world.log)
    if text.fingerprint != first:
        raise UserError(
            f"{text.name} differs from that of the first process: copy the same text, and the "
            "same version of this program, to all machines"
        )
    world.wait()
    return text


def _prepare_same_text(
    config: Config, tokenizer: Tokenizer | None, fingerprint: str, log: Log
) -> Tokens:
    """Prepare the text and check that it is the one that a resumed run was trained on."""
    if config.data.source == "synthetic":
        text = generate_tokens(config, tokenizer)
    else:
        is_given = config.init_from or config.tokenizer.is_file  # not made from the text
        text = prepare(config.data, config.tokenizer, log, tokenizer if is_given else None)
    if fingerprint not in ("", text.fingerprint):
        raise UserError(
            "the text, or how it is prepared, has changed since the run began (fingerprint "
            f"{fingerprint:.16} then, {text.fingerprint:.16} now): "
            "restore it, or start a new run"
        )
    # A resumed run keeps its tokenizer, even if another version would learn another one.
    if tokenizer and tokenizer.to_json() != text.tokenizer.to_json():
        text = prepare(config.data, config.tokenizer, log, tokenizer)
    return text
