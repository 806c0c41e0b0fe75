from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foedus.data import load
from foedus.data.formats.images import parse_cifar, parse_idx
from foedus.data.formats.read import read
from foedus.errors import DataError

# LIBSVM

TEXT = b"1 1:0.5 3:2\n-1 2:1e-1\n1\n1 3:-4\n"
DENSE = [[0.5, 0, 2], [0, 0.1, 0], [0, 0, 0], [0, 0, -4]]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.svm", bytes),
        ("a.bz2", bz2.compress),
        ("a.xz", lzma.compress),
        ("a.gz", gzip.compress),
        ("a", bytes),
    ],
)
def test_libsvm(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(TEXT))
    raw = read(tmp_path / name)
    assert np.allclose(raw.x_train, DENSE)
    assert raw.y_train.tolist() == [1, -1, 1, 1]


def test_libsvm_comments_and_blank_lines(tmp_path):
    path = tmp_path / "a.svm"
    path.write_bytes(b"# made by hand\n1 qid:3 1:0.5 3:2 # first\n\n-1 2:1e-1\r\n1\n1 3:-4")
    assert np.allclose(read(path).x_train, DENSE)


def test_libsvm_both_parsers_agree(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 30)) * (rng.random((50, 30)) < 0.3)
    x[:, -1] = 1
    lines = [
        f"{i % 3} " + " ".join(f"{j + 1}:{v:.17g}" for j, v in enumerate(row) if v)
        for i, row in enumerate(x)
    ]
    (tmp_path / "fast.svm").write_text("\n".join(lines))
    (tmp_path / "slow.svm").write_text("#\n" + "\n".join(lines))
    fast, slow = read(tmp_path / "fast.svm"), read(tmp_path / "slow.svm")
    assert np.array_equal(fast.x_train, slow.x_train)
    assert np.array_equal(fast.x_train, x.astype(np.float32))
    assert np.array_equal(fast.y_train, slow.y_train)
    assert fast.y_train.dtype == np.int64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"1 1:2\n1 2:x\n", ["line 2", "'2:x'"]),
        (b"1 1:2\n\none 2:3\n", ["line 3", "'one'"]),
        (b"1 1:2:3\n", ["line 1", "'1:2:3'"]),
        (b"1 3:2 2:1\n", ["line 1", "index 2 after 3"]),
        (b"1 0:2\n", ["line 1", "index 0", "begin at 1"]),
        (b"1 1.5:2\n", ["line 1", "'1.5:2'"]),
        (b"1 7\n", ["line 1", "'7'"]),
        (b"\n \n", ["no rows"]),
        (b"\x00\x01\x02", ["binary"]),
        (b"1 2000000000:1\n", ["2000000000 features", "too many"]),
    ],
)
def test_libsvm_errors_name_the_line(tmp_path, text, words):
    path = tmp_path / "bad.svm"
    path.write_bytes(text)
    with pytest.raises(DataError) as error:
        read(path)
    assert str(path) in str(error.value) and all(word in str(error.value) for word in words), (
        error.value
    )


@settings(max_examples=200, deadline=None)
@given(st.text("01 :.-+e#\nnaqid", max_size=40))
def test_libsvm_garbage_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "garbage.svm"
    path.write_text(text)
    try:
        raw = read(path)
    except DataError:
        return
    assert len(raw.x_train) == len(raw.y_train)


