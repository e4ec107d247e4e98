"""The documents: their figures are the committed ones, their pages hang together, and every public name has its place.

Their examples are doctests, which pytest runs from the pages themselves; .ci/run builds the pages.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupymlp
from cupymlp import cli
from cupymlp._convert import KINDS
from cupymlp.activations import ACTIVATIONS
from cupymlp.schedules import SCHEDULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
PERFORMANCE = PAGES["performance.md"]

CANONICAL = "48-64-40-24"
BATCHES = (16, 1024, 16384, 1048576)
OURS = "net(x, out=y)"


def measured(file):
    return json.loads((ROOT / "benchmarks" / file).read_text())


def medians(file, net, **wanted):
    """{batch: (microseconds, schedule)} of one subject."""
    rows = (r for r in measured(file)["rows"] if r["net"] == net and all(r[k] == v for k, v in wanted.items()))
    return {r["batch"]: (r["gpu_us"]["median"], r["schedule"]) for r in rows if r["gpu_us"] is not None}


def shown(us):
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def line(*cells):
    return f"| {' | '.join(cells)} |"


# --- Figures ----------------------------------------------------------------------------------------------------------


def canonical_table():
    """GPU time of the canonical net by batch, beside floors and peers."""
    subjects = [
        ("an empty kernel", "float32", "ieee", "empty kernel"),
        ("a copy of x and y, float32", "float32", "ieee", "copy kernel"),
        ("a copy of x and y, float16", "float16", "ieee", "copy kernel"),
        ("its multiply-adds at the chip's peak, float32", "float32", "ieee", "FMA peak"),
        *(
            (f"**{name}**", dtype, precision, OURS)
            for name, dtype, precision in (
                ("float32", "float32", "ieee"),
                ("float32, split3", "float32", "split3"),
                ("float32, tf32", "float32", "tf32"),
                ("float16", "float16", "ieee"),
                ("bfloat16", "bfloat16", "ieee"),
            )
        ),
        *(
            (f"{name}, float32", "float32", "ieee", subject)
            for name, subject in (
                ("CuPy, five calls", "CuPy chain"),
                ("torch eager", "torch eager"),
                ("torch.compile, max-autotune", "torch.compile"),
                ("jax.jit, by the wall clock", "jax.jit"),
            )
        ),
    ]
    yield line("us", *(f"B={b:,}" for b in BATCHES))
    yield line(*["---"] * (len(BATCHES) + 1))
    for name, dtype, precision, subject in subjects:
        found = medians("sweep-canonical-h200.json", CANONICAL, dtype=dtype, precision=precision, subject=subject)
        schedule = {b: f" {s}" if subject == OURS else "" for b, (_, s) in found.items()}
        yield line(name, *(f"{shown(found[b][0])}{schedule[b]}" if b in found else "-" for b in BATCHES))


NETS = ("16-16-1", "64-64-64-64", "128-128-128-128-128", "784-256-10", "512-512-512-512")
PRECISIONS = (
    ("float32", "ieee"),
    ("float32", "split3"),
    ("float32", "tf32"),
    ("float32", "library"),
    ("float16", "ieee"),
)


def nets_table():
    """GPU time of other nets at 2^20 rows: of the schedule that is taken."""
    yield line(
        "ms, 1,048,576 rows", *(d if p == "ieee" else p for d, p in PRECISIONS), "a copy, float32", "FMA peak, float32"
    )
    yield line(*["---"] * (len(PRECISIONS) + 3))
    for net in NETS:
        cells = []
        for dtype, precision in PRECISIONS:
            found = medians("sweep-nets-h200.json", net, dtype=dtype, precision=precision, subject=OURS)
            us, schedule = found[2**20]
            cells.append(f"{us / 1e3:.3g} {schedule}")
        for floor in ("copy kernel", "FMA peak"):
            found = medians("sweep-nets-h200.json", net, dtype="float32", precision="ieee", subject=floor)
            cells.append(f"{found[2**20][0] / 1e3:.3g}")
        yield line(net, *cells)


LATENCY = {
    "NumPy to NumPy on the GPU": "NumPy arrays, on the GPU",
    "NumPy to NumPy on the CPU": "NumPy arrays, on the CPU path",
    "NumPy: matmul, maximum, ...": "NumPy, five calls",
}


def host_table():
    """Round trips of NumPy arrays."""
    rows = [r for r in measured("latency-h200.json")["rows"] if r["subject"] in LATENCY]
    batches = sorted({r["batch"] for r in rows})
    yield line("us, from call to result", *(f"B={b:,}" for b in batches))
    yield line(*["---"] * (len(batches) + 1))
    for subject, name in LATENCY.items():
        times = {r["batch"]: r["round_trip_us"]["median"] for r in rows if r["subject"] == subject}
        yield line(name, *(shown(times[b]) for b in batches))


ACTIVATION_COLUMNS = (
    ("float32, B=16", "float32", "ieee", 16),
    ("float32", "float32", "ieee", 2**20),
    ("tf32", "float32", "tf32", 2**20),
    ("split3", "float32", "split3", 2**20),
    ("float16", "float16", "ieee", 2**20),
)


def activations_table():
    """GPU time of the canonical net with each activation, as a ratio to relu."""
    ratios = {}
    for r in measured("activations-h200.json")["rows"]:
        ratios.setdefault(r["activation"], {})[r["network"].split()[1], r["precision"], r["batch"]] = r["ratio"]
    yield line("activation", *(name for name, *_ in ACTIVATION_COLUMNS))
    yield line(*["---"] * (len(ACTIVATION_COLUMNS) + 1))
    for activation, found in ratios.items():
        yield line(activation, *(f"{found[tuple(key)]:.2f}" for _, *key in ACTIVATION_COLUMNS))


def errors_table():
    """The largest errors of the activations with their default parameters, in units in the last place."""
    columns = [(file, computed) for file in ("h200", "cpu") for computed in ("float32", "float64")]
    rows = {
        (r["activation"], file, r["computed"]): (r["max ulp for |v| <= 1"], r["max ulp"])
        for file, computed in columns
        for r in measured(f"activation-errors-{file}.json")["rows"]
        if r["computed"] == computed
    }

    def cell(near, everywhere):
        return f"{near:.1f}" if everywhere - near < 1 else f"{near:.1f} ({everywhere:.0f})"

    yield line("ulp", "GPU, float32", "GPU, float64", "CPU path, float32", "CPU path, float64")
    yield line(*["---"] * 5)
    for row in ACTIVATIONS.values():
        if not row.over_row:
            spec = row.name if row.parameter is None else f"{row.name}:{row.parameter.default}"
            yield line(row.name, *(cell(*rows[spec, *column]) for column in columns))


def test_the_errors_of_activations_are_the_committed_ones():
    assert "\n".join(errors_table()) in PAGES["numbers.md"]
    worst = 0.0
    for file in ("cpu", "h200"):
        rows = measured(f"activation-errors-{file}.json")["rows"]
        worst = max(worst, *(r["max in bounds"] for r in rows if r["computed"] in ("float32", "float64")))
        assert {r["activation"].split(":")[0] for r in rows} == {a.name for a in ACTIVATIONS.values() if not a.over_row}
        assert all(r["max in bounds"] <= 1 for r in rows)
    assert f"all of it within {worst:.2f} of the bound" in " ".join(PAGES["numbers.md"].split())


@pytest.mark.parametrize("table", [canonical_table, nets_table, host_table, activations_table])
def test_tables_are_the_committed_measurements(table):
    assert "\n".join(table()) in PERFORMANCE


def test_the_sentences_between_the_tables_have_committed_figures():
    text = " ".join(PERFORMANCE.split())
    machine = measured("latency-h200.json")["machine"]
    assert machine["gpu"] in text
    assert (
        f"({machine['multiprocessors']} multiprocessors; driver for CUDA {machine['driver']}, CuPy {machine['cupy']}"
        in text
    )
    assert f"NVRTC {machine['nvrtc']})" in text

    def canonical(subject):
        return medians("sweep-canonical-h200.json", CANONICAL, dtype="float32", precision="ieee", subject=subject)[
            2**20
        ][0]

    assert f"2^20 rows take {canonical(OURS) / canonical('FMA peak'):.2f} times what the peak allows" in text

    files = ("sweep-canonical-h200.json", "sweep-nets-h200.json")
    ratios = [c["ratio"] for file in files for c in measured(file)["crossings"]]
    assert f"Of {len(ratios)} cases in both files" in text
    assert f"fastest one in {sum(r <= 1.05 for r in ratios)}, and at worst took {max(ratios):.2f} times as long" in text

    link, mapped, from_map, from_path = measured("map-h200.json")["rows"]
    assert f"{mapped['x_bytes'] / 1e9:.0f} GB of float32 rows" in text
    assert f"took {mapped['seconds']['median']:.2f} s: {mapped['of_link']:.2f} of what the link" in text
    assert f"memory map {from_map['of_link']:.2f}, by the file's path {from_path['of_link']:.2f}" in text
    assert mapped["of_link"] == pytest.approx(
        mapped["x_bytes"] / mapped["seconds"]["median"] / link["x_bytes_per_second"], abs=0.001
    )

    def trip(subject):
        (row,) = (r for r in measured("latency-h200.json")["rows"] if (r["subject"], r["batch"]) == (subject, 16))
        return row["round_trip_us"]["median"]

    numpy, gpu = trip("NumPy: matmul, maximum, ..."), trip("NumPy to NumPy on the GPU")
    assert f"NumPy's five calls take {shown(numpy)} us for 16 rows, the GPU {shown(gpu)} with" in text

    def wide(net, precision):
        found = medians("sweep-nets-h200.json", net, dtype="float32", precision=precision, subject=OURS)
        return f"{found[2**20][0] / 1e3:.3g}"

    ours, library = wide("512-512-512-512", "ieee"), wide("512-512-512-512", "library")
    assert f'takes {ours} ms here in float32 and {library} with `precision="library"`' in text
    net = "784-256-10"
    figures = f"{net} takes {wide(net, 'ieee')} ms in float32, {wide(net, 'tf32')} in tf32 and {wide(net, 'split3')} in split3"
    assert figures in text

    def host(subject):
        return [r["host_us"]["median"] for r in measured("latency-h200.json")["rows"] if r["subject"] == subject]

    more = [a - b for a, b in zip(host("fused_mlp(x, W1, ..., out=y)"), host("net(x, out=y)"))]
    assert "some 10 us more" in text
    assert all(9 < m < 13 for m in more), more

    for bound, call in zip(host("net.bind(x, out=y)()"), host("net(x, out=y)")):
        assert 0.3 < bound / call < 0.4
    assert all("about a third of" in " ".join(PAGES[page].split()) for page in ("quickstart.md", "streams.md"))


# --- Examples that need other libraries -----------------------------------------------------------------------------------


def code_of(page, *needles):
    """The blocks of Python, not doctests, that have one of these in them."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    found = [block for block in blocks if any(needle in block for needle in needles)]
    assert len(found) == len(needles)
    return "\n".join(found)


