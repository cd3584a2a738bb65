"""The page of a model, and the answers to its requests, one at a time."""

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from cli.explore_config import ExploreConfig
from common.errors import UserError
from common.terminal import tolerate_errors
from glass.heads.measure.arguments import read_heads, read_positions
from glass.heads.measure.interventions import Interventions
from glass.heads.measure.text_pass import max_tokens
from glass.live.frames import encode_error, encode_frame
from glass.live.parameters import Parameters, check_text, read_parameters
from glass.live.requests import MODEL_REQUESTS, TOKENIZER_REQUESTS
from glass.live.session import Session, load_session
from glass.live.steps import Steps
from glass.page.describe import describe_model, describe_scores
from glass.page.html import format_html
from glass.page.values import clip_title

MAX_SMALL_PARAMETERS = 200_000_000  # whose heads two cores measure in about a minute


class Canceled(Exception):
    """The client has stopped waiting for the answer that is being computed."""


class Explorer:
    """Answers the requests of a page with one model, or those of a series, one at a time."""

    def __init__(self, settings: ExploreConfig, log: Callable[[str], None]) -> None:
        """Load the model that the settings name, or the last one of their series."""
        self.settings = settings
        self.log = log
        self._lock = threading.Lock()  # held while the model runs
        self._turn = threading.Lock()  # held by the request that waits for it
        # Of the request that the model runs for:
        self._is_canceled: Callable[[], bool] = lambda: False
        self._gives_way = False
        self._is_closed = False
        self._steps = None if settings.steps is None else Steps(settings, log)
        # At most two models are in memory: that of the step on display comes first.
        self._sessions = [self._load()]

    @property
    def session(self) -> Session:
        """The model on display."""
        return self._sessions[0]

    def _load(self) -> Session:
        series = self._steps.series if self._steps else None
        return load_session(self.settings, self.log, self._check_canceled, series)

    def page(self) -> str:
        """Return the HTML of the page, after loading the checkpoint that is now best or last."""
        with tolerate_errors("loading another checkpoint", self.log):
            if self.session.is_outdated:
                with self._turn, self._lock:
                    self._sessions = [self._load()]
        return render_page(self.session, self._steps)

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
            elif parameters.request in MODEL_REQUESTS or parameters.request == "loadStep":
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
        if self._steps and parameters.step in self._steps.numbers:
            self._show_step(self._steps, parameters.step)
        answer = None
        if parameters.request != "loadStep":
            answer = self._ask_about_text(parameters)
        if isinstance(answer, Iterator):
            for part in answer:
                yield encode_frame("part", part)
            answer = None
        yield encode_frame("answer", answer)

    def _show_step(self, steps: Steps, step: int) -> None:
        """Load a step of the series, unless it is in memory, as the one on display."""
        if step not in [session.step for session in self._sessions]:
            del self._sessions[1:]
            self._sessions.append(steps.load(self.session, step))
        self._sessions = sorted(self._sessions, key=lambda session: session.step != step)

    def _ask_about_text(self, parameters: Parameters) -> Any:
        session = self.session
        config = session.model.config
        check_text(parameters, session.step, config)
        hidden = read_positions(parameters.hidden, len(parameters.ids))
        interventions = Interventions(read_heads(parameters.off, config), hidden)
        text_pass = session.read(parameters.ids, interventions)
        return MODEL_REQUESTS[parameters.request](session, parameters, text_pass)

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
        """Stop the request that is being answered, and free the models."""
        self._is_closed = True
        with self._lock:
            self._sessions.clear()


def render_page(session: Session, steps: Steps | None = None) -> str:
    """Return the HTML of the page, which asks its server instead of holding what it shows."""
    config = session.model.config
    content = {
        "kind": "explore",
        "title": clip_title(session.title),
        **describe_model(config),
        "step": session.step,
        "maxSteps": session.max_steps,
        **(steps.describe() if steps else {"steps": [session.step], "repeats": []}),
        "shape": [config.n_layer, config.n_head],
        "snapshotCount": 0,
        "unreadableSnapshots": 0,
        "probes": [],
        "words": {},
        "weights": None,
        **(session.scores or describe_scores(session.step, {}, [])),
        "server": {
            "maxTokens": max_tokens(config),
            "prompt": session.prompt,
            "promptIds": session.prompt_ids,
            "beginOfText": session.tokenizer.begin_of_text,
            "canMeasure": session.scores is None,
            # Then the page has the heads measured without being asked.
            "isSmall": session.model.num_parameters() < MAX_SMALL_PARAMETERS,
        },
    }
    return "".join(format_html("run.html", content, is_served=True))
