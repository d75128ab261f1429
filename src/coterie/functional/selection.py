"""Peer selection: choices of peers as pure functions of keyed random draws.

Every random choice over the population takes one Gumbel draw for each pair (client, member of the
population), so that relabeling the clients relabels the choice, and the choice does not depend on
where clients are hosted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from coterie.errors import RETURN_HINT, ConfigError


def select_top(
    scores: Float[Tensor, "clients population"],
    count: int,
    allowed: Bool[Tensor, "clients population"],
) -> Int[Tensor, "clients peers"]:
    """Return the allowed ids with the `count` largest scores; ties go to the lowest id.

    Args:
        scores: finite or infinite; NaN counts as the lowest.
        count: number of ids per client, at most population - 1.
        allowed: which members each client may choose.

    Returns:
        Ids, best first; -1 where a client has too few to choose from.

    Example:
        >>> select_top(torch.tensor([[0.1, 0.9, 0.5]]), 2, torch.tensor([[False, True, True]]))
        tensor([[1, 2]])
    """
    # A client never reads itself, so at most population - 1 ids are possible.
    count = max(0, min(count, scores.shape[1] - 1))
    # Only members that are not allowed are at -inf: an allowed one with NaN or -inf ranks above.
    lowest = torch.finfo(scores.dtype).min
    scores = torch.nan_to_num(scores, nan=lowest, neginf=lowest)
    scores = torch.where(allowed, scores, -torch.inf)
    # One value more than asked for shows whether the last chosen one is tied with the next.
    values, chosen = scores.topk(min(count + 1, scores.shape[1]), dim=1)
    chosen = chosen[:, :count]
    # topk leaves open which of equal scores comes first; ties are rare, so only their rows are
    # sorted
    tied = (values[:, 1:] == values[:, :-1]).any(1)
    if bool(tied.any()):
        chosen[tied] = torch.argsort(scores[tied], dim=1, descending=True, stable=True)[:, :count]
    return torch.where(allowed.gather(1, chosen), chosen, -1)


def sample_peers(
    log_weights: Float[Tensor, "clients population"],
    noise: Float[Tensor, "clients population"],
    count: int,
    allowed: Bool[Tensor, "clients population"],
) -> Int[Tensor, "clients peers"]:
    """Draw without replacement with probabilities proportional to exp(log_weights): Gumbel top-m.

    The distribution is that of successive draws with renormalization; members of zero weight are
    drawn only when no others are left. See Kool et al., Stochastic beams and where to find them,
    2019.

    Args:
        log_weights: log of the (unnormalized) probabilities.
        noise: one standard Gumbel draw for each pair, from `Rng.gumbel`.
        count: number of ids per client.
        allowed: which members each client may choose.
    """
    # Zero weight: so low that the noise neither changes the number nor makes it overflow.
    floor = torch.finfo(torch.float64).min / 2
    return select_top(log_weights.double().clamp(min=floor) + noise, count, allowed)


def sample_peers_quickly(
    mass: Float[Tensor, "clients population"],
    draws: Float[Tensor, "clients population"],
    count: int,
    allowed: Bool[Tensor, "clients population"],
) -> tuple[Int[Tensor, "clients peers"], Bool[Tensor, " clients"]]:
    r"""Choose as `sample_peers` does, but take logarithms of a few draws only.

    With $E = -\log(1 - u)$ the order of $\log p + \mathrm{gumbel}$ is that of $E / p$, smallest
    first. Since $u \le E$, a member outside the `count + 4` smallest $u / p$ has an $E / p$ above
    the largest of them, so logarithms of these few decide the choice.

    Args:
        mass: the (unnormalized) probabilities $p$.
        draws: $u$, from `Rng.pairs`.
        count: number of ids per client.
        allowed: which members each client may choose.

    Returns:
        Ids, best first, and for which clients they are certain: the others need `sample_peers`.
    """
    population = mass.shape[1]
    count = max(0, min(count, population - 1))
    if not count:
        return torch.zeros(len(mass), 0, dtype=torch.int64), torch.ones(len(mass), dtype=torch.bool)
    ratio = (draws / mass).masked_fill_(~allowed, torch.inf)
    # u / p orders nearly as the score does. A few more than are wanted hold all chosen ones nearly
    # always; for which clients they certainly do is found below.
    few, at = ratio.topk(min(count + 4, population), dim=1, largest=False)
    # In the order of ids, so that the stable sort gives ties to the lowest id.
    at = at.sort(dim=1).values
    weight, draw = mass.gather(1, at), draws.gather(1, at)
    scores = weight.log() - (-torch.log1p(-draw)).log()
    order = torch.argsort(
        scores.masked_fill(~allowed.gather(1, at), -torch.inf), dim=1, descending=True, stable=True
    )
    # `reach` is E / p of the last chosen member, `limit` the u / p that every member outside has at
    # least.
    last = order[:, count - 1, None]
    reach = (-torch.log1p(-draw.gather(1, last)) / weight.gather(1, last))[:, 0]
    limit = torch.full_like(few[:, -1], torch.inf)
    if few.shape[1] < population:
        limit = few[:, -1]
    chosen = at.gather(1, order[:, :count])
    # the margin is far above the rounding of both sides
    certain = (reach < limit * (1 - 1e-9)) & (draw > 0).all(1) & torch.isfinite(reach)
    # A client with too few allowed members has others among the chosen ones.
    return chosen, certain & allowed.gather(1, chosen).all(1)


def sample_uniformly(
    noise: Float[Tensor, "clients population"],
    count: int,
    allowed: Bool[Tensor, "clients population"],
) -> Int[Tensor, "clients peers"]:
    """Draw uniformly without replacement among the allowed members."""
    return select_top(noise, count, allowed)


@dataclass(frozen=True)
class PeerKnowledge:
    """What one client knows when a custom selection rule chooses the peers that it reads.

    Each tensor has one entry per member of the population.

    Args:
        client: its id.
        round: number of the round, from 0.
        candidates: members that can be read in this round; never the client itself.
        similarity: to each member, where the method measures it (DAC); 0 where nothing is known.
        measured: whether the client has measured that similarity itself.
        reported: whether a peer has reported it instead.
        count: how often it has read each member.
        age: rounds since it last read each member; -1 for never.
        noise: standard Gumbel draws, keyed by seed, round, client and member: the members with the
            largest `noise + w` are a draw without replacement with probabilities proportional to
            exp(w).
    """

    client: int
    round: int
    candidates: Bool[Tensor, " population"]
    similarity: Float[Tensor, " population"]
    measured: Bool[Tensor, " population"]
    reported: Bool[Tensor, " population"]
    count: Int[Tensor, " population"]
    age: Int[Tensor, " population"]
    noise: Float[Tensor, " population"]


SelectionRule = Callable[[PeerKnowledge], Tensor]
"""A pure function of `PeerKnowledge`: a number for each member, of which the largest are read."""


def select_by_rule(
    rule: SelectionRule, known: PeerKnowledge, count: int, what: str
) -> Int[Tensor, " peers"]:
    """Choose peers with a custom rule: the candidates with the largest numbers.

    Ties go to the lowest id.

    Args:
        rule: the rule.
        known: what the client knows.
        count: how many are read at most; at most population - 1.
        what: the rule's name in error messages.

    Returns:
        Ids, the largest number first; -1 where the rule excludes so many (by minus infinity) that
        none is left.

    Raises:
        ConfigError: when the rule returns something other than a number for each member.
    """
    found = rule(known)
    shape = tuple(known.candidates.shape)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"{what} returned {found!r:.60}; "
            f"expected a number for each member, a tensor of shape {shape}"
            + RETURN_HINT
            * (found is None)
        )
    if tuple(found.shape) != shape:
        raise ConfigError(
            f"{what} returned a tensor of shape {tuple(found.shape)}; "
            f"expected {shape}, a number for each member"
        )
    scores = found.detach().double().cpu()
    if bool(scores[known.candidates].isnan().any()):
        raise ConfigError(
            f"{what} returned NaN; "
            "expected a number for each member, -inf for one that is not to be read"
        )
    return select_top(scores[None], count, (known.candidates & (scores > -torch.inf))[None])[0]


def mask_from_ids(
    peers: Int[Tensor, "clients peers"], population: int
) -> Bool[Tensor, "clients population"]:
    """Return which members of the population occur in each client's list of ids (-1 is ignored)."""
    # The column behind the population takes the -1 and is cut off.
    out = torch.zeros(len(peers), population + 1, dtype=torch.bool)
    out.scatter_(1, torch.where(peers >= 0, peers, population), True)
    return out[:, :population]