def test_the_examples_of_pytorch_run(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(tmp_path)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x = np.random.default_rng(0).standard_normal((5, 3), dtype="f4")
    names = {"cupymlp": cupymlp, "np": np, "torch": torch, "module": module, "x": x}
    names["safetensors"] = SimpleNamespace(torch=safetensors)
    exec(code_of("models.md", "assert np.allclose(net(x), module(", "save_file"), names)  # noqa: S102
    again = cupymlp.MLP.from_safetensors("net.safetensors", activation="relu")
    assert np.array_equal(again(x), names["net"](x))


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_the_example_of_keras_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("jax")
    keras = pytest.importorskip("keras")
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "gelu"), keras.layers.Dense(2)])
    x = np.random.default_rng(0).standard_normal((5, 4), dtype="f4")
    names = {"cupymlp": cupymlp, "np": np, "model": model, "x": x}
    exec(code_of("models.md", "from_keras"), names)  # noqa: S102


@pytest.mark.parametrize("library", ["flax", "haiku", "equinox"])
def test_the_examples_of_jax_run(library):
    jax = pytest.importorskip("jax")
    module = pytest.importorskip(library)
    x = np.random.default_rng(0).standard_normal((5, 4), dtype="f4")
    names = {"cupymlp": cupymlp, "np": np, "jax": jax, "key": jax.random.key(0), "x": x}
    if library == "flax":
        nn = pytest.importorskip("flax.linen")
        names["module"] = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(2)])
    elif library == "haiku":

        def forward(x):
            return module.nets.MLP([8, 2])(x)

        names["forward"] = module.without_apply_rng(module.transform(forward))
    else:
        names["mlp"] = module.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    code = code_of("models.md", f"# {library.capitalize()}")
    exec(code, names)  # noqa: S102
    assert isinstance(names["net"], cupymlp.MLP)


