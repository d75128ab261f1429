"""Masked sums: what a client and the server compute of a sum in which no single vector is seen.

The protocol of Bonawitz et al. (Practical secure aggregation for privacy-preserving machine
learning, 2017, https://eprint.iacr.org/2017/281), without its network:

1. each client makes two key pairs, and signs the public ones with its number of samples (`keys`);
2. each encrypts for each other a share of its second private key and one of a random seed;
3. each adds to its vector a mask of its seed, and one for each other client from their agreed key,
   with opposite signs at the two: these cancel in the sum (`masked`);
4. each gives the server one share of every client: of the seed where the client's vector came, of
   the key where it did not, never both. The server removes the masks from the sum.

What was relayed is digested after each step. Every mask depends on the digest after step 2, so that
clients that were shown different lists have masks that do not cancel, and every message says for
which digest it is.
"""

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import ExchangeError
from coterie.exchange.base import SecureAggregation
from coterie.exchange.secure_sum import KEYS, SEALED_SHARES, SIGNATURE, check_enough
from coterie.functional.fixed_point import (
    WORD,
    WORD_BYTES,
    decode_mean,
    divide_samples,
    encode_model,
    pack_words,
    unpack_words,
)
from coterie.net import shamir

# It precedes what is signed and digested, so that it never counts as another kind of text.
_DOMAIN = b"coterie masked sum 1\n"
_PUBLIC = 32  # bytes of a key of X25519
DIGEST = 32
"""Bytes of the digest of what was relayed."""
# Every encryption and every mask has a key of its own, which is used once: no counter is needed.
_NONCE = bytes(12)


class SumRefused(ExchangeError):
    """What the server relays or asks for would reveal more than a sum, or does not fit."""


@dataclass(frozen=True)
class SumContext:
    """What all who take part know of a sum.

    Args:
        run: the run's id.
        round: the round.
        exchange: number of the first exchange of the sum in the round.
        cohort: ids of the clients that may take part, ascending.
        terms: of the sum.
    """

    run: str
    round: int
    exchange: int
    cohort: tuple[int, ...]
    terms: SecureAggregation

    @property
    def threshold(self) -> int:
        """How many clients must take part to the end."""
        return self.terms.smallest_sum(len(self.cohort))

    def describe_keys(self, client: int, keys: bytes, samples: float) -> bytes:
        """Return what a client signs."""
        # Bound to its run and round: old keys with a good signature must not come again.
        head = f"{self.run} {self.round} {self.exchange} {client} {samples!r}\n".encode()
        return _DOMAIN + head + keys

    def check_members(self, ids: Sequence[int], among: Iterable[int], client: int) -> None:
        """Check a list of clients that the server relays to one of them.

        Raises:
            SumRefused: when it is not a set of enough of the clients, this one included.
        """
        known = set(among)
        if list(ids) != sorted(set(ids)) or not set(ids) <= known or client not in ids:
            raise SumRefused(
                f"the server lists clients {list(ids)[:10]}; expected some of "
                f"{sorted(known)[:10]}, ascending, with {client}"
            )
        check_enough(len(ids), len(self.cohort), self.terms)


