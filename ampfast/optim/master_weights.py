"""Float32 master weights for the 16-bit parameters of any optimizer."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ampfast.backends import core
from ampfast.backends.cuda_graphs import refuse_capture
from ampfast.backends.scalars import allocate
from ampfast.errors import not_compiled, refuse_differentiable

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

# Key of a master weight in a checkpoint, as in Transformer Engine's.
_KEY = "master_param"

_HALVES = torch.float16, torch.bfloat16


class _Masters(dict[Tensor, Tensor]):
    """Master weights by parameter: float32 weights, which an optimizer steps in its place.

    Attributes:
        places: The parameters in the groups, by identity, when master weights were last compared
            with them; None: compare them.
        looks: `core.looks_of` the parameters with a master weight then, or after the last step.
        others: The parameters in the groups without one.
        memory: Float32 gradients of the last step on a CPU, where fresh memory takes several times
            as long; the allocators of GPUs keep it.
    """

    places: list[int] | None = None
    looks = b""
    others: Sequence[Tensor] = ()
    memory: list[Tensor] = []  # noqa: RUF012 - replaced, never written

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy compares parameters at its first step.
        return _Masters, (dict(self),)

    def make_if_trained(self, param: Tensor) -> None:
        if param not in self and _is_trained(param):
            refuse_capture("the making of master weights")
            with torch.inference_mode(False), torch.no_grad():
                weight = param.detach().to(torch.float32)
            self[param] = weight.requires_grad_()

    def load(self, param: Tensor, saved: Any, index: Any) -> None:
        """Makes a master weight with the values of a checkpoint's, which others may hold."""
        if not isinstance(saved, Tensor) or saved.shape != param.shape:
            raise ValueError(
                f"the master weight of parameter {index} must be a dense float32 tensor of the "
                f"parameter's shape {tuple(param.shape)}, got {saved!r:.200}"
            )
        if _fits(param):
            with torch.inference_mode(False), torch.no_grad():
                weight = torch.empty_like(param.detach(), dtype=torch.float32).copy_(saved)
            self[param] = weight.requires_grad_()


