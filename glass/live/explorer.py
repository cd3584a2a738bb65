"""The page of a model, and the answers to its requests, one at a time."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from cli.explore_config import ExploreConfig
from common.errors import UserError
from common.terminal import tolerate_errors
from glass.heads.measure.arguments import read_off, read_positions
from glass.heads.measure.interventions import Interventions
from glass.heads.measure.text_pass import max_tokens
from glass.live.frames import encode_error, encode_frame
from glass.live.parameters import Parameters, check_text, read_parameters
from glass.live.requests import MODEL_REQUESTS, TOKENIZER_REQUESTS
from glass.live.session import Session, load_session
from glass.live.steps import Steps, open_steps
from glass.page.describe import describe_scores
from glass.page.html import format_html
from glass.page.values import clip_title

POLL_SECONDS = 0.01
STEP_REQUESTS = ("loadStep", "measureStep")  # of a series, beside those about a text
MAX_SMALL_PARAMETERS = 200_000_000  # whose heads two cores measure in about a minute


class Canceled(Exception):
    """The client has stopped waiting for the answer that is being computed."""


class OtherStepNeeded(Exception):
    """A waiting request needs another step than those in memory, one of which is measured."""


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
        self._waiting_step: int | None = None  # of the request that waits
        self._is_measuring = False  # the steps
        self._is_suspended = False  # a measurement that has let another request go first
        self._is_closed = False
        self._steps: Steps | None = None
        # At most two models are in memory: that of the step on display comes first.
        if settings.steps is None:
            self._sessions = [load_session(settings, log, self._check_canceled)]
        else:
            self._steps, last = open_steps(settings, log, self._check_canceled)
            self._sessions = [last]

    @property
    def session(self) -> Session:
        """The model on display."""
        return self._sessions[0]

    def page(self) -> str:
        """Return the HTML of the page, after loading the checkpoint that is now best or last."""
        with tolerate_errors("loading another checkpoint", self.log):
            if self.session.is_outdated:
                with self._turn, self._lock:
                    session = load_session(self.settings, self.log, self._check_canceled)
                    self._sessions = [session]
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
            elif parameters.request in MODEL_REQUESTS or (
                self._steps and parameters.request in STEP_REQUESTS
            ):
                gives_way = parameters.request in ("measureHeads", "measureStep")
                self._take_turn(is_canceled, gives_way, parameters.step)
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
        answer: Any = None
        if self._steps and parameters.request == "measureStep":
            answer = self._measure_step(self._steps)
        else:
            if self._steps and parameters.step in self._steps.numbers:
                session = self._find_step(self._steps, parameters.step)
                self._sessions = [session, *(s for s in self._sessions if s is not session)]
            if parameters.request != "loadStep":
                answer = self._ask_about_text(parameters)
        if isinstance(answer, Iterator):
            for part in answer:
                yield encode_frame("part", part)
            answer = None
        yield encode_frame("answer", answer)

    def _is_loaded(self, step: int) -> bool:
        return not self._steps or step in [session.step for session in self._sessions]

    def _find_step(self, steps: Steps, step: int) -> Session:
        """Return a step of the series, in the place of the one that is not on display."""
        if not self._is_loaded(step):
            del self._sessions[1:]
            self._sessions.append(steps.load(self.session, step))
        return next(session for session in self._sessions if session.step == step)

    def _measure_step(self, steps: Steps) -> Iterator[dict[str, Any]]:
        """Measure the next step, unless another request needs its place; yield what is left."""
        if self._is_measuring:
            raise UserError("another page measures these steps: wait for it, or stop it there")
        self._is_measuring = True
        try:
            with suppress(OtherStepNeeded):
                for step in steps.unmeasured[:1]:
                    yield {"step": step, "stage": "loading"}
                    for stage in steps.measure(self._find_step(steps, step)):
                        yield {"step": step, "stage": stage}
            yield {"unmeasured": len(steps.unmeasured)}
        finally:
            self._is_measuring = False

    def _ask_about_text(self, parameters: Parameters) -> Any:
        session = self.session
        config = session.model.config
        check_text(parameters, session.step, config)
        hidden = read_positions(parameters.hidden, len(parameters.ids))
        interventions = Interventions(read_off(parameters.off, config), hidden)
        text_pass = session.read(parameters.ids, interventions)
        return MODEL_REQUESTS[parameters.request](session, parameters, text_pass)

    def _take_turn(self, is_canceled: Callable[[], bool], gives_way: bool, step: int) -> None:
        has_turn = False
        while not has_turn:
            with self._turn:
                self._waiting_step = step
                self._lock.acquire()
                self._waiting_step = None
            has_turn = self._is_loaded(step) or not self._is_suspended
            if not has_turn:  # a measurement would keep a third model: it ends at its next check
                self._lock.release()
                time.sleep(POLL_SECONDS)
        self._is_canceled = is_canceled
        self._gives_way = gives_way

    def _check_canceled(self) -> None:
        """Let a waiting request go first if the current one gives way; end a canceled one."""
        step = self._waiting_step
        if self._gives_way and step is not None:
            if not self._is_loaded(step):
                raise OtherStepNeeded
            is_canceled = self._is_canceled
            self._is_suspended = True
            self._lock.release()
            self._take_turn(is_canceled, gives_way=True, step=self.session.step)
            self._is_suspended = False
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
        "modelConfig": asdict(config),
        "step": session.step,
        "maxSteps": session.max_steps,
        "steps": [session.step],
        "repeats": [],
        "shape": [config.n_layer, config.n_head],
        "snapshotCount": 0,
        "unreadableSnapshots": 0,
        "probes": [],
        "words": {},
        "weights": None,
        **(session.scores or describe_scores(session.step, {}, [])),
        **(steps.describe() if steps else {}),
        "server": {
            "maxTokens": max_tokens(config),
            "prompt": session.prompt,
            "promptIds": session.prompt_ids,
            "beginOfText": session.tokenizer.begin_of_text,
            # Steps whose heads have no scores
            "unmeasured": len(steps.unmeasured) if steps else int(session.scores is None),
            # Then the page has the heads measured without being asked.
            "isSmall": not steps and session.model.num_parameters() < MAX_SMALL_PARAMETERS,
        },
    }
    return "".join(format_html("run.html", content, is_served=True))
