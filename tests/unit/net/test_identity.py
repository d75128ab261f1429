"""Keys, certificates and signatures."""

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from coterie.errors import ClockError, TransportError
from coterie.net import identity
from coterie.net.identity import Identity

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An authority, and the member north with a certificate for thirty days from the first of January 2030."""
    folder = tmp_path_factory.mktemp("organizer")
    identity.make_authority(folder, "trial", now=NOW)
    request = identity.make_request(folder, "north", "192.0.2.7:7447")
    identity.sign_request(folder, request, "north", "192.0.2.7:7447", now=NOW)
    return folder


def files(folder):
    return folder / "north.key", folder / "members" / "north.pem", folder / "ca.pem"


def test_private_keys_are_for_their_owner_only_and_never_overwritten(folder):
    for name in ("north.key", "ca.key", "organizer.key"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(TransportError, match="never overwritten"):
        identity.make_request(folder, "north", "192.0.2.7:7447")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(folder, tmp_path, mode):
    copy = tmp_path / "k.key"
    copy.write_bytes((folder / "north.key").read_bytes())
    copy.chmod(mode)
    with pytest.raises(
        TransportError, match=f"mode {mode:04o}, so others can read this key; run chmod 600"
    ):
        identity.load_key(copy)


def test_a_certificate_says_who_where_and_for_what(folder):
    """User id, address as alternative name, client and server, no authority of its own, thirty days."""
    own = Identity.load(*files(folder), now=NOW)
    assert own.name == "north"
    get = own.certificate.extensions.get_extension_for_class
    assert [
        str(ip) for ip in get(x509.SubjectAlternativeName).value.get_values_for_type(x509.IPAddress)
    ] == ["192.0.2.7"]
    assert list(get(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    ]
    assert get(x509.BasicConstraints).value.ca is False
    assert own.certificate.not_valid_after_utc == NOW + timedelta(days=30)


def test_extensions_are_critical_where_a_standard_reader_expects_it(folder):
    """RFC 5280: basic constraints and key usage are; names beside a subject, purposes and identifiers of keys are not."""
    own = Identity.load(*files(folder), now=NOW)
    expected = {
        x509.BasicConstraints: True,
        x509.KeyUsage: True,
        x509.SubjectAlternativeName: False,
        x509.ExtendedKeyUsage: False,
        x509.SubjectKeyIdentifier: False,
        x509.AuthorityKeyIdentifier: False,
    }
    member = {type(one.value): one.critical for one in own.certificate.extensions}
    assert member == expected
    ca = identity.load_certificate(folder / "ca.pem")
    found = {type(one.value): one.critical for one in ca.extensions}
    assert found == {kind: expected[kind] for kind in found}
    assert {x509.BasicConstraints, x509.KeyUsage} < {*found}
    # It signs members alone, which sign no others.
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    request = x509.load_pem_x509_csr((folder / "north.csr").read_bytes())
    assert [one.critical for one in request.extensions] == [False]


def test_a_certificate_is_bound_to_its_key(folder):
    """Its common name is the SHA-256 of the key as `openssl pkey -pubin -outform der` writes it, not the name."""
    own = Identity.load(*files(folder), now=NOW)
    der = own.key.public_key().public_bytes(
        identity.serialization.Encoding.DER,
        identity.serialization.PublicFormat.SubjectPublicKeyInfo,
    )
    assert identity.common_name(own.certificate) == hashlib.sha256(der).hexdigest()


def test_a_request_with_another_members_name_or_key_replaces_nothing(folder, tmp_path):
    """A request under the name north, by somebody else: agreed was south; agreed was north, which has a key."""
    before = (folder / "members" / "north.pem").read_bytes()
    request = identity.make_request(tmp_path, "north", "192.0.2.7:7447")
    with pytest.raises(TransportError, match="asks for the name north; agreed was south"):
        identity.sign_request(folder, request, "south", "192.0.2.7:7447", now=NOW)
    with pytest.raises(
        TransportError, match=r"north has a certificate of another key; .* coterie net rekey"
    ):
        identity.sign_request(folder, request, "north", "192.0.2.7:7447", now=NOW)
    assert (folder / "members" / "north.pem").read_bytes() == before
    again = identity.sign_request(
        folder, folder / "north.csr", "north", "192.0.2.7:7447", now=NOW + timedelta(days=9)
    )
    assert again.not_valid_after_utc == NOW + timedelta(days=39), (
        "the same key may have a longer certificate"
    )
    (folder / "members" / "north.pem").write_bytes(before)


def test_no_certificate_is_valid_for_longer_than_its_authority(tmp_path):
    """A chain ends with its authority, and what says how long a member's is valid knows that one alone."""
    identity.make_authority(tmp_path, "short", days=40, now=NOW)
    request = identity.make_request(tmp_path, "north", "192.0.2.7:7447")

    def sign(after: float, days: float) -> datetime:
        """When it ends that is signed so many days after the authority was made."""
        at = NOW + timedelta(days=after)
        made = identity.sign_request(
            tmp_path, request, "north", "192.0.2.7:7447", days=days, now=at
        )
        return made.not_valid_after_utc

    assert sign(9, 31) == NOW + timedelta(days=40)
    assert sign(0.001, 40) == NOW + timedelta(days=40), "as long, and made a minute later"
    before = (tmp_path / "members/north.pem").read_bytes()
    for after, days, said in ((0, 400, "400 days"), (25, 30, "of which 15 are"), (41, 1, "0 are")):
        with pytest.raises(TransportError, match=r"ends on 2030-02-10 00:00 UTC") as found:
            sign(after, days)
        assert said in str(found.value)
    assert (tmp_path / "members/north.pem").read_bytes() == before