class MasterWeights(torch.optim.Optimizer):
    """Base of optimizers that `master_weights_` gave float32 master weights; for `isinstance`.

    Groups and state hold the parameters of the model, except inside of `step`, where master weights
    replace the 16-bit ones.
    """

    # The only names besides torch's, which an optimizer's own would hide.
    _masters: _Masters
    _master_weights_of: type[torch.optim.Optimizer]

    @property
    def master_weights(self) -> Mapping[Tensor, Tensor]:
        """Float32 weights by parameter, sharing memory with the weights that `step` uses.

        Of every 16-bit parameter that requires a gradient or has one.
        """
        for param in _params(self):
            self._masters.make_if_trained(param)
        return {param: weight.detach() for param, weight in self._masters.items()}

    @not_compiled
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps the master weights and rounds them to the parameters that have a gradient.

        Gradients become float32 tensors; if the optimizer sets one to None, it is None afterwards.

        Args:
            *args: Passed on; a closure, the first, sees the model's parameters.
            **kwargs: Passed on; `closure` as well.

        Returns:
            What the optimizer's own method returns.

        Raises:
            RuntimeError: If a parameter with a master weight is not 16 bit or has another shape, or
                if the optimizer changed it itself, as one does that steps a list of its own.
            ValueError: If a group is differentiable.
        """
        step = cast(Any, self._master_weights_of.step)
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # the hooks of this step run around it
        masters, swap = self._masters, _Swap(self)
        if args and callable(args[0]):
            args = (partial(swap.evaluate, args[0]), *args[1:])
        if callable(kwargs.get("closure")):
            kwargs["closure"] = partial(swap.evaluate, kwargs["closure"])
        try:
            _prepare(self)
            swap.enter()
            result = step(self, *args, **kwargs)
            swap.leave()
            _write_back(self)
        except BaseException:
            # An interrupt may come between any two lines, so each of these can be done again.
            swap.leave()
            masters.places = None  # parameters win over what the step has written
            raise
        return result

    def widen_gradients(self) -> None:
        """Replaces 16-bit gradients by float32 ones of the same values.

        `step` does it, and a scaler before it reads gradients. Float32 ones stay as they are.
        """
        found = [(param, param.grad) for param in _params(self)]
        halves = [(p, grad) for p, grad in found if grad is not None and grad.dtype in _HALVES]
        if not halves:
            return
        params, grads = map(list, zip(*halves, strict=True))
        masters = self._masters
        if not core.can_be_reused(masters.memory, grads):
            masters.memory = []  # freed first
        with torch.inference_mode(False), torch.no_grad():
            wide: Any = masters.memory or [torch.empty_like(g, dtype=torch.float32) for g in grads]
            torch._foreach_copy_(_locals(wide), _locals(grads))
        masters.memory = wide if wide[0].is_cpu else []
        for param, grad in zip(params, wide, strict=True):
            if param.grad_dtype not in (None, torch.float32):
                param.grad_dtype = None
            param.grad = grad

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's, in which `state[i]["master_param"]` is a master weight."""
        with self.register_state_dict_post_hook(_add_masters, prepend=True):
            saved: dict[str, Any] = super().state_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where a checkpoint was saved, before or after the model's is loaded.

        Where it has no master weights, as one of a plain optimizer, they are made from the
        parameters at the next step. State stays float32.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If a master weight has another shape, if a checkpoint by parameters' names
                has none, or as torch. Nothing is loaded then.
        """
        held, loaded, swap = self._masters, _Masters(), _Swap(self)

        def begin(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            state = dict(saved["state"])
            for index, param in _numbered(self, saved):
                entry = dict(state.get(index, {}))
                if _KEY in entry:
                    weight, state[index] = entry.pop(_KEY), entry
                    if not entry:
                        del state[index]  # torch saves no empty one
                    loaded.load(param, weight, index)
                elif isinstance(index, str) and index in state and _fits(param):
                    raise ValueError(
                        f"the checkpoint has no master weight of {index}: torch drops it on "
                        "loading with flatten_optimizer_state_dict=True. Save and load without "
                        f'that, or add state["{index}"]["{_KEY}"] in a pre-hook of load_state_dict'
                    )
            # torch loads state in the dtype of what it belongs to; these take no memory.
            masters = _Masters()
            for param in filter(_fits, _params(self)):
                one = allocate(torch.empty, (), dtype=torch.float32, device=param.device)
                masters[param] = one.expand(param.shape)
            self._masters = masters
            swap.enter()
            return {**saved, "state": state}

        def end(_: Any) -> None:
            nonlocal held
            swap.leave()
            self._masters = held = loaded

        try:
            with (
                self.register_load_state_dict_pre_hook(begin),
                self.register_load_state_dict_post_hook(end, prepend=True),
            ):
                super().load_state_dict(state_dict)
        except BaseException:
            swap.leave()
            self._masters = held
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_masters": self._masters}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its class is made when it is needed.
        return _restored, (self._master_weights_of,), self.__getstate__()


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _add_masters(optimizer: Any, saved: dict[str, Any]) -> None:
    """Adds master weights to a state dict, before the hooks of others see it."""
    saved["state"] = state = dict(saved["state"])
    for index, param in _numbered(optimizer, saved):
        if param in optimizer._masters:
            state[index] = {**state.get(index, {}), _KEY: optimizer._masters[param].detach()}


def _numbered(optimizer: MasterWeights, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
    """Parameters and the keys of their state in a state dict; torch checks how many."""
    keys = (key for group in state_dict["param_groups"] for key in group["params"])
    return list(zip(keys, _params(optimizer), strict=False))


def _prepare(optimizer: MasterWeights) -> None:
    """Makes master weights equal to the parameters, and lends them gradients in float32."""
    masters, params = optimizer._masters, _params(optimizer)
    refuse_differentiable(optimizer.param_groups, "master weights do")
    places = list(map(id, params))
    if (
        places != masters.places
        or core.looks_of(_locals(masters)) != masters.looks
        or any(map(_is_trained, masters.others))
    ):
        for number, param in enumerate(params):
            _follow(masters, param, number)
        for param in masters.keys() - set(params):
            del masters[param]
        masters.others = [param for param in params if param not in masters]
        masters.places, masters.looks = places, core.looks_of(_locals(masters))
    optimizer.widen_gradients()
    for param, weight in masters.items():
        weight.grad = param.grad


def _follow(masters: _Masters, param: Tensor, number: int) -> None:
    """Makes the master weight of a parameter, or makes it equal to it."""
    weight = masters.get(param)
    if weight is None:
        masters.make_if_trained(param)
        return
    if not _fits(param) or param.shape != weight.shape:
        raise RuntimeError(
            f"parameter {number} is {param.dtype} of shape {tuple(param.shape)}, and its master "
            f"weight was made for 16 bit and {tuple(weight.shape)}: make the optimizer after the "
            "model's conversion"
        )
    if weight.device != param.device:
        masters[param] = weight.detach().to(param.device).requires_grad_()
    with torch.no_grad():
        param, weight = _locals([param, masters[param]])
        # Elements that are equal keep their low bits. By bits, for the sign of zero.
        differs = weight.to(param.dtype).view(torch.int16) != param.view(torch.int16)
        weight.copy_(torch.where(differs, param.to(torch.float32), weight))


@torch.no_grad()
def _write_back(optimizer: MasterWeights) -> None:
    """Rounds master weights to the parameters that have a gradient, and takes that back.

    A parameter has none either, then, if the step has dropped it.
    """
    masters, params, weights = optimizer._masters, [], []
    # A closure may have made further master weights.
    if not core.looks_of(_locals(masters)).startswith(masters.looks):
        raise RuntimeError(
            "the optimizer's step changed a parameter while a master weight stood in for it: "
            "master_weights_ serves optimizers that step the parameters in their param_groups, "
            "none with a list of its own"
        )
    for param, weight in masters.items():
        if param.grad is not None:
            params.append(param)
            weights.append(weight)
            if weight.grad is None:
                param.grad = None
            weight.grad = None
    if params:
        torch._foreach_copy_(_locals(params), _locals(weights))
    masters.looks = core.looks_of(_locals(masters))


def _locals(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors; of DTensors their local shards."""
    return [getattr(each, "_local_tensor", each) for each in tensors]


