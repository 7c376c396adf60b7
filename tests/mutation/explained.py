"""Why no test notices some changes.

Each is named by its place, what was there, what came instead, and which of its likes it is there.
"""

_BY_REASON: dict[str, list[tuple[str, str, str, int]]] = {
    "Runs when its module is imported, before anything is changed.": [
        (
            "_not_compiled",
            "return cast(Method, torch._disable_dynamo(method, recursive=True))",
            "return None",
            1,
        ),
        ("_not_compiled", "True", "False", 1),
    ],
    "Makes a difference on a GPU or under its capture only: tests/gpu.": [
        (
            "GradScaler.__init__",
            "enabled and device == 'cuda' and amp_definitely_not_available()",
            "enabled and device == 'cuda'",
            1,
        ),
        (
            "GradScaler.found_inf",
            "torch.device('cpu') if scale is None else scale.device",
            "torch.device('cpu')",
            1,
        ),
        (
            "GradScaler.step_skipped",
            "refuse_capture('a question that the host asks', 'ask after the replay')",
            "nothing",
            1,
        ),
        (
            "GradScaler.get_scale",
            "refuse_capture('a scale that the host reads', 'read it after the replay')",
            "nothing",
            1,
        ),
        (
            "GradScaler.stats",
            "refuse_capture('counts that the host reads', 'read them after the replay')",
            "nothing",
            1,
        ),
        (
            "GradScaler.history",
            "refuse_capture('a history that the host reads', 'read it after the replay')",
            "nothing",
            1,
        ),
        (
            "GradScaler.check_ranks",
            "refuse_capture('a comparison that the host makes', 'compare after the replay')",
            "nothing",
            1,
        ),
        (
            "GradScaler._maybe_opt_step",
            "isinstance(flag, Tensor) and flag.is_cuda",
            "isinstance(flag, Tensor)",
            1,
        ),
        ("GradScaler._maybe_opt_step", "on_gpu", "not on_gpu", 1),
        ("GradScaler._maybe_opt_step", "refuse_capture(*_HOST_DECIDES)", "nothing", 1),
        ("GradScaler._maybe_opt_step", "len(on_gpu) > 1", "len(on_gpu) >= 1", 1),
        ("GradScaler._maybe_opt_step", "1", "2", 1),
        ("GradScaler._maybe_opt_step", "0", "1", 1),
        ("GradScaler._maybe_opt_step", "not flag.is_cuda", "flag.is_cuda", 1),
        ("GradScaler._lazy_init_scale_growth_tracker", "str(dev) != 'cpu'", "str(dev) == 'cpu'", 1),
        (
            "GradScaler._lazy_init_scale_growth_tracker",
            "refuse_capture('the creation of the scale, which every replay would reset')",
            "nothing",
            1,
        ),
        (
            "GradScaler._step",
            "scale.is_cuda and (not self._overrides(_MAYBE_STEP))",
            "not (scale.is_cuda and (not self._overrides(_MAYBE_STEP)))",
            1,
        ),
        (
            "GradScaler._step",
            "scale.is_cuda and (not self._overrides(_MAYBE_STEP))",
            "not self._overrides(_MAYBE_STEP)",
            1,
        ),
        (
            "GradScaler._step",
            "scale.is_cuda and (not self._overrides(_MAYBE_STEP))",
            "scale.is_cuda",
            1,
        ),
        ("GradScaler._step", "not self._overrides(_MAYBE_STEP)", "self._overrides(_MAYBE_STEP)", 1),
        ("GradScaler._step", "refuse_capture(*_HOST_DECIDES)", "nothing", 1),
    ],
    "Makes a difference where ranks agree only: tests/distributed, which starts processes.": [
        ("GradScaler.__init__", "self.process_group = process_group", "nothing", 1),
        ("GradScaler.process_group", "return self._others().group", "return None", 1),
        (
            "GradScaler.process_group",
            "distributed.require_group(group, self._device)",
            "nothing",
            1,
        ),
        (
            "GradScaler.process_group",
            "self._ranks = distributed.Ranks(group, is_default=self._is_for_all)",
            "nothing",
            1,
        ),
        (
            "GradScaler.check_ranks",
            "rank_check.require_same(settings, self._others())",
            "nothing",
            1,
        ),
        (
            "GradScaler.__getstate__",
            "self._ranks is not None and self._ranks.is_alone",
            "not (self._ranks is not None and self._ranks.is_alone)",
            1,
        ),
        (
            "GradScaler.__getstate__",
            "self._ranks is not None and self._ranks.is_alone",
            "self._ranks is not None",
            1,
        ),
        ("GradScaler.__getstate__", "self._ranks is not None", "self._ranks is None", 1),
        ("GradScaler._unscale", "None if agreement else update", "update", 1),
    ],
    "The update comes by itself, to the same end; tests/test_device_costs.py counts launches.": [
        ("GradScaler.step_and_update", "optimizers or (None,)", "(None,)", 1),
        ("GradScaler._unscale", "None if agreement else update", "None", 1),
    ],
    "What is left out is done again, or made where it is first needed.": [
        ("GradScaler.__init__", "distributed.require_group(process_group, device)", "nothing", 1),
        ("GradScaler.__init__", "self._choice = choice", "nothing", 1),
        ("GradScaler.__getstate__", "state.pop('_ranks')", "nothing", 1),
        (
            "GradScaler._lazy_init_scale_growth_tracker",
            "self._scale is not None",
            "self._scale is None",
            1,
        ),
        (
            "GradScaler._lazy_init_scale_growth_tracker",
            "self._kept().on(self._scale.device)",
            "nothing",
            1,
        ),
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
    "Never happens with torch's classes; it tells the type checker so.": [
        (
            "GradScaler._fused_step",
            "raise AssertionError('_get_scale_async returned None')",
            "nothing",
            1,
        ),
    ],
    "An empty checkpoint holds no such entry either.": [
        (
            "GradScaler.load_state_dict",
            "state_dict and 'ampfast' in state_dict",
            "'ampfast' in state_dict",
            1,
        ),
    ],
    "A disabled scaler reads neither of what is set.": [
        ("GradScaler.__init__", "enabled and (not dynamic)", "not dynamic", 1),
    ],
}

EXPLAINED = {key: reason for reason, keys in _BY_REASON.items() for key in keys}