# --- What the pages name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    here = (DOCS / page).parent
    anchors = {
        name: {
            re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", text, re.M)
        }
        for name, text in PAGES.items()
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (here / path).resolve() if path else (DOCS / page).resolve()
        assert file.is_file(), target
        if anchor:
            assert anchor in anchors[str(file.relative_to(DOCS))], target


def test_every_page_is_in_a_table_of_contents():
    listed = {"index.md"}
    for page, text in PAGES.items():
        for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
            names = [line for line in block.split() if not line.startswith(":")]
            listed |= {str(Path(page).parent / f"{name}.md") for name in names}
    assert set(PAGES) <= listed


def test_every_public_name_is_in_the_reference():
    dask = re.search(r"__all__ = \[(.*?)\]", (ROOT / "cupymlp" / "dask.py").read_text(), re.DOTALL)
    names = [f"cupymlp.{name}" for name in cupymlp.__all__]
    names += [f"cupymlp.dask.{name}" for name in re.findall(r'"(\w+)"', dask[1])]
    for name in names:
        assert re.search(rf":: {re.escape(name)}$", PAGES["api.md"], re.MULTILINE), name


def test_every_error_class_has_a_page():
    classes = [c for c in vars(cupymlp).values() if isinstance(c, type) and issubclass(c, BaseException)]
    assert len(classes) >= 3
    for error in classes:
        page = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error.__name__).lower()
        assert PAGES[f"errors/{page}.md"].startswith(f"# {error.__name__}\n")
        assert f"| [{error.__name__}]({page}.md) | `{error.__mro__[1].__name__}` |" in PAGES["errors/index.md"]


