"""The page of a model, and the answers to its requests, one at a time."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import Queue
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

MEASUREMENTS = ("measureHeads", "measureStep")  # take minutes; other requests go first
MAX_SMALL_PARAMETERS = 200_000_000  # whose heads two cores measure in about a minute


class Canceled(Exception):
    """The client has stopped waiting, or another step is needed in the place of a measured one."""


@dataclass(eq=False)
class Request:
    """A request that the model answers, and the frames of its answer, which end with None."""

    parameters: Parameters
    is_canceled: Callable[[], bool]
    frames: Queue[bytes | None] = field(default_factory=lambda: Queue(maxsize=1))


class Explorer:
    """Answers the requests of a page with one model, or those of a series, one at a time."""

    def __init__(self, settings: ExploreConfig, log: Callable[[str], None]) -> None:
        """Load the model that the settings name, or the last one of their series."""
        self.settings = settings
        self.log = log
        self._worker = ThreadPoolExecutor(max_workers=1)  # the thread in which the model runs
        # What waits for it:
        self._requests: deque[Request] = deque()
        self._measurements: deque[Request] = deque()
        self._current = Request(Parameters(request="load"), is_canceled=lambda: False)
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
            if self.session.is_outdated():
                arguments = (self.settings, self.log, self._check_canceled)
                self._sessions = [self._worker.submit(load_session, *arguments).result()]
        return render_page(self.session, self._steps)

    def answer(self, body: bytes, is_canceled: Callable[[], bool]) -> Generator[bytes, None, None]:
        """Yield the frames that answer a request; end soon after `is_canceled` returns True."""
        if self._is_closed:
            return
        try:
            parameters = read_parameters(body, self.session.model.config)
            if respond := TOKENIZER_REQUESTS.get(parameters.request):
                yield encode_frame("answer", respond(self.session, parameters))
            else:
                yield from self._wait_for_answer(Request(parameters, is_canceled))
        except Exception as e:
            yield encode_error(e)

    def _wait_for_answer(self, request: Request) -> Iterator[bytes]:
        is_measurement = request.parameters.request in MEASUREMENTS
        (self._measurements if is_measurement else self._requests).append(request)
        self._worker.submit(self._run_next)
        frames = iter(request.frames.get, None)
        try:
            yield from frames
        finally:  # the worker asks for the client until then, if that does not take all frames
            request.is_canceled = lambda: True
            for _ in frames:
                pass

    @torch.no_grad()
    def _run_next(self) -> None:
        """Run the request that is next, unless a measurement has let all of them go first."""
        waiting = self._requests or self._measurements
        if not waiting:
            return
        interrupted = self._current
        self._current = waiting.popleft()
        frames = self._current.frames
        try:
            for frame in self._run_model(self._current.parameters):
                frames.put(frame)
        except Canceled:
            pass
        except Exception as e:
            frames.put(encode_error(e))
        self._current = interrupted
        frames.put(None)

    def _run_model(self, parameters: Parameters) -> Iterator[bytes]:
        answer: Any = None
        if self._steps and parameters.request == "measureStep":
            answer = self._measure_step(self._steps)
        else:
            if self._steps and parameters.step in self._steps.numbers:
                session = self._find_step(self._steps, parameters.step)
                self._sessions = [session, *(s for s in self._sessions if s is not session)]
            if not self._steps or parameters.request != "loadStep":
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
            session = steps.load(self.session, step)
            self._sessions.append(session)
        return next(session for session in self._sessions if session.step == step)

    def _measure_step(self, steps: Steps) -> Iterator[dict[str, Any]]:
        """Measure the next step, unless another request needs its place; yield what is left."""
        with suppress(Canceled):
            for step in steps.unmeasured[:1]:
                yield {"step": step, "stage": "loading"}
                for stage in steps.measure(self._find_step(steps, step)):
                    yield {"step": step, "stage": stage}
        yield {"unmeasured": len(steps.unmeasured)}

    def _ask_about_text(self, parameters: Parameters) -> Any:
        if parameters.request not in MODEL_REQUESTS:
            raise UserError(f"there is no request {parameters.request}")
        session = self.session
        config = session.model.config
        check_text(parameters, session.step, config)
        hidden = read_positions(parameters.hidden, len(parameters.ids))
        interventions = Interventions(read_off(parameters.off, config), hidden)
        text_pass = session.read(parameters.ids, interventions)
        return MODEL_REQUESTS[parameters.request](session, parameters, text_pass)

    def _check_canceled(self) -> None:
        """Let the waiting requests go first if a measurement runs; end a canceled request."""
        while self._current.parameters.request in MEASUREMENTS and self._requests:
            if not self._is_loaded(self._requests[0].parameters.step):
                raise Canceled
            self._run_next()
        if self._is_closed or self._current.is_canceled():
            raise Canceled

    def close(self) -> None:
        """Stop the request that is being answered, and free the models."""
        self._is_closed = True
        self._worker.shutdown()
        self._sessions.clear()


def render_page(session: Session, steps: Steps | None = None) -> str:
    """Return the HTML of the page, which asks its server instead of holding what it shows."""
    config = session.model.config
    content = {
        "kind": "explore",
        "title": session.title,
        "modelConfig": asdict(config),
        "step": session.step,
        "maxSteps": session.max_steps,
        "steps": [session.step],
        "shape": [config.n_layer, config.n_head],
        "snapshotCount": 0,
        "unreadableSnapshots": 0,
        "probes": [],
        "words": {},
        **(session.scores or describe_scores(session.step, [])),
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
    return "".join(format_html("run.html", content))
