from dataclasses import replace

import pytest
import torch

from coterie.data.federation import Federation, compute_checksum
from coterie.data.source import InputPart
from coterie.errors import DataError
from coterie.testing import tiny_federation


def test_hosted_rows_carry_the_data_of_their_clients_and_never_the_truth():
    federation = tiny_federation(num_clients=5)
    hosted = federation.host([3, 1])
    assert hosted.truth is None
    assert federation.host(federation.ids).truth is None
    assert hosted.population == 5
    assert hosted.ids.tolist() == [3, 1]
    assert torch.equal(hosted.x[0], federation.x[3])
    assert hosted.test_of.tolist() == [1, 1]


def test_a_hosted_client_keeps_its_own_noise():
    federation = replace(
        tiny_federation(num_clients=4),
        noise=torch.tensor([0.0, 0.1, 0.2, 0.3], dtype=torch.float64),
    )
    assert federation.host([3, 1]).noise.tolist() == [0.3, 0.1]


def test_hosting_a_client_that_is_not_here_is_refused():
    with pytest.raises(DataError, match=r"clients \[9\] are not in this federation of 5"):
        tiny_federation(num_clients=5).host([0, 9])


def test_save_and_load_give_back_every_part(tmp_path):
    federation = tiny_federation()
    federation.save(tmp_path / "sub" / "data.safetensors")
    loaded = Federation.load(tmp_path / "sub" / "data.safetensors")
    assert torch.equal(loaded.x, federation.x)
    assert loaded.truth is not None
    assert loaded.truth.names == federation.truth.names
    assert torch.equal(loaded.tests[1].y, federation.tests[1].y)
    assert loaded.compute_fingerprint() == federation.compute_fingerprint()
    assert not list((tmp_path / "sub").glob("*.tmp"))


def test_save_and_load_give_back_the_noise_of_clients_and_of_test_sets(tmp_path):
    plain = tiny_federation()
    noise = torch.arange(6, dtype=torch.float64) / 8
    federation = replace(
        plain, noise=noise, tests=(plain.tests[0], replace(plain.tests[1], noise=0.5))
    )
    federation.save(tmp_path / "data.safetensors")
    loaded = Federation.load(tmp_path / "data.safetensors")
    assert torch.equal(loaded.noise, noise)
    assert [test.noise for test in loaded.tests] == [0.0, 0.5]
    assert loaded.compute_fingerprint() == federation.compute_fingerprint()


def test_a_file_that_is_no_federation_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"hello")
    with pytest.raises(DataError, match="is not a federation file"):
        Federation.load(tmp_path / "x")


def test_the_fingerprint_tells_samples_splits_and_transforms_apart():
    federation = tiny_federation()
    other_split = replace(federation, split=federation.split.flip(1))
    other_shift = replace(federation, truth=replace(federation.truth, shift=("x",) * 6))
    prints = {
        f.compute_fingerprint()
        for f in (federation, other_split, other_shift, tiny_federation(seed=1))
    }
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: replace(f, y=f.y + 7), "labels run from 7 to 9; expected 0 to 2"),
        (lambda f: replace(f, classes=2), "labels run from 0 to 2; expected 0 to 1"),
        (lambda f: replace(f, x=f.x / 0), "inputs of client 0 contain NaN or infinity"),
        (
            lambda f: replace(f, split=torch.where(f.ids[:, None] == 2, 1, f.split)),
            "client 2 has no training samples",
        ),
        (lambda f: replace(f, classes=0, y=f.y * torch.nan), "targets contain NaN"),
    ],
)
def test_data_that_cannot_be_used_are_refused_at_the_door(change, words):
    with pytest.raises(DataError, match=words):
        change(tiny_federation()).validate()


@pytest.mark.parametrize("part", ["x", "y", "split", "tests.x", "tests.y", "truth"])
def test_one_changed_number_anywhere_changes_the_fingerprint(part):
    federation = tiny_federation()
    values = {
        "tests.x": federation.tests[1].x,
        "tests.y": federation.tests[1].y,
        "truth": federation.truth.cluster,
    }
    changed = values.get(part, getattr(federation, part, None)).clone()
    changed.view(-1)[-1] += 1
    if part.startswith("tests."):
        name = part.removeprefix("tests.")
        other = replace(
            federation, tests=(federation.tests[0], replace(federation.tests[1], **{name: changed}))
        )
    elif part == "truth":
        other = replace(federation, truth=replace(federation.truth, cluster=changed))
    else:
        other = replace(federation, **{part: changed})
    assert other.compute_fingerprint() != federation.compute_fingerprint()


def test_every_piece_of_large_inputs_counts():
    """Inputs of some megabytes: a bit in the first, in the last and in a middle one."""
    values = torch.zeros(3 << 20, dtype=torch.uint8)
    seen = {compute_checksum(values)}
    for place in (0, 3 << 19, (3 << 20) - 1):
        values[place] ^= 1
        seen.add(compute_checksum(values))
    assert len(seen) == 4


def test_print_tells_what_there_is_to_know():
    """Six clients with 12, 4 and 30 samples, three classes, two planted clusters; hosted rows know no clusters."""
    text = str(tiny_federation())
    assert text.splitlines()[0] == "Federation 'tiny'"
    told = dict(line.strip().split("  ", 1) for line in text.splitlines()[1:])
    assert {name: value.strip() for name, value in told.items()} == {
        "clients": "6",
        "samples of a client": "train 12, validation 4, test 30",
        "inputs": "4 of float64",
        "targets": "3 classes",
        "planted clusters": "rule 0 (3), rule 1 (3)",
    }
    hosted = repr(tiny_federation().host([1, 2]))
    assert "2 of 6" in hosted
    assert "unknown" in hosted


