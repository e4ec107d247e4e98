"""The README says what is true: its example runs, its commands are CI's, its figures are the committed ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from cupymlp.bench.report import markdown
from cupymlp.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LATENCY = json.loads((ROOT / "benchmarks" / "latency-h200.json").read_text())


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_runs_as_it_stands():
    (example,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "(16, 24)" in done.stdout
    assert done.stdout.rstrip().endswith("verified")
    assert len(example.splitlines()) <= 10


def test_the_two_commands_are_those_that_ci_and_the_tests_run(capsys):
    (commands,) = blocks("sh")
    main_job, tests = commands.strip().splitlines()
    assert main_job.endswith("&& python3 -m cupymlp verify")
    assert main(["verify", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("verified")
    assert tests.endswith("&& python3 -m pytest")
    assert "grep -m1 -- '-m pytest' README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_table_is_the_committed_measurement():
    assert markdown(LATENCY["rows"]) in README
    assert LATENCY["machine"]["gpu"] in README
    assert "benchmarks/latency-h200.json" in README
    assert len(LATENCY["commit"]) == 40


def figure(subject, batch, kind):
    (row,) = (r for r in LATENCY["rows"] if r["subject"] == subject and r["batch"] == batch)
    return row[kind]["median"]


def test_the_committed_measurement_shows_what_was_promised():
    """Figures of one run, as ratios to figures of the same run: the issue's acceptance, read off the JSON."""
    empty, out, raw = "empty kernel", "net(x, out=y)", "bare RawKernel call"
    assert figure(out, 16, "gpu_us") <= 2.25 * figure(empty, 16, "gpu_us")
    assert figure(out, 1024, "gpu_us") <= 3.0 * figure(empty, 1024, "gpu_us")
    assert figure(out + ", out_in", 16, "gpu_us") <= 1.1 * figure(out, 16, "gpu_us")
    for batch in (1, 16, 128, 1024):
        limit = 1.5 * figure(raw, batch, "host_us")
        assert figure(out, batch, "host_us") <= limit
        assert figure("net(x)", batch, "host_us") <= limit + figure("cupy.empty", batch, "host_us")


def test_the_figures_of_where_not_to_use_it_are_committed_ones():
    def round_trips(file, batch):
        rows = {
            r["subject"]: r for r in json.loads((ROOT / "benchmarks" / file).read_text())["rows"] if r["batch"] == batch
        }
        return [rows[s]["round_trip_us"]["median"] for s in ("net(x, out=y)", "CuPy: matmul, maximum, ...")]

    text = " ".join(README.split())
    few, million = round_trips("large-h200.json", 16384), round_trips("large-h200.json", 1048576)
    wide = round_trips("wide-h200.json", 1024)
    assert f"16,384 rows take {few[0]:.0f} us and five CuPy calls {few[1]:.0f};" in text
    assert f"a million take {million[0] / 1e3:.1f} ms and {million[1] / 1e3:.1f}]" in text
    assert f"at 1,024 rows: {wide[0]:.0f} us and {wide[1]:.0f}]" in text


def test_the_readme_is_one_screen():
    assert len(README.splitlines()) <= 85
