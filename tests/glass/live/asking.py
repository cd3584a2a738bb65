"""Ask a session as its page does, without a server."""

from glass.live.requests import make_requests
from glass.live.session import Session


def ask(session: Session, name: str, **parameters):
    """The parts and the answer of a request."""
    requests = make_requests(session)
    if name in requests.immediate:
        return [], requests.immediate[name](parameters)
    parts, results = [], requests.handlers[name](parameters)
    while True:
        try:
            parts.append(next(results))
        except StopIteration as end:
            return parts, end.value