def test_a_certificate_that_is_over_is_refused_with_both_dates(folder):
    with pytest.raises(
        TransportError,
        match="valid from 2029-12-31 23:55 to 2030-01-31 00:00 UTC; it is 2030-02-01",
    ):
        Identity.load(*files(folder), now=NOW + timedelta(days=31))


def test_a_certificate_of_another_authority_or_key_is_refused(folder, tmp_path):
    identity.make_authority(tmp_path, "trial", now=NOW)
    key, certificate, _ = files(folder)
    with pytest.raises(TransportError, match="was not issued by the authority"):
        Identity.load(key, certificate, tmp_path / "ca.pem", now=NOW)
    with pytest.raises(TransportError, match="is not the key of the certificate"):
        Identity.load(folder / "ca.key", certificate, folder / "ca.pem", now=NOW)


def test_a_request_for_another_address_or_without_proof_of_its_key_is_refused(folder, tmp_path):
    request = identity.make_request(tmp_path, "south", "192.0.2.8:7447")
    with pytest.raises(TransportError, match=r"agreed was 192.0.2.9:7447"):
        identity.sign_request(folder, request, "south", "192.0.2.9:7447", now=NOW)
    csr = x509.load_pem_x509_csr(request.read_bytes())
    raw = bytearray(csr.public_bytes(identity.serialization.Encoding.DER))
    raw[-1] ^= 1
    forged = x509.load_der_x509_csr(bytes(raw))
    request.write_bytes(forged.public_bytes(identity.serialization.Encoding.PEM))
    with pytest.raises(TransportError, match="not signed by the key"):
        identity.sign_request(folder, request, "south", "192.0.2.8:7447", now=NOW)


