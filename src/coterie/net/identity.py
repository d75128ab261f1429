"""Identities: a private certificate authority, members' keys and certificates, signatures.

A member creates its key on its own machine and sends only a request; the organizer returns a
certificate with the fingerprint of that key as common name, the member's name as user id and its
address as alternative name. The same key signs the member's messages. All keys are ECDSA on P-256;
private keys are files that only their owner can read.
"""

import errno
import hashlib
import ipaddress
import math
import os
import re
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie._util.files import write_atomically
from coterie.errors import ClockError, ConfigError, TransportError
from coterie.net.wire import NAME, SIGNATURE

_CURVE = ec.SECP256R1()
_ALGORITHM = ec.ECDSA(hashes.SHA256())
OUTBOUND = "outbound"
"""The address of a member that accepts no connection: it only dials out."""
# At most 253 characters, the limit of DNS.
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
# certificates are valid from so long before they are made, for clocks that run slow
_SKEW = timedelta(minutes=5)
# a certificate for as many days as its authority may be made so long after it
_AGE = timedelta(hours=1)


def check_name(name: str, what: str = "member name") -> str:
    """Check the name of a member or of a run, and return it.

    Raises:
        TransportError: when it is not made of 1 to 63 of a-z, 0-9 and "-".
    """
    if not NAME.fullmatch(name):
        raise TransportError(
            f"{what} {name[:80]!r}; expected 1 to 63 of the characters a-z, 0-9 and -"
        )
    return name


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" ("[::1]:7447" for IPv6).

    The host is in lower case, and an IPv6 address in its shortest form.

    Raises:
        TransportError: when it is not such an address.
    """
    host, _, port = address.rpartition(":")
    # In brackets only an IPv6 address: its own colons would be taken for that of the port.
    bracketed = host.startswith("[") and host.endswith("]")
    bare = (host[1:-1] if bracketed else host).lower()
    fine = _is_ip(bare) if bracketed else _HOST.fullmatch(bare) is not None
    if bracketed and fine:
        # In its canonical form, so that two spellings of an address are found to be the same.
        bare = str(ipaddress.ip_address(bare))
    if not fine or not re.fullmatch(r"[1-9][0-9]{0,4}", port) or int(port) > 65535:
        raise TransportError(
            f"address {address[:80]!r}; expected host:port, such as 192.0.2.7:7447"
        )
    return bare, int(port)


def check_address(address: str) -> str:
    """Check an address at which others are to reach a member; return it in its canonical form.

    That of a member that accepts no connection is `OUTBOUND`.

    Raises:
        TransportError: when it is none, or one on which a program only listens.
    """
    if address == OUTBOUND:
        return address
    host, port = split_address(address)
    if _is_short_ip(host):
        raise TransportError(
            f"address {address[:80]!r} is a number that some systems read as an IPv4 address; give "
            "its four numbers, such as 192.0.2.7:7447"
        )
    if _is_ip(host) and _find_ipv4(host).is_unspecified:
        raise TransportError(
            f"address {address[:80]!r} stands for all addresses of a machine, and nobody can dial "
            "it; give the one at which the others reach this member, and `listen` in node.toml to "
            "listen on all"
        )
    return join_address(host, port)


def join_address(host: str, port: int) -> str:
    """Return "host:port" of the result of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_obstacle(host: str, port: int) -> str:
    """Return why this machine cannot listen at an address; "" when it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As a server does it: a port of a connection that just ended counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror:
            return "has a host name that is not known here: DNS"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "is taken: the node runs already, or another program"
            if error.errno == errno.EADDRNOTAVAIL:
                return (
                    "is no address of this machine: behind a router, say in node.toml where it "
                    f'listens, such as listen = "0.0.0.0:{port}"'
                )
            return f"cannot be opened: {error.strerror}"
    return ""


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _find_ipv4(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address that an IPv6 address stands for, or else the address itself."""
    found = ipaddress.ip_address(host)
    # ::ffff:0.0.0.0 stands for all addresses of a machine as 0.0.0.0 does.
    return getattr(found, "ipv4_mapped", None) or found


def _is_short_ip(host: str) -> bool:
    """Whether a host is an old notation of an IPv4 address, such as 0 for 0.0.0.0 and 127.1."""
    if _is_ip(host):
        return False
    try:
        # The C library reads them too, when such a "host name" is dialed.
        socket.inet_aton(host)
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- keys and signatures


