"""exp, sigmoid, softplus of cpu/vector_math.h: accuracy against float64, specials, independence of place."""

import ctypes
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from deepinfer.kernels import native

PROBE = """
#include "vector_math.h"

using namespace deepinfer;

template <class Function>
static void each(const float* x, int64_t count, float* y, Function function) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_part(function(load_part(x + i, count - i)), y + i, count - i);
  }
}

#pragma GCC visibility push(default)
extern "C" {
void probe_exp(const float* x, int64_t n, float* y) { each(x, n, y, [](Lanes v) { return exp(v); }); }
void probe_sigmoid(const float* x, int64_t n, float* y) {
  each(x, n, y, [](Lanes v) { return sigmoid(v); });
}
void probe_softplus(const float* x, int64_t n, float* y) {
  each(x, n, y, [](Lanes v) { return softplus(v); });
}
void probe_exp_one(const float* x, int64_t n, float* y) { while (n--) *y++ = exp_one(*x++); }
void probe_sigmoid_one(const float* x, int64_t n, float* y) { while (n--) *y++ = sigmoid_one(*x++); }
}
"""
Probe = Callable[[str, np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> Probe:
    """Apply a function of the header to an array, compiled as the library is."""
    folder = tmp_path_factory.mktemp("vector-math")
    (folder / "probe.cpp").write_text(PROBE)
    march = native.ISA_LEVELS[native.host_isa()][0]
    command = ["g++", *native.COMPILE_FLAGS, f"-march={march}", f"-I{native.SOURCE_DIR}", "-shared"]
    subprocess.run([*command, "-o", str(folder / "probe.so"), str(folder / "probe.cpp")], check=True)
    library = ctypes.CDLL(str(folder / "probe.so"))

    def apply(name: str, x: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(x, np.float32)
        y = np.empty_like(x)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, y)]
        getattr(library, f"probe_{name}")(pointers[0], ctypes.c_int64(len(x)), pointers[1])
        return y

    return apply


def exact(name: str, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if name == "exp":
        return np.exp(x)
    if name == "sigmoid":
        return 1 / (1 + np.exp(-x))
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def samples(low: float, high: float) -> np.ndarray:
    """Evenly over the range, and around zero at every scale."""
    rng = np.random.default_rng(0)
    even = rng.uniform(low, high, 200_000)
    small = rng.choice([-1, 1], 50_000) * 10.0 ** rng.uniform(-30, 1, 50_000)
    return np.concatenate((even, small)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "low", "high", "ulps"),
    [("exp", -87, 88.7, 2.0), ("sigmoid", -85, 88, 4.0), ("softplus", -85, 100, 4.0)],
)
def test_accurate_to_a_few_units_in_the_last_place(probe, name, low, high, ulps):
    x = samples(low, high)
    want = exact(name, x)
    error = np.abs(probe(name, x).astype(np.float64) - want) / np.spacing(want.astype(np.float32))
    assert error.max() <= ulps, x[error.argmax()]


@pytest.mark.parametrize("name", ["exp", "sigmoid", "softplus"])
def test_a_value_does_not_depend_on_its_place(probe, name):
    x = samples(-100, 100)[::1250]
    x[::20] = np.resize(np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 88.8, -90, 3e38]), 10)
    alone = np.concatenate([probe(name, x[i : i + 1]) for i in range(len(x))])
    for start in range(17):
        for count in (*range(1, 34), len(x) - start):
            part = probe(name, x[start : start + count])
            assert (part.view(np.int32) == alone[start : start + count].view(np.int32)).all()


@pytest.mark.parametrize("name", ["exp", "sigmoid"])
def test_one_value_at_a_time_gives_the_same_bits(probe, name):
    x = samples(-100, 100)[::100]
    assert (probe(f"{name}_one", x).view(np.int32) == probe(name, x).view(np.int32)).all()


def test_special_values(probe):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1000, -1000], np.float32)
    assert np.isnan(probe("exp", x)[0])
    assert probe("exp", x)[1:].tolist() == [np.inf, 0, 1, 1, np.inf, 0]
    assert np.isnan(probe("sigmoid", x)[0])
    assert probe("sigmoid", x)[1:].tolist() == [1, 0, 0.5, 0.5, 1, 0]
    assert np.isnan(probe("softplus", x)[0])
    want = np.float32(np.log(2.0))
    assert probe("softplus", x)[1:].tolist() == [np.inf, 0, want, want, 1000, 0]
