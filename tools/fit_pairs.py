"""Fit the numbers of coefficients.py: two steps of Newton-Schulz as one polynomial that takes four products in place of
five.

    make build && python tools/fit_pairs.py polar_express jordan

Prints an entry for the last two steps of each interval of a set, but for the first two of all. With t = A / m on [0,
1], the last product's numbers are linear in Q(t); the seven others are found by Levenberg-Marquardt from one known
solution and random neighbours of it, for the smallest relative error, then with weights that grow where the error is
large. Five seconds a pair.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
from pathlib import Path

import numpy as np
from kernels import get_kernel

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

# p, d; e, f; g, h, i of a pair of `polar_express`: S = t^2 + p t + d, C = t S + e t + f S, H = C^2 + g t + h S + i
START = np.array([-1.5003564, 0.4004510, 0.1344323, -0.3225153, -0.0125362, -0.0258167, 0.0040003])
MARGIN = 1.03  # of the range of A: rounding leaves it
TRIES, GOOD = 60, 2.0  # neighbours; those are refined whose error is at most so many times the smallest
ROUNDS, POWER = 40, 0.5  # of weights, and how fast they grow
FAR = 100.0  # no number is larger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", help="names of coefficient sets")
    parser.add_argument("--steps", type=int, nargs="+", default=[5], help="ns_steps, of sets of any length")
    options = parser.parse_args()
    steps = importlib.import_module(f"{get_kernel('org/optimizer', version=1).__name__}.newton_schulz.coefficients")
    if unknown := [name for name in options.sets if name not in steps.SETS]:
        parser.error(f"no sets: {', '.join(unknown)}; there are {', '.join(steps.SETS)}")
    for name in options.sets:
        known = {}
        for count in options.steps if name in steps.ANY_LENGTH else [len(steps.SETS[name])]:
            for at, first, second, largest in sorted(pairs_of(steps.steps_of(name, count))):
                if at not in known:
                    known[at] = fit(first, second, MARGIN * largest**2)
                    print(f"{name} {at}: Pair{known[at][1]},  # {known[at][0]:.1e}", flush=True)


def pairs_of(steps):
    """(Index, triple, next triple, largest singular value before them) of the last two steps of each interval, as large
    and as small matrices are cut.
    """
    for intervals in (steps.intervals(), steps.intervals(n=1)):
        values, at = np.linspace(0, 1, 1 << 20), 0
        for interval in intervals:
            for number, (a, b, c) in enumerate(interval):
                if number == len(interval) - 2 and c and at:
                    yield at, interval[-2], interval[-1], values.max()
                values, at = a * values + b * values**3 + c * values**5, at + 1


def fit(first, second, m: float):
    """(Largest relative error on [0, m], numbers of a `Pair`)."""
    t = np.unique(np.concatenate([(1 - np.cos(np.linspace(0, np.pi, 240))) / 2, np.logspace(-4, -1, 60)]))
    P = polynomial(first, m * t)
    Q = P * polynomial(second, m * t * P * P)
    random, found = np.random.default_rng(0), []
    for number in range(TRIES):
        x = START * (1 + (number > 0) * 0.3 * random.normal(size=len(START)))
        found.append(minimize(x, t, Q, 1 / Q))
    best = min(np.abs(residuals(x, t, Q, 1 / Q)[0]).max() for x in found)
    good = [x for x in found if np.abs(residuals(x, t, Q, 1 / Q)[0]).max() < GOOD * best]
    x = min((evened(x, t, Q) for x in good[:4]), key=lambda x: np.abs(residuals(x, t, Q, 1 / Q)[0]).max())
    error, last = residuals(x, t, Q, 1 / Q)
    return np.abs(error).max(), device_scalars(x, last, t, m)


def polynomial(triple, t):
    return triple[0] + triple[1] * t + triple[2] * t * t


def residuals(x, t, Q, weights):
    """(Weighted residuals with the best numbers of the last product, these numbers)."""
    _, S, C, H = powers(x, t)
    columns = np.stack([H * H, S, C, np.ones_like(t)], axis=1) * weights[:, None]
    sizes = np.abs(columns).max(axis=0)
    last = np.linalg.lstsq(columns / sizes, Q * weights, rcond=1e-13)[0] / sizes
    return columns @ last - Q * weights, last


def powers(x, t):
    p, d, e, f, g, h, i = x
    S = t * t + p * t + d
    C = t * S + e * t + f * S
    return t, S, C, C * C + g * t + h * S + i


def minimize(x, t, Q, weights, rounds=100):
    """Levenberg-Marquardt with differences for derivatives."""
    damping, value = 1e-3, residuals(x, t, Q, weights)[0]
    for _ in range(rounds):
        steps = 1e-7 * (np.abs(x) + 1e-3)
        slopes = np.stack([(residuals(x + step, t, Q, weights)[0] - value) / step.sum() for step in np.diag(steps)], 1)
        sizes = np.linalg.norm(slopes, axis=0) + 1e-300
        for _ in range(8):
            rows = np.concatenate([slopes / sizes, damping * np.eye(len(x))])
            move = np.linalg.lstsq(rows, np.concatenate([value, 0 * x]), rcond=None)[0] / sizes
            tried = residuals(x - move, t, Q, weights)[0] if np.abs(x - move).max() < FAR else None
            if tried is not None and tried @ tried < value @ value:
                x, value, damping = x - move, tried, damping / 5
                break
            damping *= 5
        else:
            break
    return x


def evened(x, t, Q):
    """Toward the smallest largest error: weights grow where the error is large."""
    weights, best, least = 1 / Q, x, np.inf
    for _ in range(ROUNDS):
        x = minimize(x, t, Q, weights, rounds=15)
        error = np.abs(residuals(x, t, Q, 1 / Q)[0])
        if error.max() < least:
            best, least = x, error.max()
        weights = weights * (1 + error / error.max()) ** POWER
    return best


def device_scalars(x, last, t, m):
    """Without the constants of S and C, which next to small t would cost digits; S and C up to 1; H such that Q = H^2 +
    ...; of A in place of t.
    """
    (p, d, e, f, g, h, i), (square, j, k, rest) = map(np.asarray, (x, last))
    S, v = t * t + p * t, f * d
    C = t * S + (e + d) * t + f * S
    s, c, root = 1 / np.abs(S).max(), 1 / np.abs(C).max(), math.sqrt(square)
    return tuple(tuple(float(f"{number:.9g}") for number in numbers) for numbers in (
        (s / m**2, s * p / m), (c / (s * m), c * (e + d) / m, c * f / s),
        (root / c**2, root * g / m, root * h / s, root * 2 * v / c, root * (i + v * v + h * d)),
        (j / s, k / c, rest + j * d + k * v)))


if __name__ == "__main__":
    main()
