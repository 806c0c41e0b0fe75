from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import foedus as fd
from foedus import wire
from foedus.audit import leakage
from foedus.audit.attack import SigmoidLeNet, attack, gradient, label_shown, message, mismatch, psnr
from foedus.audit.leakage import audit_leakage, noisy
from foedus.base import random
from foedus.base.spec import Spec
from foedus.cli.app import app
from foedus.errors import ConfigError, DataError
from foedus.geometry import domain_of

SPEC = Spec((1, 8, 8), 10, 10)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digit():
    return audit_leakage("digits", 3, iterations=60, restarts=1, others=100, seed=0)


@pytest.fixture(scope="module")
def client():
    """A network, an image of digits with its label, and their gradient."""
    data = fd.load("digits", scale=None)
    x, y = torch.tensor(data.x_train[3] / 16).reshape(1, 8, 8), int(data.y_train[3])
    params = SigmoidLeNet().init(SPEC, random.key(5))
    return params, x, y, gradient(SigmoidLeNet(), params, x, torch.eye(10)[y])


def test_psnr_by_hand():
    black = torch.zeros(1, 2, 2)
    # 10 log10(1 / 0.01)
    assert psnr(torch.full((1, 2, 2), 0.1, dtype=torch.float64), black) == pytest.approx(20.0)
    # error 1/4
    assert psnr(torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]), black) == pytest.approx(
        10 * math.log10(4)
    )
    assert psnr(
        torch.full((2, 2), 25.5, dtype=torch.float64), torch.zeros(2, 2), span=255
    ) == pytest.approx(20.0)
    assert psnr(black, black) == math.inf


def test_network_is_the_lenet_of_dlg():
    shapes = {
        k: tuple(v.shape)
        for k, v in SigmoidLeNet().init(Spec((3, 32, 32), 100, 100), random.key(0)).items()
    }
    assert (
        shapes["weight"] == (100, 768)
        and shapes["conv0"] == (12, 3, 5, 5)
        and shapes["conv2"] == (12, 12, 5, 5)
    )
    params = SigmoidLeNet().init(SPEC, random.key(0))
    flat = torch.cat([p.flatten() for p in params.values()])
    assert -0.5 <= flat.min() < -0.45 and 0.45 < flat.max() <= 0.5
    for side in (8, 9, 11, 28):  # the last layer fits whatever the side
        spec = Spec((1, side, side), 3, 3)
        assert SigmoidLeNet().apply(
            SigmoidLeNet().init(spec, random.key(0)), torch.zeros(2, 1, side, side)
        ).shape == (2, 3)


def test_gradient_agrees_with_an_independent_one(client):
    params, x, y, g = client
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    torch.nn.functional.cross_entropy(
        SigmoidLeNet().apply(leaves, x[None]), torch.tensor([y])
    ).backward()
    for name, p in leaves.items():
        torch.testing.assert_close(g[name], p.grad)


def test_messages_by_hand(client):
    g = client[3]
    flat = np.concatenate([v.numpy().ravel() for v in g.values()]).astype(np.float64)
    sent = message(g, domain_of(fd.L2Ball(2.5)))
    np.testing.assert_allclose(sent.numpy(), -2.5 * flat / math.sqrt((flat**2).sum()), atol=1e-7)
    one = message(g, domain_of(fd.L1Ball(2.5)))
    place = int(np.abs(flat).argmax())
    assert one.indices.tolist() == [place]
    assert one.values.tolist() == [-2.5 * np.sign(flat[place])]
    assert message(g, None) is g
    assert wire.nbytes(one) < 30 < 4 * len(flat) < wire.nbytes(sent) < wire.nbytes(g)