class _Swap:
    """Groups and state of an optimizer, by parameter or by master weight."""

    def __init__(self, optimizer: MasterWeights) -> None:
        self.optimizer = optimizer
        self._own: list[tuple[list[Tensor], list[Tensor]]] | None = None

    def enter(self) -> None:
        optimizer, masters = self.optimizer, self.optimizer._masters
        own = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
        # What `leave` restores is recorded before anything is written.
        self._state = optimizer.state
        self._inner = _rekeyed(optimizer.state, masters.items())
        self._own = own
        for params, _ in own:
            params[:] = [masters.get(param, param) for param in params]
        optimizer.state = self._inner

    def leave(self) -> None:
        """Undoes `enter`, also one that was interrupted, as a `leave` may have been."""
        if self._own is None:
            return
        optimizer, state = self.optimizer, self._state
        for params, own in self._own:
            params[:] = own
        if optimizer.state is not state:
            back = ((weight, param) for param, weight in optimizer._masters.items())
            entries = _rekeyed(optimizer.state, back)
            if optimizer.state is self._inner:
                # The same object, which others may hold.
                state.clear()
                state.update(entries)
            else:
                state = entries
            optimizer.state = state
        self._own = None

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Calls a step's closure, which sees the parameters instead of the master weights."""
        self.leave()
        try:
            _write_back(self.optimizer)
            loss = closure()
            _prepare(self.optimizer)
        finally:
            self.enter()
        return loss