def pack_mask(mask: Bool[Tensor, "clients population"]) -> UInt8[Tensor, "clients bytes"]:
    """Return a mask with eight members in a byte, the first one in its lowest bit.

    Example:
        >>> pack_mask(torch.tensor([[True, False, True] + [False] * 5 + [True]]))
        tensor([[5, 1]], dtype=torch.uint8)
    """
    return torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))


def unpack_mask(
    packed: UInt8[Tensor, "clients bytes"], population: int
) -> Bool[Tensor, "clients population"]:
    """Return a mask as it was before `pack_mask`."""
    found = np.unpackbits(packed.numpy(), axis=1, count=population, bitorder="little")
    return torch.from_numpy(found.view(np.bool_))


def find_listed(
    peers: Int[Tensor, "clients peers"], listed: Int[Tensor, "clients others"]
) -> Bool[Tensor, "clients peers"]:
    """Return which peers of a client are in its list of others; -1 is in none.

    Example:
        >>> find_listed(torch.tensor([[3, -1, 4]]), torch.tensor([[4, -1]]))
        tensor([[False, False,  True]])
    """
    return ((peers[:, :, None] == listed[:, None, :]) & (peers >= 0)[:, :, None]).any(2)


def keep_allowed(
    peers: Int[Tensor, "clients peers"], allowed: Bool[Tensor, "clients population"]
) -> Int[Tensor, "clients peers"]:
    """Set slots with a peer that is not allowed to -1.

    Example:
        >>> keep_allowed(torch.tensor([[1, 2]]), torch.tensor([[False, True, False]]))
        tensor([[ 1, -1]])
    """
    # The clamp makes -1 a legal index; its value is not used.
    return torch.where((peers >= 0) & allowed.gather(1, peers.clamp(min=0)), peers, -1)


