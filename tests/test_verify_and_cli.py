"""verify, the command line and the benchmark, as far as they go without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support import CANONICAL, random_net

import cupymlp
from cupymlp import MLP, cli
from cupymlp.bench import latency, report, timing
from cupymlp.network import DTYPES, PRECISIONS, numpy_dtype, precision_takes
from cupymlp.verify import random_mlp

KINDS = [(d, p) for d in DTYPES for p in PRECISIONS if precision_takes(p, d)]

no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def run(*arguments):
    """The command line as a user starts it, with no GPU to be seen."""
    return subprocess.run(
        [sys.executable, "-m", "cupymlp", *arguments],
        capture_output=True,
        text=True,
        env=no_gpu,
        timeout=120,
        check=False,
    )


def test_verify_reports_the_cpu_path():
    result = cupymlp.verify(random_mlp(CANONICAL, bias=True, dtype="float64"), batch=100, device="cpu")
    assert result.ok
    assert result.rows_equal is None
    (comparison,) = result.comparisons
    assert comparison.name == "float64 reference"
    assert comparison.limit == 1
    assert 0 <= comparison.in_bounds <= 1
    for text in (
        "48-64-40-24 float64",
        "precision ieee",
        "100 rows, on the CPU",
        "float64 reference",
        "5 repeats: yes",
        "verified",
    ):
        assert text in str(result)


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
def test_verify_every_dtype_and_precision_on_the_cpu(dtype, precision):
    net = random_mlp(CANONICAL, bias=True, dtype=dtype, precision=precision)
    assert net.dtype == numpy_dtype(dtype)
    result = cupymlp.verify(net, batch=50, device="cpu")
    assert result.ok
    assert result.precision == precision
    assert f"24 {dtype}, relu relu identity, bias, precision {precision}, 50 rows" in str(result)


class GpuArray(np.ndarray):
    """A NumPy array that passes for CuPy's in verify."""

    def get(self):
        return np.asarray(self)


@pytest.fixture
def pretended_gpu(monkeypatch):
    """verify as on a GPU, with NumPy for CuPy, the CPU path for the kernels. ``shift`` of what it returns changes one row's."""
    module = sys.modules["cupymlp.verify"]
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
    fake = SimpleNamespace(asarray=lambda a: np.asarray(a).view(GpuArray), matmul=np.matmul, cuda=cuda)
    monkeypatch.setattr(module, "gpu_problem", lambda: None)
    monkeypatch.setattr(module, "cupy_or_error", lambda asked: fake)
    monkeypatch.setattr(module, "device_numbers", lambda device_id: SimpleNamespace(name="a pretended GPU"))
    right, alone = MLP.__call__, SimpleNamespace(shift=0)

    def call(self, x, out=None, **options):
        y = right(self, np.asarray(x), out, device="cpu")
        if x.ndim == 1 and alone.shift:
            y = y * y.dtype.type(1 + alone.shift)
        return y.view(GpuArray)

    monkeypatch.setattr(MLP, "__call__", call)
    return alone


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
def test_verify_compares_with_cupy_matmul_rounded_once_a_layer(pretended_gpu, dtype, precision):
    for schedule in (None, "row"):
        net = random_mlp(CANONICAL, bias=True, dtype=dtype, precision=precision, schedule=schedule)
        x = np.random.default_rng(0).integers(-3, 4, (50, 48)).astype(net.dtype)
        result = cupymlp.verify(net, x)
        assert [c.name for c in result.comparisons] == ["float64 reference", "cupy.matmul"]
        assert all(c.ok for c in result.comparisons), str(result)
        assert "on a pretended GPU" in str(result)


@pytest.mark.parametrize(
    ("dtype", "options", "promised"),
    [
        ("float32", {}, True),
        ("float64", {}, True),
        ("float32", {"precision": "tf32"}, True),
        ("float32", {"precision": "split3"}, True),
        ("float32", {"precision": "library"}, False),
        ("float16", {}, False),
        ("bfloat16", {}, False),
        ("float16", {"schedule": "row"}, True),
        ("float16", {"precision": "library"}, False),
    ],
)
def test_rows_alone_must_have_the_bits_of_the_batch_where_that_is_promised(pretended_gpu, dtype, options, promised):
    """The pretended GPU gives other bits for one row."""
    pretended_gpu.shift = 0.01
    result = cupymlp.verify(random_mlp((3, 4), dtype=dtype, **options))
    assert all(c.ok for c in result.comparisons)
    assert result.rows_equal is (False if promised else None)
    assert result.ok is not promised
    told = "bits differ, rows in the batch and alone; that they are equal is not promised for " + dtype
    assert (told in str(result)) is not promised
    assert ("unless schedule= pins one" in str(result)) is (not promised and not options)


