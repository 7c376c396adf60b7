"""Skips these tests where ranks cannot be forked or cannot reach each other."""

from __future__ import annotations

import multiprocessing

import torch.distributed as dist

if (
    not dist.is_available()
    or not dist.is_gloo_available()
    or "forkserver" not in multiprocessing.get_all_start_methods()
):
    collect_ignore_glob = ["test_*.py"]
