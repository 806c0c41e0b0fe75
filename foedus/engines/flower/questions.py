"""Questions of a server to a site: the header of each kind of message, declared field by field.

A site does not trust its server. `read_question` checks a header against the class of its message
before any row is read, any model built or any byte of the body decoded; an error names the field,
its value and what is allowed. Keys that a class does not declare are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, Predicate

from foedus.aggregation.secure.protocol import question_of
from foedus.base.settings import Means, check_settings, check_value
from foedus.base.tree import Tree
from foedus.data.formats.frames import MOST
from foedus.data.preprocess import Preprocessor
from foedus.engines.flower.site import Schema
from foedus.errors import ReplyError
from foedus.version import __version__

LONGEST_DELAY = 1000
"""Largest delay in rounds. Clients of some algorithms keep as many models, so a site limits it."""

Count = Annotated[int, Ge(0), Lt(2**63)]
ClientId = Annotated[int, Ge(0), Lt(2**32)]
Version = Annotated[int, Ge(0), Lt(2**48)]
Delay = Annotated[int, Ge(0), Le(LONGEST_DELAY)]
Name = Annotated[str, MinLen(1), MaxLen(100), Means("a text of 1 to 100 characters")]
Metrics = Annotated[list[Name], MaxLen(100)]
Session = Annotated[str, MinLen(1), MaxLen(256), Means("a text of 1 to 256 characters")]
Shard = Annotated[
    str, MaxLen(64), Predicate(str.isalnum), Means("a text of at most 64 letters and digits")
]
Cohort = Annotated[str, MinLen(1), MaxLen(64), Means("a text of 1 to 64 characters")]
Probability = Annotated[float, Gt(0), Le(1), Means("above 0 and at most 1")]


@dataclass(frozen=True, kw_only=True)
class Question:
    """The fields of every header: the algorithm, and the rows with their form.

    algorithm, secure: settings as `foedus.core.describe.to_config` writes them; `from_config`
        checks them when they are built.
    session: the run, as a name. foedus: the version of the server.
    shard: which clients of a simulation, for a node that has some.
    schema, preprocess: the columns of a site's own file, and their preprocessing; none until it is
        fitted.
    """

    algorithm: dict[str, Any]
    seed: Annotated[int, Ge(0), Lt(2**64)]
    session: Session | Literal[""] = ""
    foedus: Name | None = None
    shard: Shard | None = None
    schema: Schema | None = None
    preprocess: Preprocessor | None = None
    secure: dict[str, Any] | None = None

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_settings(self, ReplyError)
        made, schema = self.preprocess, self.schema
        if made is not None and (
            schema is None or made.names != schema.columns or {*made.categories} != {*schema.texts}
        ):
            raise ReplyError("preprocess: its columns are not those of the schema")

    def _as_long(self, name: str, what: str, others: Sequence[Any] | None) -> None:
        """Refuse a list that does not have an element for each of the others."""
        values = getattr(self, name)
        if values is not None and others is not None and len(values) != len(others):
            raise ReplyError(f"{name} has {len(values)} elements for {len(others)} {what}")

    def _each_once(self, name: str, values: Sequence[Any]) -> None:
        if len(set(values)) < len(values):
            raise ReplyError(f"{name} names something twice: {str(values)[:200]}")


@dataclass(frozen=True, kw_only=True)
class Hello(Question):
    """Greeting: asks a node for its clients and rows.

    metrics: the metrics whose sums over test rows the server will request; `None`: none.
    """

    metrics: Metrics | None = None

    kind: ClassVar[str] = "query.hello"


@dataclass(frozen=True, kw_only=True)
class TryModel(Question):
    """Asks for the score of a model (the body) on the site's test rows."""

    kind: ClassVar[str] = "evaluate.model"


@dataclass(frozen=True, kw_only=True)
class EvaluateOwn(Question):
    """Asks for the scores of the clients' own models on their own test rows.

    ids: the clients asked. seen: for each the version of its last answer that the server has, 0 for
        none: the state to go on from.
    up, down, longest: where messages are late, the delays of each client, and the longest round
        trip of all clients.
    metrics: the metrics whose sums over test rows are requested as well.
    """

    session: Session
    ids: Annotated[list[ClientId], MinLen(1)]
    seen: list[Version]
    up: list[Delay] | None = None
    down: list[Delay] | None = None
    longest: Annotated[int, Ge(0), Le(2 * LONGEST_DELAY)] | None = None
    metrics: Metrics | None = None

    kind: ClassVar[str] = "evaluate.own"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._each_once("ids", self.ids)
        for name in ("seen", "up", "down"):
            self._as_long(name, "clients in ids", self.ids)
        delays = (self.up, self.down, self.longest)
        if any(d is None for d in delays) and delays != (None, None, None):
            raise ReplyError("up, down and longest must be given together, or none of them")
        trips = map(sum, zip(self.up or [0], self.down or [0], strict=True))
        if (slowest := max(trips)) > (self.longest or 0):
            raise ReplyError(
                f"longest={self.longest} is less than up + down of a client, {slowest}"
            )


