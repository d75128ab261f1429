"""Drift: in each phase clients have the data that the change says, and everything else stays as it was."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.drifting import active, build

from coterie.data import build as building
from coterie.data.build import DataConfig, build_federation
from coterie.data.drift import drift_to_table
from coterie.data.federation import Federation
from coterie.errors import ConfigError, DataError

ROTATED = [{"kind": "rotation", "degrees": [0, 180]}]
"""Clients 0 to 3 upright, 4 to 7 upside down."""


def test_before_the_change_the_data_are_those_without_drift():
    plain, drifting = build(shift=ROTATED), build({"kind": "move", "at": 3}, shift=ROTATED)
    x, y, split = active(drifting, None)
    assert torch.equal(x, plain.x)
    assert torch.equal(y, plain.y)
    assert torch.equal(split, plain.split)
    assert torch.equal(drifting.test_of, plain.test_of)
    for one, other in zip(plain.tests, drifting.tests, strict=True):
        assert torch.equal(one.x, other.x)
    assert torch.equal(drifting.truth.cluster, plain.truth.cluster)


def test_clients_that_move_have_the_data_and_the_test_set_of_their_new_cluster():
    data = build({"kind": "move", "at": 3, "clients": [1, 6]}, shift=ROTATED)
    (phase,) = data.phases
    assert phase.first == 3
    before, after = active(data, None)[0], active(data, phase)[0]
    for client in range(8):
        own = before[client]
        if client in (1, 6):
            own = own.rot90(2, (-2, -1))
        assert torch.equal(after[client], own)
    assert torch.equal(active(data, phase)[1], active(data, None)[1])
    assert data.truth.cluster.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert phase.truth.cluster.tolist() == [0, 1, 0, 0, 1, 1, 0, 1]
    # No test set is made twice: the other cluster has it.
    assert len(data.tests) == 2
    assert phase.test_of.tolist() == phase.truth.cluster.tolist()


def test_the_last_cluster_moves_to_the_first():
    shift = [{"kind": "rotation", "degrees": [0, 90, 180, 270]}]
    (phase,) = build({"kind": "move", "at": 1}, shift=shift).phases
    assert phase.truth.cluster.tolist() == [1, 1, 2, 2, 3, 3, 0, 0]


def test_images_are_turned_and_their_test_set_too():
    data = build({"kind": "rotation", "degrees": [90], "at": 2})
    (phase,) = data.phases
    turned = active(data, None)[0].rot90(1, (-2, -1))
    assert torch.equal(active(data, phase)[0], turned)
    assert phase.test_of.tolist() == [1] * 8
    assert torch.equal(data.tests[1].x, data.tests[0].x.rot90(1, (-2, -1)))
    assert torch.equal(data.tests[1].y, data.tests[0].y)


def test_labels_are_swapped_and_images_stay():
    data = build({"kind": "label-swap", "swaps": [[[1, 7]]], "at": 2, "clients": [5]})
    (phase,) = data.phases
    assert torch.equal(active(data, phase)[0], active(data, None)[0])
    expected = active(data, None)[1].clone()
    own = expected[5].clone()
    expected[5][own == 1], expected[5][own == 7] = 7, 1
    assert torch.equal(active(data, phase)[1], expected)
    ones, sevens = data.tests[0].y == 1, data.tests[0].y == 7
    swapped = data.tests[int(phase.test_of[5])].y
    assert (swapped[ones] == 7).all()
    assert (swapped[sevens] == 1).all()


def test_a_change_that_comes_back_holds_no_sample_a_third_time():
    data = build({"kind": "rotation", "degrees": [180], "at": [2, 6], "lasts": 2})
    assert [phase.first for phase in data.phases] == [2, 4, 6, 8]
    turned, back, again, end = data.phases
    assert torch.equal(turned.split, again.split)
    for phase in (back, end):
        assert torch.equal(phase.split, data.split)
        assert torch.equal(phase.test_of, data.test_of)
    assert data.x.shape[1] == 2 * 28
    assert len(data.tests) == 2


def test_clients_change_one_after_another():
    data = build({"kind": "rotation", "degrees": [180], "at": 2, "over": 4, "lasts": 10})
    assert [phase.first for phase in data.phases] == [2, 3, 4, 5, 12, 13, 14, 15]
    changed = [(phase.split != data.split).any(1) for phase in data.phases]
    assert [int(one.sum()) for one in changed] == [2, 4, 6, 8, 6, 4, 2, 0]
    # Who has changed stays changed until its own time is over.
    for before, after in itertools.pairwise(changed[:4]):
        assert (after | ~before).all()
    assert torch.equal(changed[0], ~changed[4])


def test_a_share_is_of_each_cluster_and_drawn_by_the_seed():
    found = set()
    for seed in range(5):
        data = build({"kind": "move", "at": 1, "share": 0.5}, shift=ROTATED, seed=seed)
        moved = data.phases[0].truth.cluster != data.truth.cluster
        assert (int(moved[:4].sum()), int(moved[4:].sum())) == (2, 2)
        found.add(tuple(moved.tolist()))
    assert len(found) > 1


def test_one_change_does_not_depend_on_another():
    one = {"kind": "rotation", "degrees": [180], "at": 4, "share": 0.5}
    alone = build(one).phases[0]
    both = build(one, {"kind": "rotation", "degrees": [90], "at": 2, "clients": [0]})
    assert [phase.first for phase in both.phases] == [2, 4]
    turned = (active(both, both.phases[1])[0] != active(both, None)[0]).flatten(1).any(1)
    expected = (alone.split != build(one).split).any(1)
    assert torch.equal(turned[1:], expected[1:])


def test_changes_add_up_in_their_order():
    data = build(
        {"kind": "rotation", "degrees": [90], "at": 2},
        {"kind": "rotation", "degrees": [90], "at": 3, "clients": [0]},
    )
    last = active(data, data.phases[1])[0]
    first = active(data, None)[0]
    assert torch.equal(last[0], first[0].rot90(2, (-2, -1)))
    assert torch.equal(last[1:], first[1:].rot90(1, (-2, -1)))
    assert data.phases[1].truth.names[-1] == "rotation 90 + rotation 90"
    assert data.phases[1].truth.cluster.tolist() == [2] + [1] * 7


def test_held_out_samples_change_with_their_client():
    data = build({"kind": "rotation", "degrees": [180], "at": 2, "clients": [3]}, test="client")
    (phase,) = data.phases
    assert data.test_of.tolist() == list(range(8))
    assert phase.test_of.tolist() == [0, 1, 2, 8, 4, 5, 6, 7]
    assert torch.equal(data.tests[8].x, data.tests[3].x.rot90(2, (-2, -1)))


def test_noise_begins_with_its_phase():
    change = {"kind": "visual", "domains": ["noise"], "sigma": 0.5, "at": 2, "clients": [1]}
    data = build(change)
    (phase,) = data.phases
    assert data.noise is None
    assert phase.noise.tolist() == [0.0, 0.5, *[0.0] * 6]
    fixed = build({**change, "noise": "fixed"})
    (phase,) = fixed.phases
    before, after = active(fixed, None)[0], active(fixed, phase)[0]
    assert before.dtype == torch.float16
    assert torch.equal(before[0], after[0])
    assert float((after[1].float() - before[1].float()).std()) == pytest.approx(0.5, abs=0.05)


def test_a_stored_federation_is_the_same(tmp_path):
    data = build({"kind": "move", "at": 3, "share": 0.5}, shift=ROTATED)
    data.save(tmp_path / "d.safetensors")
    found = Federation.load(tmp_path / "d.safetensors")
    assert found.compute_digest() == data.compute_digest()
    assert torch.equal(found.phases[0].split, data.phases[0].split)
    assert found.phases[0].truth.names == data.phases[0].truth.names
    later = build({"kind": "move", "at": 4, "share": 0.5}, shift=ROTATED)
    fingerprints = {one.compute_fingerprint() for one in (data, later, replace(data, phases=()))}
    assert len(fingerprints) == 3


def test_hosted_rows_do_not_say_the_clusters_of_a_later_phase():
    data = build({"kind": "move", "at": 3}, shift=ROTATED)
    for ids in (range(8), [5, 2]):
        (phase,) = data.host(list(ids)).phases
        assert phase.truth is None
        assert torch.equal(phase.test_of, data.phases[0].test_of[list(ids)])
        assert torch.equal(phase.split, data.phases[0].split[list(ids)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "move", "at": 0}, "at is 0"),
        ({"kind": "move", "at": 3, "shar": 0.5}, "unknown key 'shar'; did you mean 'share'"),
        ({"kind": "move"}, "at is missing"),
        ({"kind": "rotation", "degrees": [90], "at": 3, "degree": 2}, "unknown key 'degree'"),
        ({"kind": "mov", "at": 3}, "unknown shift 'mov'"),
        ({"at": 3}, "kind is missing"),
        ({"kind": "move", "at": 3, "share": 0.0}, "share is 0.0"),
        ({"kind": "move", "at": 3, "share": 0.5, "clients": [1]}, "share and clients are both"),
        ({"kind": "move", "at": [3, 2], "lasts": 1}, "expected ascending rounds"),
        ({"kind": "move", "at": [3, 5]}, "lasts is None; expected lasts below 2"),
        ({"kind": "move", "at": [3, 5], "lasts": 2}, "lasts is 2; expected lasts below 2"),
    ],
)
def test_a_mistake_is_one_line(change, said):
    with pytest.raises(ConfigError) as caught:
        DataConfig("digits", drift=[change])
    assert said in str(caught.value)
    assert "drift[0]" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        ({"kind": "labels", "groups": ["0-4"]}, {}, "gives client 0 other samples (labels 0-4)"),
        ({"kind": "quantity", "concentration_per_client": 1.0}, {}, "other samples"),
        (
            {"kind": "move"},
            {"shift": [{"kind": "labels", "groups": ["0-4", "5-9"]}]},
            "gives client 0 other samples",
        ),
        ({"kind": "move"}, {}, "there is one planted cluster"),
        ({"kind": "move", "clients": [8]}, {"shift": ROTATED}, "clients has 8; expected 0 to 7"),
        ({"kind": "move", "share": 0.01}, {"shift": ROTATED}, "which is no client"),
    ],
)
def test_what_cannot_be_is_refused_when_the_data_are_made(change, settings, said):
    with pytest.raises(ConfigError) as caught:
        build({"at": 3, **change}, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def make_function_federation():
    return build(shift=ROTATED)


def test_a_finished_federation_is_not_changed():
    with pytest.raises(ConfigError, match="drift is set"):
        build_federation(
            DataConfig(f"{__name__}:make_function_federation", drift=[{"kind": "move", "at": 1}]), 0
        )


def test_the_data_of_all_phases_are_not_those_of_one_client():
    data = build({"kind": "move", "at": 3}, shift=ROTATED)
    for wrong in (data.pool_clients, lambda: data.select_clients(torch.tensor([0]))):
        with pytest.raises(DataError, match="leave the drift out"):
            wrong()


def test_a_table_is_stored_with_every_field_and_read_again():
    for table in (
        {"kind": "move", "at": [3, 9], "lasts": 2},
        {"kind": "rotation", "degrees": [90], "at": 3, "clients": [1]},
        {"kind": "some.package:Shift", "at": 2, "own": 1},
    ):
        stored = drift_to_table(table)
        assert table.items() <= stored.items()
        assert stored["over"] == 1
        assert drift_to_table(stored) == stored
    assert DataConfig("digits").drift is None


def test_phases_are_checked_where_they_are_given():
    data = build({"kind": "move", "at": 3}, shift=ROTATED)
    (phase,) = data.phases
    for wrong, said in (
        (replace(phase, first=0), "ascending rounds"),
        (replace(phase, split=torch.full_like(phase.split, -1)), "no training samples"),
        (replace(phase, noise=torch.tensor([np.nan] * 8)), "noise from"),
    ):
        with pytest.raises(DataError, match=said):
            replace(data, phases=(wrong,)).validate()


def test_a_cluster_has_the_same_number_and_size_with_every_seed():
    """Two draws meet at other clients with each seed, and at equally many of each cluster."""
    changes = (
        {"kind": "move", "at": 2, "share": 0.5},
        {"kind": "label-swap", "swaps": [[[1, 7]]], "at": 4, "share": 0.5, "lasts": 4},
        {"kind": "visual", "domains": ["blur"], "at": 5, "clients": [0, 1]},
    )
    names, sizes, who = set(), set(), set()
    for seed in range(6):
        data = build(*changes, shift=ROTATED, seed=seed)
        names |= {phase.truth.names for phase in data.phases}
        assert data.truth.names == data.phases[0].truth.names
        swapped = data.phases[1].truth
        sizes.add(tuple(torch.bincount(swapped.cluster, minlength=8).tolist()))
        who.add(tuple(swapped.cluster.tolist()))
        for phase in data.phases:
            for number, told in zip(phase.truth.cluster.tolist(), phase.truth.shift, strict=True):
                # The description of a client's data names its cluster with ";" between shifts.
                expected = phase.truth.names[number].replace(" + ", "; ")
                assert told.startswith(expected)
    assert len(names) == 1
    assert sizes == {(2, 2, 2, 2, 0, 0, 0, 0)}
    assert len(who) == 6


def test_clients_move_between_the_clusters_of_before_also_where_one_is_empty():
    """All of the first cluster move in round 1; in round 2 who is in the last one goes to the first, and not past it."""
    data = build(
        {"kind": "move", "at": 1, "clients": [0, 1, 2, 3]},
        {"kind": "move", "at": 2, "clients": [0, 7]},
        shift=ROTATED,
    )
    assert data.phases[0].truth.cluster.tolist() == [1] * 8
    assert data.phases[1].truth.cluster.tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    with pytest.raises(ConfigError, match=r"drift\[1\]: kind is 'move', after a change of another"):
        build({"kind": "rotation", "degrees": [90], "at": 1}, {"kind": "move", "at": 2})


def test_changes_of_two_kinds_are_two_clusters():
    """Each is the first cluster of its own shift."""
    data = build(
        {"kind": "rotation", "degrees": [90], "at": 1, "clients": [0]},
        {"kind": "visual", "domains": ["blur"], "at": 1, "clients": [1]},
    )
    (phase,) = data.phases
    named = [phase.truth.names[number] for number in phase.truth.cluster.tolist()]
    assert named[:3] == ["rotation 90", "blur", "all clients"]
    assert len({*phase.truth.cluster.tolist()}) == 3


def test_samples_that_are_read_when_they_are_needed_are_refused(monkeypatch):
    """As those on disk, and those of clients of very unequal size."""
    monkeypatch.setattr(building, "_MAX_PADDING", 0)
    shift = [{"kind": "quantity", "concentration_per_client": 0.2, "minimum": 2}]
    assert not isinstance(build(shift=shift).x, torch.Tensor)
    with pytest.raises(DataError, match="needs samples in memory"):
        build({"kind": "rotation", "degrees": [90], "at": 1}, shift=shift)
