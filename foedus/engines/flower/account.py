"""What a site has released so far, over all runs, in one file that survives restarts.

Exchanges and evaluations by day, the privacy that was spent, and for which sets of clients a
question was answered. Every entry is on disk before the answer leaves.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from foedus.errors import FoedusError

_TABLES = """
create table if not exists days (day text, kind text, count integer, primary key (day, kind));
create table if not exists spent (cohort text, probability real, noise real, exchanges integer,
    primary key (cohort, probability, noise));
create table if not exists sums (client integer, question text, clients text,
    primary key (client, question));
"""


class RefusedError(FoedusError):
    """A request that the policy of this site refuses."""


class Account:
    """The account in a site's folder, shared by all of its processes."""

    def __init__(self, folder: Path):
        self.path = folder / "account.sqlite"

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction that no other process shares."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as db:
                db.executescript(_TABLES)
                with db:
                    db.execute("begin immediate")
                    yield db
        except sqlite3.DatabaseError as error:
            raise RefusedError(
                f"the account of this site cannot be read ({error}); without it nothing is answered"
            ) from error

    def count(self, kind: str, limit: int) -> None:
        """Count one more request of a kind today; raises beyond the limit."""
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        with self._open() as db:
            row = db.execute("select count from days where day = ? and kind = ?", (day, kind))
            (before,) = row.fetchone() or (0,)
            if before >= limit:
                raise RefusedError(f"this site answers {limit} {kind} a day, and has done so today")
            db.execute("insert or replace into days values (?, ?, ?)", (day, kind, before + 1))

    def spend(
        self, cohort: str, probability: float, noise: float, epsilon: float, delta: float
    ) -> None:
        """Count one more exchange of a round; raises if the total privacy loss would exceed the
        budget."""
        from foedus.aggregation.dp.accounting import epsilon as cost
        from foedus.aggregation.dp.distributed import APART

        with self._open() as db:
            rows = db.execute("select cohort, probability, noise, exchanges from spent").fetchall()
            rounds = {(c, q, z): k for c, q, z, k in rows}
            this = (cohort, probability, noise)
            if any(c == cohort and (c, q, z) != this for c, q, z in rounds):
                # it is drawn once whether a client is in a cohort, so it must be one entry
                raise RefusedError(
                    f"cohort={cohort!r} has been accounted for with another probability or noise"
                )
            rounds[this] = rounds.get(this, 0) + 1
            spent = Counter((q, z, k) for (_, q, z), k in rounds.items())
            if (found := cost(spent, delta, "rdp", APART)) > epsilon:
                raise RefusedError(
                    f"epsilon={epsilon:g} at delta={delta:g} is what this site spends over all "
                    f"runs; this reply would make it {found:.4g}"
                )
            db.execute("insert or replace into spent values (?, ?, ?, ?)", (*this, rounds[this]))

    def sum_of(self, client: int, question: str, clients: Iterable[int]) -> None:
        """A client helps to unmask a sum of these clients.

        Refused if the same question was answered for others: the difference of two such sums shows
        the replies of a few.
        """
        names = ",".join(map(str, sorted(clients)))
        with self._open() as db:
            row = db.execute(
                "select clients from sums where client = ? and question = ?", (client, question)
            ).fetchone()
            if row is not None and row[0] != names:
                raise RefusedError(
                    "the same was asked before, for a sum of other clients, and two such sums show "
                    "single replies; ask the same clients, or begin a run with another seed"
                )
            db.execute("insert or replace into sums values (?, ?, ?)", (client, question, names))
