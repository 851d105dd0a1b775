"""The user's own table of tiles: how it is found and refused, how ranks agree on it, and the tool that writes it."""
from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import package, part, run_ranks

ROOT = Path(__file__).resolve().parent.parent
ENTRY = {"op": "gram", "bytes": 2, "rows": 64, "columns": 64, "tile": [16, 16, 32], "group": 1, "stages": 2, "warps": 4}

PINGPONG = ENTRY | {"loop": "pingpong", "tile": [128, 128, 64], "stages": 5}
COOPERATIVE = ENTRY | {"loop": "cooperative", "tile": [128, 256, 64], "stages": 3}


@pytest.fixture
def tiles(part):
    return part("kernels.launch.tile_config")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("tune_tiles")
    monkeypatch.setattr(module, "TRIES", 500)
    return module


@pytest.fixture
def chosen(tiles, monkeypatch):
    """A function: what a process chooses that begins with this table."""
    def forget():
        tiles.table.cache_clear()
        tiles._best.cache_clear()

    def choose(path):
        monkeypatch.setenv("OPTIMIZER_TILES", str(path))
        forget()
        return tiles.choose("gram", torch.float16, 64, 64, torch.device("cpu"))

    yield choose
    forget()


def table(**changes):
    return {"arch": "cpu", "measured": [], "entries": [ENTRY]} | changes


@pytest.mark.parametrize("arch, expected", [("cpu", (16, 16, 32)), ("sm90", (64, 64, 32))])
def test_a_table_of_ones_own_is_taken_on_its_architecture(chosen, tmp_path, arch, expected):
    (tmp_path / "mine.json").write_text(json.dumps(table(arch=arch)))
    tile = chosen(tmp_path / "mine.json")
    assert (tile.rows, tile.columns, tile.inner) == expected


def test_no_such_file(chosen, tmp_path):
    with pytest.raises(ValueError, match="which is no file; tools/tune_tiles.py writes one, or unset it"):
        chosen(tmp_path / "none.json")


@pytest.mark.parametrize("changes, message", [
    ({"arch": None}, "needs arch"),
    ({"entries": [ENTRY | {"us": [1, 1, 1, 1]}]}, "needs processors"),
    ({"entries": [ENTRY | {"op": "sum"}]}, "op is none of"),
    ({"entries": [ENTRY | {"tile": [48, 48, 32]}]}, "no power of two"),
    ({"entries": [ENTRY | {"tile": [16, 32, 32]}]}, "a symmetric result needs square tiles"),
    ({"entries": [ENTRY | {"loop": "twice"}]}, "loop is unknown"),
    ({"entries": [ENTRY | {"group": 0}]}, "no positive whole number"),
    ({"entries": [ENTRY | {"group": 0.5}]}, "no positive whole number"),
    ({"entries": [ENTRY | {"stages": None}]}, "no positive whole number"),
    ({"entries": [ENTRY | {"stages": True}]}, "no positive whole number"),
    ({"entries": [ENTRY | {"warps": 3}]}, "warps is no power of two"),
    ({"entries": [ENTRY | {"warps": 2.5}]}, "warps is no power of two"),
    ({"entries": [ENTRY | {"warps": 64}]}, "warps is no power of two"),
    ({"entries": [ENTRY | {"tile": [64, 64]}]}, "no power of two"),
    ({"entries": [ENTRY | {"tile": ["64"] * 3}]}, "no power of two"),
    ({"entries": [ENTRY | {"tile": 64}]}, "no power of two"),
    ({"entries": [ENTRY | {"tile": [4096] * 3}]}, "too large for any GPU"),
    ({"entries": [ENTRY | {"stages": 200}]}, "too large for any GPU"),
    ({"entries": [ENTRY | {"op": ["gram"]}]}, "op is none of"),
    ({"entries": [ENTRY | {"bytes": "2"}]}, "bytes is neither 2 nor 4"),
    ({"entries": [ENTRY | {"rows": 0}]}, "neither four numbers"),
    ({"entries": [ENTRY | {"columns": -1}]}, "neither four numbers"),
    ({"entries": [ENTRY | {"rows": 10**400}]}, "neither four numbers"),
    ({"entries": [ENTRY | {"us": ["a"] * 4}], "processors": 1}, "neither four numbers"),
    ({"entries": [ENTRY | {"us": [math.nan] * 4}], "processors": 1}, "neither four numbers"),
    ({"entries": [ENTRY | {"us": 4}], "processors": 1}, "neither four numbers"),
    ({"entries": [ENTRY | {"us": [1] * 4, "resident": 0}], "processors": 1}, "group, stages or resident"),
    ({"entries": [ENTRY | {"gpu": 100}]}, "gpu is no part of a GPU's name"),
    ({"entries": [ENTRY | {"us": [1] * 4}], "processors": 0}, "processors no positive whole number"),
    ({"entries": {"a": 1}}, "entries is no list of objects"),
    ({"entries": [1]}, "entries is no list of objects"),
    ({"arch": 90}, "arch is no text"),
    ({"arch": "sm80", "entries": [ENTRY | {"loop": "once"}]}, "TMA needs 2 bytes and sm90"),
    ({"arch": "gfx942", "entries": [ENTRY | {"loop": "flat"}]}, "TMA needs 2 bytes and sm90"),
    ({"arch": "sm90", "entries": [ENTRY | {"loop": "once", "bytes": 4}]}, "TMA needs 2 bytes and sm90"),
    ({"arch": "sm90", "entries": [PINGPONG | {"bytes": 4}]}, "TMA needs 2 bytes and sm90"),
    ({"arch": "sm100", "entries": [PINGPONG]}, "pingpong is for"),
    ({"arch": "sm90", "entries": [PINGPONG | {"tile": [64, 64, 64]}]}, "pingpong is for"),
    ({"arch": "sm90", "entries": [PINGPONG | {"warps": 8}]}, "pingpong is for"),
    ({"arch": "sm90", "entries": [PINGPONG | {"stages": 6}]}, "pingpong is for"),
    ({"arch": "sm100", "entries": [COOPERATIVE]}, "cooperative is for"),
    ({"arch": "sm90", "entries": [COOPERATIVE | {"tile": [128, 128, 64]}]}, "cooperative is for"),
    ({"arch": "sm90", "entries": [COOPERATIVE | {"stages": 4}]}, "cooperative is for"),
    ({"entries": [{k: v for k, v in ENTRY.items() if k != "rows"}]}, "neither four numbers"),
    ({"entries": [ENTRY, ENTRY | {"us": [1, 1, 1, 1]}], "processors": 1}, "us is in some entries"),
])
def test_a_wrong_table_is_refused(tiles, changes, message):
    given = {key: value for key, value in (table() | changes).items() if value is not None}
    with pytest.raises(ValueError, match=f"mine.json: .*{message}"):
        tiles.check_table(given, "mine.json")


