"""Desks: work for many others, in turn for each of them, and for none at the cost of another."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]


class PeerQueues:
    """A desk for each of those who ask: jobs of one are done in their order, jobs of several at the same time.

    One whose jobs take long (an answer that it does not read, for example) holds up only itself.

    Args:
        threads: desks that work at the same time.
        room: jobs that one may have waiting.
    """

    def __init__(self, threads: int = 64, room: int = 64) -> None:
        self._room, self._lines, self._served = room, dict[str, deque[Job]](), set[str]()
        self._lock, self._closed = threading.Lock(), False
        self._pool = ThreadPoolExecutor(threads, "coterie-desk")

    def put(self, who: str, job: Job, room: int | None = None) -> bool:
        """Take a job; return False when too many of this one wait already, or when the desks are closed."""
        with self._lock:
            line = self._lines.setdefault(who, deque())
            if self._closed or len(line) >= (self._room if room is None else room):
                return False
            line.append(job)
            if who not in self._served:
                self._served.add(who)
                self._pool.submit(self._work_off, who)
        return True

    def _work_off(self, who: str) -> None:
        while True:
            with self._lock:
                line = self._lines[who]
                if not line:
                    del self._lines[who]
                    self._served.remove(who)
                    return
                job = line.popleft()
            job()

    def close(self) -> None:
        """Do what is waiting and take no more."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True)
