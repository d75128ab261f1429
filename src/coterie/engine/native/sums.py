"""Sums of matrix products as one product: gradients of weights used in many steps of time.

A sum of a1 b1, a2 b2, ... is the product of [a1 a2 ...] and the b1, b2, ... below each other.
"""

from dataclasses import replace

from coterie.engine.native.trace import ArrayKind, Operation, Ref, Size, Trace

_FEWEST = 3  # products of a sum for which joining them pays


def join_products(trace: Trace) -> Trace:
    """Return a trace in which each sum of several products is one product."""
    makers = {}
    for node in trace.nodes:
        makers |= dict.fromkeys(node.outs, node)
    makers.pop(None, None)
    uses, kinds = trace.count_uses(), dict(trace.kinds)
    gone: set[int] = set()
    made: dict[int, list[Operation]] = {}

    def factors(ref: Ref, turned: bool) -> list[tuple[Ref, Ref, bool]] | None:
        """Return the factors of a sum used once, with whether products are turned, or None."""
        node = makers.get(ref)
        # A value that is read elsewhere too must stay as it is.
        if node is None or uses[ref] != 1:
            return None
        if node.name == "mm":
            gone_now.append(node)
            return [(node.args[0], node.args[1], turned)]
        if node.name == "t":
            gone_now.append(node)
            return factors(node.args[0], not turned)
        if _plain_sum(node):
            gone_now.append(node)
            left, right = factors(node.args[0], turned), factors(node.args[1], turned)
            if left is not None and right is not None:
                return [*left, *right]
        return None

    def new(shape: tuple[Size, ...], like: Ref) -> Ref:
        ref = Ref(max(kinds) + 1)
        kinds[ref.number] = ArrayKind(shape, kinds[like.number].dtype)
        return ref

    # From the end: a whole sum is met before the sums that are part of it.
    for node in reversed(trace.nodes):
        if id(node) in gone or not _plain_sum(node):
            continue
        gone_now: list[Operation] = []
        before, after = factors(node.args[0], False), factors(node.args[1], False)
        if before is None or after is None or len(before) + len(after) < _FEWEST:
            continue
        nodes: list[Operation] = []
        columns, rows = [], []
        for a, b, turned in (*before, *after):
            # The transpose of a product is that of its factors in the other order.
            left, right = a, b
            if turned:
                left, right = b, a
            for ref, flip, into in ((left, not turned, columns), (right, turned, rows)):
                # a left factor lies with its columns below each other, so that they are joined like
                # rows
                if flip:
                    shape = kinds[ref.number].shape
                    other = new((shape[1], shape[0]), ref)
                    nodes.append(Operation("t", (ref,), {}, (other,), node.layer))
                    into.append(other)
                else:
                    into.append(ref)
        joined = []
        for refs in (columns, rows):
            total: Size = 0
            for ref in refs:
                total = total + kinds[ref.number].shape[0]
            joined.append(new((total, kinds[refs[0].number].shape[1]), refs[0]))
            nodes.append(Operation("cat", (refs, 0), {}, (joined[-1],), node.layer))
        shape = kinds[joined[0].number].shape
        left = new((shape[1], shape[0]), joined[0])
        nodes.append(Operation("t", (joined[0],), {}, (left,), node.layer))
        nodes.append(Operation("mm", (left, joined[1]), {}, node.outs, node.layer))
        made[id(node)] = nodes
        gone.update(map(id, gone_now))
    result: list[Operation] = []
    for node in trace.nodes:
        if id(node) not in gone:
            result += made.get(id(node), [node])
    return replace(trace, nodes=result, kinds=kinds)


def _plain_sum(node: Operation) -> bool:
    return (
        node.name == "add"
        and len(node.args) == 2
        and all(isinstance(a, Ref) for a in node.args)
        and not node.kwargs
    )