def test_truncated_archives(tmp_path):
    for name, pack in (("a.bz2", bz2.compress), ("a.xz", lzma.compress), ("a.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(pack(TEXT * 200)[:-20])
        with pytest.raises(DataError, match="not a readable libsvm file"):
            read(path)
    bomb = tmp_path / "bomb.bz2"
    bomb.write_bytes(bz2.compress(b" " * 50_000_000))
    with pytest.raises(DataError, match="times its size"):
        read(bomb)


# IDX


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, part: str, n: int, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    x, y = rng.integers(0, 256, (n, 4, 5), dtype=np.uint8), (np.arange(n) % 3).astype(np.uint8)
    for kind, array in ((f"{part}-images-idx3-ubyte", x), (f"{part}-labels-idx1-ubyte", y)):
        (folder / (kind + ".gz" * packed)).write_bytes(
            gzip.compress(idx(array)) if packed else idx(array)
        )
    return x, y


@pytest.mark.parametrize("packed", [False, True])
def test_idx_folder_and_file(tmp_path, packed):
    x, y = write_idx(tmp_path, "train", 12, packed)
    for path in (tmp_path, tmp_path / ("train-images-idx3-ubyte" + ".gz" * packed)):
        raw = read(path)
        assert np.array_equal(raw.x_train, x.reshape(12, 20))
        assert np.array_equal(raw.y_train, y)
        assert raw.x_test is None
    x_test, _ = write_idx(tmp_path, "t10k", 5, packed)
    assert np.array_equal(read(tmp_path).x_test, x_test.reshape(5, 20))
    assert len(load(tmp_path).x_test) == 5


def test_idx_types():
    for code, dtype in ((0x09, ">i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")):
        content = struct.pack(">BBBBI", 0, 0, code, 1, 2) + np.array([1, -2], dtype).tobytes()
        assert parse_idx(content, "x").tolist() == [1, -2]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_idx_garbage_is_read_or_refused(content):
    with contextlib.suppress(DataError):
        parse_idx(content, "x")


def test_idx_errors(tmp_path):
    good = idx(np.zeros((2, 3), np.uint8))
    for content, word in (
        (good[:-1], "offset 17: shape"),
        (good + b"!", "needs 18 bytes"),
        (good[:7], "within the header"),
        (b"\1\2\3\4", "magic number"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**31, 2**31, 2**31), "the file has 16"),
    ):
        with pytest.raises(DataError, match=word):
            parse_idx(content, "some file")
    write_idx(tmp_path, "train", 4, False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, np.uint8)))
    with pytest.raises(DataError, match="one label an image"):
        read(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no labels file"):
        read(tmp_path)


# CIFAR


def records(n: int, head: int, classes: int = 10) -> bytes:
    rng = np.random.default_rng(n)
    out = rng.integers(0, 256, (n, head + 3072), dtype=np.uint8)
    out[:, 0] = np.arange(n) % (20 if head == 2 else classes)
    if head == 2:
        out[:, 1] = np.arange(n) % 100
    return out.tobytes()


def test_cifar_file_folder_and_archive(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    names = "\n".join(f"class{i}" for i in range(10)) + "\n\n"
    contents = {
        "data_batch_1.bin": records(4, 1),
        "data_batch_2.bin": records(6, 1),
        "test_batch.bin": records(3, 1),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "batches.meta.txt").write_text(names)
    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-bin")
    for path in (folder, tmp_path / "cifar.tar.gz"):
        raw = read(path)
        assert raw.x_train.shape == (10, 3, 32, 32)
        assert raw.x_test.shape == (3, 3, 32, 32)
        assert raw.y_train.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
        assert raw.class_names[3] == "class3"
        first = np.frombuffer(contents["data_batch_1.bin"], np.uint8)[1:3073]
        assert np.array_equal(raw.x_train[0].reshape(-1), first)
    assert load(tmp_path / "cifar.tar.gz").scaling == "unit"
    one = read(folder / "test_batch.bin")
    assert len(one.x_train) == 3
    assert one.x_test is None


def test_cifar100_fine_and_coarse(tmp_path):
    (tmp_path / "train.bin").write_bytes(records(120, 2))
    (tmp_path / "test.bin").write_bytes(records(20, 2))
    assert read(tmp_path).y_train.tolist() == [i % 100 for i in range(120)]
    assert read(tmp_path, label="coarse").y_test.tolist() == list(range(20))
    with pytest.raises(DataError, match="label 'corse' is unknown"):
        read(tmp_path, label="corse")


def test_cifar_errors(tmp_path):
    with pytest.raises(DataError, match="offset 6146: the file ends within a record"):
        parse_cifar(records(3, 1)[:-1], "x", False)
    with pytest.raises(DataError, match="offset 3073: label 255 in record 1"):
        parse_cifar(bytes(3073) + b"\xff" + bytes(3072), "x", False)
    (tmp_path / "a.tar.gz").write_bytes(b"this is not an archive")
    with pytest.raises(DataError, match="not a readable cifar file"):
        read(tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("readme.md"))
    with pytest.raises(DataError, match="no training records"):
        read(tmp_path / "b.tar.gz")


# npz


def test_npz(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(
        path,
        x_train=np.eye(4),
        y_train=np.array(["b", "a", "b", "a"]),
        x_test=np.eye(4)[:1],
        y_test=np.array(["a"]),
        client_train=[1, 1, 0, 0],
        client_test=[0],
        client_names=["x", "y"],
    )
    data = load(path)
    assert data.name == "own"
    assert data.class_names == ("a", "b")
    assert data.y_train.tolist() == [1, 0, 1, 0]
    assert data.groups_train.tolist() == [1, 1, 0, 0]
    assert data.group_names == ("x", "y")
    np.savez_compressed(path, x=np.eye(8), y=np.arange(8) % 2)
    assert len(load(path).x_test) == 2
    assert len(load(path, test=0).x_test) == 0


def test_npz_errors(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez(path, x_train=np.eye(2))
    with pytest.raises(DataError, match="no array 'y_train'"):
        read(path)
    np.savez(path, x_train=np.array([[1, None]], dtype=object), y_train=[0])
    with pytest.raises(DataError, match="Python objects"):
        read(path)
    np.savez(path, x_train=np.eye(2), y_train=[0, 1], x_test=np.eye(2))
    with pytest.raises(DataError, match="both or neither"):
        read(path)
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match="not a readable npz"):
        read(path)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f8", "fortran_order": False, "shape": (10**9, 10**6)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", head.getvalue())
        archive.writestr("y_train.npy", head.getvalue())
    with pytest.raises(DataError, match="claims shape"):
        read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", b"garbage")
    with pytest.raises(DataError, match="not an array"):
        read(path)


# CSV


def test_csv(tmp_path):
    path = tmp_path / "sites.csv"
    path.write_text(
        "age,site,dose,ill\n30,north,0.5,yes\n40,south,1.5,no\n50,north,2.5,no\n60,south,3.5,yes\n"
    )
    data = load(path, label="ill", group="site", test=0, scale=None)
    assert data.class_names == ("no", "yes")
    assert data.y_train.tolist() == [1, 0, 0, 1]
    assert data.group_names == ("north", "south")
    assert data.groups_train.tolist() == [0, 1, 0, 1]
    assert data.x_train.tolist() == [[30, 0.5], [40, 1.5], [50, 2.5], [60, 3.5]]
    assert load(path, label=-1, group="site", test=0).classes == 2
    path.write_text("a,b,y\n1,2,0.5\n2,3,1.5\n3,4,2.5\n4,4,9\n")
    assert load(path).classes is None


def test_csv_integers_as_classes_or_targets(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,y\n" + "".join(f"{i},{1 + i % 3}\n" for i in range(12)))
    assert load(path).class_names == ("1", "2", "3")
    assert load(path, task="regression").classes is None


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a,b\n1,2\n", {}, ["pass label=", "a, b"]),
        ("a,b\n1,2\n", {"label": "c"}, ["label 'c' is unknown", "a, b"]),
        ("a,b\n1,2\n", {"label": 2}, ["label=2", "2 columns"]),
        ("a,y\n1,1\n2,0\n?,1\n", {}, ["line 4", "column 'a'", "'?'", "leave it empty"]),
        ("a,b,y\n1,2,0\n", {"drop": ["c"]}, ["drop: column 'c' is unknown", "a, b, y"]),
        ("a,y\n1,1\n,0\n3,1\n4,0\n", {"test": 0}, ["1 missing", "column 'a'", "impute='median'"]),
        ("a,y\n1,1\n2,\n3,1\n", {}, ["line 3", "'y'", "missing in 1 rows"]),
        ("a,y\n", {}, ["no rows"]),
        ("y\n1\n2\n", {}, ["no feature columns"]),
        ("", {}, ["not a CSV"]),
        ("a,y\n1,2\n1,2,3,4\n", {}, ["not a CSV", "line 3"]),
        ("a,y\n1,2\n", {"group": "site"}, ["group 'site' is unknown"]),
        ("a,b,a,y\n1,2,3,0\n4,5,6,1\n", {}, ["two columns have the name 'a'", "rename"]),
        ('\n"y", y\n1,2\n3,4\n', {"label": 0}, ["two columns have the name 'y'"]),
    ],
)
def test_csv_errors(tmp_path, text, options, words):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        load(path, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_csv_columns_that_are_not_the_same(tmp_path):
    """Names that pandas would give to a second "a", and columns without a name."""
    path = tmp_path / "a.csv"
    path.write_text("a,a.1,A,,,y\n" + "".join(f"{i},1,2,3,4,{i % 2}\n" for i in range(8)))
    assert load(path, scale=None, test=0).x_train[1].tolist() == [1, 1, 2, 3, 4]


def test_csv_imputes_from_training_rows(tmp_path):
    path, other = tmp_path / "a.csv", tmp_path / "b.csv"
    path.write_text("a,b,y\n1,5,0\n,5,1\n3,5,0\n8,5,1\n")
    other.write_text("a,b,y\n,5,0\n100,5,1\n")
    for impute, value in (("median", 3), ("mean", 4), ("zero", 0)):
        data = load(path, test=other, impute=impute, scale=None)
        assert data.x_train[1, 0] == value
        assert data.x_test[0, 0] == value


# LEAF


def leaf(users: dict) -> str:
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(u["y"]) for u in users.values()],
            "user_data": users,
        }
    )


