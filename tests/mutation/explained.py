"""Equivalent mutants, which no test can notice, each with its reason.

Each is named by place, original source, replacement, and number among equal ones in that place.
"""

# Functions that run when their module is imported, before anything is changed.
AT_IMPORT = ("_not_compiled", "_methods")

_BY_REASON: dict[str, list[tuple[str, str, str, int]]] = {
    "Who asks takes None for False.": [
        ("GradScaler._overrides", "return False", "return None", 1),
        ("lacks_momentum", "return False", "return None", 1),
    ],
    "SGD with fused and other groups raises at the first step that is not skipped: torch does.": [
        (
            "lacks_momentum",
            "group.get('fused') and group['momentum'] != 0",
            "group['momentum'] != 0",
            1,
        ),
    ],
    "Makes a difference on a GPU only: test_fused_optimizer_in_mixed_places of tests/gpu.": [
        (
            "GradScaler._found_by_division",
            "len(flags) == 1 and flags[0].device == scale.device",
            "len(flags) == 1",
            1,
        ),
    ],
    "What is left out is done again where the group is kept.": [
        ("GradScaler.__init__", "distributed.require_group(process_group, device)", "nothing", 1),
    ],
    "Both are None, or neither, unless a caller sets one of them.": [
        (
            "GradScaler.stats",
            "self._scale is None or self._growth_tracker is None",
            "self._growth_tracker is None",
            1,
        ),
        (
            "GradScaler.stats",
            "self._scale is None or self._growth_tracker is None",
            "self._scale is None",
            1,
        ),
    ],
    "With an interval of 0 nothing grows, by whatever factor.": [
        ("GradScaler._set_scale", "1.0", "2.0", 1),
    ],
    "Only the text of a TypeError differs: what is no number is refused by the kernels, too.": [
        (
            "_factors",
            "not isinstance(growth_factor, (int, float)) or not isinstance(backoff_factor, (int, float))",
            "not isinstance(backoff_factor, (int, float))",
            1,
        ),
        (
            "_factors",
            "not isinstance(growth_factor, (int, float)) or not isinstance(backoff_factor, (int, float))",
            "not isinstance(growth_factor, (int, float))",
            1,
        ),
    ],
    "A checked optimizer means that there is a scale.": [
        (
            "GradScaler.found_inf",
            "torch.device('cpu') if scale is None else scale.device",
            "scale.device",
            1,
        ),
    ],
    "The same where no other rank takes part; tests/distributed/test_marks.py sees it.": [
        (
            "GradScaler.overflow_report",
            "local or not self._enabled",
            "not (local or not self._enabled)",
            1,
        ),
        ("GradScaler.overflow_report", "local or not self._enabled", "not self._enabled", 1),
        ("GradScaler.overflow_report", "local or not self._enabled", "local", 1),
        ("GradScaler.overflow_report", "not self._enabled", "self._enabled", 1),
    ],
    "A way round that comes to the same where there are no ranks; tests/distributed has them.": [
        (
            "GradScaler._agreement",
            "ranks.is_alone or not (self._enabled or dist.is_initialized())",
            "not (self._enabled or dist.is_initialized())",
            1,
        ),
        (
            "GradScaler._agreement",
            "ranks.is_alone or not (self._enabled or dist.is_initialized())",
            "ranks.is_alone",
            1,
        ),
        (
            "GradScaler._agreement",
            "self._enabled or dist.is_initialized()",
            "dist.is_initialized()",
            1,
        ),
    ],
    "What is no tensor has no item() for torch's method either.": [
        (
            "GradScaler._maybe_opt_step",
            "isinstance(flag, Tensor) and flag.is_cuda",
            "flag.is_cuda",
            1,
        ),
    ],
    "A sum of one flag is that flag, and any of their devices will do for several.": [
        ("GradScaler._maybe_opt_step", "len(on_gpu) > 1", "len(on_gpu) >= 1", 1),
        ("GradScaler._maybe_opt_step", "0", "1", 1),
    ],
    "Only the names of the entries are asked for.": [
        ("ScalePolicy._tracker_of", "0", "1", 1),
    ],
}

EXPLAINED = {key: reason for reason, keys in _BY_REASON.items() for key in keys}