def test_verify_takes_any_x_and_an_empty_one():
    net = random_mlp((3, 4, 2))
    assert cupymlp.verify(net, np.full((2, 2, 3), np.nan, "f4"), device="cpu").ok
    assert cupymlp.verify(net, np.zeros((0, 3), "f4"), device="cpu").ok
    with pytest.raises(ValueError, match="last axis is 5"):
        cupymlp.verify(net, np.zeros((2, 5), "f4"), device="cpu")


def test_verify_fails_and_says_where(monkeypatch):
    net = random_mlp((5, 4), seed=1)
    right = MLP.__call__

    def wrong(self, x, out=None, **options):
        y = right(self, x, out, **options)
        y[7, 2] += 1
        return y

    monkeypatch.setattr(MLP, "__call__", wrong)
    result = cupymlp.verify(net, device="cpu")
    assert not result.ok
    assert (result.comparisons[0].row, result.comparisons[0].column) == (7, 2)
    assert "TOO FAR" in str(result)
    assert str(result).endswith("FAILED")


def test_verify_notices_bits_that_change(monkeypatch):
    right, count = MLP.__call__, iter(range(100))

    def restless(self, x, out=None, **options):
        y = right(self, x, out, **options)
        y[0, 0] = np.nextafter(y[0, 0], np.float32(1e9 if next(count) % 2 else -1e9))
        return y

    monkeypatch.setattr(MLP, "__call__", restless)
    result = cupymlp.verify(random_mlp((5, 4)), device="cpu")
    assert not result.ok
    assert "5 repeats: NO" in str(result)


# --- The command line -------------------------------------------------------------------------------------------------


def test_verify_on_the_command_line_without_a_gpu():
    done = run("verify")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no GPU, so the CPU path is verified") == 1
    assert "48-64-40-24 float32" in done.stdout
    assert done.stdout.rstrip().endswith("verified")


@pytest.mark.parametrize(("dtype", "precision"), [("float16", "ieee"), ("bfloat16", "library"), ("float32", "split3")])
def test_dtype_precision_and_schedule_on_the_command_line(capsys, dtype, precision):
    options = ["--dtype", dtype, "--precision", precision, "--schedule", "row", "--device", "cpu"]
    assert cli.main(["verify", *options]) == 0
    assert f"{dtype}, relu relu identity, no bias, precision {precision}, 16 rows" in capsys.readouterr().out
    assert cli.main(["plan", *options]) == 0
    assert re.search(f"precision +{precision}", capsys.readouterr().out)


def test_activations_on_the_command_line(capsys):
    options = ["--activation", "leaky_relu:0.25", "--out-activation", "softmax", "--device", "cpu", "--bias"]
    assert cli.main(["verify", *options]) == 0
    assert "float32, leaky_relu:0.25 leaky_relu:0.25 softmax, bias" in capsys.readouterr().out
    assert cli.main(["plan", "--activation", "softmax"]) == 2
    assert "activation is 'softmax', which the output layer alone takes" in capsys.readouterr().err
    assert cli.main(["plan", "--activation", "elu:x"]) == 2
    assert "'elu:x' has no number after its colon, as leaky_relu:0.25 has" in capsys.readouterr().err


def test_the_schedule_of_a_saved_net_on_the_command_line(tmp_path, rng, monkeypatch):
    random_net(rng, (7, 5, 3), "float16").mlp().save(tmp_path / "net.npz")
    found = []
    monkeypatch.setattr(cli, "verify", lambda net, **options: found.append(net) or SimpleNamespace(ok=True))
    assert cli.main(["verify", str(tmp_path / "net.npz"), "--schedule", "row"]) == 0
    assert (found[0].schedule, found[0].dtype) == ("row", np.float16)


def test_verify_a_saved_net(tmp_path, rng):
    random_net(rng, (7, 5, 3)).mlp().save(tmp_path / "net.npz")
    done = run("verify", str(tmp_path / "net.npz"), "--batch", "33", "--device", "cpu")
    assert done.returncode == 0
    assert "7-5-3" in done.stdout
    assert "33 rows" in done.stdout


