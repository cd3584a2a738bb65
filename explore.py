"""Serve a page that runs a model on the reader's text and shows every attention head.

python explore.py                          the newest run in runs/
python explore.py FILE.gguf                another model: see python explore.py --help
"""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from typing import TYPE_CHECKING

import cli
from cli.explore_config import ExploreConfig, translate_model
from common.terminal import print_stderr, run_main
from common.text import format_magnitude, pluralize

if TYPE_CHECKING:  # importing torch takes a second, so that the command line is checked first
    from model import GPT

CHECK_SECONDS = 2.0  # without a request, until a newer checkpoint of a run is looked for


def main() -> None:
    """Run the command line."""
    argv = translate_model(sys.argv[1:])
    explore(cli.read_settings(argv, ExploreConfig, "python explore.py"))


def explore(config: ExploreConfig) -> None:
    """Load a model and answer the requests of its page until Ctrl-C."""
    from glass.live.checkpoints import RunFollower, load_exploration
    from glass.live.jobs import Jobs
    from glass.live.requests import make_requests
    from glass.live.server import serve
    from glass.live.session import Session
    from training.device import describe, pick_device

    device = pick_device(config.device)
    model, tokenizer, explored, followed_run = load_exploration(config, print_stderr)
    move_to_device(model, device, config.precision)
    jobs = Jobs()
    session = Session(model, tokenizer, explored, jobs.check_canceled)
    server = serve(session.page, make_requests(session), jobs, config.port)

    print_stderr(f"{explored.title}: {describe_model(model)}, on {describe(device)}")
    print(server.address, flush=True)
    print_stderr("Open this address in a browser on this machine; Ctrl-C stops")
    if config.browser:
        open_browser(server.address)
    if followed_run is None:
        jobs.run()
        return
    follower = RunFollower(followed_run, tokenizer, print_stderr)
    while True:
        jobs.run(CHECK_SECONDS)
        newer = follower.load_newer(model, session.explored)
        if newer is not None:
            session.replace(newer)


def move_to_device(model: GPT, device: str, precision: str) -> None:
    """Move a model to a device, with its weights in a precision; "auto" is float32."""
    from kernels import DTYPES

    model.to(device, DTYPES["fp32" if precision == "auto" else precision])


def describe_model(model: GPT) -> str:
    """Return the size of a model for the user."""
    config = model.config
    return (
        f"{format_magnitude(model.num_parameters(), None)} parameters, "
        f"{pluralize(config.n_layer, 'layer')} of {pluralize(config.n_head, 'head')}"
    )


def open_browser(address: str) -> None:
    """Open an address if there is a screen, in a thread, because some browsers block."""
    has_screen = sys.platform in ("darwin", "win32")
    if has_screen or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


if __name__ == "__main__":
    run_main(main, cli.explore_help)
