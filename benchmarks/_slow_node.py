"""Run a command of coterie whose local trainings take at least so long: a machine of another speed.

python benchmarks/_slow_node.py SECONDS python -m coterie node node.toml
"""

import sys
import time
from typing import Any

from coterie.cli import app
from coterie.engine.task import Task


def main() -> None:
    """Take the words behind the seconds as those of the command itself."""
    seconds, train = float(sys.argv[1]), Task.train

    def train_slowly(self: Task, *arguments: Any, **options: Any) -> Any:
        until = time.monotonic() + seconds
        found = train(self, *arguments, **options)
        time.sleep(max(0.0, until - time.monotonic()))
        return found

    Task.train = train_slowly  # type: ignore[method-assign]
    sys.argv = ["coterie", *sys.argv[sys.argv.index("coterie") + 1 :]]
    app.main()


if __name__ == "__main__":
    main()
