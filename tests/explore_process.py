"""Run explore.py as a process, and ask it as its page does."""

import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from frame_reader import decode_frames
from processes import Process

SECONDS = 60  # for one answer


class Explorer(Process):
    """A process that runs `python explore.py ARGV` and serves its page."""

    def __init__(self, folder: Path, *argv: str, **more):
        super().__init__(folder, *argv, "port=0", "browser=false", script="explore.py", **more)
        self.wait_for(self.out, lines=1)
        self.address = self.out.read_text().strip()

    def page(self) -> str:
        """Return the HTML of the page."""
        with urllib.request.urlopen(self.address, timeout=SECONDS) as response:
            return response.read().decode()

    def data(self) -> dict:
        """Return the data of the page."""
        _, _, rest = self.page().partition('<script type="application/json" id="data">')
        return json.loads(rest.partition("</script>")[0])

    def post(self, body: dict):
        """Return the response to a request."""
        origin = "http://" + urlsplit(self.address).netloc
        request = urllib.request.Request(f"{self.address}ask", json.dumps(body).encode())
        request.add_header("Origin", origin)
        return urllib.request.urlopen(request, timeout=SECONDS)

    def ask(self, request: str, **parameters):
        """Return the answer of a request, without its parts."""
        with self.post({"request": request, **parameters}) as response:
            kind, value = decode_frames(response.read())[-1]
        assert kind == "answer", value
        return value


@contextmanager
def exploring(folder: Path, *argv: str, **more) -> Iterator[Explorer]:
    """Run explore.py, and stop it with Ctrl-C at the end."""
    explorer = Explorer(folder, *argv, **more)
    try:
        yield explorer
    finally:
        if not explorer.ended():
            explorer.signal(signal.SIGINT)
        status = explorer.wait(SECONDS)
    assert status == 130, explorer.output()
    assert "Traceback" not in explorer.output()