def test_noise_is_relative_to_the_root_mean_square(client):
    g = client[3]
    flat = lambda t: torch.cat([v.flatten() for v in t.values()])  # noqa: E731
    added = flat(noisy(g, 0.5, random.key(1))) - flat(g)
    rms = float(flat(g).square().mean().sqrt())
    assert float(added.std()) == pytest.approx(0.5 * rms, rel=0.05)
    assert abs(float(added.mean())) < 0.05 * rms
    assert noisy(g, 0.0, random.key(1)) is g


def test_mismatch_by_hand():
    g = {
        "w": torch.tensor([3.0, 0.0], dtype=torch.float64),
        "b": torch.tensor([4.0], dtype=torch.float64),
    }
    other = {
        "w": torch.tensor([0.0, 0.0], dtype=torch.float64),
        "b": torch.tensor([10.0], dtype=torch.float64),
    }

    def value(domain, at):
        domain = domain and domain_of(domain)
        return float(mismatch(leakage.opened(message(g, domain), domain, g), domain)(at))

    assert value(None, other) == pytest.approx((9 + 36) / 25)
    # the cosine of (3, 0, 4) and (0, 0, 10)
    assert value(fd.L2Ball(7.0), other) == pytest.approx(1 - 4 / 5)
    rms = 10 / math.sqrt(3)
    signed = [0.0, 0.0, 10 / rms, 0.0, 0.0, -10 / rms]
    assert value(fd.L1Ball(7.0), other) == pytest.approx(
        math.log(sum(map(math.exp, signed))) - 10 / rms
    )
    # Signs of -g are (-, +, -) with a zero counted as +. At (-1, 0, 4) the first is wrong: the gap
    # is 2 radius 1.
    at = {
        "w": torch.tensor([-1.0, 0.0], dtype=torch.float64),
        "b": torch.tensor([4.0], dtype=torch.float64),
    }
    assert value(fd.LInfBall(2.0), at) == pytest.approx(
        2 * 2 * 1 / (2 * 2 * math.sqrt(3) * math.sqrt(17))
    )
    # Over the simplex the least entry wins, which is the second.
    assert value(fd.Simplex(1.0), other) == pytest.approx(math.log(2 + math.exp(-10 / rms)))
    # Each tensor on its own: (3, 0) and (0, 0) are uncorrelated, 4 and 10 have one direction.
    assert value(fd.PerLayer(fd.L2Ball(1.0)), other) == pytest.approx((1 + 0) / 2)


@pytest.mark.parametrize(
    "domain",
    [
        None,
        fd.L2Ball(3.0),
        fd.LInfBall(1.0),
        fd.KSparse(5, 1.0),
        fd.Box(-1.0, 2.0),
        fd.PerLayer(fd.L2Ball(1.0)),
        fd.Box(1.0, 2.0),
    ],
)
def test_the_true_gradient_explains_its_message(client, domain):
    params, _, _, g = client
    domain = domain and domain_of(domain)
    distance = mismatch(leakage.opened(message(g, domain), domain, params), domain)
    precise = {k: v.double() for k, v in g.items()}
    turned = {k: -v for k, v in precise.items()}
    assert abs(float(distance(precise))) < 1e-12
    assert float(distance(turned)) > 1e-3


def test_the_surrogate_of_one_entry_has_a_slope(client):
    """The message itself is constant almost everywhere; an attack without a slope would prove
    nothing.
    """
    params, _, y, g = client
    domain = domain_of(fd.L1Ball(1.0))
    distance = mismatch(leakage.opened(message(g, domain), domain, params), domain)
    precise = {k: v.double() for k, v in params.items()}
    dummy = torch.full((1, 8, 8), 0.5, dtype=torch.float64, requires_grad=True)
    loss = distance(
        gradient(SigmoidLeNet(), precise, dummy, torch.eye(10, dtype=torch.float64)[y], graph=True)
    )
    (slope,) = torch.autograd.grad(loss, dummy)
    assert float(slope.abs().min()) > 0
    ends = [
        distance(
            gradient(
                SigmoidLeNet(),
                precise,
                dummy.detach() + step,
                torch.eye(10, dtype=torch.float64)[y],
            )
        )
        for step in (1e-6, -1e-6)
    ]
    assert float(ends[0] - ends[1]) / 2e-6 == pytest.approx(float(slope.sum()), rel=1e-4)


