"""Launch choice: tables that fit their architecture, the nearest entry, and which path a device takes."""
from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import paths
from tests.ranks import THOROUGH

ROOT = Path(__file__).resolve().parent.parent
SHARED_BYTES = {"sm80": 166912, "sm90": 232448, "sm100": 232448, "gfx942": 65536,
                "sm86": 101376}  # a program's most, by the vendors
every_table = pytest.mark.parametrize("arch", [arch for arch in SHARED_BYTES if arch != "sm86"])


@pytest.fixture
def tiles(part):
    return part("kernels.launch.tile_config")


def nearest(tiles, op, rows, columns, arch, itemsize=2):
    return tiles._best(op, itemsize, rows, columns, 1, arch)


@every_table
def test_tables_are_whole(tiles, arch):
    table = tiles.table(arch)
    assert table["arch"] == arch and set(table["measured"]) <= {2, 4}
    assert {(e["op"], e["bytes"]) for e in table["entries"]} == {
        (op, size) for op in ("gram", "symmetric", "product") for size in (2, 4)}
    for entry in table["entries"]:
        rows, columns, inner = entry["tile"]
        assert all(x >= 16 and x & (x - 1) == 0 for x in entry["tile"])
        square = rows == columns or columns == 2 * rows and entry.get("loop", "pointers") != "pointers"
        assert entry["op"] == "product" or square, "a symmetric result needs square tiles"
        assert entry["stages"] * inner * (rows + columns) * entry["bytes"] <= SHARED_BYTES[arch]


