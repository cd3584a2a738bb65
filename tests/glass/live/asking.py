"""Ask a session as its page does, without a server."""

import json
from collections.abc import Iterator

import torch

from glass.heads.measure.arguments import read_off, read_positions
from glass.heads.measure.interventions import Interventions
from glass.live.parameters import check_text, read_parameters
from glass.live.requests import MODEL_REQUESTS, TOKENIZER_REQUESTS
from glass.live.session import Session


@torch.no_grad()
def ask(session: Session, name: str, **parameters):
    """The parts and the answer of a request."""
    config = session.model.config
    checked = read_parameters(json.dumps({"request": name, **parameters}).encode(), config)
    if name in TOKENIZER_REQUESTS:
        return [], TOKENIZER_REQUESTS[name](session, checked)
    check_text(checked, session.step, config)
    hidden = read_positions(checked.hidden, len(checked.ids))
    interventions = Interventions(read_off(checked.off, config), hidden)
    text_pass = session.read(checked.ids, interventions)
    answer = MODEL_REQUESTS[name](session, checked, text_pass)
    return (list(answer), None) if isinstance(answer, Iterator) else ([], answer)
