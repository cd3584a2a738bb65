"""Jobs run in order in one thread, and stop soon after they are canceled."""

import gc
import threading
import time
import weakref

import pytest
from frame_reader import decode_frames

from common.errors import UserError
from glass.live.jobs import MAX_WAITING_FRAMES, MAX_WAITING_JOBS, Jobs, TooManyJobs

SECONDS = 10  # that no wait of a passing test reaches


def read(job):
    """Return the frames of a job to its end."""
    return decode_frames(b"".join(iter(lambda: job.frames.get(timeout=SECONDS), None)))


def compute(*parts, answer=None, error=None):
    yield from parts
    if error:
        raise error
    return answer


def test_jobs_run_in_order_and_end_with_an_answer():
    jobs = Jobs()
    order = []

    def numbered(n):
        order.append(n)
        yield n
        return [n]

    submitted = [jobs.submit(lambda n=n: numbered(n)) for n in range(3)]
    jobs.run(seconds=0)
    assert order == [0, 1, 2]
    assert [read(job) for job in submitted] == [[("part", n), ("answer", [n])] for n in range(3)]


@pytest.mark.parametrize(
    "error, name",
    [
        (UserError("no"), "UserError"),
        (RecursionError(), "InternalError"),
        (StopIteration(), "InternalError"),
        (OSError(28, "No space left on device"), "UserError"),
    ],
)
def test_an_error_ends_its_job_and_not_the_next_one(error, name):
    jobs = Jobs()
    failing = jobs.submit(lambda: compute(1, error=error))
    unsendable = jobs.submit(lambda: compute(answer=object()))
    following = jobs.submit(lambda: compute(answer=2))
    jobs.run(seconds=0)
    part, (kind, value) = read(failing)
    assert (part, kind, value["name"]) == (("part", 1), "error", name)
    assert read(unsendable)[0][0] == "error"
    assert read(following) == [("answer", 2)]


def test_ctrl_c_ends_the_loop():
    jobs = Jobs()
    jobs.submit(lambda: compute(error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        jobs.run(seconds=0)


def test_a_canceled_job_stops_at_its_next_check_and_cleans_up():
    jobs = Jobs()
    reached = []

    def canceled_within():
        try:
            yield 1
            job.cancel()
            jobs.check_canceled()
            reached.append("after the check")
        finally:
            reached.append("clean-up")

    job = jobs.submit(canceled_within)
    following = jobs.submit(lambda: compute(answer=2))
    jobs.run(seconds=0)
    assert reached == ["clean-up"]
    assert read(following) == [("answer", 2)]
    jobs.check_canceled()  # there is no current job


def test_a_job_canceled_between_parts_cleans_up_at_once():
    jobs = Jobs()
    reached = []

    def endless():
        try:
            while True:
                yield 1
        finally:
            reached.append("clean-up")

    job = jobs.submit(endless)
    canceler = threading.Thread(target=lambda: (job.frames.get(timeout=SECONDS), job.cancel()))
    canceler.start()
    jobs.run(seconds=0)  # the job has filled its queue and waits, until it is canceled
    canceler.join()
    assert reached == ["clean-up"]


def test_a_job_canceled_before_it_starts_computes_nothing():
    jobs = Jobs()
    computed = []

    def append():
        computed.append(1)
        yield

    jobs.submit(append).cancel()
    following = jobs.submit(append)
    jobs.run(seconds=0)
    assert computed == [1]
    assert [kind for kind, _ in read(following)] == ["part", "answer"]


def test_a_job_waits_for_a_client_that_reads_slowly():
    jobs = Jobs()
    yielded = []

    def counted():
        for n in range(10 * MAX_WAITING_FRAMES):
            yielded.append(n)
            yield n

    job = jobs.submit(counted)
    received = []

    def read_slowly():
        while (frame := job.frames.get(timeout=SECONDS)) is not None:
            received.append(frame)
            assert len(yielded) <= len(received) + MAX_WAITING_FRAMES + 2

    reader = threading.Thread(target=read_slowly)
    reader.start()
    jobs.run(seconds=0)
    reader.join()
    assert len(received) == 10 * MAX_WAITING_FRAMES + 1


def test_too_many_jobs_are_refused_but_canceled_ones_do_not_count():
    jobs = Jobs()
    waiting = [jobs.submit(compute) for _ in range(MAX_WAITING_JOBS)]
    with pytest.raises(TooManyJobs):
        jobs.submit(compute)
    waiting[7].cancel()
    jobs.submit(compute)
    with pytest.raises(TooManyJobs):
        jobs.submit(compute)


def test_the_loop_ends_only_after_it_was_idle_for_the_time():
    jobs = Jobs()
    late = []
    timer = threading.Timer(0.1, lambda: late.append(jobs.submit(lambda: compute(answer=1))))
    timer.start()
    start = time.monotonic()
    jobs.run(seconds=0.3)
    assert time.monotonic() - start >= 0.3
    assert read(late[0]) == [("answer", 1)]


def test_the_memory_of_a_failed_job_is_freed_at_its_end():
    class Tensor:
        pass

    def failing():
        tensor = Tensor()
        tensors.append(weakref.ref(tensor))
        yield 1
        raise MemoryError

    tensors = []
    jobs = Jobs()
    job = jobs.submit(failing)
    gc.disable()  # only references count
    try:
        jobs.run(seconds=0)
        assert tensors[0]() is None
    finally:
        gc.enable()
    assert read(job)[-1][0] == "error"