@dataclass(frozen=True)
class KeyList:
    """The public keys of the clients in a sum, as the server relays them.

    Args:
        ids: the clients, ascending.
        keys: of each, two public keys and the digest of its seed.
        samples: number of samples of each.
        signatures: over both, by the member that hosts each client.
    """

    ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    samples: tuple[float, ...]
    signatures: tuple[bytes, ...]

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> "KeyList":
        """Read what `to_tensors` made."""
        return KeyList(
            tuple(tensors["ids"].tolist()),
            tuple(map(to_bytes, tensors["keys"])),
            tuple(tensors["samples"].tolist()),
            tuple(map(to_bytes, tensors["signatures"])),
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the list as tensors of a message."""
        return {
            "ids": torch.tensor(self.ids, dtype=torch.int64),
            "keys": stack_bytes(self.keys, KEYS),
            "samples": torch.tensor(self.samples, dtype=torch.float64),
            "signatures": stack_bytes(self.signatures, SIGNATURE),
        }

    def compute_digest(self, context: SumContext) -> bytes:
        """Return a digest of all that is public of a sum, on which every mask depends."""
        # The threshold is part of it: clients that see different ones get different masks, and
        # no sum.
        found = hashlib.sha256(_DOMAIN + _to_json(context.cohort, [context.threshold]))
        for client, keys, samples in zip(self.ids, self.keys, self.samples, strict=True):
            found.update(context.describe_keys(client, keys, samples))
        return found.digest()


def _to_json(*lists: Sequence[int]) -> bytes:
    """Return lists of whole numbers as canonical JSON, which a digest needs."""
    return json.dumps(list(map(list, lists)), separators=(",", ":")).encode()


def stack_bytes(rows: Sequence[bytes], width: int) -> Tensor:
    """Return texts of bytes of one width as the rows of a tensor."""
    joined = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), width)
    return torch.from_numpy(joined.copy())


def to_bytes(row: Tensor) -> bytes:
    """Return a tensor of bytes as bytes."""
    return row.contiguous().numpy().tobytes()


def _agree(private: X25519PrivateKey, public: bytes, digest: bytes, purpose: bytes) -> bytes:
    """Return the key that two clients agree on, for one purpose in one sum."""
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order, with which every key is the same
        raise SumRefused("a client's public key is none") from None
    return HKDF(SHA256(), 32, salt=digest, info=_DOMAIN + purpose).derive(shared)


def expand_mask(seed: bytes, length: int) -> Int[np.ndarray, " params"]:
    """Return a mask: the key stream of ChaCha20, five bytes for each number."""
    # Nonce and counter are 0: a seed is used for this one stream.
    cipher = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    stream = cipher.update(bytes(length * WORD_BYTES))
    return unpack_words(torch.frombuffer(bytearray(stream), dtype=torch.uint8))


def _pair_purpose(one: int, other: int) -> bytes:
    """Name the mask of two clients: the same at both."""
    return f"mask {min(one, other)} {max(one, other)}".encode()


def extend_digest(digest: bytes, *lists: Sequence[int]) -> bytes:
    """Return the digest of a sum after a step that ends with some lists of clients."""
    return hashlib.sha256(_DOMAIN + digest + _to_json(*lists)).digest()


def _answer_for(digest: bytes, name: str, value: Tensor) -> dict[str, Tensor]:
    """Return a client's message of a step, with the digest of what it answers."""
    return {name: value, "digest": stack_bytes([digest], DIGEST)[0]}


class MaskingClient:
    """A client's part in one sum. Its keys and its seed are of this sum alone.

    Attributes:
        share: its share of the samples of all whose models are masked; known once its own is.

    Args:
        context: of the sum.
        client: its id.
        model: what it adds, within `fixed_point.largest_number` of the cohort.
        samples: by which it weighs; public.
        sign: signs bytes as the member that hosts the client.
        verify: (client, signature, bytes) -> whether a signature is by the member that hosts it.
    """

    def __init__(
        self,
        context: SumContext,
        client: int,
        model: Float[Tensor, " params"],
        samples: float,
        sign: Callable[[bytes], bytes],
        verify: Callable[[int, bytes, bytes], bool],
    ) -> None:
        self.context, self.client, self.samples = context, client, float(samples)
        self._model, self._sign, self._verify = model, sign, verify
        # Two pairs: the second private key is given away in shares where its client leaves, and
        # must not open the shares that others have sent.
        self._for_shares, self._for_masks = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(shamir.SECRET)
        pairs = self._for_shares, self._for_masks
        public = [pair.public_key().public_bytes_raw() for pair in pairs]
        # The digest of the seed is signed with the keys, so that a seed made of wrong shares is
        # noticed.
        self._keys = b"".join([*public, hashlib.sha256(self._seed).digest()])
        self.share = 0.0
        self._list: KeyList | None = None
        self._sealed: dict[int, bytes] | None = None
        self._answered: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def make_keys(self) -> dict[str, Tensor]:
        """Return the public keys, the number of samples, and the signature over both."""
        text = self.context.describe_keys(self.client, self._keys, self.samples)
        return {
            "keys": stack_bytes([self._keys], KEYS)[0],
            "samples": torch.tensor(self.samples, dtype=torch.float64),
            "signature": stack_bytes([self._sign(text)], SIGNATURE)[0],
        }

    def share_secrets(self, found: KeyList) -> dict[str, Tensor]:
        """Return shares of the second key and of the seed, encrypted for each client of the list.

        Raises:
            SumRefused: when the list is not of enough clients, or a signature is not by its member.
        """
        # One list in a sum: all masks and shares are for it.
        if self._list is not None:
            raise SumRefused("the server relays a second list of keys in one sum")
        context = self.context
        context.check_members(found.ids, context.cohort, self.client)
        for client, keys, samples, signature in zip(
            found.ids, found.keys, found.samples, found.signatures, strict=True
        ):
            if not (math.isfinite(samples) and samples > 0):
                raise SumRefused(f"client {client} claims {samples:.6g} samples")
            if not self._verify(client, signature, context.describe_keys(client, keys, samples)):
                raise SumRefused(f"the keys of client {client} are not signed by its member")
        own = found.ids.index(self.client)
        if found.keys[own] != self._keys or found.samples[own] != self.samples:
            raise SumRefused(f"the keys that the server relays of client {self.client} are not its")
        self._list, self._digest = found, found.compute_digest(context)
        private = self._for_masks.private_bytes_raw()
        holders, rows = len(found.ids), []
        of_key = shamir.split_secret(private, holders, context.threshold)
        of_seed = shamir.split_secret(self._seed, holders, context.threshold)
        for place, other in enumerate(found.ids):
            both = of_key[place] + of_seed[place]
            if other == self.client:
                # Its own stay here; the row keeps the places of the others.
                self._own_shares = both
                rows.append(bytes(SEALED_SHARES))
            else:
                key = self._sealing_key(self.client, other, other)
                rows.append(ChaCha20Poly1305(key).encrypt(_NONCE, both, None))
        return _answer_for(self._digest, "shares", stack_bytes(rows, SEALED_SHARES))

    def _sealing_key(self, sender: int, reader: int, other: int) -> bytes:
        assert self._list is not None
        public = self._list.keys[self._list.ids.index(other)][:_PUBLIC]
        purpose = f"share {sender} {reader}".encode()
        return _agree(self._for_shares, public, self._digest, purpose)

    def mask_model(self, ids: Sequence[int], sealed: Sequence[bytes]) -> dict[str, Tensor]:
        """Return the masked vector, for a sum over the clients that have shared their secrets.

        Args:
            ids: these clients, ascending.
            sealed: what each of them encrypted for this one.

        Raises:
            SumRefused: when there are not enough of them, or it has masked its model already.
        """
        if self._list is None or self._sealed is not None:
            raise SumRefused("the server asks for a masked model twice, or too early")
        found = self._list
        self.context.check_members(ids, found.ids, self.client)
        self._sealed = dict(zip(ids, sealed, strict=True))
        self._masking = extend_digest(self._digest, ids)
        shares = dict(zip(ids, divide_samples(_samples_of(found, ids)), strict=True))
        self.share = shares[self.client]
        # Weighted before it is masked, as the server sees nothing that it could weigh.
        total = encode_model(self._model, self.share, len(self.context.cohort))
        total = total + expand_mask(_seed_key(self._seed, self._masking), len(total))
        for other in ids:
            if other == self.client:
                continue
            public = found.keys[found.ids.index(other)][_PUBLIC : 2 * _PUBLIC]
            purpose = _pair_purpose(self.client, other)
            mask = expand_mask(_agree(self._for_masks, public, self._masking, purpose), len(total))
            # The two of a pair add it with opposite signs.
            total = total + (mask if self.client < other else -mask)
        return _answer_for(self._masking, "masked", pack_words(total % WORD))

    def answer_unmasking(self, came: Sequence[int], left: Sequence[int]) -> dict[str, Tensor]:
        """Return one share of each client: of the seed where its vector came, of the key of others.

        Args:
            came: clients whose masked vector the server has.
            left: those of which it has none.

        Raises:
            SumRefused: when the server asks for both shares of a client, for those of other
                clients, for too few, or a second time for others.
        """
        if self._sealed is None:
            raise SumRefused("the server asks for shares before it has a masked model")
        # Seed and key of one client together remove all masks of its vector.
        if both := sorted(set(came) & set(left)):
            raise SumRefused(
                f"the server asks for both shares of client {both[0]}, which would reveal its model"
            )
        if sorted([*came, *left]) != sorted(self._sealed):
            raise SumRefused("the server asks for shares of other clients than those of the sum")
        # Enough are left: a sum of few vectors says much about each.
        self.context.check_members(came, self._sealed, self.client)
        asked = tuple(came), tuple(left)
        if self._answered not in (None, asked):
            raise SumRefused(
                "the server asks a second time and names other clients, which would give it both "
                "shares of some"
            )
        # Noted before anything is opened: an error in the middle must not let the server ask again.
        self._answered = asked
        rows = []
        for other, sealed in self._sealed.items():
            of_key, of_seed = self._open_shares(other, sealed)
            rows.append(of_seed if other in came else of_key)
        digest = extend_digest(self._masking, came, left)
        return _answer_for(digest, "shares", stack_bytes(rows, shamir.SHARE))

    def _open_shares(self, other: int, sealed: bytes) -> tuple[bytes, bytes]:
        if other == self.client:
            both = self._own_shares
        else:
            try:
                key = self._sealing_key(other, self.client, other)
                both = ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
            except InvalidTag:
                # Zeros: the others' shares may be enough, and a wrong secret is noticed.
                both = bytes(2 * shamir.SHARE)
        return both[: shamir.SHARE], both[shamir.SHARE :]


def _seed_key(seed: bytes, digest: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return HKDF(SHA256(), 32, salt=digest, info=_DOMAIN + b"own").derive(seed)


def _samples_of(found: KeyList, ids: Sequence[int]) -> Tensor:
    """Return the numbers of samples of some clients of a list."""
    known = dict(zip(found.ids, found.samples, strict=True))
    return torch.tensor([known[client] for client in ids], dtype=torch.float64)


class SummingServer:
    """The server's part in one sum: it sees keys, encrypted shares, masked vectors and the sum.

    Args:
        context: of the sum.
        params: numbers in a vector.
    """

    def __init__(self, context: SumContext, params: int) -> None:
        self.context, self.params = context, params

    def take_keys(self, came: Mapping[int, Mapping[str, Tensor]]) -> KeyList:
        """Return the list of keys to relay.

        Raises:
            TooFewToSum: when fewer than the threshold came.
        """
        ids = tuple(sorted(came))
        check_enough(len(ids), len(self.context.cohort), self.context.terms)
        self.keys = KeyList(
            ids,
            tuple(to_bytes(came[client]["keys"]) for client in ids),
            tuple(float(came[client]["samples"]) for client in ids),
            tuple(to_bytes(came[client]["signature"]) for client in ids),
        )
        self._digest = self.keys.compute_digest(self.context)
        return self.keys

    def _take(
        self, came: Mapping[int, Mapping[str, Tensor]], among: Iterable[int], digest: bytes
    ) -> dict[int, Mapping[str, Tensor]]:
        """Return the messages of some clients that are for a digest: others are of another start.

        Raises:
            TooFewToSum: when these are fewer than the threshold.
        """
        found = {}
        for client in sorted(set(came) & set(among)):
            if to_bytes(came[client]["digest"]) == digest:
                found[client] = came[client]
        check_enough(len(found), len(self.context.cohort), self.context.terms)
        return found

    def take_shares(self, came: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
        """Return, for each client, what the others have encrypted for it.

        Raises:
            TooFewToSum: when fewer than the threshold came.
        """
        came = self._take(came, self.keys.ids, self._digest)
        self.sharing = tuple(came)
        self._masking = extend_digest(self._digest, self.sharing)
        ids, out = torch.tensor(self.sharing, dtype=torch.int64), {}
        for reader in self.sharing:
            place = self.keys.ids.index(reader)
            rows = [came[sender]["shares"][place] for sender in self.sharing]
            out[reader] = {"ids": ids, "shares": torch.stack(rows)}
        return out

    def take_masked(self, came: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Add the masked vectors, and return the question for shares.

        Raises:
            TooFewToSum: when fewer than the threshold came.
        """
        came = self._take(came, self.sharing, self._masking)
        self.came = tuple(came)
        # Reduced after each client: sums of numbers below WORD never come near 2^63.
        self._total = np.zeros(self.params, dtype=np.int64)
        for client in self.came:
            self._total = (self._total + unpack_words(came[client]["masked"])) % WORD
        left = [client for client in self.sharing if client not in came]
        self._unmasking = extend_digest(self._masking, self.came, left)
        return {
            "came": torch.tensor(self.came, dtype=torch.int64),
            "left": torch.tensor(left, dtype=torch.int64),
        }

    def unmask(
        self, came: Mapping[int, Mapping[str, Tensor]], dtype: torch.dtype
    ) -> tuple[Float[Tensor, " params"], Float[Tensor, " clients"]]:
        """Remove the masks from the sum.

        Args:
            came: answers of clients.
            dtype: of the mean.

        Returns:
            The weighted mean, and the numbers of samples of the clients in it.

        Raises:
            TooFewToSum: when fewer than the threshold answered.
            ExchangeError: when their shares do not give the clients' secrets.
        """
        came = self._take(came, self.came, self._unmasking)
        # As many as are needed; each has one share of every client.
        answers = dict(list(came.items())[: self.context.threshold])
        total = self._total
        for place, client in enumerate(self.sharing):
            shares = {}
            for holder, answer in answers.items():
                shares[self.keys.ids.index(holder)] = to_bytes(answer["shares"][place])
            found = shamir.combine_shares(shares)
            if client in self.came:
                self._check_seed(client, found)
                total = total - expand_mask(_seed_key(found, self._masking), self.params)
            else:
                total = total - self._masks_of(client, found)
        samples = _samples_of(self.keys, self.sharing)
        share_of = dict(zip(self.sharing, divide_samples(samples), strict=True))
        # Exact, whatever the order: all who compute this share get the same bits.
        share = math.fsum(share_of[client] for client in self.came)
        mean = decode_mean(total % WORD, share, len(self.context.cohort), dtype)
        return mean, _samples_of(self.keys, self.came)

    def _check_seed(self, client: int, seed: bytes) -> None:
        """Check a seed against the digest of it that its client signed."""
        signed = self.keys.keys[self.keys.ids.index(client)][2 * _PUBLIC :]
        if hashlib.sha256(seed).digest() != signed:
            raise ExchangeError(
                f"the shares of client {client}'s seed do not give it: some of them are wrong"
            )

    def _masks_of(self, client: int, private: bytes) -> Int[np.ndarray, " params"]:
        """Return what is left in the sum of the masks of a client that left."""
        key = X25519PrivateKey.from_private_bytes(private)
        public = self.keys.keys[self.keys.ids.index(client)][_PUBLIC : 2 * _PUBLIC]
        if key.public_key().public_bytes_raw() != public:
            raise ExchangeError(
                f"the shares of client {client}'s key do not give it: some of them are wrong"
            )
        total = np.zeros(self.params, dtype=np.int64)
        for other in self.came:
            theirs = self.keys.keys[self.keys.ids.index(other)][_PUBLIC : 2 * _PUBLIC]
            purpose = _pair_purpose(client, other)
            mask = expand_mask(_agree(key, theirs, self._masking, purpose), self.params)
            # As the other client added it.
            total = total + (mask if other < client else -mask)
        return total % WORD
