"""The same methods between machines that do not trust each other: peers, or nodes and a server.

Needs the extra `net`. A node is the run's own loop with one hosted client and a remote exchange;
the modules, from the bottom up: `wire` (what a message is), `identity` and `roster` (who may
speak), `outbox`, `transport` and `grpc_transport` (how messages travel), `exchange` (the methods'
door), `node` (the process).
"""

import os

# Before the library is imported: it writes what others send, as it comes, to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
