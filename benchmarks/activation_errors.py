"""How far activations are from the exact functions, in ulp: what the constants of cupymlp/activations.py rest on.

    python benchmarks/activation_errors.py cpu benchmarks/activation-errors-cpu.json
    python benchmarks/activation_errors.py cuda benchmarks/activation-errors-h200.json

Each activation runs as a network of one feature, one layer and the weight 1, so that its sum is x itself. Exact values are
mpmath's, to 40 digits; of float32, float16 and bfloat16 networks, where points are many, those of float64 NumPy, which the
line "float64 reference" holds to mpmath's. An ulp is the distance between neighbouring numbers of the dtype around the exact
value. Where terms cancel (gelu below -3, say) that says little, so the error is given in units of the proven bound, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
from mpmath import mp, mpf
from numpy.typing import NDArray

import cupymlp
from cupymlp._formats import FORMATS
from cupymlp.activations import ACTIVATIONS, ActivationSpec, parameter_of, spec_text
from cupymlp.bench.report import write_json
from cupymlp.cli import _git_commit
from cupymlp.network import DTYPES, numpy_dtype
from cupymlp.reference import error_in_bounds, forward_and_bound

Exact = Callable[[Any, Any], Any]  # of v and the parameter, numbers of mpmath

SPECS: tuple[ActivationSpec, ...] = tuple(
    spec
    for row in ACTIVATIONS.values()
    if not row.over_row
    for spec in ([row.name] if row.parameter is None else [(row.name, p) for p in (row.parameter.default, 0.1, 30.0)])
)
FEW, MANY = 3000, 30_000


def _sigmoid(v: Any) -> Any:
    return 1 / (1 + mpmath.exp(-v))


def _hard_sigmoid(v: Any) -> Any:
    return max(mpf(0), min(mpf(1), v / 6 + mpf(1) / 2))


def _selu(v: Any, _: Any) -> Any:
    scale, alpha = mpf("1.0507009873554804934193349852946"), mpf("1.6732632423543772848170429916717")
    return scale * (v if v > 0 else alpha * mpmath.expm1(v))


def _gelu_tanh(v: Any, _: Any) -> Any:
    # (1 + tanh t) / 2 is 1 / (1 + e^(-2t)), which does not cancel.
    return v * _sigmoid(2 * mpmath.sqrt(2 / mp.pi) * (v + mpf("0.044715") * v**3))


EXACT: dict[str, Exact] = {
    "identity": lambda v, _: v,
    "relu": lambda v, _: max(v, mpf(0)),
    "leaky_relu": lambda v, slope: v if v >= 0 else slope * v,
    "elu": lambda v, alpha: v if v > 0 else alpha * mpmath.expm1(v),
    "celu": lambda v, alpha: v if v > 0 else alpha * mpmath.expm1(v / alpha),
    "selu": _selu,
    "gelu": lambda v, _: v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda v, _: v * _sigmoid(v),
    "tanh": lambda v, _: mpmath.tanh(v),
    "sigmoid": lambda v, _: _sigmoid(v),
    "softplus": lambda v, _: max(v, mpf(0)) + mpmath.log1p(mpmath.exp(-abs(v))),
    "softsign": lambda v, _: v / (1 + abs(v)),
    "sin": lambda v, omega: mpmath.sin(omega * v),
    "exp": lambda v, _: mpmath.exp(v),
    "hard_sigmoid": lambda v, _: _hard_sigmoid(v),
    "hard_swish": lambda v, _: v * _hard_sigmoid(v),
    "relu6": lambda v, _: min(max(v, mpf(0)), mpf(6)),
    "squareplus": lambda v, _: (v + mpmath.sqrt(v * v + 4)) / 2 if v > 0 else 2 / (mpmath.sqrt(v * v + 4) - v),
}


def points(count: int, dtype: str, seed: int = 0) -> NDArray[Any]:
    """Numbers of every size from 2^-24 to 2^8, and some larger, of both signs."""
    rng = np.random.default_rng(seed)
    sizes = np.concatenate([np.exp2(rng.uniform(-24, 8, count - count // 8)), np.exp2(rng.uniform(8, 14, count // 8))])
    numbers: NDArray[Any] = (sizes * rng.choice([-1.0, 1.0], count)).astype(numpy_dtype(dtype))
    return numbers


def exact_values(spec: ActivationSpec, v: NDArray[Any], dtype: str) -> list[Any]:
    """The function of v, a network's sums, with its parameter as arithmetic of that dtype has it."""
    name = spec if isinstance(spec, str) else spec[0]
    parameter = mpf(parameter_of(spec, dtype))
    with mp.workdps(40):
        return [EXACT[name](mpf(float(x)), parameter) for x in v]