@pytest.mark.parametrize("given", [[1], None, "table", 7])
def test_what_is_no_table_is_refused(tiles, given):
    with pytest.raises(ValueError, match="mine.json: a table of tiles is an object of JSON"):
        tiles.check_table(given, "mine.json")


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "gfx942"])
def test_our_own_tables_pass(tiles, arch):
    tiles.check_table(tiles.table(arch), arch)


def step_with_tiles(rank, world, folder):
    """One step of a matrix that both ranks share, with tables of other content on each."""
    mesh = init_device_mesh("cpu", (world,))
    W = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    W.grad = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    os.environ["OPTIMIZER_TILES"] = str(Path(folder) / f"{rank}.json")
    known = part("kernels.launch.tile_config").table
    known.cache_clear()
    try:
        package().Muon([W], lr=0.1).step()
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ["OPTIMIZER_TILES"]
        known.cache_clear()  # this process is a rank of other tests, beside some that never had these tables
    return ""


@pytest.mark.parametrize("same", [True, False])
def test_ranks_with_unlike_tables_are_told(tmp_path, same):
    """They would compute other bits for one matrix, and replicas would drift apart without a word."""
    for rank in range(2):
        (tmp_path / f"{rank}.json").write_text(json.dumps(table(measured=[] if same else [rank])))
    messages = run_ranks(2, step_with_tiles, str(tmp_path))
    assert all((message == "") == same and (same or "OPTIMIZER_TILES" in message) for message in messages)


