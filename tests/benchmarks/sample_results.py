"""Sample results with every kind of row."""

from __future__ import annotations

import dataclasses

from benchmarks import host_time
from benchmarks.results import Goal, Results, Row


def cpu_results(**changes):
    results = Results(
        machine={"cpu": "a cpu", "cores": 2, "threads": 1, "load": 0.0},
        torch="2.99",
        triton=None,
        ampfast="0.0",
        commit="abc",
        date="2030-01-02T03:04:05+00:00",
        rows=[
            Row("host", "10x4", "float32", host_time.UNSCALE, "torch", host_us_p50=20.0),
            Row(
                "host",
                "10x4",
                "float32",
                host_time.UNSCALE,
                "cpu",
                host_us_p50=5.0,
                vs_torch=4.1,
            ),
            Row("kernels", "1000x1k", "float16", "unscale", "torch", ms_p50=1.5),
            Row(
                "kernels",
                "1000x1k",
                "float16",
                "unscale",
                "cpu",
                ms_p50=0.5,
                vs_torch=3.02,
            ),
        ],
        goals=[Goal("faster", "1000x1k", "float16", ">=", 2.5, 3.02, 2.9, 3.1)],
    )
    return dataclasses.replace(results, **changes)


def gpu_results(**changes):
    rows = []
    for case in ("1000x1k", "gpt2_xl"):
        shared = {"lists": 25 if case == "1000x1k" else 1, "list_bytes": 4000}
        for path in ("check", "unscale"):
            for provider, gb_s in (("torch", 1500.0), ("triton", 2700.0), ("cuda", 2600.0)):
                rows.append(
                    Row(
                        *("kernels", case, "float32", path, provider),
                        ms_p50=1.0,
                        host_us_p50=20.0,
                        gb_s=gb_s,
                        copy_gb_s=3000.0,
                        launches=1,
                        syncs=0,
                        timer="graph",
                        vs_torch=None if provider == "torch" else gb_s / 1500,
                        **shared,
                    )
                )
        for path, gb_s in (("copy", 3000.0), ("copy of half", 2900.0)):
            rows.append(
                Row(
                    *("kernels", case, "float32", path, "torch"),
                    ms_p50=0.5,
                    gb_s=gb_s,
                    copy_gb_s=gb_s,
                    **shared,
                )
            )
    steps = [
        ("full step, fused", "torch", 900.0, 17, None),
        ("full step, fused", "triton", 90.0, 3, 10.0),
        ("step_and_update, fused", "triton", 80.0, 2, 11.3),
    ]
    for path, provider, microseconds, launches, faster in steps:
        rows.append(
            Row(
                *("steps", "1000x1k", "float32", path, provider),
                ms_p50=0.1,
                host_us_p50=microseconds,
                launches=launches,
                syncs=0,
                lists=8,
                host_vs_torch=faster,
                timer="events",
            )
        )
    gpu = {"gpu": "a gpu", "driver": "1.2", "tensors_per_launch": 110}
    machine = {**cpu_results().machine, **gpu}
    changes = {"rows": rows, "goals": [], "machine": machine, "triton": "3.6", **changes}
    return cpu_results(**changes)


def training_results(**changes):
    """Rows of training and growth."""
    rows = []
    for provider, over in (("none", None), ("torch", 1.25), ("cpu", 1.02)):
        for subject, path in (("mlp", "autocast"), ("training", "AdamW, clip")):
            rows.append(
                Row(
                    *(subject, "a net", "float16", path, provider),
                    ms_p20=9.0,
                    ms_p50=10 * (over or 1),
                    ms_p80=14.0,
                    vs_torch=None if provider == "torch" else 1.25 / (over or 1),
                    over_none=over,
                )
            )
    for provider, slope in (("torch", 1e-3), ("cpu", 1e-4)):
        faster = None if provider == "torch" else 10.0
        for tensors in (10, 100, 1000):
            rows.append(
                Row(
                    *("growth", f"{tensors}x100", "float32", "by tensors", provider),
                    ms_p50=slope * tensors,
                    vs_torch=faster,
                    tensors=tensors,
                    elements=100 * tensors,
                )
            )
        for elements in (1000, 10000):
            rows.append(
                Row(
                    *("growth", f"one of {elements}", "float32", "by elements", provider),
                    ms_p50=slope * elements / 100,
                    vs_torch=faster,
                    tensors=1,
                    elements=elements,
                )
            )
    return cpu_results(**{"rows": rows, "goals": [], **changes})


def loop_results(**changes):
    """Rows of training loops."""
    rows = [
        Row(
            *("loops", case, "bfloat16", "AdamW", provider),
            host_us_p20=0.95 * microseconds,
            host_us_p50=microseconds,
            host_us_p80=1.1 * microseconds,
            vs_torch=None if provider == "torch" else 2.5,
            scale_us=parts[0],
            step_us=parts[1],
            update_us=parts[2],
            share=share * microseconds / 100,
            tensors=tensors,
        )
        for case, tensors, share in (("conv net", 10, 0.025), ("MLP 3x512, batch 4096", 6, 0.001))
        for provider, microseconds, parts in (
            ("torch", 100.0, (10.0, 80.0, 10.0)),
            ("cpu", 40.0, (5.0, 30.0, 5.0)),
        )
    ]
    return cpu_results(**{"rows": [*rows, *cpu_results().rows], **changes})