def select_lowest(
    scores: Float[Tensor, "clients peers"],
    peers: Int[Tensor, "clients peers"],
    count: int,
    mask: Bool[Tensor, "clients peers"],
) -> Bool[Tensor, "clients peers"]:
    """Choose the arrived slots with the `count` lowest scores; ties go to the lowest id.

    Args:
        scores: NaN counts as the highest.
        peers: the id in each slot.
        count: number of slots; fewer where fewer arrived.
        mask: which slots arrived.

    Example:
        >>> scores, peers = torch.tensor([[0.5, 0.5, 0.1]]), torch.tensor([[7, 3, 4]])
        >>> select_lowest(scores, peers, 2, torch.ones(1, 3, dtype=torch.bool))
        tensor([[False,  True,  True]])
    """
    cost = torch.nan_to_num(scores.double(), nan=torch.inf)
    # Arrived slots come first, then the lower cost, then the lower id.
    best = _rank_slots((~mask).to(torch.int8), cost, peers)[:, :count]
    return torch.zeros_like(mask).scatter(1, best, True) & mask


def select_best(
    scores: Float[Tensor, "clients slots"],
    slots: Int[Tensor, "clients slots"],
    count: int,
    mask: Bool[Tensor, "clients slots"],
    stays: Bool[Tensor, "clients slots"],
) -> Int[Tensor, "clients peers"]:
    """Return the arrived ids with the `count` highest scores; ties go to the lowest id.

    Args:
        scores: of each slot.
        slots: ids; -1 for an empty slot.
        count: how many.
        mask: which slots arrived.
        stays: ids that fill the remaining places although no message from them arrived.

    Returns:
        Ids, best first; -1 behind the last.
    """
    # 0: arrived; 1: silent, but stays; 2: neither, which is cut off below.
    silent = torch.where(stays & (slots >= 0), 1, 2)
    rank = torch.where(mask, 0, silent)
    order = _rank_slots(rank, -torch.nan_to_num(scores.double(), nan=-torch.inf), slots)[:, :count]
    ids = torch.where(rank.gather(1, order) < 2, slots.gather(1, order), -1)
    return torch.nn.functional.pad(ids, (0, count - ids.shape[1]), value=-1)


