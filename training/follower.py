"""What the other processes of a run do: what the first orders, each with its slice of the work."""

import json
import sys
from contextlib import suppress

import torch

import cli
from config import Config, UserError, config_from
from data.batches import Batches
from data.tokenizer import tokenizer_from
from data.tokens import Tokens, prepare
from model import GPT
from training.distributed import Lost, Team, join
from training.evaluate import Validation
from training.optim import (
    build_optimizers,
    load_optimizer_tensors,
    optimizer_tensors,
    partition_parameters,
    update,
)
from training.runtime import Stopped, compile_model


def follow() -> None:
    """Take part in a run that another process leads, and end as it ends.

    Raises:
        SystemExit: with the run's status, or 1 where this process failed or lost another.
    """
    team = join()
    try:
        with team, team.stop:
            _follow(team)
    except UserError as e:
        if not getattr(e, "already_printed", False):
            here = "" if isinstance(e, Lost) else f"process {team.rank}: "
            print(f"error: {here}{e}", file=sys.stderr)
        cli.give_up()


def _follow(team: Team) -> None:
    order, number, nats, predicted = "", 0, 0.0, 0
    while order != "end":
        order, number = team.next_order(nats, predicted)
        if order == "start":
            started = json.loads(team.broadcast_bytes())
            config = team.resolve_device(config_from(started["config"]))
            tokens = same_tokens(config, started["tokenizer"], started["fingerprint"])
            torch.manual_seed(config.seed)
            model = GPT(config.model).to(config.device)
            mine = team.divide(partition_parameters(model, config.optim, team.size))
            optimizers = build_optimizers(model, config.optim, config.precision, mine)
            team.broadcast_weights(of_first=True)
            T, forward = config.model.block_size, model
            batches = Batches(tokens.train, T, config.batch_size, config.seed)
            validation = Validation(tokens.val, tokens.tokenizer, T, config.device,
                                    config.precision, team, config.data)
        elif order == "load":
            load_optimizer_tensors(optimizers, model, team.broadcast_tensors({}))
        elif order in ("compile", "step"):
            x, y = (torch.from_numpy(part)  # (batch_size / processes, T) each
                    for part in batches.batch(number, team.rank, team.size))
            if order == "step":
                update(forward, model, optimizers, x, y, config, number, team)
            else:
                x, y = (part[:len(part) // config.accumulate].to(config.device) for part in (x, y))
                forward, _ = compile_model(model, x, y, config.precision, lambda line: None)
        elif order == "evaluate":
            nats, predicted = 0.0, 0
            with suppress(Stopped):
                nats, predicted = validation.local_loss(model, team.stop.check)
        elif order == "gather":
            team.gather(optimizer_tensors(optimizers, model))
    if number:
        team.stop.exit_status = number  # torchrun, which sees some end before others, signals those
        raise SystemExit(number)


def same_tokens(config: Config, tokenizer_json: str, fingerprint: str) -> Tokens:
    """The tokens that the first process has, from the cache here or made now.

    Raises:
        UserError: the text here is another.
    """
    tokenizer = tokenizer_from(tokenizer_json)
    brought = tokenizer if config.init_from else None
    tokens = prepare(config.data, config.tokenizer, lambda line: None, brought)
    if tokens.fingerprint != fingerprint:
        raise UserError(f"the text here ({tokens.name}) is another than that of process 0 "
                        f"(fingerprint {tokens.fingerprint[:16]} here, {fingerprint[:16]} there): "
                        "give every machine the same text by data=text data.path=PATH")
    if tokens.tokenizer.to_json() != tokenizer_json:
        tokens = prepare(config.data, config.tokenizer, lambda line: None, tokenizer)
    return tokens
