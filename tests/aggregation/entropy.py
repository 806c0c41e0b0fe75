"""Random bytes that are the same every time: a stand-in for the operating system's, for tests."""

from __future__ import annotations

import hashlib


class Counted:
    """SHAKE-256 of a name and of how often it was asked."""

    def __init__(self, name: bytes = b""):
        self.name, self.times = name, 0

    def __call__(self, size: int) -> bytes:
        self.times += 1
        return hashlib.shake_256(self.name + self.times.to_bytes(8, "little")).digest(size)
