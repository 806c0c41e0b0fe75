from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import os
import socket
import sys
import threading
import zipfile
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from foedus.data import Data, catalog, load, split
from foedus.data.catalog import Home, Source, cache_dir, info, locate, names
from foedus.data.formats.raw import Raw
from foedus.data.holdout import hold_out
from foedus.data.loading import load_speeches
from foedus.errors import DataError
from tests.data.test_speeches import EDITION, USERS

REAL = os.environ.get("FOEDUS_DATA")


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path, monkeypatch):
    """Tests see an empty cache and no folder of sets, unless they are about the real ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if "real" not in request.fixturenames:
        monkeypatch.delenv("FOEDUS_DATA", raising=False)


@pytest.fixture
def real():
    if not REAL:
        pytest.skip("FOEDUS_DATA is not set: no folder of real data sets")


@pytest.mark.parametrize(
    ("name", "rows", "features", "classes"),
    [
        ("digits", 1797, 64, 10),
        ("breast_cancer", 569, 30, 2),
        ("wine", 178, 13, 3),
        ("diabetes", 442, 10, None),
    ],
)
def test_bundled(name, rows, features, classes):
    data = load(name)
    assert len(data.x_train) + len(data.x_test) == rows
    assert data.spec.shape == (features,)
    assert data.classes == classes
    assert abs(len(data.x_test) / rows - 0.25) < 0.01
    assert np.array_equal(data.x_train, load(name).x_train)
    assert not np.array_equal(data.x_train, load(name, seed=1).x_train)
    entry = info(name)
    assert (entry.rows, entry.test_rows, entry.features, entry.classes) == (
        len(data.x_train),
        len(data.x_test),
        features,
        classes,
    )
    if classes:
        # stratified
        assert np.allclose(np.bincount(data.y_test) / np.bincount(data.y_train), 1 / 3, atol=0.05)


def test_scaling_is_fitted_on_training_rows(tmp_path):
    rng = np.random.default_rng(0)
    x, x_test = rng.normal(5, 3, (200, 4)), rng.normal(50, 3, (50, 4))
    x[:, 2] = x_test[:, 2] = 0.1  # constant: must not be divided by zero
    path = tmp_path / "a.npz"
    np.savez(path, x_train=x, y_train=np.arange(200) % 2, x_test=x_test, y_test=np.arange(50) % 2)
    data = load(path)
    assert data.scaling == "standard"
    assert np.abs(data.x_train.mean(0)).max() < 1e-5
    assert np.allclose(data.x_train.std(0)[[0, 1, 3]], 1, atol=1e-5)
    assert (np.abs(data.x_train[:, 2]) < 1e-5).all()
    assert np.allclose(
        data.x_test[:, 0], (x_test[:, 0] - x[:, 0].mean()) / x[:, 0].std(), atol=1e-4
    )
    low = load(path, scale="minmax")
    assert low.x_train.min() == 0
    assert low.x_train.max() == 1
    assert low.x_test[:, 0].min() > 1
    assert (low.x_train[:, 2] == 0).all()
    assert np.allclose(load(path, scale="unit").x_train, x / 255)
    assert np.allclose(load(path, scale=None).x_train, x)
    with pytest.raises(DataError, match="scale 'standrad' is unknown; did you mean 'standard'"):
        load(path, scale="standrad")


@pytest.mark.parametrize(
    ("x", "scaling"),
    [
        (np.full((4, 300), 200, np.uint8), "unit"),
        (np.full((4, 8, 8, 3), 200, np.uint8), "unit"),
        (np.full((4, 300), 200.0), "standard"),
        (np.full((4, 10), 200, np.uint8), "standard"),
        (np.full((4, 10), -1.0), None),
        (np.ones((4, 300), np.uint8), None),
        (np.full((4, 10), 0.1), "standard"),
    ],
)
def test_auto_scaling(tmp_path, x, scaling):
    np.savez(tmp_path / "a.npz", x_train=x, y_train=[0, 1, 0, 1], x_test=x, y_test=[0, 1, 0, 1])
    data = load(tmp_path / "a.npz")
    assert data.scaling == scaling
    assert x.ndim == 2 or data.spec.shape == (3, 8, 8)  # channels first


def test_test_part(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        x_train=np.eye(20),
        y_train=np.arange(20) % 2,
        x_test=np.eye(20)[:4],
        y_test=np.arange(4) % 2,
    )
    assert len(load(tmp_path / "a.npz").x_test) == 4
    assert len(load(tmp_path / "a.npz", test=0.5).x_test) == 12
    assert len(load(tmp_path / "a.npz", test=0).x_test) == 0
    (tmp_path / "train.svm").write_text("1 1:1 2:1\n2 1:2\n")
    (tmp_path / "test.svm").write_text("2 1:1 4:5\n")
    data = load(tmp_path / "train.svm", test=tmp_path / "test.svm", scale=None)
    assert data.x_train.shape == (2, 4)
    assert data.x_test.tolist() == [[1, 0, 0, 5]]
    assert data.y_test.tolist() == [1]
    with pytest.raises(DataError, match=r"test=1\.5"):
        load("digits", test=1.5)


def test_nan_and_infinite_features(tmp_path):
    x = np.ones((8, 3))
    x[3, 1] = np.nan
    np.savez(
        tmp_path / "a.npz", x_train=x, y_train=np.arange(8) % 2, x_test=x, y_test=np.arange(8) % 2
    )
    with pytest.raises(
        DataError, match=r"1 missing values .* row 3, column 1; pass impute='median'"
    ):
        load(tmp_path / "a.npz")
    assert np.isfinite(load(tmp_path / "a.npz", impute="median").x_test).all()
    x[4, 2] = np.inf
    np.savez(
        tmp_path / "a.npz", x_train=x, y_train=np.arange(8) % 2, x_test=x, y_test=np.arange(8) % 2
    )
    with pytest.raises(DataError, match="infinite"):
        load(tmp_path / "a.npz", impute="median", scale=None)
    with pytest.raises(DataError, match="impute 'medain' is unknown"):
        load(tmp_path / "a.npz", impute="medain")


def test_unknown_names():
    with pytest.raises(DataError, match="data set 'leter' is unknown; did you mean 'letter'"):
        load("leter")
    with pytest.raises(DataError, match="unknown"):
        info("nothing")
    with pytest.raises(DataError, match="no file or folder"):
        load("some/where.csv")
    assert locate("../x") is None
    assert locate("") is None


def test_found_by_name_in_the_folder_and_the_cache(tmp_path, monkeypatch):
    folder = tmp_path / "sets"
    folder.mkdir()
    cache_dir().mkdir(parents=True)
    np.savez(
        folder / "mine.npz",
        x_train=np.eye(3),
        y_train=[0, 1, 0],
        x_test=np.eye(3),
        y_test=[0, 1, 0],
    )
    np.savez(
        cache_dir() / "mine.npz",
        x_train=np.eye(5),
        y_train=[0, 1, 0, 1, 0],
        x_test=np.eye(5),
        y_test=[0] * 5,
    )
    assert len(load("mine").x_train) == 5
    monkeypatch.setenv("FOEDUS_DATA", str(folder))
    assert len(load("mine").x_train) == 3
    assert locate("mine") == folder / "mine.npz"
    entry = {i.name: i for i in names()}["mine"]
    assert (entry.rows, entry.test_rows, entry.features, entry.classes) == (3, 3, 3, 2)
    assert entry.where == str(folder / "mine.npz")
    assert {"digits", "letter", "cifar100", "shakespeare"} <= {i.name for i in names()}


# Downloads, against a server of our own


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "www"
    folder.mkdir()
    hits = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            hits.append(self.path)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(folder))
    ) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{httpd.server_address[1]}/", hits
        httpd.shutdown()


def serve(monkeypatch, name: str, url: str, **changes):
    home = catalog._HOMES[name]
    sources = tuple(
        replace(s, **{"url": url + s.url.rsplit("/", 1)[-1], "former": None, **changes})
        for s in home.sources
    )
    monkeypatch.setitem(catalog._HOMES, name, replace(home, sources=sources))


def test_download_end_to_end(server, monkeypatch):
    folder, url, hits = server
    (folder / "letter.scale").write_text("1 1:1 16:0.5\n2 1:-1\n26 3:0.25\n")
    (folder / "letter.scale.t").write_text("2 1:1\n")
    serve(monkeypatch, "letter", url)
    assert info("letter").where == "to download"
    data = load("letter")
    assert data.x_train.shape == (3, 16)
    assert data.y_train.tolist() == [0, 1, 2]
    assert data.class_names == ("1", "2", "26")
    assert data.y_test.tolist() == [1]
    assert data.name == "letter"
    assert data.scaling is None
    assert sorted(p.name for p in cache_dir().iterdir()) == ["checksums.json", "letter.npz"]
    load("letter")
    assert len(hits) == 2  # the second time comes from the cache
    recorded = json.loads((cache_dir() / "checksums.json").read_text())
    assert (
        recorded[url + "letter.scale"]
        == hashlib.sha256((folder / "letter.scale").read_bytes()).hexdigest()
    )

    (cache_dir() / "letter.npz").unlink()
    (folder / "letter.scale").write_text("1 1:1 16:0.5\n2 1:-1\n25 3:0.25\n")
    with pytest.raises(DataError, match="first download had") as error:
        load("letter")
    assert "checksums.json" in str(error.value)
    assert not (cache_dir() / "letter.npz").exists()
    (cache_dir() / "checksums.json").write_text("[")
    with pytest.raises(DataError, match="damaged"):
        load("letter")


def test_published_checksum(server, monkeypatch):
    folder, url, _ = server
    import struct

    def idx(a):
        return gzip.compress(
            struct.pack(f">BBBB{a.ndim}I", 0, 0, 8, a.ndim, *a.shape) + a.tobytes()
        )

    files = {}
    for part, n in (("train", 6), ("t10k", 2)):
        files[f"{part}-images-idx3-ubyte.gz"] = idx(np.full((n, 28, 28), 255, np.uint8))
        files[f"{part}-labels-idx1-ubyte.gz"] = idx((np.arange(n) % 10).astype(np.uint8))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    serve(monkeypatch, "mnist", url)
    with pytest.raises(DataError, match="f68b3c2dcbeaaa9fbdd348bbdeb94873 is published"):
        load("mnist")
    assert not list(cache_dir().glob("*.npz"))
    assert not list(cache_dir().glob(".download*"))
    home = catalog._HOMES["mnist"]
    own = tuple(
        replace(s, md5=hashlib.md5(files[s.url.rsplit("/", 1)[-1]]).hexdigest())
        for s in home.sources
    )
    monkeypatch.setitem(catalog._HOMES, "mnist", replace(home, sources=own))
    data = load("mnist")
    assert data.x_train.shape == (6, 784)
    assert data.x_train.max() == 1
    assert data.scaling == "unit"
    assert len(data.x_test) == 2
    assert not (cache_dir() / "checksums.json").exists()


def test_emnist_is_upright_and_its_archive_kept(server, monkeypatch):
    folder, url, hits = server
    import struct

    images = np.zeros((3, 28, 28), np.uint8)
    images[:, 2, 5] = 200  # in the file: column 2, row 5
    with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
        for part in ("letters", "balanced"):
            for half in ("train", "test"):
                head = struct.pack(">BBBB3I", 0, 0, 8, 3, *images.shape)
                archive.writestr(
                    f"gzip/emnist-{part}-{half}-images-idx3-ubyte.gz",
                    gzip.compress(head + images.tobytes()),
                )
                labels = bytes([1, 2, 3]) if part == "letters" else bytes([0, 1, 2])
                archive.writestr(
                    f"gzip/emnist-{part}-{half}-labels-idx1-ubyte.gz",
                    gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 3) + labels),
                )
            archive.writestr(
                f"gzip/emnist-{part}-mapping.txt",
                "1 65 97\n2 66 98\n3 67 99\n" if part == "letters" else "0 48\n1 49\n2 50\n",
            )
    for name in ("emnist", "emnist_letters"):
        serve(monkeypatch, name, url)
    letters, balanced = load("emnist_letters"), load("emnist")
    assert letters.class_names == ("A", "B", "C")
    assert letters.y_train.tolist() == [0, 1, 2]
    assert balanced.class_names == ("0", "1", "2")
    assert letters.x_train[0].reshape(28, 28)[5, 2] > 0.7
    assert letters.x_train[0].reshape(28, 28)[2, 5] == 0
    assert hits == ["/gzip.zip"]
    assert (cache_dir() / "downloads" / "gzip.zip").exists()


def test_cifar100_keeps_both_kinds_of_labels(server, monkeypatch):
    import tarfile

    folder, url, _ = server
    record = np.zeros((100, 3074), np.uint8)
    record[:, 0], record[:, 1] = np.arange(100) % 20, np.arange(100)
    with tarfile.open(folder / "cifar-100-binary.tar.gz", "w:gz") as archive:
        for name in ("train.bin", "test.bin"):
            entry = tarfile.TarInfo(f"cifar-100-binary/{name}")
            entry.size = record.nbytes
            archive.addfile(entry, io.BytesIO(record.tobytes()))
    serve(monkeypatch, "cifar100", url, md5=None)
    assert load("cifar100").classes == 100
    assert load("cifar100").spec.shape == (3, 32, 32)
    assert load("cifar100", label="coarse").classes == 20


def test_failed_download_says_what_to_do(server, monkeypatch, tmp_path):
    _, url, _ = server
    cache_dir().mkdir(parents=True)
    np.savez(
        cache_dir() / "covtype60k.npz",
        x_train=np.eye(3),
        y_train=[0, 1, 0],
        x_test=np.eye(3),
        y_test=[0, 1, 0],
    )
    serve(monkeypatch, "covtype", url)
    with pytest.raises(DataError) as error:
        load("covtype")
    for word in (
        "covtype.bz2",
        "404",
        str(cache_dir()),
        "covtype60k",
        "Put covtype.npz",
        "$FOEDUS_DATA is not set",
    ):
        assert word in str(error.value)
    monkeypatch.setitem(
        catalog._HOMES,
        "gone",
        Home(1, 1, 1, 2, (Source((tmp_path / "none").as_uri()),), catalog._parse_libsvm),
    )
    with pytest.raises(DataError, match="failed"):
        load("gone")


def test_a_download_that_breaks_off_is_not_kept(server, monkeypatch):
    """The server promises more bytes than it sends; then there is none at all."""
    _, url, _ = server

    def short(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"1 1:1\n")

    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "do_GET", short)
    serve(monkeypatch, "letter", url)
    with pytest.raises(
        DataError,
        match=r"letter\.scale failed \(.*6 bytes read, 994 more expected.*Put letter\.npz",
    ):
        load("letter")
    assert list(cache_dir().iterdir()) == []
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    serve(monkeypatch, "letter", f"http://127.0.0.1:{port}/")
    with pytest.raises(
        DataError, match=r"letter\.scale failed \(\[Errno \d+\] Connection refused\)\. Looked for"
    ):
        load("letter")


def test_a_download_shows_its_progress(server, monkeypatch, capsys):
    folder, url, _ = server
    (folder / "letter.scale").write_text("1 1:1 16:0.5\n2 1:-1\n" * 50_000)
    (folder / "letter.scale.t").write_text("2 1:1\n")
    serve(monkeypatch, "letter", url)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert len(load("letter").x_train) == 100_000
    assert "letter.scale" in capsys.readouterr().err


def test_a_broken_download_is_not_kept(server, monkeypatch):
    folder, url, _ = server
    (folder / "usps.bz2").write_bytes(b"<html>please log in</html>")
    (folder / "usps.t.bz2").write_bytes(b"")
    serve(monkeypatch, "usps", url)
    with pytest.raises(DataError, match="not a readable libsvm file"):
        load("usps")
    assert not (cache_dir() / "usps.npz").exists()


# Shakespeare


def test_shakespeare_windows():
    users = [
        {"id": "A", "speeches": ["abcabcabc", "abc"]},
        {"id": "B", "speeches": ["ab"]},
        {"id": "C", "speeches": ["cba" * 5]},
    ]
    cache_dir().mkdir(parents=True)
    with gzip.open(cache_dir() / "shakespeare_by_speaker.json.gz", "wt") as file:
        json.dump({"users": users}, file)
    assert [u["id"] for u in load_speeches()] == ["A", "B", "C"]
    data = load("shakespeare", window=4, stride=3, test=0.4)
    assert data.class_names == ("\n", "a", "b", "c")
    assert data.group_names == ("A", "C")
    assert data.scaling is None
    # A: 13 characters, the first 8 for training: windows at 0 and 3, labels at 4 and 7
    assert data.x_train[data.groups_train == 0].tolist() == [[1, 2, 3, 1], [1, 2, 3, 1]]
    assert data.y_train[data.groups_train == 0].tolist() == [2, 2]
    assert data.x_test[data.groups_test == 0].tolist() == [[3, 0, 1, 2]]
    assert data.y_test[0] == 3
    each = load("shakespeare", window=4, stride=3, test=0.4, sequence=True)
    assert each.x_train.tolist() == data.x_train.tolist() and each.class_names == data.class_names
    assert each.y_train[each.groups_train == 0].tolist() == [[2, 3, 1, 2], [2, 3, 1, 2]]
    assert each.y_test[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="character ids"):
        load("shakespeare", window=4, scale="standard")
    with pytest.raises(DataError, match="longer than every"):
        load("shakespeare", window=100)
    with pytest.raises(DataError, match="stride=0"):
        load("shakespeare", window=4, stride=0)


def zipped(text: str, name: str = "100.txt") -> bytes:
    """An archive as of the home: one text with the line ends of its time."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text.replace("\n", "\r\n").encode("latin-1"))
    return content.getvalue()