@pytest.mark.parametrize("name", ["", "North", "a/b", "a*", "$x", "a" * 64, "ä", "a b", "a\n"])
def test_names_are_made_of_few_characters(name, tmp_path):
    """A name becomes part of a key expression and of a path, so nothing with a meaning there is allowed."""
    with pytest.raises(TransportError, match="member name"):
        identity.make_request(tmp_path, name, "127.0.0.1:7447")


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.7:7447", "192.0.2.7"),
        ("[2001:db8::1]:7447", "2001:db8::1"),
        ("node.example.org:1", "node.example.org"),
        ("node.example.org:65535", "node.example.org"),
        ("Node-3.Example.ORG:7447", "node-3.example.org"),
        ("[2001:DB8:0:0::1]:7447", "2001:db8::1"),
    ],
)
def test_addresses(address, host):
    assert str(identity.split_address(address)[1]) == address.rpartition(":")[2]
    assert identity.split_address(address)[0] == host


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":7447",
        "host:0",
        "host:70000",
        "2001:db8::1:7447",
        "a b:1",
        "[x]:1",
        "h:+1",
        "h:01",
        "h:65536",
        "h:100000",
        "[::1:7447",
        "::1]:7447",
        "[]:7447",
    ],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(TransportError, match="expected host:port"):
        identity.split_address(address)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:7447", "[::]:7447", "[0:0:0:0:0:0:0:0]:7447", "[::ffff:0.0.0.0]:7447"]
)
def test_an_address_that_nobody_can_dial_is_refused_with_what_to_do(address, tmp_path):
    with pytest.raises(TransportError, match="stands for all addresses of a machine") as found:
        identity.check_address(address)
    assert "`listen` in node.toml" in str(found.value)
    with pytest.raises(TransportError, match="stands for all addresses"):
        identity.make_request(tmp_path, "north", address)
    assert list(tmp_path.iterdir()) == [], "no key is made for it"
    assert identity.split_address(address)[1] == 7447, "a program can listen there"


@pytest.mark.parametrize("host", ["0", "0.0", "00.0.0.0", "0x0", "127.1", "2130706433"])
def test_an_old_notation_of_an_ipv4_address_is_refused(host):
    """A system's resolver takes each of them for 0.0.0.0 or 127.0.0.1."""
    with pytest.raises(TransportError, match="give its four numbers"):
        identity.check_address(f"{host}:7447")


@pytest.mark.parametrize("host", ["192.0.2.7", "7.example.org", "[::ffff:192.0.2.7]", "0-1", "x0"])
def test_an_address_or_a_name_with_digits_is_no_old_notation(host):
    assert identity.check_address(f"{host}:7447").endswith(":7447")


def test_capitals_and_long_forms_of_an_address_are_one_address(tmp_path):
    assert identity.check_address("North.Example.ORG:7447") == "north.example.org:7447"
    assert identity.check_address("[2001:DB8:0::1]:7447") == "[2001:db8::1]:7447"
    identity.make_authority(tmp_path, "trial", now=NOW)
    for name, asked, agreed in (
        ("north", "North.Example.ORG:7447", "north.example.org:7447"),
        ("south", "[2001:DB8:0::1]:7447", "[2001:db8::1]:7447"),
    ):
        request = identity.make_request(tmp_path, name, asked)
        assert identity.sign_request(tmp_path, request, name, agreed, now=NOW)


def test_a_clock_that_is_before_the_certificate_is_not_set_yet(folder):
    """As on a machine without a battery: it is no reason to ask for another certificate."""
    with pytest.raises(ClockError, match="by the clock of this machine it is 1970-01-01 00:00"):
        Identity.load(*files(folder), now=datetime(1970, 1, 1, tzinfo=UTC))


def test_a_signature_is_64_bytes_and_of_one_key_and_text():
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    signature = identity.sign(key, b"text")
    assert len(signature) == 64
    assert identity.verify(key.public_key(), signature, b"text")
    assert not identity.verify(key.public_key(), signature, b"test")
    assert not identity.verify(other.public_key(), signature, b"text")
    for wrong in (b"", bytes(64), b"\xff" * 64, signature[:-1], signature + b"x"):
        assert not identity.verify(key.public_key(), wrong, b"text")


def test_public_keys_are_written_as_66_digits():
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    text = identity.encode_public_key(key)
    assert len(text) == 66
    assert identity.encode_public_key(identity.decode_public_key(text)) == text
    with pytest.raises(TransportError, match="is no public key"):
        identity.decode_public_key("00" * 33)