def test_label_shown_by_hand():
    def seen(weight, bias):
        return {"conv": torch.ones(7), "weight": torch.tensor(weight), "bias": torch.tensor(bias)}

    ball = domain_of(fd.L1Ball(1.0))
    nothing = [[0.0, 0.0]] * 3
    # the gradient: negative at the label
    assert label_shown(seen(nothing, [0.2, -0.9, 0.7]), None, 3) == 1
    # a step: against the gradient
    assert label_shown(seen(nothing, [-0.2, 0.9, -0.7]), ball, 3) == 1
    assert label_shown(seen(nothing, [0.0, 0.0, -1.0]), ball, 3) is None  # only: not label 2
    assert label_shown(seen([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]], [0.0] * 3), ball, 3) == 2
    assert label_shown(seen(nothing, [0.0] * 3), ball, 3) is None  # the entry lies in another layer
    assert label_shown({"conv": torch.ones(7, 7)}, None, 3) is None


def test_gradient_and_direction_leak_and_one_entry_does_not(digit):
    found = digit.messages
    assert found["gradient"].psnr[-1] > 25
    assert found["L2 ball"].psnr[-1] > 25
    assert max(found["L1 ball"].psnr) < min(10, digit.class_average)
    assert all(r.label == digit.label for r in found.values())
    assert found["L1 ball"].loss[-1] < found["L1 ball"].loss[0]
    assert found["L1 ball"].explained  # the guess sends the same message, and is another image
    assert found["gradient"].twins == found["L2 ball"].twins == 0 < found["L1 ball"].twins


def test_result_is_consistent(digit):
    data = fd.load("digits", scale=None)
    image = torch.tensor(data.x_train[3]).reshape(1, 8, 8) / 16
    torch.testing.assert_close(digit.original, image)
    assert digit.label == data.y_train[3]
    others = np.delete(data.x_train, 3, 0) / 16
    average = 10 * math.log10(1 / ((others.mean(0) - data.x_train[3] / 16) ** 2).mean())
    assert digit.average == pytest.approx(average, abs=1e-3)
    same = others[np.delete(data.y_train, 3) == digit.label]
    assert digit.class_average == pytest.approx(
        10 * math.log10(1 / ((same.mean(0) - data.x_train[3] / 16) ** 2).mean()), abs=1e-3
    )
    for r in digit.messages.values():
        assert len(r.psnr) == len(r.loss) <= 61
        assert r.psnr[-1] == psnr(r.image, digit.original)
        assert {0, len(r.psnr) - 1} <= set(r.shots)
        assert all(psnr(shot, digit.original) == r.psnr[n] for n, shot in r.shots.items())
        assert r.image.min() >= 0 and r.image.max() <= 1
    table = digit.table()
    assert list(table.message[:3]) == ["gradient", "L2 ball", "L1 ball"]
    assert list(table.psnr_last[:3]) == [r.psnr[-1] for r in digit.messages.values()]
    assert list(table.psnr_last[3:]) == [digit.average, digit.class_average]
    assert list(table.label_right[:3]) == list(table.label_shown[:3]) == [True, True, True]


def test_twins_by_brute_force(digit):
    """With the network of the audit: images whose largest gradient entry has the same place and
    sign.
    """
    data = fd.load("digits", scale=None)
    params = SigmoidLeNet().init(SPEC, random.fold(random.key(0), 0))

    def largest(i):
        g = gradient(
            SigmoidLeNet(),
            params,
            torch.tensor(data.x_train[i]).reshape(1, 8, 8) / 16,
            torch.eye(10)[data.y_train[i]],
        )
        flat = torch.cat([v.flatten() for v in g.values()])
        return int(flat.abs().argmax()), bool(flat[flat.abs().argmax()] > 0)

    rest = [i for i in range(len(data.x_train)) if i != 3]
    picked = [rest[i] for i in random.permutation(random.fold(random.key(0), 2), len(rest))[:100]]
    assert digit.messages["L1 ball"].twins == sum(largest(i) == largest(3) for i in picked)