@pytest.mark.parametrize("resident", [1, 2, 4])
def test_the_fit_recovers_the_numbers_that_made_the_times(tool, tiles, resident):
    entry = next(tool.candidates("product", "sm90", 232448)) | {"resident": resident, "us": [3.0, 0.5, 0.0, 0.25]}
    times = {(N, n, m): tiles.expected_us(entry, n, m, N, 132) for N, n, m in tool.cases("product", 132)}
    assert len(times) > 20
    found = tool.fit(tiles, entry, times, 132)
    assert found["resident"] == resident and found["us"] == pytest.approx(entry["us"], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("op", ["gram", "symmetric", "product"])
def test_the_choice_keeps_the_tiles_that_win_somewhere(tool, tiles, op, tmp_path):
    """Small tiles that start fast, large ones that compute fast, and one that is worse everywhere; then the file."""
    one, two, bad = [e for e in tool.candidates(op, "sm90", 232448) if e["stages"] == 3][::3][:3]
    cases = list(dict.fromkeys(tool.cases(op, 132)))
    numbers = ([1.0, 0.1, 0.0, 0.4], [9.0, 0.1, 0.0, 0.2], [30.0, 3.0, 0.3, 3.0])
    times = {json.dumps(e): {(N, n, m): tiles.expected_us(e | {"us": us}, n, m, N, 132) for N, n, m in cases}
             for e, us in zip((one, two, bad), numbers)}
    kept = tool.choose(tiles, op, times, 132)
    assert sorted(e["us"] for e in kept) == [pytest.approx(us, rel=0.01, abs=1e-3) for us in sorted(numbers[:2])]
    tool.write(tmp_path / "t.json", {"arch": "sm90", "measured": [2], "processors": 132, "entries": kept})
    written = json.loads((tmp_path / "t.json").read_text())
    tiles.check_table(written, "t.json")
    assert written["entries"] == kept


def test_refined_numbers_choose_better_and_are_not_far_from_the_truth(tool, tiles):
    """Of two tiles, one is taken for up to a tenth slower than it is: the other wins where it should not."""
    numbers = [2, 1, 0, 0.2], [6, 1, 0, 0.1]
    entries = [e | {"us": us} for e, us in zip(tool.candidates("product", "sm90", 232448), numbers)]
    cases = list(dict.fromkeys(tool.cases("product", 132)))
    times = [{(N, n, m): tiles.expected_us(e, n, m, N, 132) for N, n, m in cases} for e in entries]
    wrong = [entries[0] | {"us": [x * 1.1 for x in entries[0]["us"]]}, entries[1]]
    losses = []
    for given in (wrong, tool.refine(tiles, wrong, times, 132)):
        chosen = [min(range(2), key=lambda i: tiles.expected_us(given[i], n, m, N, 132)) for N, n, m in cases]
        losses.append(sum(times[i][case] / min(t[case] for t in times) - 1 for i, case in zip(chosen, cases)))
    assert losses[1] < 0.2 * losses[0]
    assert [e["us"] for e in tool.refine(tiles, entries, times, 132)] == [e["us"] for e in entries]


@pytest.mark.parametrize("arch, shared", [("sm80", 166912), ("sm90", 232448), ("gfx942", 65536)])
def test_candidates_are_valid_for_their_architecture(tool, tiles, arch, shared):
    for op in tool.OPS:
        entries = list(tool.candidates(op, arch, shared))
        assert len(entries) >= 4
        tiles.check_table({"arch": arch, "measured": [2], "processors": 1,
                           "entries": [e | {"us": [1, 1, 1, 1]} for e in entries]}, arch)
        assert all((e["loop"] == "pointers") == (arch != "sm90") for e in entries)


def test_cases_are_enough_for_a_fit_however_little_time_there_is(tool, tiles, monkeypatch):
    X, A = torch.ones(1, 4, 8), torch.ones(1, 4, 4)
    for name, stub in {"operands": lambda *_: (X, A), "call_of": lambda gram, op, X, A, out: out.zero_,
                       "captured": lambda call: call, "race": lambda calls: dict.fromkeys(calls, 1.0)}.items():
        monkeypatch.setattr(tool, name, stub)
    entries = list(tool.candidates("gram", "sm90", 232448))[:2]
    times = tool.measure(None, tiles, "gram", entries, 132, until=0)
    assert [len(found) for found in times.values()] == [tool.LEAST] * 2
    assert len(tool.choose(tiles, "gram", times, 132)) >= 1
    fewer = {key: dict(list(found.items())[1:]) for key, found in times.items()}
    assert tool.choose(tiles, "gram", fewer, 132) == []  # so that the entries that there are stay


@pytest.mark.gpu
def test_the_tool_on_a_gpu(tmp_path, tiles):
    out = tmp_path / "mine.json"
    done = subprocess.run([sys.executable, ROOT / "tools" / "tune_tiles.py", "--out", out, "--ops", "symmetric",
                           "--seconds", "20"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    tiles.check_table(written, str(out))
    assert written["arch"] == tiles.architecture("cuda") and any("us" in e for e in written["entries"])


def test_a_replay_keeps_the_tensors_of_its_call_alive(tool, monkeypatch):
    """A graph knows addresses only; the memory went to somebody else, or back to the driver."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=list))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensor = torch.zeros(4)
    watch, replay = weakref.ref(tensor), tool.captured(lambda tensor=tensor: tensor.add_(1))
    del tensor
    gc.collect()
    assert watch() is not None
    del replay
    gc.collect()
    assert watch() is None