def _rekeyed(
    state: Mapping[Any, Any], pairs: Iterable[tuple[Tensor, Tensor]]
) -> defaultdict[Any, Any]:
    """The state with the second tensor of a pair as key for the first, in the same order."""
    by_id = {id(key): other for key, other in pairs}  # keys may be numbers
    return defaultdict(dict, {by_id.get(id(key), key): entry for key, entry in state.items()})


def master_weights_(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Gives an optimizer float32 master weights for its 16-bit parameters, in place.

    Each step makes their gradients float32, updates the master weights, and rounds these to the
    parameters, which hold the model's weights as before: bit for bit the training with master
    weights by hand. A `GradScaler` makes them float32 before it reads them, float16 gradients too;
    bfloat16 needs no scaler. Other parameters are stepped as they are. State is float32, but what
    the constructor made in 16 bit, as Adagrad its sums, stays rounded.

    The class becomes a subclass of its own and of `MasterWeights`, whose `master_weights` maps
    parameters to master weights. A second call has no effect.

    Where a parameter was edited since the last step, by an operation that autograd sees or by a
    loaded checkpoint, it wins: element by element, so that others keep their low bits.

    Args:
        optimizer: Any `torch.optim.Optimizer`, before schedulers and trainers get it.

    Returns:
        The optimizer.

    Raises:
        TypeError: If it is none, wraps another one, or has a flat parameter of FSDP1; for a class
            whose first base is ABC or Generic.
        ValueError: If a group is differentiable.
        RuntimeError: If its `step` was replaced on the instance, or under CUDA graph capture.

    The optimizer is unchanged where an error is raised.
    """
    if isinstance(optimizer, MasterWeights):
        return cast(AnyOptimizer, optimizer)
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or any(
        isinstance(held, torch.optim.Optimizer) for held in vars(optimizer).values()
    ):
        raise TypeError(
            f"master_weights_ takes a torch.optim.Optimizer, got {kind.__module__}."
            f"{kind.__qualname__}; if it wraps one, pass the inner one, before it is wrapped"
        )
    if "step" in vars(optimizer):
        raise RuntimeError(
            "the optimizer's step was replaced on the instance: call master_weights_ before the "
            "scheduler or trainer gets it"
        )
    refuse_capture("master_weights_, which makes float32 weights", "call it before")
    refuse_differentiable(optimizer.param_groups, "master weights do")
    if any(getattr(param, "_is_flat_param", False) for param in _params(optimizer)):
        raise TypeError(
            "master_weights_ cannot take a flat parameter of FSDP1, which keeps float32 weights by "
            "itself: use its MixedPrecision policy"
        )
    masters = _Masters()
    for param in _params(optimizer):
        masters.make_if_trained(param)
    converted = cast(MasterWeights, optimizer)
    try:
        converted.__class__ = _class_of(cast(Any, kind))
        converted._masters = masters
        if optimizer.state:
            # State of 16 bit becomes float32, as torch loads it.
            converted.load_state_dict(converted.state_dict())
    except BaseException:
        converted.__class__ = cast(Any, kind)
        vars(converted).pop("_masters", None)
        raise
    return optimizer


def _fits(param: Tensor) -> bool:
    """Whether a parameter may have a master weight: 16 bit and dense, and with values by now."""
    return param.dtype in _HALVES and not is_lazy(param) and param.layout is torch.strided


def _is_trained(param: Tensor) -> bool:
    return _fits(param) and (param.requires_grad or param.grad is not None)


@cache
def _class_of(kind: Any) -> type[MasterWeights]:
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: Any = type(kind)(kind.__name__, (MasterWeights, kind), names)
    step: Any = torch.optim.Optimizer.profile_hook_step(MasterWeights.step)
    step.hooked = True
    # For code that asks whether it takes a closure or a scaler.
    step.__signature__ = inspect.signature(kind.step)
    made.step, made._master_weights_of = step, kind
    return cast(type[MasterWeights], made)


def _restored(kind: type[torch.optim.Optimizer]) -> MasterWeights:
    """An optimizer without its state, for pickle and copy."""
    made = _class_of(cast(Any, kind))
    return made.__new__(made)
