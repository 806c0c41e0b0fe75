"""Sites and a hub: the numbers of a run, one row at a time, by messages; and messages that must be
refused.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import foedus as fd
from foedus import wire


@pytest.fixture(scope="module")
def fed() -> fd.Federation:
    return fd.split(fd.load("digits"), "tasks", clients=3)


def play(
    algorithm: fd.FedRes, fed: fd.Federation, rounds: int, lag: int = 0
) -> tuple[fd.Hub, dict[int, fd.Site], list[bytes]]:
    """Every site predicts and learns once a round; messages arrive `lag` rounds late."""
    hub, sites = (
        fd.Hub(algorithm, fed.spec),
        {i: fd.Site(algorithm, fed.spec, i, lag=lag) for i in range(len(fed))},
    )
    post: list[dict[int, bytes]] = []
    for t in range(rounds):
        messages = {}
        for i, site in sites.items():
            site.receive(hub.broadcast())
            row = fed.client_rows(i)[t % fed.sizes[i]]
            site.predict(fed.data.x_train[row])
            messages[i] = site.learn(fed.data.x_train[row], fed.data.y_train[row])
        post.append(messages)
        hub.learn(post[t - lag] if t >= lag else {})
    return hub, sites, post


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"send": "gradient"},
        {"rule": "misaligned", "schedule": "constant", "step": 0.01},
        {"loss": "logistic", "schedule": "sqrt"},
    ],
    ids=["rows", "gradient", "misaligned", "logistic"],
)
def test_a_service_has_the_numbers_of_a_run(fed, options, lag):
    part = {"shared": fed.settings["global_features"], "private": fed.settings["local_features"]}
    algorithm = fd.FedRes(**part, **options)
    run = fd.run(algorithm, fed, 70, engine=fd.Delayed(up=lag), evaluate_every=0)
    hub, sites, _ = play(algorithm, fed, 70, lag)
    torch.testing.assert_close(hub.w["weight"], run.state.w["weight"], rtol=1e-5, atol=1e-6)
    assert np.mean([s.loss for s in sites.values()]) == pytest.approx(
        run.history.online_loss.iloc[-1], rel=1e-5
    )
    # The site's pair is the one that the run ends with, but for the model that the last round made.
    model, x = run.model_of(1), fed.data.x_test[:20]
    assert [sites[1].predict(row) for row in x] == model.predict(x).tolist()


def test_the_family_has_a_name_of_its_own():
    for name in ("FedRes", "Hub", "Site", "Regret", "regret", "rollouts"):
        assert getattr(fd.fedres, name) is getattr(fd, name)
    assert "fedres" in dir(fd)
    # the functions, not the modules of that name
    assert callable(fd.fedres.regret) and callable(fd.fedres.rollouts)


def test_alone_a_site_sends_nothing(fed):
    site = fd.Site(fd.FedRes(global_model=None), fed.spec)
    assert site.learn(fed.data.x_train[0], fed.data.y_train[0]) == b""


def test_regression_values():
    spec = fd.Spec((2,), None, 1)
    algorithm = fd.FedRes(
        fd.Linear(bias=False), fd.Linear(bias=False), schedule="constant", step=0.1
    )
    site, hub = fd.Site(algorithm, spec, 4), fd.Hub(algorithm, spec)
    assert site.predict([1.0, 2.0]) == 0.0
    # the gradient of (3 - f)^2 is -2 * 3 * (1, 2): both models become 0.6 * (1, 2)
    hub.learn({4: site.learn([1.0, 2.0], 3.0)})
    site.receive(hub.broadcast())
    assert site.predict([1.0, 2.0]) == pytest.approx(2 * 0.6 * 5)
    assert site.loss == pytest.approx(9.0)


def test_messages_that_are_refused(fed):
    algorithm = fd.FedRes()
    hub, site = fd.Hub(algorithm, fed.spec, keep=2), fd.Site(algorithm, fed.spec)
    site.receive(hub.broadcast())
    good = site.learn(fed.data.x_train[0], 1)
    tree = wire.decode(good)

    def refuse(match: str, error=fd.ReplyError, **changes):
        with pytest.raises(error, match=match):
            hub.learn({5: wire.encode({**tree, **changes})})

    refuse("site 5: x must be torch.float32", x=tree["x"][:, :10])
    refuse("site 5: local is not finite", local=tree["local"] * torch.nan)
    refuse("site 5: y must be torch.uint8", y=tree["y"].float())
    refuse("site 5 has class 2; there are 2", y=tree["y"] + 1)
    refuse("site 5 refers to version 7; from 1 to 1 are kept", version=7)
    refuse("site 5 has no version", version="1")
    refuse("site 5 must hold x, y, local", more=torch.zeros(1))
    refuse("site 5 has no version", version=True)
    refuse("site 5 has no version", version=-1)
    refuse("site 5 is finite, but its gradient is too large", x=tree["x"] * 0 + 3e38)
    for junk in (good[:-3], b"junk", good + b"x" * (1 << 17)):
        with pytest.raises(fd.ReplyError, match="site 5 cannot be read"):
            hub.learn({5: junk})
    with pytest.raises(fd.ReplyError, match="site 5 must be bytes, not str"):
        hub.learn({5: "junk"})
    with pytest.raises(fd.ReplyError, match="no version"):
        hub.learn({5: b""})
    assert hub.version == 1  # nothing of this was used
    for _ in range(4):
        hub.learn({})
    with pytest.raises(fd.ReplyError, match="refers to version 1; from 3 to 5 are kept"):
        hub.learn({5: good})
    with pytest.raises(fd.ReplyError, match="no broadcast"):
        site.receive(good)
    with pytest.raises(fd.ReplyError, match="the broadcast model"):
        site.receive(wire.encode({"version": 3, "w": {"weight": torch.zeros(2, 2)}}))


def test_bad_rows_and_settings(fed):
    site = fd.Site(fd.FedRes(), fed.spec)
    for x in (np.zeros(3), np.full(64, np.nan)):
        with pytest.raises(fd.DataError, match="x has shape"):
            site.predict(x)
    for y in (2, -1, 0.5, "a", None, np.nan, True):
        with pytest.raises(fd.DataError, match=f"y={y!r}"):
            site.learn(np.zeros(64), y)
    with pytest.raises(fd.DataError, match="x='abc'"):
        site.predict("abc")
    real = fd.Site(fd.FedRes(), fd.Spec((2,), None, 1))
    for y in (np.nan, "a", [1.0, 2.0]):
        with pytest.raises(fd.DataError, match="1 finite numbers"):
            real.learn([0.0, 0.0], y)
    with pytest.raises(fd.ConfigError, match="id='a'"):
        fd.Site(fd.FedRes(), fed.spec, "a")
    with pytest.raises(fd.ConfigError, match="says nothing of clients"):
        fd.Site(fd.FedRes(private={0: (1,)}), fed.spec, 1)
    with pytest.raises(fd.ReplyError, match="no global model"):
        fd.Site(fd.FedRes(global_model=None), fed.spec).receive(b"")
    with pytest.raises(fd.ConfigError, match=r"must be a fd.FedRes"):
        fd.Hub(fd.FedResBandit(every=2), fed.spec)
    wild = fd.Site(fd.FedRes(schedule="constant", step=1e30), fd.Spec((2,), None, 1))
    wild.learn([1e5, 1.0], 1.0)
    with pytest.raises(fd.DivergenceError, match="site 0"):
        wild.learn([1e5, 1.0], 1.0)


def test_an_older_broadcast_is_left_aside(fed):
    algorithm = fd.FedRes()
    hub, site = fd.Hub(algorithm, fed.spec), fd.Site(algorithm, fed.spec)
    old = hub.broadcast()
    hub.learn({0: site.learn(fed.data.x_train[0], 1)})
    site.receive(hub.broadcast())
    site.receive(old)
    assert site.version == 2 and float(site.w["weight"].abs().sum()) > 0
    with pytest.raises(fd.ConfigError, match="batch_size=1"):
        fd.Site(fd.FedRes(batch_size=2), fed.spec)
    with pytest.raises(fd.ConfigError, match="with a global model"):
        fd.Hub(fd.FedRes(global_model=None), fed.spec)
    with pytest.raises(fd.ConfigError, match="lag=-1"):
        fd.Site(fd.FedRes(), fed.spec, lag=-1)


def test_messages_that_are_too_long_are_not_decoded():
    """64 kB more than a message of the right form has."""
    spec = fd.Spec((2,), None, 1)
    algorithm = fd.FedRes(fd.Linear(bias=False), None)
    long = wire.encode({"version": 1, "x": torch.zeros(1 << 15)})
    with pytest.raises(fd.ReplyError, match="expected at most"):
        fd.Hub(algorithm, spec).learn({0: long})
    with pytest.raises(fd.ReplyError, match="expected at most"):
        fd.Site(algorithm, spec).receive(long)
