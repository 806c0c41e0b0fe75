"""A site's policy, checked for every message before a row is read; and the site's log."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from foedus.aggregation.secure.protocol import SecureAggregation
from foedus.algorithms.preprocessing.fit import FitPreprocessing
from foedus.core.algorithm import Algorithm
from foedus.engines.flower import auditlog
from foedus.engines.flower.account import Account, RefusedError
from foedus.engines.flower.measure import Measure
from foedus.engines.flower.policy import Policy
from foedus.engines.flower.questions import EvaluateOwn, Exchange, Question, Step, TryModel
from foedus.engines.flower.score import Score
from foedus.engines.flower.secure_site import Plain
from foedus.models.base import Model
from foedus.models.oracles import Oracle


class Guard:
    """Decides, by the policy of a site, which messages are answered."""

    def __init__(self, policy: Policy):
        self.policy, self.account = policy, Account(policy.cache)

    def question(self, question: Question) -> None:
        """Refuse columns and classes that the policy does not allow, and more messages than it
        allows a day."""
        schema, policy = question.schema, self.policy
        if schema is not None:
            strange = [c for c in schema.columns if c not in policy.columns]
            if strange:
                raise RefusedError(
                    f"schema.columns: this site's policy does not allow {strange[0]!r}"
                )
            strange = [c for c in schema.texts if c not in policy.categories]
            if strange:
                raise RefusedError(
                    f"schema.texts: allow.categories in this site's policy does not have "
                    f"{strange[0]!r}"
                )
            if set(schema.classes or ()) != set(policy.classes or ()):
                raise RefusedError("schema.classes: they are not those of this site's policy")
        own = isinstance(question, EvaluateOwn) and not isinstance(question, Exchange)
        kind = question.algorithm.get("type")
        score = isinstance(question, Step) and kind in (Score.__name__, Measure.__name__)
        if isinstance(question, TryModel) or own or score:
            self.account.count("evaluations", policy.limit("evaluations"))
        if isinstance(question, Step):
            self.account.count("exchanges", policy.limit("exchanges"))

    def algorithm(self, algorithm: Algorithm, question: Question) -> None:
        """Refuse algorithms and models that the policy does not name, and preprocessing that
        reveals more than sums.
        """
        if isinstance(algorithm, FitPreprocessing):
            return self._fit(algorithm, question)
        algorithm = algorithm.algorithm if isinstance(algorithm, Score | Measure) else algorithm
        for kind, allowed, values in (
            ("algorithms", self.policy.algorithms, [algorithm]),
            ("models", self.policy.models, list(models_in(algorithm))),
        ):
            for value in values:
                name = type(value).__name__
                if allowed is not None and name not in allowed:
                    raise RefusedError(f"allow.{kind} in this site's policy does not have {name}")

    def _fit(self, algorithm: FitPreprocessing, question: Question) -> None:
        policy = self.policy
        private = question.secure is not None and question.secure.get("privacy") is not None
        noise = private and (policy.budget is not None or policy.sections["secure"].get("noise"))
        if (algorithm.quantiles or (algorithm.ranges and not noise)) and not policy.quantiles:
            raise RefusedError(
                "allow.quantiles in this site's policy is not true: medians, quartiles and extremes"
                " are not told, from which single values can be found; use scale='standard' and "
                "impute='mean'"
            )

    def reply(self, question: Step, settings: SecureAggregation | None) -> None:
        """Account for the privacy loss of a reply that is not empty, if the policy has a budget."""
        if self.policy.budget is None:
            return
        privacy = None if settings is None else settings.privacy
        if privacy is None:
            raise RefusedError(
                "this site has a privacy budget: it sends no reply without differential privacy"
            )
        assert question.cohort is not None and question.probability is not None
        self.account.spend(
            question.cohort, float(question.probability), float(privacy.noise), *self.policy.budget
        )

    def score(self, question: TryModel | EvaluateOwn) -> None:
        """Refuse to send a score without noise, whose privacy loss is unbounded."""
        if self.policy.budget is None:
            return
        remedy = (
            "the server's remedy is [aggregation] with SecureAggregation and privacy, which sends "
            "one average over all sites, with noise"
            if isinstance(question, TryModel)
            else "only a site without [privacy] in its policy sends scores of its clients' own "
            "models"
        )
        raise Plain(f"this site has a privacy budget: it sends no score without noise; {remedy}")

    def metrics(self, names: Sequence[str], test_rows: int) -> None:
        """Refuse sums for metrics that the policy does not name, or over too few test rows."""
        policy = self.policy
        if strange := [name for name in names if name not in policy.metrics]:
            raise RefusedError(f"allow.metrics in this site's policy does not have {strange[0]!r}")
        if test_rows < policy.test_rows:
            raise RefusedError(
                f"this site has {test_rows} test rows, and tells sums of {policy.test_rows} or "
                "more (limits.test_rows in its policy)"
            )

    def measures(self, names: Sequence[str], test_rows: int) -> str | None:
        """The reason to refuse a server that will ask for the sums of these metrics, or None."""
        try:
            self.metrics(names, test_rows)
        except RefusedError as error:
            return str(error)
        if self.policy.budget is not None:
            return "this site has a privacy budget: it sends no score without noise"
        return None

    def log(self, **entry: Any) -> None:
        """Log a question, and its answer or refusal."""
        auditlog.append(self.policy.log, **entry)


def models_in(value: Any) -> Iterator[Model | Oracle]:
    """The models and oracles among the settings of an algorithm."""
    if isinstance(value, Model | Oracle):
        yield value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from models_in(getattr(value, f.name))
    elif isinstance(value, list | tuple):
        for v in value:
            yield from models_in(v)
