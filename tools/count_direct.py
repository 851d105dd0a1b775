"""How many matrices skip both copies of an exchange, and the time that saves: of models, by the plan alone.

    make build && python tools/count_direct.py --models gpt2_124m llama3_8b --ranks 2 8

A matrix that is read where its pieces arrived, and whose update is written where its pieces leave, saves 4 bytes an
element twice (read and written): of what arrives, and of all. Prints, for the rank that saves least and most, the bytes
and the microseconds at the bandwidth of `--gbps`.
"""

from __future__ import annotations

import argparse
import importlib

import simulate

rank_plan = importlib.import_module(f"{simulate.PACKAGE}.planning.rank_plan")
SIZE = 2  # bytes of an element in an all-to-all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2_124m", "qwen3_1p7b", "llama3_8b"],
                        choices=simulate.MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--modes", nargs="+", default=["fsdp"], choices=["fsdp", "hsdp", "ddp"])
    parser.add_argument("--shards", type=int, default=None, help="ranks that share one copy, in hsdp (half of them)")
    parser.add_argument("--gbps", type=float, default=simulate.PACE["copy_gbps"],
                        help="GB/s of a copy, read and written together (default: %(default)s, of an H200)")
    options = parser.parse_args()
    for model in options.models:
        for mode in options.modes:
            for ranks in options.ranks:
                print(line(model, mode, ranks, options))


def line(model, mode, ranks, options) -> str:
    arguments = ["--shards", str(options.shards or max(1, ranks // 2))]
    layouts, buckets, times, _ = simulate.planned(model, mode, ranks, simulate.arguments(arguments))
    found = [saved(rank, buckets, layouts, times) for rank in range(ranks)]
    direct, all_, nbytes = zip(*found)
    least, most = min(nbytes), max(nbytes)
    return (f"{model}, {mode}, {ranks} ranks: {sum(direct)} of {sum(all_)} matrices in {len(buckets)} buckets; a rank "
            f"saves {least / 2**20:.0f} to {most / 2**20:.0f} MiB, {1e-3 * least / options.gbps:.0f} to "
            f"{1e-3 * most / options.gbps:.0f} us")


def saved(rank, buckets, layouts, times):
    """(matrices of a rank that are read and written in place, all of them, bytes that are not read and written)."""
    direct = all_ = nbytes = 0
    for bucket in buckets:
        mine = rank_plan.rank_plan_of(bucket, rank, layouts, {}, simulate.terms_of(times))
        direct, all_ = direct + len(mine.direct), all_ + len(mine.matrices)
        leave = {at: p for p, at in mine.outbound.leave.items()}  # what several ranks get is copied once
        pieces = [*mine.inbound.arrive, *leave.values(), *mine.kept]
        nbytes += sum(2 * SIZE * p.numel for p in pieces if p.matrix in mine.direct)
    return direct, all_, nbytes


if __name__ == "__main__":
    main()