@pytest.mark.parametrize("archs", ["sm90", "sm80 sm86 sm100 gfx942"])
@pytest.mark.parametrize("sizes", ["even", "uneven"])
def test_every_kernel_compiles(tmp_path, sizes, archs):
    """For GPUs that are not here, and within their shared memory; the compiler itself needs none. Two processes, which
    take about as long as each other. The others share a cache: of two with the same code, what they launch alike is
    compiled once.
    """
    archs = archs.split()
    if archs != ["sm90"] and not THOROUGH:
        archs = [arch for arch in archs if arch not in ("sm86", "sm100")]  # in the workflow test.yml
    if reason := paths.why_no_triton():
        pytest.skip(reason)
    usual = importlib.metadata.version("triton").startswith("3.6.")  # others have a job of their own in the workflow
    if sizes == "uneven" and usual:
        pytest.skip("with Triton 3.6 GPUs have run these; an assertion of 3.7.1's LLVM ended the process")
    environment = paths.compiler_environment(tmp_path)
    if archs != ["sm90"] and not THOROUGH:
        environment["DISABLE_LLVM_OPT"] = "1"  # no assembler reads the text, and it takes half as long
    command = [sys.executable, "-m", "tests.compile_kernels", f"--{sizes}", *["--few"] * (usual and not THOROUGH),
               *(f"{arch}={SHARED_BYTES[arch]}" for arch in archs)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = list(map(json.loads, done.stdout.splitlines()))
    assert [found["arch"] for found in compiled] == archs
    for found in compiled:
        arch, products, others = found["arch"], found["products"], found["others"]
        assert len(products) >= 3 and len(others) >= 30
        assert max([entry["shared_bytes"] for entry in products] + others) <= SHARED_BYTES[arch], arch
        if (arch, sizes) == ("sm90", "even"):  # rows of a multiple of 8 or 4 elements are read in one piece, too
            at_once = found["cast_bytes"]
            assert at_once.items() >= {"4": 8, "8": 16, "16": 16}.items() and at_once["1"] < 8
            by_tma = "one_tile_kernel pingpong_kernel cooperative_kernel mixed_input_kernel _tma_kernel".split()
            early = by_tma + "gram_chain_kernel _cast_kernel _norm_kernel _raw_norm_kernel".split()
            assert all(map(found["waits"].get, early)), "launched programmatically, and does not wait"
            assert found["reads_first"]["gram_chain_kernel"], "the next kernel would hold processors all the time"
            assert set(found["serialized"]) == {"hasty_kernel"}, "products wait for each other"
            if usual:  # others spill more
                spilled, most = found["spilled"], {"_polar_kernel": 160}
                known = [*by_tma, "gram_chain_kernel", *most]
                assert all(spilled[name] <= most.get(name, 0) for name in known), "it comes back from L2"


def test_the_nearest_entry_is_taken_in_powers_of_two(tiles):
    def entry(rows, columns):
        return {"op": "gram", "bytes": 2, "rows": rows, "columns": columns, "tile": [rows, rows, 16], "group": 1,
                "stages": 1, "warps": 4}

    made = {"measured": False, "entries": [entry(64, 64), entry(64, 512), entry(512, 512)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "table", lambda arch: made)
        choose = tiles._best.__wrapped__
        assert choose("gram", 2, 60, 70, 1, "x").rows == 64
        assert choose("gram", 2, 300, 300, 1, "x").rows == 512
        assert choose("gram", 2, 100000, 600, 1, "x").rows == 512
        assert choose("gram", 2, 0, 0, 1, "x").rows == 64


def test_relatives_have_a_table_that_fits_them(tiles):
    """By the vendors: 99 KiB for a program on sm86, sm89 and sm12x, 64 on gfx90a, of the others more than on theirs."""
    for arch, relative in tiles.RELATIVES.items():
        table = tiles.table(arch)
        assert table == tiles.table(relative) and table["entries"] and table["measured"] == []
        if relative == "sm80":
            assert max(e["stages"] * e["tile"][2] * sum(e["tile"][:2]) * e["bytes"] for e in table["entries"]) <= 101376


def test_an_unknown_architecture_or_size_gets_the_default(tiles):
    assert nearest(tiles, "gram", 64, 64, "sm75") == tiles.DEFAULT
    assert nearest(tiles, "product", 64, 64, "cpu", 4) == tiles.DEFAULT_FP32


def test_a_measured_table_counts_turns(tiles):
    """A small tile for few matrices, a large one where all processors are busy with it."""
    small, large = (tiles._best("symmetric", 2, 768, 768, n, "sm90") for n in (1, 64))
    assert small.rows < large.rows


def test_an_entry_for_a_gpu_is_taken_there_alone(tiles):
    best = functools.partial(tiles._best, "gram", 2, 4096, 4096, 4)
    assert best("sm90 NVIDIA H100 80GB HBM3").loop == best("sm90 NVIDIA H200").loop == "cooperative"
    assert best("sm90 NVIDIA H20") == best("sm90") and best("sm90").loop != "cooperative"


def test_the_expected_time_is_that_of_the_busiest_processor(tiles):
    entry = {"op": "gram", "tile": [64, 64, 32], "us": [100.0, 10.0, 1.0, 0.0]}
    # 128 rows: 3 tiles of the lower triangle; 96 columns: 3 steps; 2 matrices on 4 processors: 2 turns
    assert tiles.expected_us(entry, 128, 96, 2, 4) == 100 + 2 * 10 + 2 * 3 * 1
    entry.update(op="product", us=[0.0, 0.0, 0.0, 1.0])  # 2 x 2 tiles, 4 steps, 8 tiles over 4 processors
    assert tiles.expected_us(entry, 128, 96, 2, 4) == 4 * 2
    entry.update(resident=2, us=[0.0, 1.0, 0.0, 0.0])  # 8 tiles, 2 on each of 4 processors at a time; then 12 of 3
    assert [tiles.expected_us(entry, 128, 96, matrices, 4) for matrices in (2, 3)] == [1, 2]


@pytest.mark.parametrize("loop, wide", [("pingpong", False), ("cooperative", False), ("flat", True)])
def test_a_tile_is_shared_where_half_of_the_processors_would_be_idle(tiles, loop, wide):
    for count in range(1, 400):
        programs, whole, halves = tiles.divide(count, 132, loop, wide)
        last = count % 132
        assert (whole + halves // 2, halves % 2) == (count, 0) and programs == min(132, whole + halves)
        assert (halves > 0) == (0 < last <= 66) and (not halves or whole % 132 == 0 and halves <= 132)


def test_other_loops_share_no_tile(tiles):
    assert tiles.divide(140, 132, "flat") == (132, 140, 0)
    assert tiles.divide(140, 132, "once", True) == tiles.divide(140, 132, "pointers") == (140, 140, 0)


def test_a_turn_of_shared_tiles_is_expected_to_take_less(tiles):
    entry = {"op": "symmetric", "tile": [128, 128, 64], "us": [0.0, 1.0, 0.0, 0.0], "loop": "pingpong"}
    turns = [tiles.expected_us(entry, 128, 128, matrices, 4) for matrices in range(1, 14)]
    assert turns == pytest.approx([1, 1, 1, 1, 2, 2, 2, 2, 2.6, 2.6, 3, 3, 3.6])
    assert tiles.expected_us(entry | {"loop": "turns"}, 128, 128, 5, 4) == 2
    assert tiles.expected_us(entry | {"loop": "cooperative"}, 128, 128, 5, 4) == pytest.approx(1.6)
    alone = [tiles.expected_us(entry | {"op": "gram"}, 128, 128, matrices, 4) for matrices in range(1, 7)]
    assert alone == pytest.approx([0.6, 0.6, 1, 1, 2, 2])


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_few_matrices_take_what_whole_calls_found_fastest(tiles, gpu):
    """X X^T of long rows, and of short ones (docs/log.md; stacks.csv, "gram_tiles"). Large stacks take wide tiles."""
    def loop(N, n, m):
        tile = tiles._best("gram", 2, n, m, N, f"sm90 {gpu}")
        return f"{tile.columns} {tile.loop}"

    long = [(1, 1024, 8192), (2, 768, 6144), (2, 896, 4864), (3, 768, 3072), (4, 640, 2560), (8, 768, 3072)]
    assert {loop(*stack) for stack in long} == {"128 pingpong"}
    assert {loop(*stack) for stack in ((1, 512, 2048), (1, 768, 3072), (2, 640, 2560))} == {"64 once"}
    assert {loop(*stack) for stack in ((16, 2048, 8192), (28, 2048, 2048))} == {"256 cooperative"}


@pytest.mark.parametrize("down", [*range(1, 10), 23, 32])
def test_squares_in_pairs_leave_one_tile_half_in_vain_at_most(part, tiles, down):
    """Of tiles twice as wide as high, whose pairs have rows (i, -k); as many are expected as there are."""
    tile_order = part("kernels.launch.tile_scheduler").tile_order
    order, count = tile_order(down, -(-down // 2), 2, 8, True, torch.device("cpu"))
    found, in_vain = [], 0
    for i, j in order.tolist():
        squares = [(i, i), (-j, -j)] if j < 0 else [(i, 2 * j), (i, 2 * j + 1)]
        found += [(row, column) for row, column in squares if column <= row]
        in_vain += sum(column > row for row, column in squares)
    assert sorted(found) == [(i, j) for i in range(down) for j in range(i + 1)] and in_vain <= 1
    entry = {"op": "gram", "bytes": 2, "tile": [128, 256, 64], "loop": "cooperative", "us": [0, 0, 0, 1]}
    assert tiles.expected_us(entry, 128 * down, 64, 1, 1) == count == len(order)


@pytest.mark.parametrize("down, inner, together", [
    (13, 1600, 4), (17, 2100, 4), (22, 8192, 8), (32, 4096, 4), (33, 64, 8)])
def test_strips_of_tiles_are_as_high_as_each_other(part, tiles, down, inner, together):
    """Sixteen programs that follow one another share a way to the cache: four rows and four columns are eight operands
    for them, one row, which a last strip could have, and sixteen columns seventeen.
    """
    module = part("kernels.launch.tile_scheduler")
    narrow = tiles.Tile(128, 128, 64, 8, 5, 4, "pingpong")
    assert module.tile_rows_per_group("gram", 128 * down, inner, narrow) == together
    order, count = module.tile_order(down, down, 1, together, False, torch.device("cpu"))
    found = [tuple(tile) for tile in order.tolist()]
    assert sorted(found) == [(i, j) for i in range(down) for j in range(i + 1)] and count == len(found)
    firsts = [len(list(run)) for first, run in itertools.groupby(found, key=lambda tile: tile[1] == 0) if first]
    assert sum(firsts) == down and max(firsts) - min(firsts) <= 1 and abs(max(firsts) - together) <= together // 2


@pytest.mark.parametrize("op", ["gram", "symmetric", "product"])
def test_wide_tiles_of_large_matrices_have_higher_strips(part, tiles, op):
    wide, narrow = tiles.Tile(128, 256, 64, 8, 3, 4, "cooperative"), tiles.Tile(128, 128, 64, 8, 5, 4, "pingpong")
    together = part("kernels.launch.tile_scheduler").tile_rows_per_group
    assert [together(op, rows, 8192, wide) for rows in (6016, 6017)] == [8, 16] and together(op, 8192, 64, narrow) == 8
    assert together(op, 4096, 4096, wide) == (8 if op == "product" else 4)


def test_a_choice_can_be_forced(tiles):
    tile, cpu = tiles.Tile(16, 16, 16, 1, 1, 1), torch.device("cpu")
    usual = tiles.choose("gram", torch.float16, 64, 64, cpu)
    with tiles.force(tile):
        assert tiles.choose("gram", torch.float16, 64, 64, cpu) is tile
    assert tiles.choose("gram", torch.float16, 64, 64, cpu) == usual != tile


@pytest.mark.parametrize("choice, expected", [("auto", False), ("torch", False), ("triton", True)])
def test_the_path_of_a_cpu(part, monkeypatch, choice, expected):
    monkeypatch.setenv("OPTIMIZER_KERNELS", choice)
    assert part("kernels.backend").use_triton(torch.device("cpu")) is expected


def test_an_unknown_path_raises(part, monkeypatch):
    monkeypatch.setenv("OPTIMIZER_KERNELS", "cuda")
    with pytest.raises(ValueError, match="OPTIMIZER_KERNELS is 'cuda'; it may be one of auto, torch, triton"):
        part("kernels.backend").use_triton(torch.device("cpu"))


@pytest.mark.gpu
def test_the_path_of_a_gpu(part, tiles, monkeypatch):
    monkeypatch.delenv("OPTIMIZER_KERNELS", raising=False)
    device = torch.device("cuda", torch.cuda.current_device())
    assert part("kernels.backend").use_triton(device)
    assert tiles.architecture("cuda", None).startswith("gfx" if torch.version.hip else "sm")