def test_a_failed_verification_exits_with_1(monkeypatch, capsys):
    failed = cupymlp.verify(random_mlp((2, 2)), device="cpu")
    object.__setattr__(failed, "repeats_equal", False)
    monkeypatch.setattr(cli, "verify", lambda *a, **k: failed)
    assert cli.main(["verify"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_plan_and_info():
    done = run("plan", "--sizes", "5,6,7", "--batch", "1000")
    assert done.returncode == 0
    assert "5-6-7 float32" in done.stdout
    info = json.loads(run("info").stdout)
    assert {"cupymlp", "python", "numpy", "system", "cpu", "cupy", "gpu", "cuda_src"} <= set(info)
    assert info["cupymlp"] == cupymlp.__version__
    assert info["gpu"] is None
    assert info["gpu_problem"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--sizes", "5"], "--sizes has 1 number; accepted: at least two"),
        (["verify", "--sizes", "5,x"], "'5,x' is no list of whole numbers such as 48,64,40,24"),
        (["verify", "--sizes", "5,-1"], "'5,-1' is no list of whole numbers"),
        (["verify", "nothing.npz"], "No such file"),
        (["verify", "--device", "cuda"], "needs a CUDA GPU"),
        (["verify", "--dtype", "float8"], "invalid choice: 'float8'"),
        (["verify", "--schedule", "fast"], "invalid choice: 'fast'"),
        (["plan", "--dtype", "float16", "--precision", "tf32"], "precision is 'tf32' and the network is float16"),
        (["plan", "--batch", "-1"], "batch is -1"),
        ([], "command"),
    ],
)
def test_what_the_user_got_wrong_exits_with_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# --- The benchmark ------------------------------------------------------------------------------------------------------


def test_bench_without_a_gpu_measures_the_cpu_and_writes_json(tmp_path):
    path = tmp_path / "latency.json"
    done = run("bench", "--batches", "1,16", "--rounds", "2", "--json", str(path), "--commit", "abc")
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
    content = json.loads(path.read_text())
    assert content["format"] == report.FORMAT
    assert content["commit"] == "abc"
    assert content["machine"]["gpu"] is None
    assert content["verified"][-1] == "verified"
    assert {row["batch"] for row in content["rows"]} == {1, 16}
    for row in content["rows"]:
        assert row["gpu_us"] is None
        assert row["round_trip_us"]["low"] <= row["round_trip_us"]["median"] <= row["round_trip_us"]["high"]
        assert row["round_trip_us"]["low"] > 0
    assert os.listdir(tmp_path) == ["latency.json"]


def test_the_commit_is_that_of_the_checkout_or_none(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, timeout=60)

    package = tmp_path / "cupymlp"
    package.mkdir()
    monkeypatch.setattr(cli, "__file__", str(package / "cli.py"))
    assert cli._git_commit() is None
    git("init")
    assert cli._git_commit() is None  # nothing is committed yet
    (package / "cli.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    assert re.fullmatch("[0-9a-f]{40}", cli._git_commit())
    (package / "cli.py").write_text("2")
    assert re.fullmatch("[0-9a-f]{40}-dirty", cli._git_commit())


def test_the_benchmark_does_not_measure_a_wrong_network(monkeypatch):
    monkeypatch.setattr(MLP, "__call__", lambda self, x, out=None, **options: np.zeros((len(x), 24), "f4"))
    with pytest.raises(RuntimeError, match="the network is wrong, so it is not measured"):
        latency.verified(CANONICAL, 0)


def test_the_benchmark_measures_what_it_says():
    calls = []
    subject = timing.Subject("append", lambda: calls.append(1), ("round_trip",))
    ((found, times),) = timing.measure([subject], rounds=3)
    assert found is subject
    assert set(times) == {"round_trip"}
    assert len(calls) >= 3 * timing.MOST_ROUND_TRIPS
    assert timing.Timing.of([4.0]) == timing.Timing(4.0, 4.0, 4.0)
    assert timing.Timing.of([1.0, 2.0, 3.0, 4.0, 5.0]) == timing.Timing(3.0, 2.0, 4.0)


def test_the_table_gives_ratios_to_the_floor_and_the_bare_call():
    def row(subject, gpu, host):
        def value(v):
            return None if v is None else {"median": v, "low": v, "high": v}

        return {
            "network": "n", "precision": "ieee", "batch": 16, "subject": subject, "note": "", "gpu_us": value(gpu),
            "host_us": value(host), "round_trip_us": None,
        }  # fmt: skip

    text = report.table([row(latency.EMPTY, 0.5, 4.0), row(latency.RAW, 1.0, 5.0), row("net", 1.25, 6.0)])
    line = next(line for line in text.splitlines() if line.strip().startswith("net"))
    assert line.split() == ["net", "1.25", "2.50", "6.00", "1.20", "-"]


@pytest.mark.parametrize(
    ("error", "status"), [(MemoryError(), 2), (OverflowError("too large"), 2), (KeyboardInterrupt(), 130)]
)
def test_whatever_stops_a_command_is_one_line(monkeypatch, capsys, error, status):
    def stop(*_, **__):
        raise error

    monkeypatch.setattr(cli, "random_mlp", stop)
    assert cli.main(["verify", "--sizes", "3,3"]) == status
    said = capsys.readouterr().err
    assert said.startswith("cupymlp: ")
    assert said.count("\n") == 1
