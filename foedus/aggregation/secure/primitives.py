"""The cryptography of secure aggregation: X25519, HKDF-SHA256, AES-256-GCM and AES-256-CTR, all
from `cryptography`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping

import numpy as np

from foedus.errors import ConfigError, SecureError

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    why = f"secure aggregation needs the package cryptography, which is not there ({error})"
    raise ConfigError(f"{why}: pip install 'foedus[secure]'") from error

NONCE, _CHUNK = 12, 1 << 20
_ZEROS = memoryview(bytes(_CHUNK))


def public_key(secret: bytes) -> bytes:
    """The X25519 public key of a secret one."""
    return load(secret).public_key().public_bytes_raw()


def load(secret: bytes) -> X25519PrivateKey:
    """A secret key ready for use; this costs as much as a key agreement, so do it once for
    several."""
    return X25519PrivateKey.from_private_bytes(secret)


def agree(secret: X25519PrivateKey, public: bytes) -> bytes:
    """X25519: the shared secret of two parties, from the secret key of one and the public key of
    the other.
    """
    try:
        return secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise SecureError(f"{public.hex()} is not a valid X25519 public key") from None


def derive(secret: bytes, *info: bytes) -> bytes:
    """HKDF-SHA256: a key for one purpose; `info` is what it is bound to, each part with its
    length.
    """
    parts = b"".join(struct.pack("<I", len(part)) + part for part in info)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=parts).derive(secret)


def _who(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def pair_key(
    tag: bytes, secret: X25519PrivateKey, mine: int, public: bytes, other: int, other_public: bytes
) -> bytes:
    """The key of the mask that two clients share, the same on both sides; their keys are those for
    masks.
    """
    first, last = sorted([(mine, public), (other, other_public)])
    return derive(
        agree(secret, other_public), b"pair", tag, _who(first[0], last[0]), first[1], last[1]
    )


def self_key(tag: bytes, seed: bytes, client: int) -> bytes:
    """The key of a client's own mask."""
    return derive(seed, b"self", tag, _who(client))


def box_key(tag: bytes, agreed: bytes, sender: int, receiver: int) -> bytes:
    """The key of the box that one client sends to another, from the shared secret of their keys for
    boxes.
    """
    return derive(agreed, b"box", tag, _who(sender, receiver))


def bound(kind: bytes, tag: bytes, *ids: int) -> bytes:
    """The context that is signed, encrypted or hashed with a value, so that it cannot be used
    elsewhere.
    """
    return b"foedus/" + kind + tag + _who(*ids)


def commitment(tag: bytes, seed: bytes, client: int) -> bytes:
    """A hash that verifies a rebuilt seed, and reveals nothing about it before."""
    return hashlib.sha256(bound(b"seed", tag, client) + seed).digest()


def add_mask(numbers: np.ndarray, key: bytes, subtract: bool = False) -> None:
    """Add the stream of a key to unsigned numbers in place (or subtract it), modulo their width:
    AES-256-CTR from 0.
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    buffer = np.empty(min(_CHUNK, numbers.nbytes) + 16, np.uint8)
    change, length = np.subtract if subtract else np.add, _CHUNK // numbers.itemsize
    for at in range(0, len(numbers), length):
        part = numbers[at : at + length]
        stream.update_into(_ZEROS[: part.nbytes], buffer.data)
        change(part, buffer[: part.nbytes].view(part.dtype), out=part)


def seal(key: bytes, data: bytes, tag: bytes, sender: int, receiver: int, nonce: bytes) -> bytes:
    """A box: the nonce, then AES-256-GCM of the data, bound to this sender and receiver."""
    return nonce + AESGCM(key).encrypt(nonce, data, bound(b"box", tag, sender, receiver))


def unseal(key: bytes, box: bytes, tag: bytes, sender: int, receiver: int) -> bytes:
    """The contents of a box; raises if it was altered."""
    try:
        return AESGCM(key).decrypt(box[:NONCE], box[NONCE:], bound(b"box", tag, sender, receiver))
    except InvalidTag:
        raise SecureError(f"the box from client {sender} was altered, or is not from it") from None


def verifier(keys: Mapping[int, bytes]) -> Callable[[int, bytes, bytes], bool]:
    """A `verify` for clients with these Ed25519 public keys (32 bytes each); their `sign` is
    `Ed25519PrivateKey.sign`.
    """
    known = {client: Ed25519PublicKey.from_public_bytes(key) for client, key in keys.items()}

    def verify(client: int, message: bytes, signature: bytes) -> bool:
        try:
            known[client].verify(signature, message)
        except (InvalidSignature, KeyError):
            return False
        return True

    return verify
