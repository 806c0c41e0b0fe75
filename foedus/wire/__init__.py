"""Messages: trees of tensors as bytes, with a length that is known before anything is encoded.

`encode` and `decode` are inverse to each other; `nbytes` is `len(encode(...))` computed from
shapes, so a simulation charges every byte without encoding. The format is described byte for byte
in `docs/reference/wire.md`. Decoding treats messages as untrusted: a malformed one raises
`WireError` with the offset, and a length is used only if as many bytes follow.
"""

from foedus.wire.arrays import (
    LowRank,
    Quantised,
    Signs,
    Sparse,
    Trees,
    densify,
    dequantise,
    quantise,
)
from foedus.wire.checks import validate_like
from foedus.wire.decoding import decode
from foedus.wire.encoding import encode, nbytes

__all__ = [
    "LowRank",
    "Quantised",
    "Signs",
    "Sparse",
    "Trees",
    "decode",
    "densify",
    "dequantise",
    "encode",
    "nbytes",
    "quantise",
    "validate_like",
]
