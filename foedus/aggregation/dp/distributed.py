"""Differential privacy under secure aggregation: every client clips its reply and adds its share of
the noise before it masks them.

Kairouz, Liu and Steinke, "The distributed discrete Gaussian mechanism for federated learning with
secure aggregation", ICML 2021. Of n clients that see each other's keys (all clients of the round,
up to 100; otherwise a client and its neighbors), the server gets a sum only if t = ceil(threshold
n) of them stay to the end. With b bits the numbers of a reply are multiples of c / 2^(b - 1), where
c is `clip`. Client i draws, as integer multiples of such steps,

    y_i = clip(r_i) a_i + N_Z(0, v)  in every entry,    v = ceil(z^2 4^(b - 1) / t),    z: noise

and masks that. N_Z is the discrete Gaussian (`foedus.aggregation.dp.noise`). a_i is 1 with the
probability q of taking part, or 0: the client draws it, from its operating system's generator, once
a round, and keeps it secret. So all n are asked in every round, and those that do not take part
send only noise, for two reasons:

- No other party knows the cohort, not even the server, so amplification by sampling
  (`foedus.aggregation.dp.accounting`) holds against the server as well.
- The variance of a sum of m replies is m v. If only the cohort were asked, the variance of the
  noise would reveal its size.

If m >= t clients reply, the sum has the noise of t clients and more; additional noise is
post-processing. So the accounting with noise z holds however many clients drop out. Up to m - t of
the survivors may reveal their noise to the server, and noise z remains. Neighboring federations
have the same n clients, one of which has rows in one and none in the other, where it replies 0; n
is public.

The accounting is for normal noise. How far from it is a sum of t discrete Gaussians, of variance
s^2 = t v, in d entries?

1. The probability of x is within exp(+-tau) of that under N_Z(0, s^2), tau = 10 sum_{k<t} exp(-2
   pi^2 v k / (k + 1)) (their bound); and that is the normal density f(x) over 1 + 2 sum_k exp(-2
   pi^2 s^2 k^2). With v >= 25 these factors are 1 to a hundred digits.
2. A normal number rounded to the nearest integer has the probabilities r(x) = f(x) E[exp(-(2 x u +
   u^2) / (2 s^2))], u uniform in [-1/2, 1/2]. By Jensen's inequality, f(x) <= r(x) exp(1 / (24
   s^2)) for every x. As sinh(a) <= a exp(a^2 / 6), r(x) <= f(x) exp(x^2 / (24 s^4)).
3. |x|^2 <= 1.01 s^2 (d + 2 sqrt(150 d) + 300) except with probability e^-150 (Laurent and Massart
   2000).

So both are within factors of exp(+-h) of each other, h = 1.01 (d + 2 sqrt(150 d) + 300) / (24 s^2),
except with probability e^-150. A rounded normal vector is a function of a normal one, for which the
accounting is exact. The grid must be fine enough that h <= APART = 1e-8; the 2e-8 k that k
exchanges add to epsilon are accounted for. A share beyond TAIL = 16 standard deviations has a
probability of 1e-55; it is an error, and nothing is sent: the modulus holds n replies and n such
shares, so a sum never wraps. These probabilities fit into the part of delta that
`accounting.epsilon` reserves, for a delta of at least 1e-20 and an epsilon of at most 20.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from fractions import Fraction

import numpy as np

from foedus.aggregation.dp import noise as sampling
from foedus.aggregation.secure.fixedpoint import FINE
from foedus.aggregation.secure.protocol import SecureAggregation
from foedus.errors import ConfigError

APART = 1e-8
"""The largest h of an exchange."""
TAIL = 16
"""The modulus has room for a client's noise up to this number of standard deviations."""
_LEAST = 25
"""The least variance of a client's noise, in steps."""


class Share:
    """The part of each of `clients` in one exchange: `clip` is the largest norm of its reply,
    `variance` that of its noise, in steps.

    `settings` are those of the exchange: its range is `clip`, and it has room for the noise.
    """

    def __init__(self, config: SecureAggregation, clip: float, clients: int):
        privacy = config.privacy
        assert privacy is not None
        self.bits, self.multiplier, self.needed = (
            config.bits,
            Fraction(privacy.noise),
            config.needed(config.degree(clients) + 1),
        )
        self.clip, self.entropy = clip, privacy.entropy or os.urandom
        self.variance = math.ceil(self.multiplier**2 * 4 ** (self.bits - 1) / self.needed)
        self.headroom = math.isqrt(TAIL**2 * self.variance) + 1
        self.settings = replace(config, range=self.clip, headroom=self.headroom, privacy=None)

    def noise(self, size: int) -> np.ndarray:
        """This client's noise for a reply of `size` numbers; raises if the grid is too coarse for
        them.
        """
        if not self._fine(size, self.bits):
            enough = [bits for bits in range(self.bits, 41) if self._fine(size, bits)]
            remedy = (
                f"use SecureAggregation(bits={enough[0]})"
                if enough
                else "use more noise, or a smaller model"
            )
            raise ConfigError(
                f"bits={self.bits} is too coarse for noise={float(self.multiplier):g} on replies "
                f"of {size} numbers; {remedy}"
            )
        return sampling.discrete_gaussian(size, self.variance, self.entropy)

    def _fine(self, size: int, bits: int) -> bool:
        """Whether h is at most APART, and rounding changes a reply little."""
        steps = 2 ** (bits - 1)
        total = float(self.multiplier * steps) ** 2
        spread = 1.01 * (size + 2 * math.sqrt(150 * size) + 300) / (24 * total)
        return spread <= APART and total / self.needed >= _LEAST and steps >= FINE * math.sqrt(size)