def test_leaf_folder(tmp_path):
    for part, users in (
        (
            "train",
            {
                "ann": {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]},
                "bob": {"x": [[5.0, 6.0]], "y": [2]},
            },
        ),
        ("test", {"bob": {"x": [[7.0, 8.0]], "y": [1]}}),
    ):
        (tmp_path / part).mkdir()
        (tmp_path / part / "all_data.json").write_text(leaf(users))
    data = load(tmp_path, scale=None)
    assert data.x_train.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.y_train.tolist() == [0, 1, 2]
    assert data.group_names == ("ann", "bob")
    assert data.groups_train.tolist() == [0, 0, 1]
    assert data.groups_test.tolist() == [1]


def test_leaf_text(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(
        leaf({"ann": {"x": ["abc", "bca"], "y": ["a", "d"]}, "bob": {"x": ["ddd"], "y": ["b"]}})
    )
    data = load(path, test=0)
    assert data.class_names == ("a", "b", "c", "d")
    assert data.scaling is None
    assert data.x_train.tolist() == [[0, 1, 2], [1, 2, 0], [3, 3, 3]]
    assert data.y_train.tolist() == [0, 3, 1]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("[1]", "not LEAF JSON"),
        ('{"users": ["a"], "user_data": {}}', "user 'a'"),
        (
            '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1]], "y": [0]}}}',
            "num_samples",
        ),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [1, 2]], "y": [0, 1]}}}', "equal length"),
        ('{"users": [], "user_data": {}}', "no rows"),
        (
            '{"users": ["a"], "user_data": {"a": {"x": ["ab", "a"], "y": ["a", "b"]}}}',
            "equal lengths",
        ),
        (
            '{"users": ["a"], "user_data": {"a": {"x": ["ab", 3], "y": ["a", "b"]}}}',
            "some rows are text",
        ),
    ],
)
def test_leaf_errors(tmp_path, text, word):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(DataError, match=word):
        read(path)


