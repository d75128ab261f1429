"""Record: the results of a run as two long tables.

`metrics` has a row for each (round, client, split, model, metric); `edges` one for each model that
a client requested, with the similarity that the client found and the probability of its draw where
a run records them. Columns are stored as chunks of arrays, so that adding a round is cheap and a
checkpoint can hold the record exactly.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Int
from torch import Tensor

METRICS, EDGES = "metrics.parquet", "edges.parquet"
METRIC_COLUMNS = ("round", "client", "cluster", "split", "model", "metric", "value")
EDGE_COLUMNS = ("round", "reader", "read", "purpose", "weight", "bytes")
SIMILARITY_COLUMNS = ("similarity", "probability")
"""Further columns of edges in a run that records similarities; NaN where a method has none."""
AGE_COLUMNS = ("age", "age_seconds")
"""Further columns of edges in virtual time: how old a message was, in rounds of its reader and in
seconds; -1 and NaN where none arrived."""
_NAMES = ("split", "model", "metric", "purpose")
# Of columns; all others are int32.
_TYPES = {
    "value": "float64",
    "weight": "float64",
    "bytes": "int64",
    **dict.fromkeys(SIMILARITY_COLUMNS, "float32"),
    "age_seconds": "float64",
}


@dataclass
class _ColumnTable:
    """Chunks of columns; text columns hold numbers of the shared list of names."""

    columns: tuple[str, ...]
    chunks: list[dict[str, np.ndarray]] = field(default_factory=list)

    def add_rows(self, rows: int, **values: np.ndarray | int | float) -> None:
        if rows:
            chunk = {}
            for name in self.columns:
                dtype = _TYPES.get(name, "int32")
                chunk[name] = np.ascontiguousarray(
                    # Contiguous copies: a broadcast value would otherwise be one number that
                    # pretends to be a column.
                    np.broadcast_to(np.asarray(values[name], dtype=dtype), rows)
                )
            self.chunks.append(chunk)

    def join_chunks(self) -> dict[str, np.ndarray]:
        """Return whole columns instead of chunks: thousands of short arrays waste memory."""
        out = {}
        for name in self.columns:
            parts = [chunk[name] for chunk in self.chunks]
            out[name] = np.zeros(0, dtype=_TYPES.get(name, "int32"))
            if parts:
                out[name] = np.concatenate(parts)
        # The joined columns replace the chunks, so that the next call is free.
        if len(self.chunks) > 1:
            self.chunks = [out]
        return out


class Record:
    """The metrics and edges of one run.

    Args:
        clusters: planted cluster of each member of the population; -1 where unknown.
        client_names: names of clients by id, where they have any. The tables hold ids.
        ids: the id in the tables of each client of the run, where the run numbers them otherwise.
        hidden: which members of the population have no metrics: attackers.
        similarities: whether edges have SIMILARITY_COLUMNS.
        data: a digest of all data of the run; "" where nobody needs it.
        ages: whether edges have AGE_COLUMNS.
        later_clusters: the first round and the planted clusters of each later phase, where the data
            change over the rounds.
    """

    def __init__(
        self,
        clusters: Int[Tensor, " population"],
        client_names: Mapping[int, str] | None = None,
        ids: Int[Tensor, " clients"] | None = None,
        hidden: Bool[Tensor, " population"] | None = None,
        similarities: bool = False,
        data: str = "",
        ages: bool = False,
        later_clusters: Sequence[tuple[int, Int[Tensor, " population"]]] = (),
    ) -> None:
        self.data = data
        self.hidden, self.similarities, self.ages = hidden, similarities, ages
        self._clusters = [(-1, clusters.numpy())]
        for first, planted in later_clusters:
            self._clusters.append((first, planted.numpy()))
        self.ids = None if ids is None else ids.numpy()
        self.client_names = dict(client_names or {})
        self.names: list[str] = []
        further = SIMILARITY_COLUMNS * similarities + AGE_COLUMNS * ages
        self._metrics = _ColumnTable(METRIC_COLUMNS)
        self._edges = _ColumnTable((*EDGE_COLUMNS, *further))

    def find_clusters(self, round: int) -> Int[np.ndarray, " population"]:
        """Return the planted cluster of each member of the population in a round."""
        return [planted for first, planted in self._clusters if first <= round][-1]

    def _name_code(self, text: str) -> int:
        if text not in self.names:
            self.names.append(text)
        # Codes are places in the list, so names keep their order: files must be the same bytes
        # after a restart.
        return self.names.index(text)

    def add_metrics(
        self,
        round: int,
        ids: Int[Tensor, " clients"],
        split: str,
        model: str,
        values: Mapping[str, Tensor],
    ) -> None:
        """Add one value of each metric for each client.

        Args:
            round: -1 for the warm-up.
            ids: the clients.
            split: "train", "validation" or "test"; "new_clients" for the tests of clients that
                joined at the end.
            model: "current" (after the round) or "best" (the best on validation so far); of clients
                that joined also "received" (that of the server, before they trained).
            values: metrics by name, a value a client; NaN where undefined.
        """
        if self.hidden is not None:
            # Attackers have no rows of metrics; see `simulation.attackers`.
            seen = ~self.hidden[ids]
            values = {name: value[seen.to(value.device)] for name, value in values.items()}
            ids = ids[seen]
        clients, planted = self.table_ids(ids), self.find_clusters(round)
        # Sorted, so that the order in which a method reports does not change the files.
        for metric, value in sorted(values.items()):
            self._metrics.add_rows(
                len(clients),
                round=round,
                client=clients,
                cluster=planted[clients],
                split=self._name_code(split),
                model=self._name_code(model),
                metric=self._name_code(metric),
                value=value.detach().cpu().double().numpy(),
            )

    def table_ids(self, ids: Int[Tensor, " clients"]) -> np.ndarray:
        """Return the ids under which the tables have clients of the run."""
        if self.ids is None:
            return ids.numpy()
        return self.ids[ids.numpy()]

    def list_refused(self, round: int) -> list[tuple[int, int]]:
        """Return (reader, read) of each model that its reader refused in a round."""
        out = list[tuple[int, int]]()
        # Looked for only where anything was refused: otherwise the name has no code.
        if "refused" not in self.names:
            return out
        for chunk in self._edges.chunks:
            found = (chunk["round"] == round) & (chunk["purpose"] == self._name_code("refused"))
            out += zip(chunk["reader"][found].tolist(), chunk["read"][found].tolist(), strict=True)
        return out

    def drop_metrics(self, round: int, split: str, model: str) -> None:
        """Remove the values of a split and a model in a round, before they are measured again."""
        wanted = {"round": round, "split": self._name_code(split), "model": self._name_code(model)}
        for number, chunk in enumerate(self._metrics.chunks):
            old = np.logical_and.reduce([chunk[name] == value for name, value in wanted.items()])
            if old.any():
                left = {name: values[~old] for name, values in chunk.items()}
                self._metrics.chunks[number] = left

    def add_edges(
        self, round: int, ids: Int[Tensor, " clients"], info: Mapping[str, Tensor]
    ) -> None:
        """Add the models that clients requested in a round, from the report of a method.

        A received model that was mixed has the purpose "mix", one that was only evaluated "probe";
        a message that did not arrive gives an edge with purpose "missing" (without bytes, unless it
        came after a deadline), and one that the reader refused has the purpose "refused". The
        similarity of a message that did not arrive is NaN.
        """
        if "peers" not in info:
            return
        peers = info["peers"]
        asked = peers >= 0
        reader = ids[:, None].expand_as(peers)[asked]
        # A method that reports peers alone received and mixed all of them.
        arrived = torch.ones_like(reader, dtype=torch.bool)
        weight = torch.ones_like(reader, dtype=torch.float64)
        size = torch.zeros_like(reader)
        if "arrived" in info:
            arrived = info["arrived"][asked]
        if "weights" in info:
            weight = info["weights"][asked]
        if "bytes" in info:
            size = info["bytes"][asked]
        names = ["mix", "probe", "missing"]
        # 0, 1 and 2 are places in `names`: mix, probe, missing.
        kind = torch.where(arrived, torch.where(weight > 0, 0, 1), 2)
        if "slots_refused" in info:
            names.append("refused")
            kind = torch.where(info["slots_refused"][asked] & ~arrived, 3, kind)
        # In this order whatever a round has, so that the codes of words do not depend on it.
        kinds = torch.tensor(list(map(self._name_code, names)))
        further: dict[str, Any] = {}
        if self.similarities:
            further = dict.fromkeys(SIMILARITY_COLUMNS, np.nan)
            keys = ("similarities", "probabilities")
            for name, key in zip(SIMILARITY_COLUMNS, keys, strict=True):
                if key in info:
                    further[name] = info[key][asked].cpu().numpy()
            further["similarity"] = np.where(arrived.cpu().numpy(), further["similarity"], np.nan)
        if self.ages:
            found = arrived.cpu().numpy()
            further["age"] = np.where(found, info["ages"][asked].numpy(), -1)
            further["age_seconds"] = np.where(found, info["age_seconds"][asked].numpy(), np.nan)
        self._edges.add_rows(
            len(reader),
            round=round,
            reader=self.table_ids(reader),
            read=self.table_ids(peers[asked]),
            purpose=kinds[kind].numpy(),
            # The weight of what did not arrive is 0, whatever the method planned.
            weight=torch.where(arrived, weight, 0).double().cpu().numpy(),
            bytes=size.cpu().numpy(),
            **further,
        )

    @property
    def metrics(self) -> pd.DataFrame:
        """The metrics as a data frame (see METRIC_COLUMNS)."""
        return self._make_frame(self._metrics)

    @property
    def edges(self) -> pd.DataFrame:
        """The edges as a data frame (see EDGE_COLUMNS and SIMILARITY_COLUMNS)."""
        return self._make_frame(self._edges)

    def _make_frame(self, table: _ColumnTable) -> pd.DataFrame:
        columns = {}
        # One type for all columns: each new one would check its categories again.
        kind = pd.CategoricalDtype(self.names)
        for name, values in table.join_chunks().items():
            columns[name] = values
            if name in _NAMES:
                columns[name] = pd.Categorical.from_codes(values, dtype=kind)
        return pd.DataFrame(columns)

    def encode_files(self) -> dict[str, bytes]:
        """Return metrics.parquet and edges.parquet by name; the same bytes for the same record."""
        files = {}
        for name, table in ((METRICS, self._metrics), (EDGES, self._edges)):
            columns = {}
            for column, values in table.join_chunks().items():
                if column in _NAMES:
                    codes = pa.array(values, type=pa.int32())
                    columns[column] = pa.DictionaryArray.from_arrays(
                        codes, pa.array(self.names, type=pa.string())
                    )
                else:
                    columns[column] = pa.array(values)
            buffer = io.BytesIO()
            # In memory and with fixed options: equal tables give equal bytes.
            pq.write_table(pa.table(columns), buffer, compression="zstd")
            files[name] = buffer.getvalue()
        # arrow's pool keeps two megabytes more whenever a table outgrows a size
        pa.default_memory_pool().release_unused()
        return files

    def snapshot(self) -> tuple[dict[str, Tensor], list[str]]:
        """Return the record as tensors and the list of names, for a checkpoint."""
        tensors = {}
        for prefix, table in (("metrics", self._metrics), ("edges", self._edges)):
            for name, values in table.join_chunks().items():
                tensors[f"{prefix}.{name}"] = torch.from_numpy(values)
        return tensors, list(self.names)

    def restore(self, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        """Restore the result of `snapshot`."""
        self.names = list(names)
        for prefix, table in (("metrics", self._metrics), ("edges", self._edges)):
            arrays = {name: tensors[f"{prefix}.{name}"].numpy() for name in table.columns}
            # No empty chunk: the checkpoint of a fresh run restores to a fresh record.
            table.chunks = []
            if len(arrays["round"]):
                table.chunks.append(arrays)
