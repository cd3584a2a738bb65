"""Serve a page that runs a model on the reader's text and shows every attention head.

python explore.py                          the newest run in runs/
python explore.py FILE.gguf                another model: see python explore.py --help
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P and -I leave it out
    import common.wait_policy  # noqa: F401  measures from here on what other programs compute
    from common.signals import end_on_interrupt

    end_on_interrupt()  # without a traceback from an import below

import os
import threading
import webbrowser
from contextlib import closing

import cli
from cli.explore_config import ExploreConfig, translate_model
from common.terminal import command, print_stderr
from common.wait_policy import choose_wait_policy
from run.run_dir import find_newest_run


def main() -> None:
    """Run the command line."""
    argv = translate_model(sys.argv[1:])
    explore(cli.read_settings(argv, ExploreConfig, "python explore.py"))


def explore(config: ExploreConfig) -> None:
    """Load a model and answer the requests of its page until Ctrl-C."""
    from glass.live.server import Server

    if config.init_from is None and config.run_dir is None:
        config.run_dir = str(find_newest_run().path)
    with Server(config.port) as server:
        # Importing torch takes a second, so that the port is tried before
        choose_wait_policy(print_stderr)
        from glass.live.explorer import Explorer

        with closing(Explorer(config, print_stderr)) as explorer:
            print(server.address, flush=True)
            print_stderr("Open this address in a browser on this machine; Ctrl-C stops")
            has_display = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
            if config.browser and (has_display or sys.platform in ("darwin", "win32")):
                # In a thread, because some browsers block
                threading.Thread(
                    target=webbrowser.open, args=(server.address,), daemon=True
                ).start()
            server.serve(explorer.page, explorer.answer)


if __name__ == "__main__":
    with command(lambda: cli.settings_help("explore", ExploreConfig())):
        main()
