"""MLP.from_onnx on files that are damaged, or lie: a clear ValueError each, without a crash, a hang or much memory."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

from cupymlp import MLP

onnx = pytest.importorskip("onnx")
from onnx_models import W2, B, W, chain, model, tensor  # noqa: E402

LARGE = 24 << 20  # bytes: far less than what the files below claim


def good(**options):
    nodes, constants = chain(("Relu", ["h"], ["g"]))
    return model(nodes, constants, dtype="float64", y=("rows", 2), **options)


def error_of(read, limit=LARGE):
    """The message of the ValueError of ``read()``, which takes little memory, and time."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(ValueError, match="cannot be read as an MLP: ") as caught:
            read()
        assert tracemalloc.get_traced_memory()[1] < limit
        assert time.perf_counter() - start < 20
    finally:
        tracemalloc.stop()
    assert type(caught.value) is ValueError
    return str(caught.value)


# --- Models with something wrong in them --------------------------------------------------------------------------------


def changed(change):
    proto = good()
    change(proto)
    return proto


def initializer(proto, name):
    return next(t for t in proto.graph.initializer if t.name == name)


def with_weight(**fields):
    """W with other fields: a TensorProto's, raw_data among them."""

    def change(proto):
        weight = initializer(proto, "W")
        for name, value in fields.items():
            if isinstance(value, list):
                weight.ClearField(name)
                getattr(weight, name).extend(value)
            else:
                setattr(weight, name, value)

    return change


def without_initializer(proto):
    del proto.graph.initializer[:]


def nodes_of(*nodes, **constants):
    def change(proto):
        proto.CopyFrom(model(list(nodes), constants, dtype="float64"))

    return change


def swapped(proto):
    first = proto.graph.node.pop(0)
    proto.graph.node.append(first)


def twice(field):
    def change(proto):
        items = getattr(proto.graph, field)
        items.append(items[0])

    return change


def sparse(proto):
    values = onnx.helper.make_tensor("S", onnx.TensorProto.DOUBLE, [1], [1.0])
    indices = onnx.helper.make_tensor("I", onnx.TensorProto.INT64, [1], [3])
    proto.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [4, 3]))


def function(proto):
    body = onnx.helper.make_node("Relu", ["a"], ["b"])
    proto.functions.append(
        onnx.helper.make_function("mine", "Act", ["a"], ["b"], [body], [onnx.helper.make_opsetid("", 20)])
    )
    proto.graph.node[1].domain, proto.graph.node[1].op_type = "mine", "Act"


def no_opset(proto):
    del proto.opset_import[:]


def opset(*versions):
    def change(proto):
        del proto.opset_import[:]
        proto.opset_import.extend(onnx.helper.make_opsetid("", v) for v in versions)

    return change


def input_shape(*lengths):
    def change(proto):
        proto.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("x", 11, lengths))

    return change


def input_kind(kind):
    def change(proto):
        proto.graph.input[0].type.tensor_type.elem_type = kind

    return change


def external(location, **entries):
    def change(proto):
        weight = initializer(proto, "W")
        onnx.external_data_helper.set_external_data(weight, location, **entries)
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL

    return change


def strings(proto):
    initializer(proto, "W").CopyFrom(onnx.helper.make_tensor("W", onnx.TensorProto.STRING, [4, 3], [b"0.5"] * 12))


def with_number(name, number):
    def change(proto):
        array = {"W": W, "B": B, "W2": W2}[name].copy()
        array.flat[1] = number
        initializer(proto, name).raw_data = array.tobytes()

    return change


def attribute(name, **value):
    def change(proto):
        proto.graph.node[0].attribute.append(onnx.helper.make_attribute(name, **value))

    return change


