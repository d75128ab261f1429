"""Peer queues: jobs for many peers, in order for each of them, without one delaying another."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]


class PeerQueues:
    """A queue of jobs for each peer: one peer's jobs run in order, those of several in parallel.

    A peer whose jobs take long, such as an answer that it does not read, delays only itself.

    Args:
        threads: peers whose jobs run at the same time.
        room: jobs that one peer may have waiting.
    """

    def __init__(self, threads: int = 64, room: int = 64) -> None:
        self._room, self._lines, self._served = room, dict[str, deque[Job]](), set[str]()
        self._lock, self._closed = threading.Lock(), False
        self._pool = ThreadPoolExecutor(threads, "coterie-peer-queue")

    def put(self, who: str, job: Job, room: int | None = None) -> bool:
        """Add a job; return False when this peer's queue is full, or when the queues are closed."""
        with self._lock:
            line = self._lines.setdefault(who, deque())
            if self._closed or len(line) >= (self._room if room is None else room):
                return False
            line.append(job)
            # One worker for each peer that has jobs, so that they run in order.
            if who not in self._served:
                self._served.add(who)
                self._pool.submit(self._work_off, who)
        return True

    def _work_off(self, who: str) -> None:
        while True:
            with self._lock:
                line = self._lines[who]
                # Under the lock: a job that is put now finds either this worker or none.
                if not line:
                    del self._lines[who]
                    self._served.remove(who)
                    return
                job = line.popleft()
            # Outside of the lock, since a job can take seconds.
            job()

    def close(self) -> None:
        """Do what is waiting and take no more."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True)