def test_unknown_formats_and_paths(tmp_path):
    with pytest.raises(DataError, match="no file or folder"):
        load(tmp_path / "none.csv")
    with pytest.raises(DataError, match="folder of no known format"):
        load(tmp_path)
    (tmp_path / "a").write_text("1 1:2\n2 1:3\n")
    with pytest.raises(DataError, match="format 'libsmv' is unknown; did you mean 'libsvm'"):
        load(tmp_path / "a", format="libsmv")
    with pytest.raises(DataError, match="group='site'"):
        load(tmp_path / "a", group="site")
    with pytest.raises(DataError, match="label='y'"):
        load(tmp_path / "a", label="y")


def test_parquet_is_a_table_like_others(tmp_path, monkeypatch):
    """By what pandas reads, whether or not pyarrow is here."""
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "c": list("uvuv"), "y": [0, 1, 0, 1]}, index=[3] * 4)
    monkeypatch.setattr(pd, "read_parquet", lambda given: frame)
    data = load(path, test=0, scale=None)
    assert data.x_train.tolist() == [[1, 1, 0], [2, 0, 1], [3, 1, 0], [4, 0, 1]]

    def failing(error):
        def read(given):
            raise error

        return read

    monkeypatch.setattr(pd, "read_parquet", failing(ImportError("no engine")))
    with pytest.raises(DataError, match="Parquet files need pyarrow: pip install pyarrow"):
        load(path)
    monkeypatch.setattr(pd, "read_parquet", failing(ValueError("no magic bytes")))
    with pytest.raises(DataError, match=r"rows\.parquet: not a Parquet file \(no magic bytes"):
        load(path)
