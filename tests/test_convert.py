"""Networks in files of any kind: convert, info, and the other commands on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import random_net, same_bits

from cupymlp import MLP, cli
from cupymlp._convert import KINDS, read_network, write_network

PACKAGES = {".npz": "numpy", ".onnx": "onnx", ".safetensors": "safetensors", ".keras": "h5py", ".h5": "h5py"}
WRITTEN = tuple(kind.suffix for kind in KINDS.values() if kind.write is not None)


@pytest.fixture
def mlp(rng):
    activations = [("leaky_relu", 0.25), "tanh", "identity"]
    return random_net(rng, (5, 7, 6, 3), biases=[True, False, True], activations=activations).mlp()


@pytest.fixture
def npz(mlp, tmp_path):
    mlp.save(tmp_path / "net.npz")
    return tmp_path / "net.npz"


@pytest.fixture
def bare(mlp, tmp_path):
    """A file of arrays alone, as torch users write it."""
    numpy = pytest.importorskip("safetensors.numpy")
    state = {f"{2 * i}.weight": np.ascontiguousarray(w.T) for i, w in enumerate(mlp.weights)}
    state |= {f"{2 * i}.bias": b for i, b in enumerate(mlp.biases) if b is not None}
    numpy.save_file(state, tmp_path / "bare.safetensors")
    return tmp_path / "bare.safetensors"


def equal(a, b):
    return a.network == b.network and all(
        same_bits(v, w) if v is not None else w is None
        for v, w in zip((*a.weights, *a.biases), (*b.weights, *b.biases))
    )


def main(capsys, *arguments):
    status = cli.main([str(a) for a in arguments])
    return status, *capsys.readouterr()


def test_every_kind_is_tested():
    assert set(KINDS) <= set(PACKAGES)


@pytest.mark.parametrize("suffix", WRITTEN)
def test_there_and_back_to_the_bit(mlp, npz, tmp_path, capsys, suffix):
    pytest.importorskip(PACKAGES[suffix])
    other, back = tmp_path / f"other{suffix}", tmp_path / "BACK.NPZ"
    status, said, _ = main(capsys, "convert", npz, other)
    assert status == 0
    assert said == f"{other}: 5-7-6-3 float32, leaky_relu:0.25 tanh identity, bias in layer 1, 3\n"
    assert main(capsys, "convert", other, back)[0] == 0
    assert equal(MLP.load(back), mlp)
    assert equal(read_network(other), mlp)


def test_as_a_user_starts_it(npz, tmp_path):
    pytest.importorskip("onnx")
    for arguments in (["convert", npz, "net.onnx"], ["info", "net.onnx"]):
        done = subprocess.run(
            [sys.executable, "-m", "cupymlp", *arguments],
            capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("network    5-7-6-3 float32, leaky_relu:0.25 tanh identity")


def test_info_of_a_file(npz, mlp, capsys):
    status, said, _ = main(capsys, "info", npz)
    assert status == 0
    lines = said.splitlines()
    assert lines[0] == "network    5-7-6-3 float32, leaky_relu:0.25 tanh identity, bias in layer 1, 3"
    assert lines[1:3] == ["precision  ieee", "numbers    105 weights and biases, 420 bytes"]
    least, most = mlp.weights[1].min(), mlp.weights[1].max()
    assert lines[4] == f"layer 2    7 -> 6, tanh, weights {least:.3g} .. {most:.3g}, no bias"
    assert len(lines) == 6


def test_info_of_an_empty_layer(tmp_path, capsys):
    MLP([np.zeros((3, 0)), np.zeros((0, 2))]).save(tmp_path / "net.npz")
    assert "3 -> 0, relu, no weights, no bias" in main(capsys, "info", tmp_path / "net.npz")[1]


def test_activations_that_a_file_does_not_name(bare, mlp, tmp_path, capsys):
    out = tmp_path / "out.npz"
    status, _, error = main(capsys, "convert", bare, out)
    assert status == 2
    assert "pass activation=" in error
    assert not out.exists()
    given = ["--activation", "leaky_relu:0.25,tanh", "--out-activation", "identity"]
    assert main(capsys, "convert", bare, out, *given)[0] == 0
    assert equal(MLP.load(out), mlp)
    assert main(capsys, "info", bare, "--activation", "silu")[1].count("silu") == 2 + 2
    assert "has no number after its colon" in main(capsys, "info", bare, "--activation", "relu:x")[2]
    assert "accepted: one of" in main(capsys, "info", bare, "--activation", "relux")[2]


def test_dtype_and_precision(npz, mlp, tmp_path, capsys):
    out = tmp_path / "out.npz"
    assert main(capsys, "convert", npz, out, "--precision", "split3")[0] == 0
    assert MLP.load(out).network.precision == "split3"
    assert main(capsys, "convert", npz, out, "--dtype", "float64", "--force")[0] == 0
    wide = MLP.load(out)
    assert wide.dtype == np.float64
    assert all(np.array_equal(a, b) for a, b in zip(wide.weights, mlp.weights))
    assert main(capsys, "info", out, "--dtype", "float16")[1].startswith("network    5-7-6-3 float16")


@pytest.mark.parametrize("suffix", WRITTEN)
def test_the_other_commands_take_any_kind(npz, mlp, tmp_path, capsys, suffix):
    pytest.importorskip(PACKAGES[suffix])
    file = tmp_path / f"other{suffix}"
    write_network(mlp, file, overwrite=True)
    status, said, error = main(capsys, "verify", file, "--device", "cpu", "--batch", 9)
    assert status == 0, error
    assert "5-7-6-3 float32" in said
    status, said, _ = main(capsys, "plan", file, "--device", "cpu", "--precision", "tf32")
    assert status == 0
    assert "tf32" in said
    x = np.random.default_rng(0).standard_normal((50, 5)).astype("f4")
    np.save(tmp_path / "x.npy", x)
    assert main(capsys, "run", file, tmp_path / "x.npy", "-o", tmp_path / "y.npy", "--device", "cpu", "--quiet")[0] == 0
    assert np.array_equal(np.load(tmp_path / "y.npy"), mlp(x, device="cpu"))


@pytest.mark.parametrize("name", ["keras_scaled.keras", "keras_functional.h5"])
def test_models_of_keras(name, tmp_path, capsys):
    pytest.importorskip("h5py")
    file, out = Path(__file__).parent / "data" / name, tmp_path / "out.npz"
    assert main(capsys, "convert", file, out, "--dtype", "float64")[0] == 0
    assert equal(MLP.load(out), MLP.from_keras(file, dtype="float64"))


def test_a_schedule_is_kept(npz):
    assert read_network(npz, schedule="row").schedule == "row"


def test_what_the_user_got_wrong(npz, tmp_path, capsys):
    for file in ("net", "net.pt", "net.npz.gz"):
        status, _, error = main(capsys, "info", tmp_path / file)
        assert status == 2
        assert "has no suffix that says its kind; accepted: .npz (MLP.save), .onnx (ONNX), .safetensors" in error
    assert "says itself what is between its layers" in main(capsys, "info", npz, "--activation", "relu")[2]
    assert "out_activation is given" in main(capsys, "info", npz, "--out-activation", "relu")[2]
    assert "No such file" in main(capsys, "convert", tmp_path / "none.npz", tmp_path / "out.npz")[2]
    before = npz.read_bytes()
    status, _, error = main(capsys, "convert", npz, npz)
    assert status == 2
    assert "exists; pass --force" in error
    assert npz.read_bytes() == before
    assert main(capsys, "convert", npz, npz, "--force")[0] == 0


@pytest.mark.parametrize("suffix", [s for s in KINDS if s not in WRITTEN])
def test_kinds_that_are_only_read(npz, tmp_path, capsys, suffix):
    status, _, error = main(capsys, "convert", npz, tmp_path / f"out{suffix}")
    assert status == 2
    assert "are read, not written; accepted: .npz (MLP.save), .onnx" in error


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_precision_is_replaced_together_with_the_dtype(tmp_path, suffix):
    """tf32 is of float32 alone, so that the one cannot be changed before the other."""
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    source, target = tmp_path / f"a{suffix}", tmp_path / "b.npz"
    cli_net = MLP([np.eye(3, dtype="f4")], precision="tf32")
    cli_net.save(source) if suffix == ".npz" else cli_net.to_safetensors(source)
    assert cli.main(["convert", str(source), str(target), "--dtype", "float64", "--precision", "ieee"]) == 0
    assert (MLP.load(target).network.dtype, MLP.load(target).network.precision) == ("float64", "ieee")
