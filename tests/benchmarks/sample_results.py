"""Sample results with every kind of row."""

from __future__ import annotations

import dataclasses

from benchmarks.results import Goal, Results, Row, Spread

MACHINE = {"cpu": "a cpu", "cores": 2, "threads": 1, "load": 0.0}


def spread(middle):
    return Spread(round(0.9 * middle, 4), middle, round(1.1 * middle, 4))


def results(rows, **changes):
    made = Results(MACHINE, "2.99+cpu", None, "0.0", "abc", "2030-01-02T03:04:05+00:00", rows=rows)
    return dataclasses.replace(made, **changes)


def both(subject, case, dtype, call, theirs, ours, **more):
    """Rows of both sides, in milliseconds or, of loops and host time, microseconds."""
    unit = "host_us" if subject in ("loops", "host") else "ms"
    faster = theirs / ours
    return [
        Row(subject, case, dtype, call, "torch", **{unit: spread(theirs)}, **more),
        Row(
            *(subject, case, dtype, call, "ampfast"),
            **{unit: spread(ours)},
            **{**more, "vs_torch": faster},
        ),
    ]


def cpu_results(**changes):
    """Every subject that a page shows."""
    rows = []
    for case, tensors, theirs, ours in (
        ("conv net", 10, 130.0, 50.0),
        ("perceptron 31x32, batch 64", 62, 200.0, 80.0),
        ("perceptron 3x512, batch 128", 6, 100.0, 80.0),
    ):
        more = {"tensors": tensors, "parts_us": (1.0, 2.0, 3.0), "share": 0.01}
        rows += both("loops", case, "bfloat16", "AdamW", theirs, ours, **more)
    rows += both("host", "1000x4", "float32", "unscale_ + update", 800.0, 80.0)
    net = ("gpt2", "bfloat16", "AdamW")
    rows.append(Row("training", *net, "no scaler", ms=spread(10.0)))
    rows += [
        dataclasses.replace(row, over_none=row.ms.p50 / 10)
        for row in both("training", *net, 12.5, 10.0)
    ]
    for tensors in (10, 100):
        more = {"tensors": tensors, "elements": 100 * tensors}
        rows += both("growth", f"{tensors}x100", "float32", "by tensors", tensors, 1.0, **more)
    more = {"bytes": 8 * 10**6, "copy_gb_s": 10.0}
    rows += both("kernels", "bert_base", "float32", "unscale", 2.0, 1.0, **more)
    rows.append(
        Row("kernels", "bert_base", "float32", "copy", "torch", ms=spread(0.8), bytes=8 * 10**6)
    )
    clip, deferred = both("clip", "bert_base", "float32", "clip", 4.0, 2.0), "clip, in_place=False"
    rows += [*clip, dataclasses.replace(clip[1], call=deferred, replaces="clip", vs_torch=8.0)]
    rows += both("masters", "1000x4", "float16", "master weights", 4.0, 1.0)
    rows.append(dataclasses.replace(rows[-2], side="a loop", ms=spread(8.0)))
    goal = Goal(*rows[1].name, "AdamW, torch", Spread(0.3, 0.4, 0.5), 0.5)
    return results(rows, **{"goals": [goal], **changes})


def gpu_results(**changes):
    rows = []
    for side, launches in (("torch", 3), ("ampfast, triton", 1), ("ampfast, cuda", 1)):
        faster = None if side == "torch" else 2.0
        rows.append(
            Row(
                *("steps", "1000x1k, cold", "float32", "full step", side),
                ms=spread(1.0),
                host_us=spread(20.0),
                vs_torch=faster,
                host_vs_torch=faster,
                launches=launches,
                syncs=0,
                timer="graph",
            )
        )
    machine = {**MACHINE, "gpu": "a gpu", "driver": "1.2", "tensors_per_launch": 110}
    return results(rows, **{"machine": machine, "triton": "3.6", **changes})