def new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Make a private key and write it where only its owner can read it.

    Raises:
        TransportError: when the file exists; a key is never overwritten.
    """
    key = ec.generate_private_key(_CURVE)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # The folder too: who may write there could put another key in the place of this one.
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        # O_EXCL refuses an existing file. The mode counts from the creation on, so at no moment
        # can others read the key.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise TransportError(
            f"{path} exists; a key is never overwritten: move it away first"
        ) from None
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return key


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key.

    Raises:
        TransportError: when the file is missing, readable by others, or holds another kind of key.
    """
    try:
        mode = path.stat().st_mode & 0o777
        text = path.read_bytes()
    except OSError as error:
        raise TransportError(f"cannot read the key {path}: {error.strerror}") from None
    # Windows has no such modes.
    if os.name == "posix" and mode & 0o077:
        raise TransportError(
            f"{path} has mode {mode:04o}, so others can read this key; run chmod 600 {path}"
        )
    try:
        key = serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise TransportError(f"{path} holds no private key on the curve P-256 in PEM")
    return key


def encode_public_key(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key as 66 hexadecimal digits (the compressed point)."""
    # 33 bytes: the x coordinate, and the sign of y.
    return key.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    ).hex()


def decode_public_key(text: str) -> ec.EllipticCurvePublicKey:
    """Read a public key that `encode_public_key` wrote.

    Raises:
        TransportError: when it is no point of the curve.
    """
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, bytes.fromhex(text))
    except ValueError:
        raise TransportError(
            f"{text[:80]!r} is no public key: expected 66 hexadecimal digits"
        ) from None


def sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    """Return the signature of some bytes: r and then s, each of 32 bytes, big-endian."""
    # A fixed length: the DER form, which the library makes, varies.
    r, s = decode_dss_signature(key.sign(data, _ALGORITHM))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def verify(key: ec.EllipticCurvePublicKey, signature: bytes, data: bytes) -> bool:
    """Return whether a signature is of these bytes and by this key."""
    # Checked here, since bytes of any length could be cut into two numbers.
    if len(signature) != SIGNATURE:
        return False
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    try:
        key.verify(encode_dss_signature(r, s), data, _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key (its SubjectPublicKeyInfo in DER) in hexadecimal.

    It is the common name of a member's certificate, so that access is given to a key and not to a
    name.
    """
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()


def key_host(key: str) -> str:
    """Return the host name that a certificate has for a key, by the key's fingerprint.

    A node that dials a member demands this name, so that no other member's certificate will do.
    """
    # A part of a host name has at most 63 characters, and a fingerprint 64.
    return f"{key[:32]}.{key[32:]}.coterie"


# ---------------------------------------------------------------- certificates


def load_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM.

    Raises:
        TransportError: when there is none.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise TransportError(f"cannot read the certificate {path}: {error.strerror}") from None
    except ValueError:
        raise TransportError(f"{path} holds no certificate in PEM") from None


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of a certificate in hexadecimal."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def certificate_name(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """Return the member name in a certificate (its user id) or in a request (its common name).

    Certificates of older versions have the name as common name, too.

    Raises:
        TransportError: when it has no such name, several, or an invalid one.
    """
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    users = certificate.subject.get_attributes_for_oid(NameOID.USER_ID)
    if len(common) != 1 or len(users) > 1 or len(list(certificate.subject)) != 1 + len(users):
        raise TransportError(
            "a certificate must have one common name, at most one user id, and nothing else"
        )
    return check_name(str((users or common)[0].value))


def common_name(certificate: x509.Certificate) -> str:
    """Return a certificate's common name: its key's fingerprint, in older ones the name."""
    # For its checks alone: the subject has the form of a member's.
    certificate_name(certificate)
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def certificate_key(
    certificate: x509.Certificate | x509.CertificateSigningRequest,
) -> ec.EllipticCurvePublicKey:
    """Return the public key of a certificate or request.

    Raises:
        TransportError: when it is of another kind than P-256.
    """
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise TransportError(
            "the key of a certificate is not on the curve P-256; make it with `coterie net join`"
        )
    return key


def write_certificate(path: Path, certificate: x509.Certificate) -> None:
    """Write a certificate in PEM, atomically."""
    write_atomically(path, certificate.public_bytes(serialization.Encoding.PEM))


def _make_alternative_name(address: str) -> x509.SubjectAlternativeName | None:
    """Return a certificate's alternative name for the host of an address; None for `OUTBOUND`."""
    if address == OUTBOUND:
        return None
    host, _ = split_address(address)
    name = x509.IPAddress(ipaddress.ip_address(host)) if _is_ip(host) else x509.DNSName(host)
    return x509.SubjectAlternativeName([name])


def _check_days(days: float) -> None:
    if not 0 < days <= 3650:
        raise ConfigError(f"--days is {days:g}; expected more than 0 and at most 3650")


def _certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    end: datetime,
):
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(**on: bool) -> x509.KeyUsage:
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
        "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: on.get(name, False) for name in names})