@dataclass(frozen=True, kw_only=True)
class Exchange(EvaluateOwn):
    """One exchange with clients.

    version: of the states after it. lengths: of the parts of the body. quantise: of replies.
    phase, weights: of secure aggregation. step, cohort, probability: of differential privacy, the
        step for which keys are made, the sample of the round, and its probability.
    """

    round: Annotated[int, Ge(0), Lt(2**32)]
    exchange: Annotated[int, Ge(0), Lt(2**16 - 1)]
    version: Version
    lengths: list[Count]
    quantise: Literal["int8", "float16", "bfloat16"] | None = None
    phase: Literal["advertise", "share", "mask", "unmask"] | None = None
    weights: Literal["rows", "uniform"] | None = None
    step: Name | None = None
    cohort: Cohort | None = None
    probability: Probability | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version != (due := (self.round << 16) + self.exchange + 1):
            raise ReplyError(f"version={self.version} must be {due}, by round and exchange")


@dataclass(frozen=True, kw_only=True)
class Phase(Exchange):
    """A phase of secure aggregation other than `mask`."""

    phase: Literal["advertise", "share", "unmask"]

    kind: ClassVar[str] = "query.secure"


@dataclass(frozen=True, kw_only=True)
class Step(Exchange):
    """A client step.

    sent: the round of the broadcast, where it is late. groups: the clients that are sent the same
        message. held, items: the arguments that are held
        values (`foedus.core.held`), and those of them that are a `HeldItems`.
    """

    phase: Literal["mask"] | None = None
    sent: Annotated[int, Ge(0), Lt(2**32)] | None = None
    groups: list[Annotated[list[ClientId], MinLen(1)]]
    held: list[Name]
    items: list[Name]

    kind: ClassVar[str] = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._each_once("held, with items,", [*self.held, *self.items])
        late = 0 if self.phase is None else self.round  # secure aggregation has no late replies
        if self.sent is not None and not late <= self.sent <= self.round:
            raise ReplyError(f"sent={self.sent} must be from {late} to {self.round}, the round")

    def hash(self, step: str, payload: Tree, held: Tree) -> str:
        """What the exchange must be bound to (`foedus.aggregation.secure.protocol.Offer`)."""
        common = {name: getattr(self, name) for name in COMMON}
        if self.schema is not None:
            classes = None if self.schema.classes is None else list(self.schema.classes)
            columns, texts = list(self.schema.columns), list(self.schema.texts)
            common["schema"] = {"columns": columns, "classes": classes, "texts": texts}
        common["preprocess"] = None if self.preprocess is None else self.preprocess.to_json()
        extra = {name: getattr(self, name) for name in TOLD if getattr(self, name) is not None}
        return asked_hash(common, step, self.weights, extra, payload, held)


COMMON = ("algorithm", "seed", "schema", "preprocess", "quantise")
"""The fields of a header on which a reply depends, besides the step and its arguments."""

TOLD = ("step", "cohort", "probability")


def asked_hash(
    common: dict[str, Any], step: str, weights: str | None, extra: dict[str, Any], payload: Tree,
    held: Tree,
) -> str:  # fmt: skip
    """The hash of the question of a step under secure aggregation, the same at server and site.

    held: the held values as the client has them, once they are up to date.
    """
    return question_of(json.dumps(common, sort_keys=True), step, weights, extra, payload, held)


KINDS: dict[str, type[Question]] = {cls.kind: cls for cls in (Hello, TryModel, EvaluateOwn, Phase)}


def read_question(kind: str, header: dict[str, Any]) -> Question:
    """The checked header of a message of this type from the server."""
    cls = Step if kind.startswith(f"{Step.kind}.") else KINDS.get(kind)
    if cls is None:
        raise ReplyError(
            f"this site does not know messages of type {kind[:100]!r}; it has foedus {__version__}"
        )
    for f in fields(cls):
        if f.name not in header and f.default is MISSING:
            raise ReplyError(f"the header of {kind[:100]} has no {f.name}")
    known = {f.name: header[f.name] for f in fields(cls) if f.name in header}
    known["schema"] = read_schema(known.get("schema"))
    known["preprocess"] = read_preprocess(known.get("preprocess"))
    return cls(**known)


def read_schema(schema: Any) -> Schema | None:
    """The form of the rows of all sites."""
    if schema is None:
        return None
    names = Annotated[list[Annotated[str, MaxLen(1000)]], MinLen(1)]
    check_value("schema", schema, dict[str, Any], ReplyError)
    check_value("schema.columns", schema.get("columns"), names, ReplyError)
    check_value("schema.classes", schema.get("classes"), names | None, ReplyError)
    check_value("schema.texts", schema.get("texts", []), list[str], ReplyError)
    columns, classes, texts = schema["columns"], schema.get("classes"), schema.get("texts", [])
    for name, values in (("columns", columns), ("classes", classes or []), ("texts", texts)):
        if len(set(values)) < len(values):
            raise ReplyError(f"schema.{name} has a name twice")
    if strange := set(texts) - set(columns):
        raise ReplyError(f"schema.texts: {min(strange)!r} is none of the columns")
    return Schema(tuple(columns), None if classes is None else tuple(classes), tuple(texts))


def read_preprocess(about: Any) -> Preprocessor | None:
    """The preprocessing of the rows of all sites, checked without reading rows."""
    if about is None:
        return None
    check_value("preprocess", about, dict[str, Any], ReplyError)
    try:
        made = Preprocessor.from_json(about)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ReplyError(f"preprocess cannot be read: {error!r}"[:300]) from None
    if made.divisor is not None and (np.asarray(made.divisor) < np.finfo(np.float32).tiny).any():
        raise ReplyError("preprocess: a divisor gives numbers that are not finite")
    if max(map(len, made.categories.values()), default=0) > MOST + 1:
        raise ReplyError(f"preprocess: a column has more than {MOST} categories")
    return made
