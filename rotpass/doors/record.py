"""What a torch.compile backend remembers of the graphs it compiled: sites and notes, no graph and no weight."""

from __future__ import annotations

import dataclasses
import threading
import weakref

from torch import Tensor

from rotpass.report import Report, Site


@dataclasses.dataclass
class Record:
    """One compiled graph.

    Attributes:
        frame: Dynamo's number for the code object; None outside Dynamo.
        weights: name -> id of each parameter and buffer of the graph; the module that it was compiled for.
        sites, notes: what was found in it.
        served: the first weight of every module that the graph has run for: id -> its storage, weakly.
    """

    frame: int | None
    weights: dict[str, int]
    sites: list[Site]
    notes: list[str] = dataclasses.field(default_factory=list)
    served: dict[int, weakref.ref] = dataclasses.field(default_factory=dict)

    def supersedes(self, other: Record) -> bool:
        """Whether this is a recompilation (other shapes, another dtype, a decode step) of the same code and module.

        The same code for another module is a graph of its own, even where all names are equal.
        """
        if self.frame is None or self.frame != other.frame:
            return False
        common = self.weights.keys() & other.weights.keys()
        if not common:  # code without weights; or DDPOptimizer's pieces of one graph, whose weights it hides
            return not self.weights and not other.weights and self._places() == other._places()
        return all(self.weights[name] == other.weights[name] for name in common)

    def serve(self, weight: Tensor) -> None:
        """Notes that the graph runs for the module of this weight."""
        known = self.served.get(id(weight))
        if known is None or known() is None:
            self.served[id(weight)] = weakref.ref(weight.untyped_storage())

    def _places(self) -> list[tuple[str, str]]:
        return [(site.kind, site.where) for site in self.sites]

    def all_notes(self) -> list[str]:
        """The notes, with one on the modules that share the graph."""
        further = sum(storage() is not None for storage in list(self.served.values())) - 1
        if further < 1:
            return self.notes
        graph = f"the graph of {self.sites[0].where}" if self.sites and self.sites[0].where else "a graph"
        modules = "module, which has" if further == 1 else "modules, each with"
        return [*self.notes, f"Dynamo reuses {graph} for {further} further {modules} its own folded weights"]


class Records:
    """The records of one backend, in the order of compilation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[Record] = []

    def add(self, record: Record) -> None:
        """Adds a record, in the place of the one that it supersedes."""
        with self._lock:
            for i, other in enumerate(self._records):
                if record.supersedes(other):
                    other.served.update(record.served)
                    record.served = other.served  # the graph compiled before may go on serving
                    self._records[i] = record
                    return
            self._records.append(record)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._records.clear()

    def report(self) -> Report:
        """All sites and notes; each note once."""
        with self._lock:
            records = list(self._records)
        notes = dict.fromkeys(note for record in records for note in record.all_notes())
        return Report([site for record in records for site in record.sites], list(notes))