def make_authority(
    folder: Path, run: str, *, days: float = 365.0, now: datetime | None = None
) -> x509.Certificate:
    """Create a run's authority (`ca.key`, `ca.pem`) and its `organizer.key` and `organizer.pub`.

    Args:
        folder: the organizer's folder; it should be on a machine that is not a member.
        run: the run's id.
        days: how long the authority is valid.
        now: the time.
    """
    _check_days(days)
    now = now or datetime.now(UTC)
    subject = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"coterie {check_name(run, 'run')}")]
    )
    key = new_key(folder / "ca.key")
    certificate = (
        _certificate_builder(subject, subject, key.public_key(), now, now + timedelta(days=days))
        # path_length 0: the authority signs members only, no other authorities.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_certificate(folder / "ca.pem", certificate)
    # A key of its own: who renews certificates need not be able to sign rosters.
    organizer = new_key(folder / "organizer.key")
    write_atomically(
        folder / "organizer.pub", (encode_public_key(organizer.public_key()) + "\n").encode()
    )
    return certificate


def make_request(folder: Path, name: str, address: str) -> Path:
    """Create a member's key (`NAME.key`) and the request for its certificate (`NAME.csr`)."""
    host = _make_alternative_name(check_address(address))
    key = new_key(folder / f"{check_name(name)}.key")
    request = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    )
    if host is not None:
        request = request.add_extension(host, critical=False)
    path, signed = folder / f"{name}.csr", request.sign(key, hashes.SHA256())
    write_atomically(path, signed.public_bytes(serialization.Encoding.PEM))
    return path


def sign_request(
    folder: Path,
    request: Path,
    name: str,
    address: str,
    *,
    days: float = 30.0,
    new_key: bool = False,
    now: datetime | None = None,
) -> x509.Certificate:
    """Sign a request: write its certificate to `members/NAME.pem` in the organizer's folder.

    Only the key is taken from the request. The certificate's common name is the key's fingerprint.

    Args:
        folder: the organizer's folder.
        request: the member's request.
        name: the member's name, as agreed with it; the request must have it.
        address: the member's address, as agreed with it; the request must name its host.
        days: validity of the certificate.
        new_key: whether to sign even where the member has a certificate of another key.
        now: the time.

    Raises:
        TransportError: when the request is not signed by its own key, asks for another name or
            address, has another key than the member's certificate, or is to be valid for longer
            than the authority.
    """
    _check_days(days)
    now = now or datetime.now(UTC)
    try:
        csr = x509.load_pem_x509_csr(request.read_bytes())
    except OSError as error:
        raise TransportError(f"cannot read the request {request}: {error.strerror}") from None
    except ValueError:
        raise TransportError(f"{request} holds no certificate request in PEM") from None
    # The request's own signature shows that its sender has the private key.
    if not csr.is_signature_valid:
        raise TransportError(f"{request} is not signed by the key it asks a certificate for")
    if certificate_name(csr) != check_name(name):
        raise TransportError(
            f"{request} asks for the name {certificate_name(csr)}; agreed was {name}"
        )
    key, wanted = certificate_key(csr), _make_alternative_name(check_address(address))
    made = folder / "members" / f"{name}.pem"
    if (
        made.exists()
        and not new_key
        and encode_public_key(certificate_key(load_certificate(made))) != encode_public_key(key)
    ):
        raise TransportError(
            f"{name} has a certificate of another key; to replace that key: coterie net rekey "
            f"{folder} {name} {request}"
        )
    try:
        asked = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        asked = None
    # The host was agreed on with the member, outside of the network; the request alone proves
    # nothing.
    if asked != wanted:
        hosts = [] if asked is None else [str(name.value) for name in asked]
        raise TransportError(
            f"{request} asks for {', '.join(hosts) or OUTBOUND}; agreed was {address}"
        )
    authority, ca = load_key(folder / "ca.key"), load_certificate(folder / "ca.pem")
    end = _find_end(folder, ca, now, days)
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, key_fingerprint(key)),
            x509.NameAttribute(NameOID.USER_ID, name),
        ]
    )
    certificate = (
        _certificate_builder(subject, ca.subject, key, now, end)
        .add_extension(
            x509.SubjectAlternativeName(
                [*(wanted or ()), x509.DNSName(key_host(key_fingerprint(key)))]
            ),
            critical=False,
        )
        # A member's key signs no certificates: one that is stolen admits nobody else.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(
            # A member dials some members and is dialed by others: it is client and server.
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .sign(authority, hashes.SHA256())
    )
    made.parent.mkdir(exist_ok=True)
    write_certificate(made, certificate)
    return certificate


