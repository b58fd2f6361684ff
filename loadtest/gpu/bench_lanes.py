"""An experiment: two half batches in turn, attention of one (bytes) beside the GEMMs of the other (latency).

    python -m loadtest.gpu.bench_lanes --json build/lanes.json [--rows 256,128,64] [--green 24,32,40]

One stream attends, the other does all else; events hand a half over, twice a layer. ``--green``: the second stream has
so many multiprocessors of its own (green contexts), the first the others. Qwen3-0.6B, microseconds a step of 28
layers, in a CUDA graph, GEMMs by cuBLAS and nothing linked by PDL; "serial, own GEMMs" is what the engine does.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loadtest.gpu.bench_fused import capture, replay_us
from loadtest.gpu.bench_gemm import DecodeRows, Layers, lengths_of, pages_for, projections
from loadtest.offline import environment
from mizzen.kernels.triton.decode_attention import DecodeConfig

MODEL = "qwen3-0.6b"
NO_TAIL = 10**9  # DecodeConfig.tail_from
Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]  # for attention, for all else


def lanes(halves: list[DecodeRows], streams: Streams) -> None:
    attending, other = streams
    current = torch.cuda.current_stream()
    for half in halves:
        half.plan()
    for stream in streams:
        stream.wait_stream(current)
    with torch.cuda.stream(other):
        ready = [before(half, 0) for half in halves]
    count = halves[0].layers.count
    for layer, (number, half) in itertools.product(range(count), enumerate(halves)):
        with torch.cuda.stream(attending):
            attending.wait_event(ready[number])
            half.attend(layer)
            attended = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(other):
            other.wait_event(attended)
            half.after(layer)
            if layer + 1 < count:
                ready[number] = before(half, layer + 1)
    for stream in streams:
        current.wait_stream(stream)


def before(half: DecodeRows, layer: int) -> torch.cuda.Event:
    half.before(layer)
    return torch.cuda.current_stream().record_event()


def attend_all(batch: DecodeRows) -> None:
    batch.plan()
    for layer in range(batch.layers.count):
        batch.attend(layer)


def on(stream: torch.cuda.Stream, body: Callable[[], None]) -> None:
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        body()
    current.wait_stream(stream)


def green_streams(multiprocessors: int) -> tuple[Streams, tuple[int, int]]:
    """A stream with all others, one with at least ``multiprocessors``; how many each has."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
        return result[1] if len(result) == 2 else result[1:]

    device = checked(driver.cuDeviceGet(0))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = checked(driver.cuDeviceGetDevResource(device, kind))
    groups, _, rest = checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, multiprocessors))
    streams, counts = [], []
    for resource in (rest, groups[0]):
        description = checked(driver.cuDevResourceGenerateDesc([resource], 1))
        context = checked(driver.cuGreenCtxCreate(description, device, 1))  # CU_GREEN_CTX_DEFAULT_STREAM
        stream = checked(driver.cuGreenCtxStreamCreate(context, 1, 0))  # CU_STREAM_NON_BLOCKING
        streams.append(torch.cuda.ExternalStream(int(stream)))
        counts.append(resource.sm.smCount)
    return (streams[0], streams[1]), (counts[0], counts[1])


class Bench:
    def __init__(self, green: list[int]) -> None:
        self.results: list[dict[str, Any]] = []
        self.green = {count: green_streams(count) for count in green}

    def note(self, rows: int, variant: str, body: Callable[[], None]) -> None:
        us = round(replay_us(capture(body), replays=7), 1)
        self.results.append({"rows": rows, "variant": variant, "us": us})
        print(f"{rows} {variant}: {us}", flush=True)

    def run(self, rows: int) -> None:
        lengths = lengths_of(rows)
        parts = [lengths[::2], lengths[1::2]]
        layers = Layers(MODEL, sum(map(pages_for, lengths)))

        def halves(config: DecodeConfig) -> list[DecodeRows]:
            starts = 0, sum(map(pages_for, parts[0]))
            pair = [DecodeRows(layers, part, config, start) for part, start in zip(parts, starts, strict=True)]
            for half in pair:
                half.before(0)  # leaves queries to attend with
            return pair

        whole = DecodeRows(layers, lengths, DecodeConfig(pdl=False))
        self.note(rows, "serial, own GEMMs", DecodeRows(layers, lengths, own=set(projections(MODEL))).run)
        self.note(rows, "serial", whole.run)
        self.note(rows, "serial, attention alone", lambda: attend_all(whole))
        self.note(rows, "serial, all else", lambda: whole.run(attention=False))
        half = halves(DecodeConfig(pdl=False))[0]
        self.note(rows, "half, all else", lambda: half.run(attention=False))
        for programs, tail_from in itertools.product((3, 2), (3, NO_TAIL)):
            pair = halves(DecodeConfig(pdl=False, programs_per_sm=programs, tail_from=tail_from))
            setting = f"{programs} programs, {'no ' if tail_from == NO_TAIL else ''}tail"
            self.note(rows, f"half, attention alone, {setting}", lambda p=pair: attend_all(p[0]))
            for priority in (0, -1):
                streams = torch.cuda.Stream(), torch.cuda.Stream(priority=priority)
                name = f"lanes, {setting}{', GEMMs first' if priority else ''}"
                self.note(rows, name, lambda p=pair, s=streams: lanes(p, s))
        for streams, counts in self.green.values():
            pair = halves(DecodeConfig(pdl=False, tail_from=NO_TAIL))
            for half in pair:
                half.decode._multiprocessors = counts[0]
            setting = f"green {counts[0]} + {counts[1]}"
            self.note(rows, f"half, all else, {setting}", lambda p=pair, s=streams: on(s[1], lambda: p[0].run(False)))
            self.note(
                rows, f"half, attention alone, {setting}", lambda p=pair, s=streams: on(s[0], lambda: attend_all(p[0]))
            )
            self.note(rows, f"lanes, {setting}", lambda p=pair, s=streams: lanes(p, s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rows", default="256,128,64")
    parser.add_argument("--green", default="24,32,40", help="multiprocessors for the second stream; empty: none")
    args = parser.parse_args()
    bench = Bench([int(count) for count in args.green.split(",") if count])
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for rows in map(int, args.rows.split(",")):
        bench.run(rows)
        report = {"environment": environment(), "model": MODEL, "results": bench.results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
