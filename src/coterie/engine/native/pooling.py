"""Traces with max-pooling rewritten, so that activations and convolutions around it are cheaper."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coterie.engine.native.simple import separate_windows
from coterie.engine.native.trace import ArrayKind, Operation, Ref, Trace

_ALIASES = {"detach", "alias"}
_POOL, _POOL_BACK = "max_pool2d_with_indices", "max_pool2d_with_indices_backward"
_ACTIVATIONS = {"relu": "threshold_backward", "leaky_relu": "leaky_relu_backward"}


class _Graph:
    """Who makes and who reads each value of a trace; a value and its aliases count as one."""

    def __init__(self, trace: Trace) -> None:
        self._roots: dict[Ref, Ref] = {}
        self.makers: dict[Ref, Operation] = {}
        self.aliases: dict[Ref, list[Operation]] = {}
        self._readers: dict[Ref, list[Operation]] = {}
        for node in trace.nodes:
            out = node.outs[0]
            if node.name in _ALIASES and out is not None:
                root = self.root(node.args[0])
                self._roots[out] = root
                self.aliases.setdefault(root, []).append(node)
                continue
            self.makers.update((out, node) for out in node.outs if out is not None)
            for ref in node.refs():
                self._readers.setdefault(self.root(ref), []).append(node)
        self._results = {self.root(ref) for ref in trace.outputs if ref is not None}

    def root(self, ref: Ref) -> Ref:
        """Return the value that a reference is an alias of."""
        return self._roots.get(ref, ref)

    def readers(self, ref: Ref | None) -> list[Operation] | None:
        """Return the nodes that read a value; None when the trace returns it."""
        if ref is None or ref in self._results:
            return None
        return self._readers.get(ref, [])

    def maker(self, ref: Ref) -> Operation | None:
        """Return the node that makes a value."""
        return self.makers.get(self.root(ref))

    def pooling_backward(
        self, pool: Operation, source: Ref
    ) -> tuple[Operation | None, list[Operation]] | None:
        """Return the backward node of a max-pooling, and what else reads the pooling's input.

        Args:
            pool: the pooling.
            source: its input.

        Returns:
            None when the trace returns the input.
        """
        readers = self.readers(source)
        if readers is None:
            return None
        back, others = None, []
        for node in readers:
            if node.name == _POOL_BACK and self.root(node.args[-1]) == pool.outs[1]:
                back = node
            elif node is not pool:
                others.append(node)
        return back, others


def pool_before_activations(trace: Trace) -> Trace:
    """Return a trace in which max-pooling comes before the (leaky) ReLU that it followed.

    The larger of two numbers is the same before and after a function that never falls. Afterwards
    there are fewer numbers to compute the function of, forward and backward. A zero or negative
    number that the pooling picks otherwise has no gradient, or that of equal numbers.
    """
    graph, kinds = _Graph(trace), dict(trace.kinds)
    replaced: dict[int, list[Operation]] = {}

    def new_ref(kind: ArrayKind) -> Ref:
        ref = Ref(max(kinds) + 1)
        kinds[ref.number] = kind
        return ref

    for pool in trace.nodes:
        if pool.name != _POOL:
            continue
        activated = graph.root(pool.args[0])
        activation = graph.maker(activated)
        found = graph.pooling_backward(pool, activated)
        if found is None or activation is None or not _never_falls(activation):
            continue
        back, others = found
        source, result = activation.args[0], pool.outs[0]
        assert result is not None
        slope = None
        if back is None:
            # Without a backward pass nothing else may read the activation, which is gone
            # afterwards.
            if others:
                continue
        else:
            # Backward, the pooling's gradient must be read by the activation's alone.
            inner = graph.readers(back.outs[0])
            if inner is None or len(inner) != 1:
                continue
            slope = inner[0]
            # The gradient of relu reads its result, that of leaky_relu its input.
            saved = activated if activation.name == "relu" else graph.root(source)
            known = slope.name == _ACTIVATIONS[activation.name]
            if not known or graph.root(slope.args[1]) != saved or others not in ([], [slope]):
                continue
            # It reads the result where the activation was computed in place: not known here.
            if activation.name == "leaky_relu" and slope.args[-1]:
                continue
        # Forward, the pooling reads what the activation read, and the activation what is pooled.
        pooled = new_ref(kinds[result.number])
        outs = (pooled, *pool.outs[1:])
        replaced[id(activation)] = []
        replaced.update((id(alias), []) for alias in graph.aliases.get(activated, []))
        replaced[id(pool)] = [
            replace(pool, args=(source, *pool.args[1:]), outs=outs),
            replace(activation, args=(pooled, *activation.args[1:]), outs=(result,)),
        ]
        if back is not None and slope is not None:
            # Backward in the opposite order: the slope of what was pooled, then its places in the
            # input.
            inside = new_ref(kinds[result.number])
            saved = result if activation.name == "relu" else pooled
            args = (back.args[0], saved, *slope.args[2:])
            replaced[id(back)] = [replace(slope, args=args, outs=(inside,))]
            replaced[id(slope)] = [
                replace(back, args=(inside, source, *back.args[2:]), outs=slope.outs)
            ]
    return replace(trace, nodes=_replace_nodes(trace, replaced), kinds=kinds)


def _replace_nodes(trace: Trace, replaced: Mapping[int, Sequence[Operation]]) -> list[Operation]:
    """Return the operations of a trace with others in the place of some, by their `id`."""
    nodes = []
    for node in trace.nodes:
        nodes += replaced.get(id(node), [node])
    return nodes


def _never_falls(node: Operation) -> bool:
    if node.name == "leaky_relu":
        return len(node.args) < 2 or node.args[1] > 0
    return node.name == "relu"


def join_convolutions_with_pooling(trace: Trace) -> Trace:
    """Return a trace in which a convolution and the max-pooling that alone reads it are one node.

    The node `convolution_pool` takes the arguments of the convolution and the size of the windows;
    `convolution_pool_backward` takes those of the convolution's gradient, with the places of the
    largest numbers after the weights, and the size.
    """
    graph = _Graph(trace)
    replaced: dict[int, list[Operation]] = {}
    for pool in trace.nodes:
        size = separate_windows(pool.args[1:]) if pool.name == _POOL else None
        if size is None:
            continue
        source = graph.root(pool.args[0])
        conv, found = graph.maker(source), graph.pooling_backward(pool, source)
        # The whole result of the convolution is never stored, so nothing else may read it.
        if conv is None or conv.name != "convolution" or found is None or found[1]:
            continue
        back = found[0]
        if back is not None:
            readers = graph.readers(back.outs[0])
            if readers is None or [node.name for node in readers] != ["convolution_backward"]:
                continue
            (end,) = readers
            args = (back.args[0], *end.args[1:3], pool.outs[1], *end.args[3:], size)
            replaced[id(back)] = []
            replaced[id(end)] = [replace(end, name="convolution_pool_backward", args=args)]
        replaced[id(conv)] = []
        replaced.update((id(alias), []) for alias in graph.aliases.get(source, []))
        replaced[id(pool)] = [
            Operation("convolution_pool", (*conv.args, size), {}, pool.outs, conv.layer)
        ]
    nodes = _replace_nodes(trace, replaced)
    return replace(trace, nodes=nodes)
