"""Two steps as one polynomial in A, of degree 12: four products of n x n in place of five.

Two steps, Q = P2(B) P1 with B = P1 A P1, take A^2, A P1, (A P1) P1, B^2 and P2(B) P1. By degree four would do, and the
sum of a square and of what is at hand comes near Q: S = A^2 + ..., C = A S + ..., H = C^2 + ..., Q = H^2 + ..., where
... are multiples of A, S, C and I. The numbers, fitted by tools/fit_pairs.py, give Q to less than what fp16 rounds
away, for values that A may have at this place of its set. The first two steps have none: of so small an A the square is
lost to rounding.

Decides: which steps are taken together. Must not know: how a product is computed, nor where matrices lie.
"""
from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """The factors of each product, of its addends in the order A, S, C, and of I, if it has that."""

    S: tuple[float, float]  # A A, A
    C: tuple[float, float, float]  # A S, A, S
    H: tuple[float, float, float, float, float]  # C C, A, S, C, I
    Q: tuple[float, float, float]  # S, C, I; that of H H is 1


JORDAN = Pair((0.598923969, -1.54780642), (1.33875617, 1.67397696, -0.465356319),
              (13.0330836, -2.83023773, -4.09826998, -15.5234775, 3.04269224), (-2.00700166, -4.11949379, 2.6062715))

# The fourth and fifth step of nanochat's triples, 3.7e-4: the divisor of the norm does not change the range that A has
# there. The second and third step have no pair: its error would be 1.4e-3.
NANOCHAT = Pair((0.165460584, -0.813536952), (0.565342165, 0.542160403, -0.822663684),
                (10.8447924, -0.737644894, -2.74387177, -12.4578859, 2.35967698),
                (0.720822965, -1.14333639, 2.14073821))

# Set -> index of the first of two steps -> pair. The largest relative error of Q is beside it (test_pairs.py).
PAIRS: dict[str, dict[int, Pair]] = {
    "polar_express": {
        1: Pair((0.106289081, -0.652044041), (0.704174304, 0.669932001, -0.924596087),  # 6.3e-4
                (13.9816065, -1.12013961, -5.30125738, -18.4358236, 3.7678923),
                (-0.581943756, -0.817612252, 0.50921521)),
        2: Pair((0.131492116, -0.72524119), (0.615164641, 0.529175985, -1.07127331),  # 4.9e-4
                (11.8734149, -0.774332966, -3.83324826, -15.6538119, 3.28746025),
                (0.233990008, -0.612255583, 1.07558059)),
        3: Pair((0.151031312, -0.777256353), (0.575097711, 0.553056223, -0.899099409),  # 1.5e-4
                (7.65761481, -0.668713475, -2.32535226, -9.65414489, 2.21446522),
                (0.743211776, -0.905487909, 2.02043602)),
        4: Pair((0.318631063, -1.12894899), (0.316366038, 0.460110784, -0.607342881),  # 8e-7
                (3.31182606, -0.459152568, -0.508858199, -3.94303707, 1.43186248),
                (0.314369032, -1.00924709, 1.89645862)),
        5: Pair((0.334602767, -1.20414845), (0.439329264, 0.769224713, -0.571051299),  # 5e-8
                (1.25422984, -0.306790706, -0.0982375506, -2.02066567, 1.30318614),
                (0.216980289, -0.640812315, 1.67902976)),
        6: Pair((2.34269679, -3.06117448), (0.0869952457, 0.704170778, -0.498441915),  # 4e-7
                (0.575126067, -0.383307985, 0.168134522, -1.1676031, 1.2914393),
                (-0.299549291, -1.10123352, 1.84780873))},
    "polar_express_nanochat": {3: NANOCHAT},
    "polar_express_dion": {3: NANOCHAT},
    "polar_express_modded_nanogpt": {3: NANOCHAT},
    "cans": {
        3: Pair((0.169788468, -0.824110649), (0.551946851, 0.534807042, -0.807212223),  # 3.0e-4; 1 spoils values near 1
                (9.92550141, -0.715036496, -2.44801327, -11.3101407, 2.24170512),
                (0.749754428, -1.11913383, 2.15634575))},
    "quintic": {
        1: Pair((0.600104068, -1.54933671), (1.74670221, 1.80974949, -0.704495919),  # 7.4e-4
                (15.5575845, -3.21170031, -5.71384057, -19.1802996, 3.64269353),
                (-0.259217657, -1.41679544, 1.50878582)),
        3: Pair((0.385351343, -1.24155132), (1.07409078, 1.58737128, -0.177571671),  # 2.2e-4
                (9.01992925, -1.78121584, -1.23572571, -9.12882367, 2.29180252),
                (-0.74576963, -3.1157132, 2.90725846))},
    "turbo": {
        2: Pair((0.256801533, -1.01351559), (0.547901863, 0.555284569, -0.714323151),  # 1.9e-4
                (10.2467693, -0.774373462, -2.01063105, -10.7805421, 2.0720353),
                (0.736525707, -1.43260339, 2.43325022))},
    "aol": {
        2: Pair((0.557424806, -1.49444395), (1.13187795, 1.62751319, -0.362515035),  # 3.9e-5
                (6.38286477, -1.26399791, -0.599217684, -7.16145862, 2.1367241),
                (-0.264983989, -2.44158719, 2.93823562))},
    "jordan": {1: JORDAN},  # 5.7e-5
    "deepseek_v4": {
        **dict.fromkeys(range(1, 7), JORDAN),
        8: Pair((2.34214936, -3.06082623), (0.143541039, 0.737925932, -0.369215227),  # 1.2e-6
                (1.16944596, 1.04140385, 0.174542147, -2.57459275, 1.58228958),
                (-1.45702836, -3.12916125, 1.49636263))},
}