def _find_end(folder: Path, ca: x509.Certificate, now: datetime, days: float) -> datetime:
    """Return the end of a certificate of so many days: no later than that of its authority.

    Raises:
        TransportError: when the authority ends before.
    """
    end, last = now + timedelta(days=days), ca.not_valid_after_utc
    if last <= now or end - last > _AGE:
        left = math.floor(10 * max(0.0, (last - now) / timedelta(days=1))) / 10
        raise TransportError(
            f"the authority in {folder} ends on {last:%Y-%m-%d %H:%M} UTC, and with it all of its "
            f"certificates: {days:g} days are too many, of which {left:g} are left (--days); for "
            "more, members need certificates of a new authority"
        )
    return min(end, last)


@dataclass(frozen=True)
class Identity:
    """A member's own name, key and certificate.

    Args:
        name: its name in the roster.
        key_file: the private key.
        certificate_file: the certificate.
        ca_file: the authority's certificate.
        key: the key itself.
        certificate: the certificate itself.
    """

    name: str
    key_file: Path
    certificate_file: Path
    ca_file: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @staticmethod
    def load(
        key_file: Path, certificate_file: Path, ca_file: Path, *, now: datetime | None = None
    ) -> "Identity":
        """Read an identity and check that its parts belong together.

        Raises:
            TransportError: when key and certificate do not match, when another authority signed it,
                or when it is not valid now.
        """
        key, certificate, ca = (
            load_key(key_file),
            load_certificate(certificate_file),
            load_certificate(ca_file),
        )
        if encode_public_key(key.public_key()) != encode_public_key(certificate_key(certificate)):
            raise TransportError(f"{key_file} is not the key of the certificate {certificate_file}")
        try:
            # This checks the issuer and the signature, not the dates, which follow.
            certificate.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature):
            raise TransportError(
                f"{certificate_file} was not issued by the authority in {ca_file}"
            ) from None
        for what, found in ((certificate_file, certificate), (ca_file, ca)):
            check_dates(what, found, now or datetime.now(UTC))
        return Identity(
            certificate_name(certificate), key_file, certificate_file, ca_file, key, certificate
        )

    def sign(self, data: bytes) -> bytes:
        """Sign some bytes with the member's key."""
        return sign(self.key, data)

    def read_files(self) -> tuple[bytes, bytes, bytes]:
        """Return the private key, the certificate and the authority's certificate in PEM.

        Raises:
            TransportError: when a file cannot be read.
        """
        try:
            return (
                self.key_file.read_bytes(),
                self.certificate_file.read_bytes(),
                self.ca_file.read_bytes(),
            )
        except OSError as error:
            raise TransportError(f"cannot read {error.filename}: {error.strerror}") from None


def check_dates(what: Path, certificate: x509.Certificate, now: datetime) -> None:
    """Check that a certificate is valid now.

    Raises:
        ClockError: when it is not valid yet: authorities date certificates back, so it is the
            clock that is wrong.
        TransportError: when it has expired, with both dates.
    """
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        raise ClockError(
            f"{what} is valid from {start:%Y-%m-%d %H:%M} UTC on; by the clock of this machine it "
            f"is {now:%Y-%m-%d %H:%M}: wait until the clock is set, and start again"
        )
    if now > end:
        raise TransportError(
            f"{what} is valid from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC; "
            f"it is {now:%Y-%m-%d %H:%M}: ask the organizer for a new one, or check the clock"
        )