def test_a_notebook_shows_the_same_as_a_table_with_names_escaped():
    shown = replace(tiny_federation(), name="<b>")._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "<th>targets</th><td>3 classes</td>" in shown


NAMES = ("Oslo", "مستشفى الملك", "<script>")


def test_an_error_about_a_client_calls_it_by_its_name():
    federation = replace(tiny_federation(num_clients=3), client_names=NAMES)
    broken = federation.x.clone()
    broken[1, 0] = float("nan")
    with pytest.raises(
        DataError, match="the inputs of client 'مستشفى الملك' contain NaN or infinity"
    ):
        replace(federation, x=broken).validate()
    with pytest.raises(DataError, match=r"^client 'Oslo' has no training samples"):
        replace(
            federation, split=torch.where(federation.ids[:, None] == 0, 1, federation.split)
        ).validate()


def test_a_hosted_client_keeps_its_name_and_prints_show_it():
    federation = replace(tiny_federation(num_clients=3), client_names=NAMES)
    assert federation.host([2, 0]).names_by_id == {2: "<script>", 0: "Oslo"}
    assert "clients              3 (Oslo, مستشفى الملك, <script>)" in str(federation)
    assert "&lt;script&gt;" in federation._repr_html_()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("Oslo", "Lima", "Oslo"),
            "two clients are called 'Oslo'; give every client a name of its own",
        ),
        (("Oslo", "Lima"), "there are 2 names for 3 clients; expected one for each, or none"),
        (("Oslo", "Lima", " "), "a client is called ' '; expected a text that is not empty"),
        (("Oslo", "Lima", "\ud800"), "valid Unicode"),
    ],
)
def test_names_that_cannot_tell_clients_apart_are_refused(names, said):
    with pytest.raises(DataError, match=said):
        replace(tiny_federation(num_clients=3), client_names=names).validate()


def test_errors_call_clients_by_their_names():
    named = replace(tiny_federation(), client_names=("a", "b", "c", "d", "e", "é"))
    with pytest.raises(DataError, match="inputs of client 'é' contain NaN"):
        replace(named, x=torch.where(named.ids[:, None, None] == 5, torch.nan, named.x)).validate()
    with pytest.raises(DataError, match="first other one is of client 'c'"):
        replace(named, y=torch.where(named.ids[:, None] == 2, 9, named.y)).validate()
    with pytest.raises(DataError, match=r"targets contain NaN or infinity \(first of client 'b'\)"):
        replace(
            named, classes=0, y=torch.where(named.ids[:, None] == 1, torch.nan, named.y)
        ).validate()
    with pytest.raises(DataError, match=r"client 'd' has no training samples; .*or leave it out"):
        replace(named, split=torch.where(named.ids[:, None] == 3, 1, named.split)).validate()


def test_names_are_as_many_as_what_they_name():
    with pytest.raises(
        DataError, match="there are 1 names for 6 clients; expected one for each, or none"
    ):
        replace(tiny_federation(), client_names=("a",)).validate()
    with pytest.raises(DataError, match="there are 3 names for 4 entries of an input"):
        replace(tiny_federation(), feature_names=("a", "b", "c")).validate()


def test_how_inputs_are_several_tensors_is_part_of_the_fingerprint_and_names_are_not():
    federation = tiny_federation()
    prints = {
        replace(federation, parts=parts).compute_fingerprint()
        for parts in (
            (),
            (InputPart("", (4,)),),
            (InputPart("", (3,)), InputPart("", (1,))),
            (InputPart("", (3,)), InputPart("", (1,), True)),
        )
    }
    assert len(prints) == 4
    assert (
        replace(federation, client_names=tuple("abcdef")).compute_fingerprint()
        == federation.compute_fingerprint()
    )


def test_print_tells_of_several_tensors_and_of_whole_numbers():
    federation = replace(
        tiny_federation(),
        parts=(InputPart("age", (3,)), InputPart("", (1,), whole=True)),
        classes=0,
    )
    assert "age: 3 numbers + 1 whole numbers" in str(federation)
    assert "1 whole numbers\n" in str(federation)


def with_public(seed=1):
    other = tiny_federation(2, 1, seed=seed)
    return tiny_federation().with_public_set(other), other


def test_a_public_set_is_all_samples_of_its_clients_and_stays_with_who_is_hosted(tmp_path):
    data, other = with_public()
    assert data.public is not None
    expected = torch.cat([other.x.flatten(0, 1), other.tests[0].x])
    assert torch.equal(data.public.x, expected)
    assert torch.equal(data.public.y, torch.cat([other.y.flatten(), other.tests[0].y]))
    data.save(tmp_path / "data.safetensors")
    loaded = Federation.load(tmp_path / "data.safetensors")
    for one in (data.host([3]), data.select_clients(torch.tensor([1, 2])), loaded):
        assert one.public is not None
        assert torch.equal(one.public.x, expected)
    assert loaded.compute_fingerprint() == data.compute_fingerprint()
    fingerprints = [
        one.compute_fingerprint() for one in (tiny_federation(), data, with_public(2)[0])
    ]
    assert len(set(fingerprints)) == 3
    assert f"public set           {len(expected)} samples" in str(data)


def test_a_public_set_of_another_form_is_refused():
    for other in (tiny_federation(features=(5,)), tiny_federation(kind="labels")):
        with pytest.raises(
            DataError,
            match=r"the public set has inputs .*; expected inputs \[4\] of floats, targets \[\]",
        ):
            tiny_federation().with_public_set(other)