def test_no_other_image_has_the_same_gradient(digit):
    """Some are closer to it than 0 is, none is the same."""
    assert digit.messages["gradient"].twins == 0


def test_same_seed_same_numbers():
    before = torch.get_rng_state()
    settings = {
        "messages": {"L2": fd.L2Ball(1.0)},
        "iterations": 5,
        "restarts": 1,
        "others": 0,
        "noise": 0.1,
    }
    a, b, c = (
        audit_leakage("digits", 0, **settings, seed=seed).messages["L2"] for seed in (1, 1, 2)
    )
    assert a.psnr == b.psnr and a.loss == b.loss and torch.equal(a.image, b.image)
    assert a.psnr != c.psnr
    assert torch.equal(before, torch.get_rng_state())


def test_radius_changes_nothing_for_the_observer():
    runs = [
        audit_leakage(
            "digits", 0, messages={"L1": fd.L1Ball(r)}, iterations=5, restarts=1, others=0
        ).messages["L1"]
        for r in (1.0, 64.0)
    ]
    assert runs[0].loss == pytest.approx(runs[1].loss) and runs[0].label == runs[1].label


def test_label_can_be_looked_for_as_well():
    found = audit_leakage(
        "digits", 3, messages={"g": None}, iterations=100, restarts=1, others=0, label="optimise"
    ).messages["g"]
    assert not found.label_shown
    assert found.psnr[-1] > 25 and found.label == fd.load("digits").y_train[3]


def test_noise_hides_some_of_it():
    settings = {"messages": {"g": None}, "iterations": 40, "restarts": 1, "others": 0}
    clean, noise = (
        audit_leakage("digits", 3, **settings, noise=n).messages["g"].psnr[-1] for n in (0.0, 1.0)
    )
    assert noise < clean - 10


def test_restarts_keep_the_least_mismatch():
    def last(restarts):
        return (
            audit_leakage(
                "digits",
                0,
                messages={"L2": fd.L2Ball(1.0)},
                iterations=4,
                restarts=restarts,
                others=0,
            )
            .messages["L2"]
            .loss[-1]
        )

    assert last(4) <= last(1)


def test_other_models_and_sets():
    found = audit_leakage(
        "digits", 0, model=fd.MLP((16,)),
        messages={"signs": fd.LInfBall(1.0), "layers": fd.PerLayer(fd.L1Ball(1.0))}, iterations=3,
        restarts=1, others=20,
    )  # fmt: skip
    assert set(found.messages) == {"signs", "layers"}
    assert found.messages["signs"].bytes > found.messages["layers"].bytes


def test_attack_stops_when_all_is_explained_or_nothing_is_finite():
    target = torch.full((1, 2, 2), 0.25, dtype=torch.float64)
    guesses = list(
        attack(
            lambda x, _: (x - target).square().sum(),
            (1, 2, 2),
            3,
            key=random.key(0),
            iterations=50,
            label=1,
        )
    )
    assert len(guesses) < 10 and guesses[-1].loss < leakage.ENOUGH and guesses[-1].label == 1
    torch.testing.assert_close(guesses[-1].image, target.float())
    assert (
        list(
            attack(
                lambda x, y: (x.sum() + y.sum()) * math.nan,
                (1, 2, 2),
                3,
                key=random.key(0),
                iterations=5,
            )
        )
        == []
    )