HUGE = 2**40
RELU = ("Relu", ["h"], ["y"])
BROKEN = {
    "no graph": (lambda p: p.ClearField("graph"), "it is not an ONNX file, or is damaged: it has no graph with nodes"),
    "no nodes": (lambda p: p.graph.ClearField("node"), "it has no graph with nodes"),
    "no opset": (no_opset, "it does not say which version of the ONNX operators"),
    "two opsets": (opset(13, 20), r"several versions of the ONNX operators: \[13, 20\]"),
    "an old opset": (opset(6), "it uses opset 6; accepted: 7 and later"),
    "missing initializers": (
        without_initializer,
        r"node 'n0' \(Gemm\).*its input 'W' is no input of the model, no initializer",
    ),
    "two initializers of a name": (twice("initializer"), "two initializers have the name 'W'"),
    "two nodes of an output": (twice("node"), r"'n0' \(Gemm\).*the tensor 'h' has the same name as that of node 'n0'"),
    "two inputs of a name": (twice("input"), "the input 'x' has a name that another tensor has, too"),
    "two outputs of a name": (twice("output"), "two outputs have the same name"),
    "a node that makes a weight": (
        nodes_of(("MatMul", ["x", "W"], ["W"]), W=W),
        "the tensor 'W' has the same name as that of an init",
    ),
    "no output": (
        lambda p: p.graph.ClearField("output"),
        "it has no output of real numbers; .* one of none, or any tensor",
    ),
    "an output that nobody makes": (lambda p: setattr(p.graph.output[0], "name", "z"), "no node makes the output 'z'"),
    "an unknown operator": (
        lambda p: setattr(p.graph.node[1], "op_type", "Reluu"),
        r"'n1' \(Reluu\), which makes tensor 'g': no MLP",
    ),
    "an operator without a name": (
        lambda p: setattr(p.graph.node[1], "op_type", ""),
        r"'n1' \(\).*no MLP is made of this",
    ),
    "an unknown domain": (
        lambda p: setattr(p.graph.node[1], "domain", "evil"),
        r"\(evil.Relu\).*its operator is not ONNX's own",
    ),
    "a function": (function, r"\(mine.Act\).*it calls a function in the model; see onnx.inliner"),
    "nodes in another order": (swapped, r"its input 'h' is made by node 'n0' \(Gemm\), which comes later"),
    "a cycle of one": (
        nodes_of(("Relu", ["y"], ["y"])),
        r"its input 'y' is made by node 'n0' \(Relu\), which comes later: .* cycle",
    ),
    "a cycle": (
        nodes_of(("Relu", ["b"], ["a"]), ("MatMul", ["a", "W"], ["b"]), ("Relu", ["b"], ["y"]), W=W),
        "has a cycle or is not",
    ),
    "a sparse initializer": (sparse, "tensor 'S' is a sparse initializer; accepted: dense ones"),
    "strings for weights": (strings, "tensor 'W' holds STRING; accepted: FLOAT, DOUBLE"),
    "weights of eight bits": (with_weight(data_type=17), "tensor 'W' holds FLOAT8E4M3FN; accepted"),
    "weights of an unknown type": (with_weight(data_type=999), "tensor 'W' holds the unknown type 999"),
    "weights of no type": (with_weight(data_type=0), "tensor 'W' holds UNDEFINED"),
    "complex weights": (with_weight(data_type=15), "tensor 'W' holds COMPLEX128"),
    "NaN": (with_number("W", np.nan), r"'n0' \(Gemm\).*its weight 'W' has numbers that are not finite"),
    "infinity": (with_number("B", -np.inf), r"'n0' \(Gemm\).*its input C has numbers that are not finite"),
    "infinity later": (with_number("W2", np.inf), r"\(MatMul\).*its weight 'W2' has numbers that are not finite"),
    "too few bytes": (
        with_weight(raw_data=W.tobytes()[:-5]),
        r"'W' has 91 bytes of data; float64 of the shape \[4, 3\] needs 96",
    ),
    "too many bytes": (with_weight(raw_data=W.tobytes() + b"x"), "'W' has 97 bytes of data"),
    "no bytes": (with_weight(raw_data=b""), "'W' has 0 bytes of data"),
    "no data": (
        lambda p: initializer(p, "W").ClearField("raw_data"),
        r"'W' has 0 numbers; the shape \[4, 3\] needs 12",
    ),
    "data of another field": (
        lambda p: initializer(p, "W").CopyFrom(onnx.helper.make_tensor("W", 1, [4, 3], [0.0] * 12)),
        "several dtypes",
    ),
    "another shape": (
        with_weight(dims=[3, 4]),
        r"input C, 'B', has the shape \[3\]; accepted: .* one for each of the 4 outputs",
    ),
    "a shape of one axis": (with_weight(dims=[12]), r"its weight 'W' has the shape \[12\]; accepted: a matrix"),
    "a negative length": (with_weight(dims=[-4, -3]), r"'W' has the shape \[-4, -3\], with a negative length"),
    "an absurd shape": (
        with_weight(dims=[HUGE, HUGE]),
        r"'W' has the shape \[1099511627776, 1099511627776\]; accepted: .* fit in memory",
    ),
    "a large shape": (with_weight(dims=[1 << 20, 1 << 20]), r"'W' has 96 bytes of data; .* needs 8,796,093,022,208"),
    "an absurd shape of no numbers": (
        with_weight(dims=[0, 2**62], raw_data=b""),
        "'W' has the shape .*; accepted: .* fit in memory",
    ),
    "many axes": (with_weight(dims=[1] * 70 + [4, 3]), "'W' has the shape .*; accepted: at most 8 axes"),
    "an input of strings": (input_kind(8), "it takes the model's input 'x'; accepted: a tensor of float32"),
    "a negative input": (input_shape(2, -4), r"the model's input 'x' has the shape \[2, -4\]"),
    "an input of no axes": (input_shape(), r"the model's input 'x' has the shape \[\]"),
    "a wide input": (input_shape("rows", HUGE), "takes 4 features, and the tensor before it has 1099511627776"),
    "an attribute twice": (
        lambda p: [attribute("alpha", value=2.0)(p), attribute("alpha", value=3.0)(p)],
        "the attribute 'alpha' twice",
    ),
    "an attribute of another type": (
        attribute("transB", value=1.0),
        "its attribute transB is of another type than 'i'",
    ),
    "a graph for an attribute": (attribute("body", value=good().graph), "its attribute 'body' is not known here"),
    "a constant of no value": (
        nodes_of(("Constant", [], ["W"]), ("MatMul", ["x", "W"], ["y"])),
        r"'n0' \(Constant\).*it has no value",
    ),
    "a constant that lies": (
        nodes_of(
            ("Constant", [], ["W"], {"value": onnx.TensorProto(dims=[HUGE, 3], data_type=11)}),
            ("MatMul", ["x", "W"], ["y"]),
        ),
        r"the value of node 'n0' \(Constant\) has 0 numbers; the shape",
    ),
    "a vast constant of a shape": (
        nodes_of(("ConstantOfShape", ["s"], ["W"]), ("MatMul", ["x", "W"], ["y"]), s=np.array([4, 1 << 33])),
        r"\(ConstantOfShape\).*it makes a constant of the shape \[4, 8589934592\], far larger than the file itself",
    ),
    "a negative constant of a shape": (
        nodes_of(("ConstantOfShape", ["s"], ["W"]), ("MatMul", ["x", "W"], ["y"]), s=np.array([4, -3])),
        r"its shape is \[4, -3\]; accepted",
    ),
    "a vast sum of constants": (
        nodes_of(
            ("Add", ["a", "b"], ["W"]), ("MatMul", ["x", "W"], ["y"]), a=np.ones((1 << 15, 1)), b=np.ones((1, 1 << 15))
        ),
        r"\(Add\).*it makes a constant of the shape \[32768, 32768\]",
    ),
    "many large constants": (
        nodes_of(
            *(("ConstantOfShape", ["s"], [f"c{i}"]) for i in range(50)),
            ("Concat", [f"c{i}" for i in range(8)], ["W"]),
            ("MatMul", ["x", "W"], ["y"]),
            s=np.array([4, 1 << 20]),
        ),
        "it makes a constant of the shape .*, far larger than the file itself",
    ),
    "constants that do not suit": (
        nodes_of(("Add", ["a", "b"], ["W"]), ("MatMul", ["x", "W"], ["y"]), a=np.ones(3), b=np.ones(4)),
        r"\(Add\).*it does not suit its constants, float64 \[3\], float64 \[4\]",
    ),
    "a bias for absurdly many outputs": (
        nodes_of(("Gemm", ["x", "W", "c"], ["y"]), W=np.zeros((0, 1 << 36)), c=np.array(1.0)),
        "takes 0 features|far larger than the file",
    ),
    "a permutation that is none": (
        nodes_of(("Transpose", ["W"], ["V"], {"perm": [0, 5]}), ("MatMul", ["x", "V"], ["y"]), W=W),
        "it does not suit its constants, float64",
    ),
    "functions of functions": (
        nodes_of(
            ("MatMul", ["x", "W"], ["t0"]),
            *(("Tanh", [f"t{i}"], [f"t{i + 1}"]) for i in range(20_000)),
            ("Relu", ["t20000"], ["y"]),
            W=W,
        ),
        r"\(Tanh\).*it makes more than an activation of its inputs \(functions of functions\)",
    ),
    "powers of powers": (
        nodes_of(
            ("MatMul", ["x", "W"], ["t0"]),
            *(("Mul", [f"t{i}", f"t{i}"], [f"t{i + 1}"]) for i in range(64)),
            ("Relu", ["t64"], ["y"]),
            W=W,
        ),
        r"\(Mul\).*more terms or factors than any activation has",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_a_clear_error(case):
    change, message = BROKEN[case]
    data = changed(change).SerializeToString()
    said = error_of(lambda: MLP.from_onnx(data), LARGE + 40 * len(data))
    assert re.search(message, said), said


def test_the_model_is_good_otherwise():
    assert MLP.from_onnx(good()).network.describe() == "4-3-2 float64, relu identity, bias in layer 1"


def test_long_chains_are_read():
    """Without recursion: of nodes that change nothing, of numbers, of layers."""
    n = 100_000
    nodes = [
        ("MatMul", ["x", "W"], ["t0"]),
        *(("Identity", [f"t{i}"], [f"t{i + 1}"]) for i in range(n)),
        ("Relu", [f"t{n}"], ["y"]),
    ]
    assert MLP.from_onnx(model(nodes, {"W": W}, dtype="float64")).network.activations == ("relu",)
    nodes = [
        ("MatMul", ["x", "W"], ["t0"]),
        *(("Add", [f"t{i}", "b"], [f"t{i + 1}"]) for i in range(n // 10)),
        ("Relu", [f"t{n // 10}"], ["y"]),
    ]
    assert np.allclose(MLP.from_onnx(model(nodes, {"W": W, "b": np.ones(3)}, dtype="float64")).biases[0], n // 10)
    square = np.array([[1.0]])
    nodes = [
        *(("MatMul", [f"t{i}" if i else "x", "W"], [f"t{i + 1}"]) for i in range(3000)),
        ("Relu", ["t3000"], ["y"]),
    ]
    assert MLP.from_onnx(model(nodes, {"W": square}, dtype="float64", x=("rows", 1))).network.depth == 3000


# --- Bytes that are no model -----------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.system, ("touch was-run",)


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(50 << 20))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no graph with nodes"),
        (b"\x00" * 100, "its 100 bytes are no protobuf message"),
        (b"hello, this is a text", "are no protobuf message"),
        (gzip.compress(bytes(50 << 20)), "it is gzip data, not an ONNX file"),
        (zipped(), "it is a zip archive, not an ONNX file"),
        (pickle.dumps(Evil()), "it is a pickle, not an ONNX file"),
        (b"\x3a\xff\xff\xff\xff\x07", "are no protobuf message"),  # a graph of 2 GiB, it says
        (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "are no protobuf message"),  # of 2^63
        (b"\x0b" * 10_000, "are no protobuf message"),  # groups in groups
        (b"\x08\x09\x3a\x05\x0a\x03\x22\x01\xff", "it is damaged: it does not say which version"),  # a text that is no UTF-8
    ],
    ids=["nothing", "zeros", "a text", "gzip", "zip", "pickle", "2 GiB", "2^63", "nested groups", "no UTF-8"],
)  # fmt: skip
def test_bytes_that_are_no_model(data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").write_bytes(data)
    for source in (data, tmp_path / "net.onnx"):
        assert message in error_of(lambda source=source: MLP.from_onnx(source))
    assert os.listdir(tmp_path) == ["net.onnx"]
    assert "'net.onnx' cannot be read as an MLP" in error_of(lambda: MLP.from_onnx("net.onnx"))


def test_what_is_no_source_of_a_model(tmp_path):
    with pytest.raises(
        TypeError, match=r"model is a int; accepted: the path of an ONNX file, its bytes, or an onnx.ModelProto"
    ):
        MLP.from_onnx(3)

    class Program:
        model_proto = None

    with pytest.raises(TypeError, match=r"Of a torch\.onnx\.ONNXProgram, pass its model_proto"):
        MLP.from_onnx(Program())
    with pytest.raises(FileNotFoundError):
        MLP.from_onnx(tmp_path / "nothing.onnx")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with open(tmp_path / "net.onnx", "wb") as file:
        file.truncate(3 << 30)  # a hole
    assert "it has 3,221,225,472 bytes; an ONNX file has at most 2,147,483,647" in error_of(
        lambda: MLP.from_onnx(tmp_path / "net.onnx")
    )


def test_a_file_cut_short_anywhere_is_a_clear_error():
    data = good().SerializeToString()
    for length in range(len(data)):
        with pytest.raises(ValueError, match="cannot be read as an MLP: it is "):
            MLP.from_onnx(data[:length])


def test_a_flipped_bit_is_an_error_or_another_network():
    """Numbers have no check sum in ONNX, so another weight goes unnoticed. Nothing else than a ValueError comes up."""
    data = good().SerializeToString()
    read = 0
    for at in range(len(data)):
        for bit in (1 << at % 8, 0xFF):
            flipped = bytearray(data)
            flipped[at] ^= bit
            try:
                net = MLP.from_onnx(flipped)
            except ValueError as error:
                if "cannot be read as an MLP" not in str(error):
                    raise
            else:
                read += 1
                assert all(np.isfinite(w).all() for w in net.weights)
    assert 0 < read < 2 * len(data)


# --- External data ------------------------------------------------------------------------------------------------------------


def saved(tmp_path, location, data=None, **entries):
    """A model in a folder of its own whose W is elsewhere, and the folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(W.tobytes())
    (folder / "net.onnx").write_bytes(changed(external(location, **entries)).SerializeToString())
    if data is not None:
        (folder / location).parent.mkdir(exist_ok=True)
        (folder / location).write_bytes(data)
    return folder / "net.onnx"


@pytest.mark.parametrize("location", ["weights.bin", "sub/weights.bin", "./weights.bin"])
def test_external_data_in_the_models_folder_is_read(tmp_path, location, monkeypatch):
    path = saved(tmp_path, location, b"before" + W.tobytes() + b"after", offset=6, length=96)
    assert np.array_equal(MLP.from_onnx(path).weights[0], W)
    monkeypatch.chdir(path.parent)
    assert np.array_equal(MLP.from_onnx("net.onnx").weights[0], W)
    assert "give the path of the model, not its bytes" in error_of(lambda: MLP.from_onnx(path.read_bytes()))


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../secret", "accepted: a relative path below the model's folder"),
        ("../../../../../../etc/passwd", "accepted: a relative path"),
        ("/etc/passwd", "accepted: a relative path"),
        ("sub/../../secret", "accepted: a relative path"),
        ("C:\\secret", "accepted: a relative path"),
        ("..\\secret", "accepted: a relative path"),
        ("", "accepted: a relative path"),
        ("secret\0", "accepted: a relative path"),
        ("nothing", "which cannot be read (No such file or directory)"),
        (".", "which is no regular file"),
        ("link", "which leads out of the model's folder"),
        ("folder-link/secret", "which leads out of the model's folder"),
        ("device", "which leads out of the model's folder"),
        ("pipe", "which is no regular file"),
        ("x" * 5000, "which cannot be read (File name too long)"),
    ],
)
def test_external_data_elsewhere_is_not_read(tmp_path, location, message):
    path = saved(tmp_path, location)
    (path.parent / "link").symlink_to(tmp_path / "secret")
    (path.parent / "folder-link").symlink_to(tmp_path)
    (path.parent / "device").symlink_to("/dev/zero")
    os.mkfifo(path.parent / "pipe")
    said = error_of(lambda: MLP.from_onnx(path))
    assert "tensor 'W' keeps its data in the file" in said
    assert message in said
    assert len(said) < 500


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": 1, "length": 96}, "of 96 bytes: 96 from 1 on; its shape needs 96"),
        ({"offset": -1, "length": 96}, "96 from -1 on"),
        ({"offset": 0, "length": 2**62}, "4,611,686,018,427,387,904 from 0 on; its shape needs 96"),
        ({"offset": 2**70, "length": 96}, "its shape needs 96"),
        ({"offset": 0, "length": 95}, "95 from 0 on"),
    ],
)
def test_external_data_that_is_not_there(tmp_path, entries, message):
    assert message in error_of(lambda: MLP.from_onnx(saved(tmp_path, "weights.bin", W.tobytes(), **entries)))


def test_external_data_with_an_offset_that_is_none(tmp_path):
    path = saved(tmp_path, "weights.bin", W.tobytes())
    proto = onnx.load(path, load_external_data=False)
    entry = initializer(proto, "W").external_data.add()
    entry.key, entry.value = "offset", "1e3"
    path.write_bytes(proto.SerializeToString())
    assert "with an offset or a length that is no number" in error_of(lambda: MLP.from_onnx(path))


def test_names_that_are_no_text(tmp_path):
    """They are names all the same, and shown as bytes where they are wrong."""
    data = good().SerializeToString()
    assert MLP.from_onnx(data.replace(b"W2", b"\xff\xfe")).network.sizes == (4, 3, 2)
    assert r"(\xff\xff\xff\xff), which makes tensor 'g': no MLP" in error_of(
        lambda: MLP.from_onnx(data.replace(b"Relu", b"\xff" * 4))
    )
    path = saved(tmp_path, "weights.bin", W.tobytes())
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"weights.\xff\xff\xff"))
    assert r"keeps its data in the file b'weights.\xff\xff\xff', which is no text" in error_of(
        lambda: MLP.from_onnx(path)
    )


def test_external_data_of_an_absurd_shape(tmp_path):
    path = saved(tmp_path, "weights.bin", W.tobytes())
    proto = onnx.load(path, load_external_data=False)
    initializer(proto, "W").dims[:] = [1 << 20, 1 << 20]
    path.write_bytes(proto.SerializeToString())
    assert "of 96 bytes: 8,796,093,022,208 from 0 on" in error_of(lambda: MLP.from_onnx(path))


def test_a_constant_of_a_node_can_be_external_too(tmp_path):
    """And is held to the same rules."""
    value = tensor("", W)
    onnx.external_data_helper.set_external_data(value, "../secret")
    value.ClearField("raw_data")
    value.data_location = onnx.TensorProto.EXTERNAL
    proto = model([("Constant", [], ["W"], {"value": value}), ("MatMul", ["x", "W"], ["y"])], {}, dtype="float64")
    (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
    assert "keeps its data in the file '../secret'; accepted: a relative path" in error_of(
        lambda: MLP.from_onnx(tmp_path / "net.onnx")
    )
