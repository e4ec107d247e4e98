"""MLP.save and MLP.load: what is saved comes back; what is not ours, or damaged, is a clear error."""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
import zipfile

import numpy as np
import pytest
from support import NETS, random_net, same_bits

from cupymlp import MLP
from cupymlp.network import DTYPES, PRECISIONS


def equal(a, b):
    return (
        a.network == b.network
        and a.weight_layout == b.weight_layout
        and all(same_bits(p, q) for p, q in zip(a.weights, b.weights, strict=True))
        and all((p is None and q is None) or same_bits(p, q) for p, q in zip(a.biases, b.biases, strict=True))
    )


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_round_trip(tmp_path, rng, sizes, dtype, layout):
    net = random_net(rng, sizes, dtype).mlp(weight_layout=layout)
    net.save(tmp_path / "net.npz")
    assert equal(MLP.load(tmp_path / "net.npz"), net)
    assert os.listdir(tmp_path) == ["net.npz"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_precision_is_kept(tmp_path, rng, precision):
    random_net(rng, (3, 4), precision=precision).mlp().save(tmp_path / "net.npz")
    assert MLP.load(tmp_path / "net.npz").network.precision == precision


def test_bfloat16_is_saved_as_its_bits(tmp_path, rng):
    """.npy has no bfloat16: anyone can read what is there, and unpack it with a shift."""
    net = random_net(rng, (3, 4), "bfloat16", biases=[True])
    net.mlp().save(tmp_path / "net.npz")
    with np.load(tmp_path / "net.npz", allow_pickle=False) as file:
        assert json.loads(str(file["header"]))["dtype"] == "bfloat16"
        for name, array in (("weight_0", net.weights[0]), ("bias_0", net.biases[0])):
            assert file[name].dtype == np.uint16
            assert same_bits((file[name].astype("u4") << 16).view("f4"), array.astype("f4"))


def test_the_file_is_plain_arrays_that_numpy_reads(tmp_path, rng):
    net = random_net(rng, (3, 4, 2), biases=[True, False], activations=["relu", "identity"])
    path = str(tmp_path / "any name")
    net.mlp().save(path)
    with np.load(path, allow_pickle=False) as file:
        assert sorted(file.files) == ["bias_0", "header", "weight_0", "weight_1"]
        assert same_bits(file["weight_1"], net.weights[1])
        header = json.loads(str(file["header"]))
    assert header == {
        "cupymlp": 2, "sizes": [3, 4, 2], "activations": ["relu", "identity"], "biases": [True, False],
        "dtype": "float32", "precision": "ieee", "weight_layout": "in_out",
    }  # fmt: skip
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failing_save_leaves_the_old_file_and_nothing_else(tmp_path, rng, monkeypatch):
    path = tmp_path / "net.npz"
    old = random_net(rng, (3, 4)).mlp()
    old.save(path)

    def full(*args, **options):
        args[0].write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        random_net(rng, (5, 6)).mlp().save(path)
    assert os.listdir(tmp_path) == ["net.npz"]
    assert equal(MLP.load(path), old)


@pytest.mark.parametrize("spec", [("leaky_relu", 0.1), ("sin", 30), ("elu", 5e-324), "log_softmax"], ids=str)
def test_parameters_come_back_to_the_bit(tmp_path, spec):
    net = MLP([np.eye(3)] * 2, activation=["relu"], out_activation=spec, dtype="float64")
    net.save(tmp_path / "net.npz")
    assert MLP.load(tmp_path / "net.npz").network == net.network
    assert net.network.activations == ("relu", spec)


def test_files_of_the_first_format_are_read(saved):
    write, _, good = saved
    assert equal(MLP.load(write(header=header(cupymlp=1))), MLP.load(good))


@pytest.fixture
def saved(tmp_path, rng):
    """A saved file's members, and a way to write them back changed."""
    net = random_net(rng, (3, 4, 2), biases=[True, False], activations=["relu", "identity"]).mlp()
    net.save(tmp_path / "good.npz")
    with zipfile.ZipFile(tmp_path / "good.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def write(**changes):
        path = tmp_path / "bad.npz"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in {**members, **{k + ".npy": v for k, v in changes.items()}}.items():
                if data is not None:
                    archive.writestr(name, data)
        return path

    return write, members, tmp_path / "good.npz"


def npy(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def header(**changes):
    fields = {
        "cupymlp": 2, "sizes": [3, 4, 2], "activations": ["relu", "identity"], "biases": [True, False],
        "dtype": "float32", "precision": "ieee", "weight_layout": "in_out",
    }  # fmt: skip
    return npy(np.array(json.dumps({**fields, **changes})))


def absurd_array():
    """A header that claims 4 EiB, and 48 bytes."""
    buffer = io.BytesIO()
    fields = {"descr": "<f4", "fortran_order": False, "shape": (2**30, 2**30)}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue() + bytes(48)


class Evil:
    def __reduce__(self):
        return os.abort, ()


BAD = {
    "no header": ({"header": None}, "it has no header.npy"),
    "a later format": ({"header": header(cupymlp=3)}, "format version is 3; this cupymlp reads versions 1 to 2"),
    "a format that is no number": ({"header": header(cupymlp=[1])}, r"format version is \[1\]; this cupymlp reads"),
    "no format": ({"header": header(cupymlp=None)}, "format version is None"),
    "a header that is no JSON": ({"header": npy(np.array("{"))}, "header.npy cannot be read"),
    "a header that is no object": ({"header": npy(np.array("[1]"))}, "format version is None"),
    "a header that is no text": ({"header": npy(np.zeros(3))}, "header.npy cannot be read"),
    "a pickle for a header": (
        {"header": npy(np.array([Evil()], object), allow_pickle=True)},
        "header.npy cannot be read",
    ),
    "a bare pickle": ({"header": pickle.dumps(Evil())}, "header.npy cannot be read"),
    "an enormous header": ({"header": bytes(2 << 20)}, "header.npy has 2,097,152 bytes"),
    "a weight missing": ({"weight_1": None}, r"missing arrays: \['weight_1.npy'\]"),
    "a bias missing": ({"bias_0": None}, r"missing arrays: \['bias_0.npy'\]"),
    "an array too many": ({"bias_1": npy(np.zeros(2, "f4"))}, r"do not belong: \['bias_1.npy'\]"),
    "a foreign array": ({"../../evil": npy(np.zeros(2))}, r"do not belong: \['../../evil.npy'\]"),
    "another shape": (
        {"weight_0": npy(np.zeros((4, 3), "f4"))},
        r"weight_0.npy is float32 \(4, 3\); the header says float32",
    ),
    "another dtype": (
        {"weight_0": npy(np.zeros((3, 4)))},
        r"weight_0.npy is float64 \(3, 4\); the header says float32",
    ),
    "another byte order": ({"weight_0": npy(np.zeros((3, 4), ">f4"))}, "the header says float32"),
    "a pickle for a weight": (
        {"weight_0": npy(np.array([[Evil()] * 4] * 3, object), allow_pickle=True)},
        "weight_0.npy is object",
    ),
    "data cut short": ({"weight_0": npy(np.zeros((3, 4), "f4"))[:-5]}, "has 43 bytes of data; its shape needs 48"),
    "data too long": ({"weight_0": npy(np.zeros((3, 4), "f4")) + b"x"}, "has 49 bytes of data; its shape needs 48"),
    "no array at all": ({"weight_0": b"\x93NUMPY"}, "weight_0.npy cannot be read"),
    "an absurd shape": (
        {"header": header(sizes=[2**30, 2**30, 2]), "weight_0": npy(np.zeros((3, 4), "f4"))},
        r"the header says float32 \(1073741824, 1073741824\)",
    ),
    "an absurd shape in both": (
        {"header": header(sizes=[2**30, 2**30, 2]), "weight_0": absurd_array()},
        "weight_0.npy has 48 bytes of data; its shape needs 4,611,686,018,427,387,904",
    ),
    "sizes that are none": ({"header": header(sizes=[3, -4, 2])}, r"sizes is \[3, -4, 2\]"),
    "sizes of another kind": ({"header": header(sizes=[3, 4.0, 2])}, "sizes is"),
    "sizes with a truth value": ({"header": header(sizes=[3, True, 2])}, "sizes is"),
    "too few sizes": ({"header": header(sizes=[3])}, "sizes is"),
    "too few activations": ({"header": header(activations=["relu"])}, "activations is"),
    "an unknown activation": (
        {"header": header(activations=["relu", "mish"])},
        r"activations\[1\] is 'mish'; accepted",
    ),
    "a parameter that is none": (
        {"header": header(activations=[["elu", "1"], "relu"])},
        r"the alpha of activations\[0\] is '1' \(a str\); accepted: a finite number, at least 0",
    ),
    "a parameter that is not finite": (
        {"header": header(activations=[["sin", float("inf")], "relu"])},
        r"the omega of activations\[0\] is inf",
    ),
    "a parameter that float32 cannot hold": (
        {"header": header(activations=[["celu", 1e-60], "relu"])},
        r"the alpha of activations\[0\] is 1e-60 \(arithmetic is float32\); accepted: a finite number, at least 1.17549e-38",
    ),
    "a parameter for what has none": (
        {"header": header(activations=[["relu", 1.0], "relu"])},
        "relu has no parameter",
    ),
    "two parameters": ({"header": header(activations=[["elu", 1.0, 2.0], "relu"])}, r"activations\[0\] is \["),
    "softmax in a hidden layer": ({"header": header(activations=["softmax", "relu"])}, "the output layer alone takes"),
    "activations that are no list": ({"header": header(activations="relu")}, "activations is 'relu'"),
    "an unhashable activation": ({"header": header(activations=["relu", []])}, "activations is"),
    "biases of another kind": ({"header": header(biases=[1, 0])}, "biases is"),
    "an unknown dtype": ({"header": header(dtype="float8")}, "dtype is 'float8'"),
    "a dtype that it does not have": (
        {"header": header(dtype="float16")},
        r"is float32 \(3, 4\); the header says float16",
    ),
    "a bfloat16 net with other arrays": ({"header": header(dtype="bfloat16")}, r"the header says bfloat16 \(uint16\)"),
    "a precision that the dtype cannot have": (
        {"header": header(dtype="float64", precision="tf32")},
        "precision is 'tf32'",
    ),
    "an unknown precision": ({"header": header(precision=None)}, "precision is None"),
    "an unknown layout": ({"header": header(weight_layout="torch")}, "weight_layout is 'torch'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_tampered_file_is_a_clear_error(saved, case):
    write, _, _ = saved
    changes, message = BAD[case]
    path = write(**changes)
    with pytest.raises(ValueError, match="is not a file that MLP.save wrote, or it is damaged: .*" + message) as caught:
        MLP.load(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_short_anywhere_is_a_clear_error(saved, tmp_path):
    _, _, good = saved
    content = good.read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "cut.npz").write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            MLP.load(tmp_path / "cut.npz")


def test_a_flipped_byte_never_goes_unnoticed(saved, tmp_path):
    """Wherever it is: either the same network comes back (a byte that says nothing, as a date), or an error."""
    _, _, good = saved
    want, content = MLP.load(good), good.read_bytes()
    for at in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[at] ^= 0xFF
        (tmp_path / "flip.npz").write_bytes(flipped)
        try:
            found = MLP.load(tmp_path / "flip.npz")
        except ValueError:
            continue
        assert equal(found, want), at


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    for name in ("text", "array.npy", "other.npz"):
        with pytest.raises(ValueError, match=r"is not a file that MLP\.save wrote"):
            MLP.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        MLP.load(tmp_path / "nothing")


def test_a_fortran_ordered_array_is_read_right(saved):
    write, members, good = saved
    weight = np.load(io.BytesIO(members["weight_0.npy"]))
    assert equal(MLP.load(write(weight_0=npy(np.asfortranarray(weight)))), MLP.load(good))