def _rank_slots(*keys: Shaped[Tensor, "clients slots"]) -> Int[Tensor, "clients slots"]:
    """Return the slots of each row sorted by the first key, then the next, and so on; ascending."""
    order = torch.arange(keys[0].shape[1], device=keys[0].device).expand(keys[0].shape)
    # Stable sorts from the last key to the first order by all of them.
    for key in reversed(keys):
        order = order.gather(1, torch.argsort(key.gather(1, order), dim=1, stable=True))
    return order


def place_peers(
    preference: Float[Tensor, "clients peers"], peers: Int[Tensor, "clients peers"]
) -> Int[Tensor, "clients peers"]:
    """Return the place of each slot: 0 for the preferred peer; ties go to the lowest id.

    Example:
        >>> place_peers(torch.tensor([[0.5, 0.9, 0.5]]), torch.tensor([[7, 4, 3]]))
        tensor([[2, 0, 1]])
    """
    return _rank_slots(-preference, peers).argsort(1)


def ids_from_mask(chosen: Bool[Tensor, "clients population"]) -> Int[Tensor, "clients peers"]:
    """Return the chosen members of each row as ascending ids, -1 behind the last.

    The inverse of `mask_from_ids`.

    Example:
        >>> ids_from_mask(torch.tensor([[False, True, True], [True, False, False]]))
        tensor([[ 1,  2],
                [ 0, -1]])
    """
    # Row by row, in the order of ids.
    rows, ids = chosen.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(chosen))
    first = counts.cumsum(0) - counts
    out = torch.full((len(chosen), int(counts.max()) if len(chosen) else 0), -1)
    out[rows, torch.arange(len(ids)) - first[rows]] = ids
    return out


def selection_probabilities(
    similarity: Float[Tensor, "clients population"],
    tau: float | Float[Tensor, " clients"],
    considered: Bool[Tensor, "clients population"] | None,
    ids: Int[Tensor, " clients"],
    *,
    floor: float = 1e-6,
    members: Int[Tensor, "clients population"] | None = None,
) -> Float[Tensor, "clients population"]:
    r"""Return the probability with which each client draws each other member of the population.

    $p_{ij} \propto \varepsilon_p + e^{\tau s_{ij}} / \sum_k e^{\tau s_{ik}}$ over the considered
    members, and 0 for the client itself. Other members get the floor $\varepsilon_p$ only. If none
    is considered, all others are equally probable.

    Args:
        similarity: $s_{ij}$, finite; the exponentials cannot overflow.
        tau: inverse temperature $\tau$, for all clients or for each; 0 is uniform.
        considered: which members enter the softmax; None for all.
        ids: the clients; with `members`, the column of each client itself.
        floor: $\varepsilon_p$, 0 or more.
        members: how many members of equal similarity each column stands for, 0 for an empty one;
            the result is the probability of one of them. None where each column is a member.

    Example:
        >>> s = torch.tensor([[0.0, 1.0, 0.0]])
        >>> everybody = torch.ones(1, 3, dtype=torch.bool)
        >>> selection_probabilities(s, 1e9, everybody, torch.tensor([0]), floor=0.0)
        tensor([[0., 1., 0.]], dtype=torch.float64)
    """
    own = ids[:, None]
    sharpness = torch.as_tensor(tau, dtype=torch.float64).reshape(-1, 1)
    # One array of clients x population is reused in place from here to the result.
    logits = sharpness * similarity.double()
    if considered is not None:
        logits.masked_fill_(~considered, -torch.inf)
    if members is not None:
        logits += members.double().log()
    # The client itself is outside the softmax and gets no floor.
    mass = torch.softmax(logits.scatter_(1, own, -torch.inf), dim=1)
    if members is not None:
        mass /= members.clamp(min=1)
    mass.add_(floor)
    total = _sum_of_others(mass, own, members)
    if bool(total.isnan().any()):  # the softmax over no members
        total = _sum_of_others(mass.nan_to_num_(nan=floor), own, members)
    # No member considered and no floor: all others are equally probable.
    empty = total[:, 0] <= 0
    if bool(empty.any()):
        mass[empty] = 1.0
        total = _sum_of_others(mass, own, members)
    # A population of one has no others, and no mass.
    return mass.div_(total.clamp(min=torch.finfo(torch.float64).tiny))