def test_images_are_scaled_to_the_range_of_the_set():
    x = np.array([[[2.0, 4.0], [3.0, 2.0]], [[6.0, 2.0], [2.0, 2.0]]])
    data = fd.Data("tiny", x, [0, 1], x[:0], [], classes=2)
    _, images, labels, classes = leakage._images(data)
    assert images.tolist() == [[[[0.0, 0.5], [0.25, 0.0]]], [[[1.0, 0.0], [0.0, 0.0]]]]
    assert labels.tolist() == [0, 1] and classes == 2


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"data": "digitz"}, DataError, "did you mean 'digits'"),
        ({"data": "wine"}, DataError, "not images"),
        ({"data": "diabetes"}, DataError, "real targets"),
        ({"image": 1346}, ConfigError, "image=1346.*from 0 to 1345"),
        ({"image": -1}, ConfigError, "image=-1"),
        ({"iterations": 0}, ConfigError, "iterations=0"),
        ({"restarts": 0}, ConfigError, "restarts=0"),
        ({"noise": -1.0}, ConfigError, "noise=-1.0"),
        ({"seed": -1}, ConfigError, "seed=-1"),
        ({"others": 1.5}, ConfigError, "others=1.5"),
        ({"label": "guess"}, ConfigError, "label 'guess'"),
        ({"radius": 0.0}, ConfigError, "radius=0.0"),
        ({"messages": {}}, ConfigError, "at least one"),
        ({"messages": {"L1": 3}}, ConfigError, "domain must be a set"),
        ({"messages": {"N": fd.NuclearBall(1.0)}}, ConfigError, "needs a matrix"),
    ],
)
def test_errors(settings, error, words):
    with pytest.raises(error, match=words):
        audit_leakage(**settings)


def test_pixels_scaled_one_by_one_are_refused():
    with pytest.raises(DataError, match="scale=None"):
        audit_leakage(fd.load("digits"))


def test_public_names():
    assert fd.audit_leakage is audit_leakage and fd.Leakage is leakage.Leakage


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_picture(digit, tmp_path, ending):
    first, second = (
        digit.picture(tmp_path / "new" / f"{name}.{ending}").read_bytes() for name in "ab"
    )
    assert first == second
    assert first.startswith(b"<?xml" if ending == "svg" else b"\x89PNG")


def test_picture_must_have_a_known_ending(digit, tmp_path):
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        digit.picture(tmp_path / "leak.gif")


@pytest.fixture
def cli(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOEDUS_DEBUG", raising=False)

    def call(*arguments: str, code: int = 0):
        result = CliRunner().invoke(app, ["audit", "leakage", *arguments])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result

    return call


def test_command(cli, tmp_path):
    text = cli(
        "digits", "--image", "3", "--iterations", "3", "--restarts", "1", "--out", "p.svg"
    ).output
    for words in (
        "training image 3, label 4",
        "gradient",
        "L2 ball",
        "L1 ball",
        "21",
        "4 (right, shown)",
        "average image",
        "picture: p.svg",
    ):
        assert words in text
    assert (tmp_path / "p.svg").read_text(encoding="utf-8").count("<image") >= 9


def test_command_with_chosen_messages(cli, tmp_path):
    text = cli("--message", "linf", "--iterations", "1", "--restarts", "1", "--out", "p.png").output
    assert "L-infinity ball" in text and "L1 ball" not in text
    assert (tmp_path / "p.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("digitz",), "data set 'digitz' is unknown"),
        (("wine",), "not images"),
        (("--image", "99999"), "image=99999"),
        (("--iterations", "0"), "iterations=0"),
        (("--radius", "0"), "radius=0.0"),
        (("--message", "l3"), "--message 'l3' is unknown"),
        (("--out", "p.gif"), ".svg or .png"),
    ],
)
def test_command_errors(cli, arguments, words):
    assert words in cli(*arguments, code=2).stderr


def test_command_help(cli):
    text = cli("--help").output
    assert "Example" in text and "foedus audit leakage" in text
