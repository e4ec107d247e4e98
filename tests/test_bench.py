"""The sweep of ``python -m cupymlp bench``, as far as it goes without a GPU: cases, samplers, rows, table, JSON, plot."""

from __future__ import annotations

import argparse
import json
import sys
import types

import numpy as np
import pytest

from cupymlp import MLP, cli
from cupymlp._gpu import gpu_problem
from cupymlp.activations import ACTIVATIONS
from cupymlp.bench import (
    cases,
    command,
    floors,
    interleave,
    machines,
    peers,
    plot,
    report,
    samplers,
    sweep,
    sweep_report,
)
from cupymlp.bench.cases import Case, Group, Settings
from cupymlp.bench.interleave import Measurement
from cupymlp.bench.map_rate import map_table
from cupymlp.bench.peers import Entry
from cupymlp.bench.progress import Progress
from cupymlp.bench.timing import Timing, rounded
from cupymlp.plan import PlanError

CANONICAL = Group((48, 64, 40, 24), "float32", "ieee")


def options(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def settings(*arguments):
    return command.settings_of(options("--device", "cuda", *arguments))


def timing(us):
    return None if us is None else Timing(us, us * 0.9, us * 1.1)


def rows_of(batch, times, group=CANONICAL, sets=1):
    """Rows as a sweep makes them, of subjects named ``net``, ``net:schedule`` (forced), ``peer:name`` or as a floor is."""
    measured = []
    for name, us in times.items():
        kind, _, rest = name.partition(":")
        method = None if us is None else "graph"
        if kind == "net":
            subject, schedule = (f"schedule {rest}", rest) if rest else (machines.NET, "row")
            measured.append(Measurement(subject, "net", schedule, bool(rest), timing(us), method, 10, ""))
        elif kind == "peer":
            measured.append(Measurement(rest, "peer", None, False, timing(us), method, 10, ""))
        else:
            measured.append(Measurement(name, "floor", None, False, timing(us), method, 10, ""))
    rates = {"float32": Timing(3.3e13, 3.2e13, 3.4e13)}
    return sweep._rows(Case(group, batch), "the net", measured, sets, rates)


FLOORS = {"empty kernel": 0.7, "copy kernel": 1.2, "memcpy": 2.0}


# --- What is measured ---------------------------------------------------------------------------------------------------


def test_the_cases_are_those_that_were_agreed_on():
    found = list(settings().groups())
    assert len(found) == 6 * 6
    assert [str(g) for g in found[:6]] == [
        "48-64-40-24 float32 ieee", "48-64-40-24 float32 tf32", "48-64-40-24 float32 split3", "48-64-40-24 float32 library",
        "48-64-40-24 float16 ieee", "48-64-40-24 bfloat16 ieee",
    ]  # fmt: skip
    assert settings().batches[0] == 1
    assert settings().batches[-1] == 2**22
    assert {b for a, b in zip(settings().batches, settings().batches[1:])} == {4 * b for b in settings().batches[:-1]}
    assert [str(g) for g in settings("--dtypes", "float64", "--nets", "5-6,7-8-9").groups()] == [
        "5-6 float64 ieee", "7-8-9 float64 ieee",
    ]  # fmt: skip
    assert [g.precision for g in settings("--sizes", "5,6", "--precisions", "tf32,ieee").groups()] == [
        "ieee", "tf32", "ieee", "ieee",
    ]  # fmt: skip


def test_options_of_the_sweep():
    assert settings("--batches", "3,7").batches == (3, 7)
    assert settings("--batches", "+3,1").batches == tuple(sorted({3, *cases.BATCHES}))
    assert set(settings("--batches", "3").peer_batches) == {3, *cases.PEER_BATCHES}
    assert settings("--batches", "3", "--peer-batches", "9").peer_batches == (9,)
    asked = settings("--no-peers", "--rounds", "3", "--budget-seconds", "9.5", "--compile-seconds", "0", "--seed", "4")
    assert (asked.peers, asked.rounds, asked.budget_seconds, asked.compile_seconds, asked.seed) == (False, 3, 9.5, 0, 4)
    assert settings().schedules == ()
    assert settings("--schedules", "all").schedules == tuple(command.SCHEDULES)
    assert settings("--schedules", "row").schedules == ("row",)
    assert len(settings("--quick").batches) < len(settings().batches)
    assert settings("--quick", "--nets", "3-2").nets == ((3, 2),)
    cpu = command.settings_of(options("--device", "cpu"))
    assert (cpu.dtypes, cpu.precisions) == (("float32",), ("ieee",))
    assert max(cpu.batches) <= 1024
    assert options("latency", "--batches", "1").what == "latency"
    assert options().what == "sweep"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedules", "row,none"], "--schedules names none; accepted: all, row"),
        (["--dtypes", "int8"], "dtype 'int8' is not measured; accepted: float32, float16"),
        (["--precisions", "tf64"], "precision 'tf64' is not measured; accepted: ieee, tf32"),
        (["--dtypes", "float16", "--precisions", "tf32"], "no dtype of float16 has a precision of tf32"),
        (["--batches", "0"], "batches is (0,)"),
        (["--rounds", "0"], "rounds is 0"),
        (["--sizes", "3,0"], "cannot be measured"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        settings(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("arguments", [["--nets", "5"], ["--sizes", "5,x"], ["--batches", "+"], ["quickly"]])
def test_what_cannot_be_read_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        options(*arguments)
    assert caught.value.code == 2
    assert "argument" in capsys.readouterr().err


def test_bytes_fmas_and_sets_of_buffers():
    case = Case(CANONICAL, 2**14)
    assert case.in_bytes == 2**14 * 48 * 4
    assert case.out_bytes == 2**14 * 24 * 4
    assert case.fmas == 2**14 * 6592
    cache = 50 * 2**20
    sets = case.sets(cache)
    assert sets * (case.in_bytes + case.out_bytes) >= 2 * cache
    assert (sets - 1) * (case.in_bytes + case.out_bytes) < 2 * cache
    assert Case(CANONICAL, 2**13).sets(cache) == 1
    assert Case(CANONICAL, 2**22).sets(cache) == 1
    assert Case(Group((1, 1), "float16", "ieee"), 2**14).sets(cache) == cases.MOST_SETS
    half = Case(Group((48, 64, 40, 24), "bfloat16", "ieee"), 10)
    assert half.in_bytes == 10 * 48 * 2


# --- Samplers and rounds ------------------------------------------------------------------------------------------------


def test_calls_in_a_sample():
    assert samplers.calls_for(1e-6, 1) == samplers.MOST_CALLS
    assert samplers.calls_for(5.0, 1) == 1
    assert samplers.calls_for(1e-3, 1) == 10
    assert samplers.calls_for(1e-3, 7) == 14  # whole tours of the sets
    assert samplers.calls_for(1.0, 7) == 1  # unless that takes too long
    assert samplers.warm_ups(100) > samplers.warm_ups(1e4) > samplers.warm_ups(1e6) == 0


class FakeCupy:
    """As much of CuPy as the samplers use: a graph is the list of calls that were captured."""

    def __init__(self):
        fake = self
        fake.clock, fake.capturing, fake.log = 0.0, None, []

        class Graph:
            def __init__(self, calls):
                self.calls = calls

            def launch(self, _):
                fake.clock += len(self.calls)

        class Stream:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def begin_capture(self):
                fake.capturing = []

            def end_capture(self):
                graph, fake.capturing = Graph(fake.capturing), None
                return graph

            def synchronize(self):
                fake.log.append("synchronize")

        class Event:
            def record(self, _):
                self.time = fake.clock

            def synchronize(self):
                pass

        self.stream = Stream()
        self.cuda = types.SimpleNamespace(
            Event=Event,
            get_elapsed_time=lambda a, b: b.time - a.time,
            runtime=types.SimpleNamespace(CUDARuntimeError=RuntimeError),
        )

    def RawModule(self, code):
        assert "wait_ns" in code
        return types.SimpleNamespace(get_function=lambda _: self.wait_kernel)

    def wait_kernel(self, grid, block, arguments):
        self.log.append(("wait", int(arguments[0])))

    def call(self, index):
        """Takes 1 ms."""
        if self.capturing is not None:
            self.capturing.append(index)
        else:
            self.clock += 1

    def uncapturable(self, index):
        if self.capturing is not None:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        self.clock += 1


def test_calls_that_can_be_captured_are_timed_by_a_graph():
    fake = FakeCupy()
    sampler = samplers.CupyEngine(fake, fake.stream).sampler(fake.call, 7, 3)
    assert (sampler.method, sampler.calls) == ("graph", 7)
    assert sampler._graph.calls == [0, 1, 2, 0, 1, 2, 0]
    assert sampler.sample() == pytest.approx(1000)


def test_calls_that_refuse_are_queued_behind_a_waiting_kernel():
    fake = FakeCupy()
    sampler = samplers.CupyEngine(fake, fake.stream).sampler(fake.uncapturable, 100, 3)
    assert (sampler.method, sampler.calls) == ("queue", samplers.MOST_QUEUED)
    assert fake.capturing is None
    assert sampler.sample() == pytest.approx(1000)
    assert sampler._next % samplers.MOST_QUEUED == 0
    assert fake.log[0][0] == "wait"


def host_entry(call, kind="peer", **more):
    return Entry("it", kind, call, samplers.HostEngine(), **more)


def test_what_is_optional_may_fail_and_the_net_may_not():
    def fails(_):
        raise OSError("no such thing\nat all")

    good, bad, absent = interleave.measure_entries(
        [host_entry(lambda _: None), host_entry(fails), host_entry(None, note="why")], rounds=3, sets=1
    )
    assert good.timing is not None
    assert (good.method, good.calls) == ("each", samplers.MOST_CALLS)
    assert (bad.timing, bad.note, bad.method) == (None, "failed: OSError: no such thing", None)
    assert (absent.timing, absent.note) == (None, "why")
    (forced,) = interleave.measure_entries([host_entry(fails, "net", forced=True)], rounds=1, sets=1)
    assert forced.timing is None
    with pytest.raises(OSError, match="no such thing"):
        interleave.measure_entries([host_entry(fails, "net")], rounds=1, sets=1)


def test_a_peer_that_fails_later_is_dropped():
    count = iter(range(300))

    def breaks(_):
        if next(count) > 250:
            raise MemoryError

    (found,) = interleave.measure_entries([host_entry(breaks)], rounds=3, sets=1)
    assert found.timing is None
    assert found.note.startswith("failed: MemoryError")


def test_the_hopeless_are_not_measured(monkeypatch):
    monkeypatch.setattr(interleave, "HOPELESS_SECONDS", 0.0)
    (found,) = interleave.measure_entries([host_entry(lambda _: None)], rounds=1, sets=1)
    assert found.note.startswith("not measured: one call takes")


def test_peers_that_are_not_installed_are_noted(monkeypatch):
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
    found = peers.Peers(None, samplers.HostEngine(), Settings())
    assert set(found.notes) == {"torch", "jax.jit"}
    assert all("not measured: ModuleNotFoundError" in note for note in found.notes.values())
    assert peers.Peers(None, samplers.HostEngine(), Settings(peers=False)).notes == {}
    assert list(found.entries(Case(CANONICAL, 3), None, None)) == []  # no peer batch


def test_numpy_is_not_asked_for_what_takes_it_long():
    net = sweep._make(CANONICAL, Settings(), None)
    (entry,) = peers.numpy_peer(Case(CANONICAL, 2), net, lambda: np.ones((2, 48), "f4"))
    assert np.allclose(entry.call(0), net(np.ones((2, 48), "f4"), device="cpu"), rtol=1e-4)
    assert not list(peers.numpy_peer(Case(CANONICAL, 2**22), net, lambda: pytest.fail("not wanted")))


def test_the_floors_source_and_shares():
    calls = []
    module = types.SimpleNamespace(
        get_function=lambda name: lambda grid, block, arguments: calls.append((name, grid, block, arguments))
    )
    found = floors.Floors(types.SimpleNamespace(RawModule=lambda code, options: module), None, 132)
    buffers = types.SimpleNamespace(in_bytes=192 * 1000, out_bytes=96 * 1000, copy_arguments=lambda i: (i, i + 1))
    found.copy(buffers, 5)
    ((_, (blocks,), (block,), (source, to, reads, writes, in_share, out_share)),) = calls
    assert (source, to, reads, writes) == (5, 6, 12000, 6000)
    assert block * floors.UNROLL >= max(in_share, out_share)
    assert blocks * in_share >= reads
    assert blocks * out_share >= writes
    found.empty(16)
    found.empty(2**20)
    assert [grid for _, grid, _, _ in calls[1:]] == [(16,), (132,)]


# --- The sweep ------------------------------------------------------------------------------------------------------------

TINY = Settings(nets=((3, 4, 2), (5, 1)), dtypes=("float32",), precisions=("ieee",), batches=(1, 4), rounds=2, device="cpu",
                peer_batches=(4,))  # fmt: skip


def test_a_sweep_on_the_cpu():
    lines, saves = [], []
    result = sweep.sweep(TINY, lines.append, lambda r: saves.append(len(r.rows)))
    assert [(r["net"], r["batch"], r["subject"]) for r in result.rows] == [
        (net, *rest)
        for net in ("3-4-2", "5-1")
        for rest in ((1, machines.NET), (4, machines.NET), (4, peers.NUMPY_CHAIN))
    ]
    for row in result.rows:
        assert row["gpu_us"] is None
        assert row["method"] == "each"
        assert 0 < row["round_trip_us"]["low"] <= row["round_trip_us"]["median"] <= row["round_trip_us"]["high"]
    assert len(lines) == 4
    assert saves == [3, 6, 6]
    assert len(result.verified) == 2
    assert not result.skipped
    assert "5-1 float32 ieee" in sweep_report.sweep_table(result.rows)


def test_a_wrong_network_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(
        MLP, "__call__", lambda self, x, out=None, **_: np.zeros((len(x), self.network.sizes[-1]), "f4")
    )
    with pytest.raises(sweep.VerificationError, match="the network is wrong, so it is not measured"):
        sweep.sweep(TINY)
    assert cli.main(["bench", "--device", "cpu", "--batches", "4", "--nets", "3-2"]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.err
    assert captured.out == ""


def test_an_empty_budget_measures_nothing():
    with pytest.raises(ValueError, match=r"nothing could be measured: .*the budget of 0 s was used up"):
        sweep.sweep(Settings(**{**vars(TINY), "budget_seconds": 0.0}))


class FakeMachine:
    """Answers at once; one batch does not fit, and one has no schedule."""

    def __init__(self, _):
        self.fma_rates, self.notes = {"float32": Timing(1e13, 1e13, 1e13)}, {"jax.jit": "not measured: no JAX"}

    def measure(self, case, net, forced):
        if case.batch == 16:
            raise machines.TooLargeError("it needs 1 byte more")
        if case.batch == 64:
            raise PlanError("there is none")
        measured = [Measurement(machines.NET, "net", "row", False, timing(2.0 * case.batch), "graph", 5, "")]
        measured += [
            Measurement(f"schedule {name}", "net", name, True, timing(3.0), "graph", 5, "")
            for name in forced
            if name != "row"
        ]
        return measured, 4


def test_what_cannot_be_measured_is_listed_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(sweep, "CpuBench", FakeMachine)
    result = sweep.sweep(Settings(**{**vars(TINY), "nets": ((3, 2),), "batches": (1, 16, 64, 256)}))
    assert [row["batch"] for row in result.rows if row["kind"] == "net"] == [1, 256]
    assert [row["sets"] for row in result.rows] == [4] * 4
    assert dict(result.skipped) == {
        "3-2 float32 ieee B=16": "it needs 1 byte more",
        "3-2 float32 ieee B=64": "there is none",
    }
    assert result.peer_notes


def test_a_group_that_cannot_be_made_is_skipped(monkeypatch):
    monkeypatch.setattr(sweep, "CpuBench", FakeMachine)

    def make(group, *_):
        if group.net == "3-4-2":
            raise ImportError("no ml_dtypes")
        return original(group, *_)

    original = sweep._make
    monkeypatch.setattr(sweep, "_make", make)
    result = sweep.sweep(TINY)
    assert result.skipped == [("3-4-2 float32 ieee", "no ml_dtypes")]
    assert {row["net"] for row in result.rows} == {"5-1"}


@pytest.mark.gpu
def test_a_sweep_on_the_gpu(monkeypatch):
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
    asked = Settings(
        nets=((48, 64, 40, 24),),
        dtypes=("float32", "float16"),
        precisions=("ieee",),
        batches=(1, 2**14),
        schedules=("row",),
        peer_batches=(2**14,),
        rounds=3,
    )
    result = sweep.sweep(asked)
    assert not result.skipped
    rows = {(r["dtype"], r["batch"], r["subject"]): r for r in result.rows}
    for dtype in asked.dtypes:
        for batch in asked.batches:
            net, copy = rows[dtype, batch, machines.NET], rows[dtype, batch, "copy kernel"]
            assert net["method"] == copy["method"] == rows[dtype, batch, "memcpy"]["method"] == "graph"
            assert 0 < rows[dtype, batch, "empty kernel"]["gpu_us"]["median"] < net["gpu_us"]["median"]
            assert net["to_copy"] > 0.9
            assert net["sets"] == 1 if batch == 1 else net["sets"] > 1
        assert rows[dtype, 2**14, peers.CUPY_CHAIN]["method"] == "queue"
        assert rows[dtype, 2**14, peers.CUPY_CHAIN]["gpu_us"]["median"] > net["gpu_us"]["median"]
    assert result.fma_rates["float32"].median > 1e12
    assert all(c["ratio"] >= 1 for c in sweep_report.crossings(result.rows))


# --- What is told -----------------------------------------------------------------------------------------------------------


def test_rows_have_ratios_to_the_floors_of_the_run():
    rows = {
        row["subject"]: row
        for row in rows_of(2**20, {**FLOORS, "net": 6.0, "net:tile": None, "peer:torch eager": 12.0})
    }
    net = rows[machines.NET]
    assert net["to_copy"] == pytest.approx(6.0 / 1.2)
    assert net["to_empty"] == pytest.approx(6.0 / 0.7, abs=1e-3)
    fma_us = 2**20 * 6592 / 3.3e13 * 1e6
    assert net["to_fma"] == pytest.approx(6.0 / fma_us, abs=1e-3)
    peak = rows[sweep.FMA_PEAK]["gpu_us"]
    assert peak["median"] == pytest.approx(fma_us, rel=1e-4)
    assert peak["low"] < peak["median"] < peak["high"]
    assert (rows["schedule tile"]["gpu_us"], rows["schedule tile"]["to_copy"]) == (None, None)
    assert (net["schedule"], net["forced"], net["kind"], net["method"]) == ("row", False, "net", "graph")


def test_the_table_of_a_sweep():
    rows = rows_of(16, {**FLOORS, "net": 1.5, "net:tile": 4.25, "peer:torch eager": 10.5})
    rows += rows_of(2**20, {**FLOORS, "net": 90.25, "net:tile": None})
    rows += rows_of(16, {**FLOORS, "net": 1.25}, Group((5, 6), "float16", "ieee"))
    lines = sweep_report.sweep_table(rows).splitlines()
    assert lines[0] == "48-64-40-24 float32 ieee  [us]"
    assert lines[1].split()[-4:] == ["copy", "tile", "torch", "eager"]
    assert lines[2].split() == ["16", "row", "1.50", "1.25", "469.32", "2.14", "1.20", "4.25", "10.50"]
    assert lines[3].split()[:3] == ["1,048,576", "row", "90.25"]
    assert lines[3].split()[-2:] == ["-", "-"]
    assert lines[4] == "5-6 float16 ieee  [us]"
    assert len({len(line) for line in lines[1:4]}) == 1


def test_crossings_compare_the_choice_with_the_best():
    rows = rows_of(16, {"net": 1.5, "net:tile": 4.0, "net:mma": None})
    rows += rows_of(4096, {"net": 30.0, "net:tile": 20.0, "peer:torch eager": 1.0})
    rows += rows_of(64, {"net": 2.0, "peer:torch eager": 1.0})  # nothing was forced
    first, second = sweep_report.crossings(rows)
    assert (first["batch"], first["chosen"], first["best"], first["ratio"]) == (16, "row", "row", 1.0)
    assert first["all_us"] == {"row": 1.5, "tile": 4.0}
    assert (second["batch"], second["best"], second["best_us"], second["ratio"]) == (4096, "tile", 20.0, 1.5)
    text = sweep_report.crossings_table([first, second])
    assert text.splitlines()[0] == "choices within 1.15 of the best schedule: 1 of 2"
    assert "B=4,096: row 30.00 us, tile 20.00 us, 1.50" in text


def test_json_comes_back_as_it_was(tmp_path):
    result = sweep.Result(rows=rows_of(16, {**FLOORS, "net": 1.5, "net:tile": 4.0}), skipped=[("a case", "too large")])
    result.fma_rates = {"float32": Timing(3.3e13, 3.2e13, 3.4e13)}
    parts = sweep_report.json_parts(TINY, result)
    path = tmp_path / "sweep.json"
    for rows in (result.rows, []):
        report.write_json(path, rows, "one\nverified", "abc", parts)
        content = json.loads(path.read_text())
        assert content["rows"] == rows
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.json"]
    assert content["kind"] == "sweep"
    assert content["verified"] == ["one", "verified"]
    assert content["commit"] == "abc"
    assert content["floors"]["fma_per_second"]["float32"]["median"] == 3.3e13
    assert content["skipped"] == [{"case": "a case", "reason": "too large"}]
    assert content["crossings"][0]["chosen"] == "row"
    assert content["settings"]["batches"] == [1, 4]
    assert content["peers"]["numpy"] == np.__version__
    assert set(content["methods"]) == {"graph", "queue", "wall", "each"}
    assert rounded(Timing(1.23456789, 1e-9, 1e13)) == {"median": 1.23457, "low": 1e-9, "high": 1e13}


def test_bench_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    arguments = [
        "bench",
        "--device",
        "cpu",
        "--nets",
        "3-4-2",
        "--batches",
        "1,2",
        "--rounds",
        "1",
        "--json",
        str(path),
    ]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert "3-4-2 float32 ieee  [us]" in captured.out
    assert "2/2 3-4-2 float32 ieee B=2: cpu" in captured.err
    content = json.loads(path.read_text())
    assert content["format"] == report.FORMAT
    assert content["verified"][-1] == "verified"
    assert {row["batch"] for row in content["rows"]} == {1, 2}


def test_the_latency_table_is_still_there(capsys):
    assert cli.main(["bench", "latency", "--sizes", "3,2", "--batches", "2", "--rounds", "1"]) == 0
    assert "NumPy to NumPy on the CPU" in capsys.readouterr().out


def test_the_latency_table_has_ratios_to_numpy(capsys):
    cli.main(["bench", "latency", "--sizes", "3,2", "--batches", "2", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("/ NumPy") for line in lines)
    assert [line.split()[-1] for line in lines if line.strip().startswith("NumPy: matmul")] == ["1.00"]


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_activations_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "activations.json"
    arguments = ["--sizes", "5-4-3", "--batches", "2,8", "--rounds", "1", "--device", "cpu", "--dtypes", "float32"]
    assert cli.main(["bench", "activations", *arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * len(ACTIVATIONS)
    assert {r["schedule"] for r in rows} == {"cpu"}
    assert [r["activation"] for r in rows[:2]] == ["relu", "identity"]
    assert rows[0]["ratio"] == 1
    assert all(r["us"]["median"] > 0 and r["ratio"] > 0 for r in rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["float32", "ieee"] * 2
    assert lines[1].split() == ["2", "rows", "8", "rows"]
    assert any(line.startswith("sin:30.0") for line in lines)
    assert lines[-1].startswith("log_softmax of the output")


@pytest.mark.gpu
def test_activations_on_the_gpu(tmp_path):
    path = tmp_path / "activations.json"
    arguments = ["--batches", "16", "--rounds", "2", "--dtypes", "float32", "--precisions", "ieee"]
    assert cli.main(["bench", "activations", *arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {r["schedule"] for r in rows} == {"row"}
    assert all(0.5 < r["ratio"] < 10 for r in rows)


def test_map_cannot_be_measured_without_a_gpu(capsys):
    assert cli.main(["bench", "map"]) == 2
    assert "bench map needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_map_on_the_gpu(tmp_path, capsys):
    path = tmp_path / "map.json"
    assert cli.main(["bench", "map", "--gigabytes", "0.2", "--rounds", "2", "--json", str(path)]) == 0
    assert "of the link" in capsys.readouterr().out
    link, *measured = json.loads(path.read_text())["rows"]
    assert link["x_bytes_per_second"] > 1e9
    assert len(measured) == 3  # an array, a memory map, a file
    for mapped in measured:
        assert mapped["x_bytes"] == mapped["rows"] * 48 * 4
        assert 0 < mapped["of_link"] < 1.1
        assert 0 <= mapped["gpu_bytes"] < 2 << 30


def test_the_text_of_map_s_figures():
    rows = [
        {"subject": "the link", "x_bytes_per_second": 5e10, "out_bytes_per_second": 2.5e10},
        {
            "subject": "map", "rows": 1_000_000, "x_bytes": 192_000_000, "seconds": {"median": 0.5}, "rows_per_second": 2e6,
            "of_link": 0.25, "gpu_bytes": 3_000_000,
        },
    ]  # fmt: skip
    assert map_table(rows).splitlines() == [
        "the link: 50.0 GB/s there, 25.0 GB/s back",
        "map: 1,000,000 rows, 0.2 GB, in 0.50 s: 2 million rows/s, 0.25 of the link; 3 MB of the GPU",
    ]


def test_progress_without_rich_is_lines(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(3) as progress:
        for i in range(3):
            progress.step(f"case {i}")
    assert capsys.readouterr().err.splitlines() == ["1/3 case 0", "3/3 case 2"]


def test_progress_with_rich_is_a_bar(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(2) as progress:
        assert progress._bar is not None
        progress.step("the last")
        progress.step("the last")
    assert "2/2" in capsys.readouterr().err


# --- The picture ------------------------------------------------------------------------------------------------------------


def plotted_rows():
    rows = []
    for net in ((48, 64, 40, 24), (16, 16, 1), (5, 5)):
        for dtype, precision in (("float32", "ieee"), ("float32", "tf32"), ("float16", "ieee")):
            for batch in (1, 64, 4096, 2**18):
                size = 2 if dtype == "float16" else 4
                copy = 1.0 + batch * size * sum((net[0], net[-1])) / 4.2e6
                times = {"empty kernel": 0.7, "copy kernel": copy, "net": 1.1 * copy, "net:tile": 3.0}
                rows += rows_of(batch, {**times, "peer:torch eager": 5 * copy}, Group(net, dtype, precision))
    return rows


def test_the_lines_of_the_picture():
    rows = plotted_rows()
    lines = plot._lines([row for row in rows if row["net"] == "48-64-40-24"])
    assert set(lines) == {
        "cupymlp float32 ieee", "cupymlp float32 tf32", "cupymlp float16 ieee", "torch eager", "floor, 4-byte numbers",
        "floor, 2-byte numbers",
    }  # fmt: skip
    assert all(len(points) == 4 for points in lines.values())
    batch, rate = lines["cupymlp float32 ieee"][0]
    assert rate == pytest.approx(batch / (1.1 * (1 + 72 * 4 / 4.2e6) * 1e-6), rel=1e-4)
    floor = dict(lines["floor, 4-byte numbers"])
    assert all(rate <= floor[batch] for batch, rate in lines["cupymlp float32 ieee"])
    assert set(plot._styles(rows)) == set(lines)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    plot.plot(plotted_rows(), path, "a title")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == 1200


def test_without_matplotlib_nothing_is_measured_first(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--device", "cpu", "--plot", "sweep.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"cupymlp\[bench\]"):
        plot.plot([], "sweep.png")