def _sum_of_others(
    mass: Float[Tensor, "clients population"],
    own: Int[Tensor, "clients 1"],
    members: Int[Tensor, "clients population"] | None,
) -> Float[Tensor, "clients 1"]:
    """Set the mass of the client itself and of empty columns to 0; return each row's sum."""
    mass.scatter_(1, own, 0)
    if members is None:
        return mass.sum(1, keepdim=True)
    return mass.masked_fill_(members == 0, 0).mul(members).sum(1, keepdim=True)


def find_entropy_tau(
    similarity: Float[Tensor, "clients population"],
    considered: Bool[Tensor, "clients population"] | None,
    ids: Int[Tensor, " clients"],
    bits: float,
) -> Float[Tensor, " clients"]:
    r"""Find the inverse temperature at which each client's probabilities have a given entropy.

    It is found by bisection.

    Args:
        similarity: $s_{ij}$.
        considered: which members enter the softmax; None for all.
        ids: the clients.
        bits: the wanted entropy in bits; $\tau$ is 0 unless this is below log2 of the number
            considered, and 10,000 at most.
    """
    low = torch.zeros(len(ids), dtype=torch.float64)
    high = torch.full_like(low, 1e4)
    # The entropy falls as tau rises. 60 halvings leave 1e-14 of it.
    for _ in range(60):
        middle = (low + high) / 2
        p = selection_probabilities(similarity, middle, considered, ids, floor=0.0)
        wide = -torch.special.xlogy(p, p).sum(1) > bits * math.log(2)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    return (low + high) / 2


def scale_min_max(
    similarity: Float[Tensor, "clients population"], considered: Bool[Tensor, "clients population"]
) -> Float[Tensor, "clients population"]:
    """Scale each client's similarities to [0, 1] over the considered members.

    The others become 0; so do all where the considered similarities are equal.

    Example:
        >>> scale_min_max(torch.tensor([[9.0, 4.0, 2.0]]), torch.tensor([[False, True, True]]))
        tensor([[0., 1., 0.]])
    """
    low = torch.where(considered, similarity, torch.inf).amin(1, keepdim=True)
    span = torch.where(considered, similarity, -torch.inf).amax(1, keepdim=True) - low
    # Equal similarities have no scale and become 0.
    usable = considered & (span > 0)
    return torch.where(usable, (similarity - low) / torch.where(span > 0, span, 1), 0)


def estimate_two_hop(
    known: Bool[Tensor, "clients population"],
    peers: Int[Tensor, "clients peers"],
    preference: Float[Tensor, "clients peers"],
    index: Int[Tensor, "clients peers"],
    vectors: Float[Tensor, "senders population"],
    knows: Bool[Tensor, "senders population"],
) -> tuple[Float[Tensor, "clients population"], Bool[Tensor, "clients population"]]:
    r"""Estimate similarities that a client has not measured from the ones that its peers share.

    $s_{ij} \leftarrow s_{k^* j}$ with $k^*$ the preferred peer among the ones that know $j$; ties
    go to the lowest id.

    Args:
        known: members that need no estimate: the client itself and those it measured.
        peers: id of the peer in each slot.
        preference: preference for the peer in each slot, such as $s_{ik}$; -inf where nothing
            arrived.
        index: row of `vectors` of each slot.
        vectors: the peers' similarities ($s_{kj}$).
        knows: the members for which a peer shares its similarity.

    Returns:
        The estimates, and for which members there is one.
    """
    estimate, found = vectors.new_zeros(known.shape), torch.zeros_like(known)
    # the preferred peer comes last, so that its estimate overwrites the others'
    for slot in _rank_slots(-preference, peers).flip(1).T:
        row = index.gather(1, slot[:, None])[:, 0]
        # The index of an empty slot names some row all the same: only a preference makes it count.
        arrived = preference.gather(1, slot[:, None]) > -torch.inf
        shared = knows.index_select(0, row).bitwise_and_(arrived)
        torch.where(shared, vectors.index_select(0, row), estimate, out=estimate)
        found |= shared
    return estimate, found.bitwise_and_(~known)


