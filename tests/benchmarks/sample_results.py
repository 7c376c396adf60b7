"""Sample results with every kind of row."""

from __future__ import annotations

import dataclasses

from benchmarks.results import Results, Row, Spread

MACHINE = {"cpu": "a cpu", "cores": 2, "threads": 1, "load": 0.0}


def spread(middle):
    return Spread(round(0.9 * middle, 4), middle, round(1.1 * middle, 4))


def results(rows, **changes):
    made = Results(MACHINE, "2.99+cpu", None, "0.0", "abc", "2030-01-02T03:04:05+00:00", rows=rows)
    return dataclasses.replace(made, **changes)


def both(subject, case, dtype, call, theirs, ours, **more):
    """Rows of both sides, in milliseconds or, of loops and host time, microseconds."""
    name, unit = (subject, case, dtype, call), "host_us" if subject in ("loops", "host") else "ms"
    torchs = Row(*name, "torch", **{unit: spread(theirs)}, **more)
    return [torchs, Row(*name, "ampfast", vs_torch=theirs / ours, **{unit: spread(ours)}, **more)]


def cpu_results(**changes):
    rows = []
    for case, tensors, theirs, ours in (
        ("conv net", 10, 130.0, 50.0),
        ("perceptron 31x32, batch 64", 62, 200.0, 80.0),
        ("perceptron 3x512, batch 128", 6, 100.0, 80.0),
    ):
        loop = ("loops", case, "bfloat16", "AdamW")
        rows += both(*loop, theirs, ours, tensors=tensors)
    rows += both("host", "1000x4", "float32", "unscale_ + update", 800.0, 80.0)
    for net, call, theirs, ours in (("gpt2", "AdamW", 12.5, 10.0), ("rn", "SGD, clip", 12.5, 12.5)):
        steps = both("training", net, "bfloat16", call, theirs, ours)
        rows.append(dataclasses.replace(steps[0], side="no scaler", ms=spread(10.0)))
        rows += [dataclasses.replace(row, over_none=row.ms.p50 / 10) for row in steps]
    for fused in ("", "fused "):
        call = {"call": f"{fused}SGD, clip by the scaler", "replaces": f"{fused}SGD, clip"}
        rows.append(dataclasses.replace(rows[-1], ms=spread(9.0), vs_torch=1.3889, over_none=0.9))
        rows[-1] = dataclasses.replace(rows[-1], **call)
    for tensors in (10, 100):
        sizes = {"tensors": tensors, "elements": 100 * tensors}
        rows += both("growth", f"{tensors}x100", "float32", "by tensors", tensors, 1.0, **sizes)
    moved = {"bytes": 8 * 10**6, "copy_gb_s": 10.0}
    rows += both("kernels", "bert_base", "float32", "unscale", 2.0, 1.0, **moved)
    rows.append(dataclasses.replace(rows[-2], call="copy", ms=spread(0.8)))
    clip, deferred = both("clip", "bert_base", "float32", "clip", 4.0, 2.0), "clip, in_place=False"
    rows += [*clip, dataclasses.replace(clip[1], call=deferred, replaces="clip", vs_torch=8.0)]
    rows += both("masters", "1000x4", "float16", "master weights", 4.0, 1.0)
    rows.append(dataclasses.replace(rows[-2], side="a loop", ms=spread(8.0)))
    return results(rows, **changes)


def gpu_results(**changes):
    rows = []
    for side, ratio in (("torch", None), ("ampfast, triton", 2.0), ("ampfast, cuda", 2.0)):
        row = Row("steps", "1000x1k, cold", "float32", "full step", side, timer="graph")
        rows.append(dataclasses.replace(row, ms=spread(1.0), vs_torch=ratio))
    machine = {**MACHINE, "gpu": "a gpu", "driver": "1.2", "tensors_per_launch": 110}
    return results(rows, **{"machine": machine, "triton": "3.6", **changes})