def ulps(y: NDArray[Any], exact: list[Any], dtype: str) -> NDArray[np.float64]:
    """Errors in ulp of the exact value; 0 where that overflows, or is so small that an intermediate number may be flushed."""
    form = FORMATS[dtype]
    found = np.zeros(len(exact))
    with mp.workdps(40):
        for i, (value, of) in enumerate(zip(y.astype(np.float64), exact, strict=True)):
            if np.isfinite(value) and 512 * form.normal < abs(of) < form.most:
                exponent = int(mpmath.frexp(of)[1])
                found[i] = abs(mpf(float(value)) - of) / mpf(2) ** (exponent - form.p)
    return found


def in_units(y: NDArray[Any], exact: list[Any], bound: NDArray[np.float64]) -> float:
    """The largest error in units of the bound, where there is one that is neither 0 nor infinite."""
    with mp.workdps(40):
        return max(
            (
                float(abs(mpf(float(value)) - of) / mpf(float(most)))
                for value, of, most in zip(y, exact, bound, strict=True)
                if 0 < most < np.inf
            ),
            default=0.0,
        )


def network(spec: ActivationSpec, dtype: str) -> cupymlp.MLP:
    """One feature, whose activation is taken."""
    return cupymlp.MLP([np.ones((1, 1))], out_activation=spec, dtype=dtype)


def measure(spec: ActivationSpec, dtype: str, device: Any, count: int) -> dict[str, Any]:
    """The worst errors of a network of this dtype."""
    net, x = network(spec, dtype), points(count, dtype)
    y = net(x[:, None], device=device)[:, 0]
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, x[:, None])
    exact = exact_values(spec, x, "float64") if dtype == "float64" else reference[:, 0].tolist()
    errors = ulps(y, exact, dtype)
    if dtype == "float64":  # where the reference is no more exact than what is measured
        in_bounds = in_units(y, exact, bound[:, 0])
    else:
        in_bounds = float(error_in_bounds(y[:, None], reference, bound).max())
    worst = int(np.argmax(errors))
    near = np.abs(x.astype(np.float64)) <= 1
    return {
        "max ulp": float(errors[worst]),
        "at": float(x[worst]),
        "max ulp for |v| <= 1": float(errors[near].max()),
        "max in bounds": in_bounds,
    }


def measure_reference(spec: ActivationSpec, count: int) -> dict[str, Any]:
    """The worst errors of float64 NumPy, as the reference uses it."""
    x = points(count, "float64", seed=1)
    net = network(spec, "float64")
    y, bound = forward_and_bound(net.network, net.weights, net.biases, x[:, None])
    exact = exact_values(spec, x, "float64")
    errors = ulps(y[:, 0], exact, "float64")
    worst = int(np.argmax(errors))
    return {
        "max ulp": float(errors[worst]),
        "at": float(x[worst]),
        "max in bounds": in_units(y[:, 0], exact, bound[:, 0]),
    }


def main(arguments: list[str]) -> None:
    """Measure everything, print a table and write a file."""
    if len(arguments) != 2 or arguments[0] not in ("cpu", "cuda"):
        raise SystemExit(__doc__)
    device, path = arguments
    rows: list[dict[str, Any]] = []
    for spec in SPECS:
        found = {"float64 reference": measure_reference(spec, FEW)}
        found |= {dtype: measure(spec, dtype, device, FEW if dtype == "float64" else MANY) for dtype in DTYPES}
        rows += [{"activation": spec_text(spec), "computed": kind, **numbers} for kind, numbers in found.items()]
        print(
            spec_text(spec).ljust(18),
            *(f"{k} {n['max ulp']:.3g} ({n['max in bounds']:.2g})  " for k, n in found.items()),
        )
    worst = max(row["max in bounds"] for row in rows)
    write_json(path, rows, f"on {device}, every error within {worst:.2g} of its bound", _git_commit())


if __name__ == "__main__":
    main(sys.argv[1:])