def cohort_size(members: int, participation: float | int, least: int = 1) -> int:
    r"""Return the number of a group's members that take part in a round.

    A share gives $\min(K, \max(\mathrm{least}, \lfloor \rho K + 1/2 \rfloor))$, a count $m$ gives
    $\min(K, m)$.

    Args:
        members: number of members ($K$).
        participation: a share in (0, 1] ($\rho$), or a count above 1 ($m$).
        least: the smallest number, when `participation` is a share.

    Example:
        >>> cohort_size(100, 0.1, least=3), cohort_size(25, 0.1, least=3), cohort_size(25, 10)
        (10, 3, 10)
    """
    if participation > 1:
        return min(members, int(participation))
    # Halves are rounded up; Python's round takes them to the even number.
    return min(members, max(least, math.floor(participation * members + 0.5)))


def chance_to_take_part(members: int, population: int, cohort: int, least: int) -> float:
    """Return how probable it is that so many members of a group are in a cohort drawn uniformly.

    Args:
        members: of the group.
        population: number of clients in all, of which the group is a part.
        cohort: clients drawn.
        least: of the group.

    Example:
        >>> round(chance_to_take_part(6, 12, 3, 3), 4)  # 20 of 220 cohorts are in one half
        0.0909
    """

    def log_ways(whole: int, part: int) -> float:
        if not 0 <= part <= whole:
            return -math.inf
        return math.lgamma(whole + 1) - math.lgamma(part + 1) - math.lgamma(whole - part + 1)

    fewer = 0.0
    for number in range(least):
        ways = log_ways(members, number) + log_ways(population - members, cohort - number)
        fewer += math.exp(ways - log_ways(population, cohort))
    return max(0.0, 1 - fewer)


def share_places(
    sizes: Sequence[int], often: Float[Tensor, " groups"], total: int, *, least: int
) -> list[int]:
    r"""Share a round's places among groups that each need a few; the least served come first.

    Group $c$ of size $K_c$ asks for $\min(K_c, \max(\mathrm{least}, \lfloor m K_c / K + 1/2
    \rfloor))$ of the $m$ places and gets them, or what is left if that is enough. A rest of fewer
    than `least` goes to the groups served.

    Args:
        sizes: members of each group ($K_c$, in all $K$).
        often: how often a member of each has been served, on average; ties go to the first group.
        total: places in a round ($m$), at most the members.
        least: the fewest of a group that make sense together.

    Returns:
        Places of each group; 0 where it waits.

    Example:
        >>> share_places([50, 50], torch.zeros(2), 10, least=3)
        [5, 5]
        >>> share_places([20] * 5, torch.tensor([2.0, 0, 1, 2, 2]), 10, least=3)
        [3, 4, 3, 0, 0]
    """
    order, counts, left = torch.argsort(often, stable=True).tolist(), [0] * len(sizes), total
    for group in order:
        asked = min(left, cohort_size(sizes[group], total / sum(sizes), least=least))
        # Too few are left for this group, and the later ones have been served more often: they
        # wait.
        if asked < min(least, sizes[group], total):
            break
        counts[group], left = asked, left - asked
    for group in order:
        # The rest fills up groups that were served, the first ones first.
        if counts[group]:
            more = min(left, sizes[group] - counts[group])
            counts[group], left = counts[group] + more, left - more
    return counts


def draw_cohort(
    noise: Float[Tensor, " population"],
    count: int,
    *,
    log_weights: Float[Tensor, " population"] | None = None,
    members: Bool[Tensor, " population"] | None = None,
) -> Int[Tensor, " active"]:
    """Draw clients without replacement by Gumbel top-m.

    Args:
        noise: one standard Gumbel draw for each client.
        count: number of clients, at most the members.
        log_weights: log of the (unnormalized) probabilities; uniform by default.
        members: clients that can be drawn; all by default.

    Returns:
        Ids in ascending order.
    """
    scores = noise
    if log_weights is not None:
        scores = scores + log_weights
    if members is not None:
        scores = torch.where(members, scores, -torch.inf)
    # The members of a cohort are in the order of ids.
    return torch.argsort(scores, descending=True, stable=True)[:count].sort().values