def serve_small_edition(monkeypatch, url: str, **changes):
    """The local home, and a parser that is content with the three plays of the sample."""
    serve(monkeypatch, "shakespeare", url, **changes)
    parse = partial(catalog._parse_shakespeare, plays=3, speakers=len(USERS))
    monkeypatch.setitem(
        catalog._HOMES, "shakespeare", replace(catalog._HOMES["shakespeare"], parse=parse)
    )


def test_shakespeare_is_downloaded_once(server, monkeypatch):
    folder, url, hits = server
    file = folder / "1994-01-100.zip"
    file.write_bytes(zipped(EDITION))
    serve_small_edition(monkeypatch, url)
    assert (info("shakespeare").where, info("shakespeare").source) == (
        "to download",
        url + "1994-01-100.zip",
    )
    users = load_speeches()
    assert {u["id"]: u["speeches"] for u in users} == USERS
    data = load("shakespeare", window=60, stride=20, test=0)
    assert data.group_names == tuple(
        i for i, speeches in USERS.items() if len("\n".join(speeches)) > 60
    )
    first = "\n".join(USERS["ALLS_WELL_THAT_ENDS_WELL_COUNTESS"])
    assert "".join(data.class_names[int(c)] for c in data.x_train[0]) == first[:60]
    assert hits == ["/1994-01-100.zip"]
    cached = cache_dir() / "shakespeare_by_speaker.json.gz"
    assert sorted(cache_dir().iterdir()) == [cache_dir() / "checksums.json", cached]
    assert info("shakespeare").where == str(cached)
    content = json.loads(gzip.decompress(cached.read_bytes()))
    assert list(content) == ["source", "format", "users"]
    assert content["users"] == users
    assert json.loads((cache_dir() / "checksums.json").read_text()) == {
        url + "1994-01-100.zip": hashlib.sha256(file.read_bytes()).hexdigest()
    }
    cached.unlink()
    file.write_bytes(zipped(EDITION.replace("COUNTESS", "PRINCESS")))
    with pytest.raises(DataError, match="first download had"):
        load("shakespeare")
    assert not cached.exists()


