"""Load a model, and answer the requests of its page, one at a time."""

import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import torch

from cli.explore_config import ExploreConfig
from common.errors import UserError
from common.files import exists
from common.paths import expand_model_name
from common.terminal import tolerate_errors
from common.text import REPLACEMENT, format_magnitude
from data.tokenizer import Tokenizer, normal_form_note
from glass.heads.measure.interventions import read_interventions
from glass.live.frames import encode_error, encode_frame
from glass.live.parameters import Parameters, check_text, read_parameters
from glass.live.rendering import render_page
from glass.live.requests import MODEL_REQUESTS, TOKENIZER_REQUESTS
from glass.live.session import Session
from glass.page.describe import read_scores
from glass.page.snapshots import list_snapshots
from interop import find_model
from interop.stored import RunCheckpoint
from kernels import DTYPES
from run.run_dir import RunDir
from training.device import describe, pick_device, pick_threads

PROMPT_TOKENS = 32  # of a run's text that are shown first
# Shown first if there is no text of a run. A likely next token is one of two names, and a name of
# several tokens occurs again, which induction heads complete.
EXAMPLE_PROMPT = "When Tolvan Brask and Mary went to the store, Tolvan Brask gave a drink to"


class Canceled(Exception):
    """The client has stopped waiting for the answer that is being computed."""


class Explorer:
    """Answers the requests of a page with one model, one at a time."""

    def __init__(self, settings: ExploreConfig, log: Callable[[str], None]) -> None:
        """Load the model that the settings name."""
        self.settings = settings
        self.log = log
        self._lock = threading.Lock()  # held while the model runs
        self._turn = threading.Lock()  # held by the request that waits for it
        # Of the request that the model runs for:
        self._is_canceled: Callable[[], bool] = lambda: False
        self._gives_way = False
        self._is_closed = False
        self.session = load_session(settings, log, self._check_canceled)

    def describe(self) -> str:
        """Return the title, size and device of the model."""
        session = self.session
        size = format_magnitude(session.model.num_parameters(), None)
        step = f", step {session.step:,}" if session.max_steps else ""
        device = describe(str(session.model.head.weight.device))
        return f"{session.title}{step}: {size} parameters, on {device}"

    def page(self) -> str:
        """Return the HTML of the page, after loading the checkpoint that is now best or last."""
        with tolerate_errors("loading another checkpoint", self.log):
            if self.session.is_outdated:
                with self._turn, self._lock:
                    self.session = load_session(self.settings, self.log, self._check_canceled)
        return render_page(self.session)

    @torch.no_grad()
    def answer(self, body: bytes, is_canceled: Callable[[], bool]) -> Generator[bytes, None, None]:
        """Yield the frames that answer a request; end soon after `is_canceled` returns True."""
        try:
            if self._is_closed:
                raise Canceled
            parameters = read_parameters(body, self.session.model.config)
            if parameters.request in TOKENIZER_REQUESTS:
                respond = TOKENIZER_REQUESTS[parameters.request]
                yield encode_frame("answer", respond(self.session, parameters))
            elif parameters.request in MODEL_REQUESTS:
                self._take_turn(is_canceled, parameters.request == "measureHeads")
                try:
                    self._check_canceled()
                    yield from self._run_model(parameters)
                finally:
                    self._lock.release()
            else:
                raise UserError(f"there is no request {parameters.request}")
        except Canceled:
            return
        except Exception as e:
            yield encode_error(e)

    def _run_model(self, parameters: Parameters) -> Iterator[bytes]:
        session = self.session
        config = session.model.config
        check_text(parameters, session.step, config)
        interventions = read_interventions(
            parameters.off, parameters.hidden, len(parameters.ids), config
        )
        text_pass = session.read(parameters.ids, interventions)
        answer = MODEL_REQUESTS[parameters.request](session, parameters, text_pass)
        if isinstance(answer, Iterator):
            for part in answer:
                yield encode_frame("part", part)
            answer = None
        yield encode_frame("answer", answer)

    def _take_turn(self, is_canceled: Callable[[], bool], gives_way: bool) -> None:
        with self._turn:
            self._lock.acquire()
        self._is_canceled = is_canceled
        self._gives_way = gives_way

    def _check_canceled(self) -> None:
        """Let a waiting request go first if the current one gives way; end a canceled one."""
        if self._gives_way and self._turn.locked():
            is_canceled = self._is_canceled
            self._lock.release()
            self._take_turn(is_canceled, gives_way=True)
        if self._is_closed or self._is_canceled():
            raise Canceled

    def close(self) -> None:
        """Stop the request that is being answered, and free the model."""
        self._is_closed = True
        with self._lock:
            del self.session


def load_session(
    settings: ExploreConfig,
    log: Callable[[str], None],
    check_canceled: Callable[[], None] = lambda: None,
) -> Session:
    """Load the model that the settings name; the model calls `check_canceled` before each block."""
    key = "run_dir" if settings.init_from is None else "init_from"
    name = getattr(settings, key)
    log(f"loading {name} …")
    device = pick_device(settings.device)
    torch.set_num_threads(pick_threads("auto", processes=1))
    stored = find_model(name, settings.checkpoint, log)
    model, tokenizer = stored.load()
    precision = "fp32" if settings.precision == "auto" else settings.precision
    model.to(device, DTYPES[precision])

    path = Path(expand_model_name(key, name))
    title = path.resolve().name if exists(path) else name
    session = Session(model, tokenizer, title, check_canceled=check_canceled)
    run = None
    if isinstance(stored, RunCheckpoint):
        run = stored.run
        show_checkpoint(session, stored, log)
    prompt = find_prompt(tokenizer, run) if settings.prompt is None else settings.prompt
    tokenizer.encode(prompt)  # raises UserError for an unknown character
    if note := normal_form_note(tokenizer, prompt):
        log(note)
    session.prompt = prompt
    return session


def show_checkpoint(session: Session, stored: RunCheckpoint, log: Callable[[str], None]) -> None:
    """Add to a session what is known of its model because it is a run's."""
    run = stored.run
    session.title = (run.path if run else stored.path).resolve().name
    session.step = stored.step
    session.max_steps = stored.settings.max_steps
    if run is None:
        return
    if stored.which in ("last", "best"):
        session.followed = run, stored.which
    with tolerate_errors(f"reading the scores in {run.metrics_file}", log):
        rows = [row for row in run.rows() if row["step"] <= stored.step]
        session.scores = read_scores(rows)


def find_prompt(tokenizer: Tokenizer, run: RunDir | None) -> str:
    """Return the start of the text that a run's newest snapshot is about, or an example."""
    snapshots = [] if run is None else list_snapshots(run)
    text = snapshots[-1].probes.get("text") if snapshots else None
    if text is not None and text.ids:
        return tokenizer.decode(text.ids[:PROMPT_TOKENS]).rstrip(REPLACEMENT)  # half a character
    try:
        tokenizer.encode(EXAMPLE_PROMPT)
    except UserError:  # the model lacks one of its characters
        return ""
    return EXAMPLE_PROMPT
