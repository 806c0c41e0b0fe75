"""Messages: trees of tensors as bytes, with a length that is known before anything is encoded.

`encode` and `decode` are inverse to each other; `nbytes` is `len(encode(...))` from shapes alone,
which is how a simulation charges every byte without encoding any. The form is described byte for
byte in `docs/reference/wire.md`. Decoding trusts nothing: a malformed message raises `WireError`
with the offset, and no length is believed before that many bytes are there.
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