def test_shakespeare_at_its_former_address(server, monkeypatch):
    folder, url, hits = server
    (folder / "before.zip").write_bytes(zipped(EDITION))
    serve_small_edition(monkeypatch, url, former=url + "before.zip")
    assert len(load_speeches()) == len(USERS)
    assert hits[0] == "/1994-01-100.zip"
    assert hits[-1] == "/before.zip"
    # One file, wherever it lay: its checksum belongs to the present address.
    assert list(json.loads((cache_dir() / "checksums.json").read_text())) == [
        url + "1994-01-100.zip"
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>please log in</html>", "not a readable zip archive"),
        (zipped(EDITION)[:-100], "not a readable zip archive"),
        (zipped(EDITION).replace(b"100.txt", b"100.doc"), "holds 0 text files"),
        (zipped("\n" * (17 << 20)), "100.txt has more than 33554432 bytes"),
        (zipped(EDITION[: len(EDITION) // 2]), "does not look like the edition of January 1994"),
    ],
    ids=["page", "truncated", "no text", "bomb", "half"],
)
def test_a_wrong_shakespeare_leaves_nothing_behind(server, monkeypatch, content, reason):
    folder, url, _ = server
    (folder / "1994-01-100.zip").write_bytes(content)
    serve_small_edition(monkeypatch, url)
    with pytest.raises(DataError, match=reason) as error:
        load("shakespeare")
    assert "Put shakespeare_by_speaker.json.gz" in str(error.value)
    assert "LEAF's folder" in str(error.value)
    assert list(cache_dir().iterdir()) == []
    (folder / "1994-01-100.zip").write_bytes(zipped(EDITION))  # the login page has gone
    assert len(load_speeches()) == len(USERS)


def test_three_plays_are_not_the_edition(server, monkeypatch):
    folder, url, _ = server
    (folder / "1994-01-100.zip").write_bytes(zipped(EDITION))
    serve(monkeypatch, "shakespeare", url)
    with pytest.raises(
        DataError, match="3 plays and 16 speaking characters found, expected at least 30 and 500"
    ):
        load("shakespeare")


def test_shakespeare_absent_and_from_leaf(server, monkeypatch):
    serve(monkeypatch, "shakespeare", server[1])
    with pytest.raises(DataError, match=r"404.*Put shakespeare_by_speaker.json.gz"):
        load("shakespeare")
    with pytest.raises(DataError, match=r"404.*Put shakespeare_by_speaker.json.gz"):
        load_speeches()
    folder = cache_dir() / "shakespeare"
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        content = {
            "users": ["u"],
            "num_samples": [2],
            "user_data": {"u": {"x": ["abc", "bca"], "y": ["a", "b"]}},
        }
        (folder / part / "data.json").write_text(json.dumps(content))
    data = load("shakespeare")
    assert data.x_train.shape == (2, 3)
    assert data.group_names == ("u",)
    assert data.name == "shakespeare"
    (cache_dir() / "shakespeare_by_speaker.json.gz").write_bytes(
        gzip.compress(b'{"users": [{"id": 1}]}')
    )
    with pytest.raises(DataError, match="not a JSON file of speeches"):
        load("shakespeare")


# The real sets

SETS = {
    "letter": (15000, 5000, (16,), 26, "standard"),
    "pendigits": (7494, 3498, (16,), 10, "standard"),
    "satimage": (4435, 2000, (36,), 6, "standard"),
    "dna": (2000, 1186, (180,), 3, None),
    "usps": (7291, 2007, (256,), 10, None),
    "shuttle": (43500, 14500, (9,), 7, "standard"),
    "sensorless": (48509, 10000, (48,), 11, "standard"),
    "covtype60k": (50000, 10000, (54,), 7, "standard"),
    "mnist": (60000, 10000, (784,), 10, "unit"),
    "cifar10_sub": (15000, 5000, (3, 32, 32), 10, "unit"),
    "cifar100_sub": (10000, 2000, (3, 32, 32), 100, "unit"),
    "emnist_digits10k": (8000, 2000, (784,), 10, "unit"),
    "ocr_letters": (47535, 4617, (128,), 26, None),
}


@pytest.mark.parametrize("name", SETS)
def test_real_set(real, name):
    if locate(name) is None:
        pytest.skip(f"{name} is not in FOEDUS_DATA")
    data = load(name)
    assert (
        len(data.x_train),
        len(data.x_test),
        data.spec.shape,
        data.classes,
        data.scaling,
    ) == SETS[name]
    fed = split(data, "dirichlet", clients=10, alpha=0.5)
    assert np.array_equal(np.sort(fed.rows), np.arange(len(data.x_train)))


def test_real_heart_disease(real):
    if locate("heart_disease_4sites") is None:
        pytest.skip("heart_disease_4sites is not in FOEDUS_DATA")
    with pytest.raises(DataError, match=r"impute='median'"):
        load("heart_disease_4sites")
    fed = split(load("heart_disease_4sites", impute="median"), "natural")
    assert fed.summary()["name"].tolist() == ["cleveland", "hungarian", "switzerland", "va"]
    assert (fed.sizes + fed.test_sizes).tolist() == [303, 294, 123, 200]


def test_real_shakespeare(real):
    if locate("shakespeare") is None:
        pytest.skip("shakespeare is not in FOEDUS_DATA")
    data = load("shakespeare")
    text = "".join(data.class_names[int(i)] for i in data.x_train[0])
    assert text.startswith("In delivering my son from me, I bury a second husband.\n")
    assert data.spec.shape == (80,)
    fed = split(data, "natural")
    assert len(fed) > 1000
    assert len(fed.test_rows) == len(data.x_test)
    assert isinstance(fed.data, Data)


def test_real_letter_is_learnable(real):
    """The table beside the sets says 0.772 for a linear model on 10,000 rows."""
    from sklearn.linear_model import LogisticRegression

    data = load("letter")
    score = (
        LogisticRegression(max_iter=300)
        .fit(data.x_train[:10000], data.y_train[:10000])
        .score(data.x_test[:2000], data.y_test[:2000])
    )
    assert abs(score - 0.772) < 0.02


def test_every_group_gives_its_part_to_the_test_rows():
    """Groups of 4 and 8 rows, a quarter of each: one and two."""
    groups = np.repeat([0, 1], [4, 8])
    raw = hold_out(
        Raw(np.arange(12.0)[:, None], np.arange(12) % 2, groups_train=groups), 0.25, 0, None
    )
    assert np.bincount(raw.groups_test).tolist() == [1, 2] and np.bincount(
        raw.groups_train
    ).tolist() == [3, 6]
    assert sorted([*raw.x_train[:, 0], *raw.x_test[:, 0]]) == list(range(12))
