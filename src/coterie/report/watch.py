"""The live page: the views of the report, following a run folder while a study or a node runs.

It is served to this machine only, see `server`, and only reads run folders.
"""

import hashlib
from collections.abc import Mapping
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from coterie.errors import DataError
from coterie.report.data import build_empty_payload
from coterie.report.network import render_networks
from coterie.report.page import (
    build_data,
    encode_for_script,
    format_subtitle,
    render_overview,
    render_page,
)
from coterie.report.server import NO_PAGE, Answer, PageServer
from coterie.results.stored_runs import (
    CONFIG,
    EDGES,
    FEDERATION,
    METRICS,
    NETWORK,
    PROVENANCE,
    load_runs,
)

WATCHED = (CONFIG, METRICS, EDGES, PROVENANCE, FEDERATION, NETWORK)


class FolderFollower:
    """The content of a folder, loaded again only when a file in it has changed.

    Args:
        folder: folder of a study, a run or a node; it may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._read: tuple[str, dict[str, Any]] | None = None

    def compute_signature(self) -> str:
        """Return a short text that changes whenever a file of a run does."""
        digest = hashlib.sha256()
        # Sorted: the order in which a file system lists files must not change the signature.
        for path in sorted(chain.from_iterable(map(self.folder.rglob, WATCHED))):
            try:
                found = path.stat()
            except FileNotFoundError:  # replaced or deleted since it was listed
                continue
            # Time and size, not the content: the page asks every two seconds.
            digest.update(f"{path} {found.st_mtime_ns} {found.st_size}\n".encode())
        return digest.hexdigest()[:16]

    def load_message(self) -> dict[str, Any]:
        """Return the page's data: `signature`, `subtitle` and `overview` as HTML, and `data`."""
        # Requests run in threads: one of them loads, the others wait and take its result.
        with self._lock:
            signature = self.compute_signature()
            if self._read is None or self._read[0] != signature:
                self._read = signature, {"signature": signature, **self._build_views()}
            return self._read[1]

    def _build_views(self) -> dict[str, Any]:
        try:
            runs, problems = load_runs([self.folder])
        except DataError:
            runs, problems = [], []
        try:
            data = build_data(runs, problems, self.folder)
        except DataError as error:  # a folder of several studies
            runs, data = [], {**build_empty_payload(self.folder), "notes": [str(error)]}
        return {
            "subtitle": format_subtitle(data),
            "overview": render_networks(self.folder) + render_overview(data, runs),
            "data": data,
        }

    def answer(self, path: str, given: Mapping[str, str]) -> Answer:
        """Answer a request for the page, "/", or for what is new in it, "/data"."""
        if path not in ("/", "/data"):
            return NO_PAGE
        message = self.load_message()
        if path == "/":
            data = {**message["data"], "signature": message["signature"]}
            return Answer(render_page(data, message["overview"], connect="'self'"))
        # The page asks every two seconds: without news the answer is empty.
        if given.get("since") == message["signature"]:
            return Answer("", "application/json", HTTPStatus.NO_CONTENT)
        return Answer(encode_for_script(message), "application/json")


class WatchServer(PageServer):
    """A server of the live page of a folder, running from its creation until `close`.

    Args:
        folder: the folder to follow.
        port: the port; 0 for any free one.

    Raises:
        ConfigError: when the port is taken.
    """

    def __init__(self, folder: str | Path, *, port: int = 0) -> None:
        self.follower = FolderFollower(Path(folder))
        super().__init__(self.follower.answer, port=port)
