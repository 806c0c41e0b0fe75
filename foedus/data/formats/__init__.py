"""Readers of file formats."""

from foedus.data.formats.images import parse_cifar, parse_idx
from foedus.data.formats.leaf import characters
from foedus.data.formats.npz import npz_shapes
from foedus.data.formats.raw import Raw, read_bytes
from foedus.data.formats.read import READERS, read, readable

__all__ = [
    "READERS",
    "Raw",
    "characters",
    "npz_shapes",
    "parse_cifar",
    "parse_idx",
    "read",
    "read_bytes",
    "readable",
]