def test_the_table_of_activations_has_all_of_them():
    source = (ROOT / "cupymlp" / "activations.py").read_text()
    table = source[source.index("================") :].split('"""')[0]
    assert re.findall(r"^(\w+)  ", table, re.MULTILINE)[1:] == list(ACTIVATIONS)


def test_the_command_line_page_has_every_command_and_suffix():
    page = PAGES["command_line.md"]
    (commands,) = (a.choices for a in cli._parser()._actions if a.choices)
    assert {*re.findall(r"^\| `(\w+)", page, re.MULTILINE)} == set(commands)
    kinds = dict(re.findall(r"^\| `(\.\w+)`[^|]*\| yes \| (yes|no) \|", page, re.MULTILINE))
    assert kinds == {kind.suffix: "no" if kind.write is None else "yes" for kind in KINDS.values()}


def test_the_house_has_the_rooms_that_are_drawn():
    folders = [ROOT / name for name in ("cupymlp", "cuda_src", "cupymlp/schedules", "tests")]
    named = set(re.findall(r"(?<![\w<>*/.])\w+\.(?:py|cuh|cu)\b", PAGES["inside.md"]))
    assert len(named) > 25
    for name in named:
        assert any((folder / name).is_file() for folder in folders), name
    for schedule in SCHEDULES:
        assert f"\n| {schedule} |" in PAGES["inside.md"]


def test_ci_builds_the_pages():
    assert "python3 -m sphinx -q -W -n docs " in (ROOT / ".ci" / "run").read_text()
