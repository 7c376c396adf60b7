"""Equivalent mutants, which no test can notice, each with its reason.

Each is named by place, original source, replacement, and number among equal ones in that place.
"""

# Functions that run when their module is imported, before anything is changed.
AT_IMPORT: tuple[str, ...] = ()

_BY_REASON: dict[str, list[tuple[str, str, str, int]]] = {
    "SGD with fused and other groups raises at the first step that is not skipped: torch does.": [
        (
            "lacks_momentum",
            "group.get('fused') and group['momentum'] != 0",
            "group['momentum'] != 0",
            1,
        ),
    ],
    "Makes a difference on several devices only.": [
        (
            "GradScaler.scale",
            "scale is not None and scale.device == outputs.device",
            "scale is not None",
            1,
        ),
        (
            "SpikeRules.rule",
            "window is None or window.words.device != device or window.words.numel() != size",
            "window is None or window.words.numel() != size",
            1,
        ),
    ],
    "Is replaced before it is read.": [
        ("_words_of", "0.0", "1.0", 1),
        ("_words_of", "0.0", "1.0", 2),
    ],
    "Makes a difference on a device without float64 only.": [
        (
            "Follower.before",
            "torch.float64 if scalars.has_float64(device) else torch.float32",
            "torch.float64",
            1,
        ),
        (
            "_host_reads",
            "device.type == 'cpu' or not scalars.has_float64(device)",
            "device.type == 'cpu'",
            1,
        ),
    ],
    "Makes a difference only where a scale moves from a GPU to the CPU.": [
        ("Follower.bind", "self._state = self._floats()", "nothing", 1),
    ],
    "Makes a difference on a GPU only: tests/gpu/test_gpu_master_weights.py.": [
        (
            "_follow",
            "masters[param] = weight.detach().to(param.device).requires_grad_()",
            "nothing",
            1,
        ),
    ],
    "Saves the next step a comparison of equal tensors.": [
        (
            "_write_back",
            "masters.fingerprint = _fingerprint_of(groups) if is_known else None",
            "nothing",
            1,
        ),
        ("_write_back", "_fingerprint_of(groups) if is_known else None", "None", 1),
    ],
    "Changes no class that was made before, as in the process that tries mutants.": [
        ("_class_of", "step.hooked = True", "nothing", 1),
        ("_class_of", "True", "False", 1),
        ("_class_of", "step.__signature__ = inspect.signature(kind.step)", "nothing", 1),
    ],
    "Both are None, or neither, unless a caller sets one of them.": [
        (
            "GradScaler._set_scale",
            "before is not None and tracker is not None and flags",
            "tracker is not None and flags",
            1,
        ),
        (
            "GradScaler._set_scale",
            "before is not None and tracker is not None and flags",
            "before is not None and flags",
            1,
        ),
        (
            "Diagnostics.stats",
            "self._scale is None or self._growth_tracker is None",
            "self._growth_tracker is None",
            1,
        ),
        (
            "Diagnostics.stats",
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
            "GradScaler._set_scale",
            "[] if scale is None else self._flags(scale)",
            "self._flags(scale)",
            1,
        ),
        (
            "Diagnostics.found_inf",
            "torch.device('cpu') if scale is None else scale.device",
            "scale.device",
            1,
        ),
    ],
    "The same where no other rank takes part; tests/distributed/test_features_on_ranks.py sees it.": [
        (
            "Diagnostics.overflow_report",
            "local or not self._enabled",
            "not (local or not self._enabled)",
            1,
        ),
        ("Diagnostics.overflow_report", "local or not self._enabled", "not self._enabled", 1),
        ("Diagnostics.overflow_report", "local or not self._enabled", "local", 1),
        ("Diagnostics.overflow_report", "not self._enabled", "self._enabled", 1),
    ],
    "A way round that comes to the same where there are no ranks; tests/distributed has them.": [
        (
            "Passes._agreement",
            "ranks.is_alone or not (self._enabled or dist.is_initialized())",
            "not (self._enabled or dist.is_initialized())",
            1,
        ),
        (
            "Passes._agreement",
            "ranks.is_alone or not (self._enabled or dist.is_initialized())",
            "ranks.is_alone",
            1,
        ),
        (
            "Passes._agreement",
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
    "A disabled scaler has no history.": [
        (
            "GradScaler.grad_norm",
            "self._enabled and all((turn['stage'] is READY for turn in turns))",
            "all((turn['stage'] is READY for turn in turns))",
            1,
        ),
    ],
    "Both lists are made from the same one.": [
        ("narrow_on_devices", "True", "False", 1),
        ("_hooks_aside", "True", "False", 1),
    ],
    "None is false, too.": [("_narrow_pairs", "return False", "return None", 1)],
    "Both lists are made for the same optimizers.": [
        ("Passes._clip_terms", "True", "False", 1),
        ("Passes._measure", "True", "False", 1),
        ("begin", "True", "False", 1),
    ],
    "A single step was predicted by none: the row and the list are empty.": [
        ("LossScale.history", "end > 1", "end >= 1", 1),
    ],
    "Its one caller has asked that, which a type checker cannot know.": [
        (
            "LossScale.check_min_scale",
            "self.watch is not None and self.words is not None and (not is_capturing())",
            "self.words is not None and (not is_capturing())",
            1,
        ),
    ],
    "All norms are of the order of the first.": [
        ("LossScale.joint_norm", "0", "1", 3),
    ],
    "A copy has the same entries.": [
        (
            "lacks_momentum",
            "optimizer.state if isinstance(optimizer.state, dict) else dict(optimizer.state)",
            "dict(optimizer.state)",
            1,
        ),
    ],
    "The entry of a function goes with it, before its id comes back.": [
        (
            "takes_grad_scaler",
            "known is not None and known[0]() is function",
            "known is not None",
            1,
        ),
    ],
    "Signatures are only kept so that nobody reads them twice.": [
        (
            "takes_grad_scaler",
            "_signatures[key] = (weakref.ref(function, partial(_signatures.pop, key)), takes)",
            "nothing",
            1,
        ),
    ],
    "Makes a difference under a capture on a GPU only: tests/gpu.": [
        (
            "is_capturing",
            "return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()",
            "return None",
            1,
        ),
        (
            "is_capturing",
            "torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()",
            "torch.cuda.is_initialized()",
            1,
        ),
        (
            "_current_device",
            "return torch.device('cuda', torch.cuda.current_device())",
            "return None",
            1,
        ),
    ],
    "A faster way to what torch's method returns.": [
        ("GradScaler.scale", "outputs.dtype is _FLOAT32", "outputs.dtype is not _FLOAT32", 1),
        (
            "GradScaler.scale",
            "type(outputs) is Tensor and outputs.dtype is _FLOAT32 and self._enabled",
            "type(outputs) is Tensor and self._enabled",
            1,
        ),
        ("GradScaler.scale", "self._scale if is_usual else None", "None", 1),
        ("GradScaler.scale", "scale.device == outputs.device", "scale.device != outputs.device", 1),
    ],
    "A scale that is set restarts the count at the minimum, of which nothing is told.": [
        (
            "GradScaler._end_iteration",
            "loss_scale.watch is not None and (not was_set)",
            "loss_scale.watch is not None",
            1,
        ),
    ],
    "Measures or tries what is then not taken.": [
        ("FusedSteps._checked_by_scale", "True", "False", 1),
        ("Passes._clip", "left is not None and any(defers)", "left is not None", 1),
    ],
    "Is implied by the others, which a type checker cannot know.": [
        (
            "Passes._clip_over",
            "norm is not None and follower is not None and (work.sums is not None)",
            "norm is not None and follower is not None",
            1,
        ),
        (
            "Passes._pass",
            "None if turn is None else partial(begin, [turn], agreement)",
            "partial(begin, [turn], agreement)",
            1,
        ),
        (
            "Passes._clip_over",
            "norm is not None and follower is not None and (work.sums is not None)",
            "norm is not None and work.sums is not None",
            1,
        ),
        ("Passes._clip", "left is not None and any(defers)", "any(defers)", 1),
    ],
    "A 0 beside what is observed of the same gradients changes no maximum.": [
        (
            "Passes._clip_over",
            "norm is not None and follower is not None and (work.sums is not None)",
            "follower is not None and work.sums is not None",
            1,
        ),
    ],
    "Proposes the number that the rule has without a proposal.": [
        (
            "Follower.before_update",
            "0 < ceiling < wanted",
            "0 < ceiling <= wanted",
            1,
        ),
        ("Follower._propose_on_device", "wanted > ceiling", "wanted >= ceiling", 1),
    ],
    "A slower way to the same.": [
        ("Follower.bind", "self._propose = partial(setattr, memory, 'value')", "nothing", 1),
    ],
}

EXPLAINED = {key: reason for reason, keys in _BY_REASON.items() for key in keys}
