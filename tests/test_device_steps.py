"""Steps over the kernels of a device: marks before writes, memory, flags, and ops of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparison import assert_same
from support.reference_launcher import ReferenceLauncher
from support.twins import side

from ampfast import _C, GradScaler, backends
from ampfast.backends.gpu import DeviceKernels


def backward(run: Any, seed: int = 3) -> None:
    run.optimizer.zero_grad()
    run.scaler.scale(run.loss(seed)).backward()


def call(run: Any, name: str) -> Any:
    extra = (0.5,) if name == "clip_grad_norm_" else ()
    return getattr(run.scaler, name)(run.optimizer, *extra)


@pytest.mark.parametrize("name", ["unscale_", "clip_grad_norm_"])
def test_an_interrupted_launch_leaves_a_step_that_is_skipped(
    name: str, launcher: ReferenceLauncher
) -> None:
    run = side(GradScaler)
    backward(run)
    held = run.scaler._per_optimizer_states[id(run.optimizer)]
    plain = launcher.multi_tensor

    def interrupted(work: Any, *more: Any) -> None:
        if not work.write:
            plain(work, *more)
            return
        assert held["stage"].name == "UNSCALED", "not marked before the first write"
        assert [flag.item() for flag in held["found_inf_per_device"].values()] == [1.0]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "multi_tensor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(run, name)
    before = [param.detach().clone() for param in run.model.parameters()]
    assert run.scaler.step(run.optimizer) is None
    assert_same(before, [param.detach() for param in run.model.parameters()])
    assert run.scaler.step_skipped(run.optimizer)


def test_gradients_live_until_the_launch(launcher: ReferenceLauncher) -> None:
    """What runs before a launch may drop them: nobody else gets their memory."""
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.SGD([param], lr=0.1)
    param.grad = torch.full((4096,), 8.0)
    address = param.grad.data_ptr()
    plain, held = launcher.multi_tensor, []

    def dropping(*work: Any) -> None:
        param.grad = None
        held.extend(torch.full((4096,), 8.0) for _ in range(8))
        plain(*work)

    launcher.multi_tensor = dropping  # type: ignore[method-assign]
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert held
    assert all(other.data_ptr() != address and other.eq(8.0).all() for other in held)


def test_a_norm_takes_the_table_of_the_pass_before(launcher: ReferenceLauncher) -> None:
    run = side(GradScaler)
    backward(run)
    next(run.model.parameters()).grad = None
    run.scaler.unscale_(run.optimizer)
    before = _C.tables_made()
    run.scaler.grad_norm(run.optimizer)
    assert launcher.launches[-1] == "clip"
    assert _C.tables_made() == before


def test_another_optimizers_flag_is_its_own(launcher: ReferenceLauncher) -> None:
    """torch's optimizers leave the flag alone; any other may write it."""

    class Own(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            self.seen = self.found_inf  # type: ignore[attr-defined]
            self.seen.fill_(1.0)

    run = side(GradScaler, Own)
    backward(run)
    run.scaler.step(run.optimizer)
    assert run.optimizer.seen.item() == 1.0
    assert run.scaler.found_inf(run.optimizer).item() == 0.0


class Silent(ReferenceLauncher):
    """Runs nothing: what is counted are torch's ops around the launches."""

    def multi_tensor(self, *_: Any) -> None:
        pass

    update_scale = clip_coefficient = multi_tensor


# Memory and views, values that the host reads, and the flag on the host that marks a pass.
FREE = (
    "empty",
    "empty_like",
    "empty_strided",
    "unsqueeze",
    "unbind",
    "select",
    "as_strided",
    "detach",
)
OF_HOST = ("item", "_local_scalar_dense", "ones", "fill_")


@pytest.mark.parametrize("track", [None, "overflow"])
@pytest.mark.parametrize("kind", ["sgd", "fused_sgd"])
@pytest.mark.parametrize("name", ["step", "unscale_", "clip_grad_norm_"])
def test_torchs_ops_launch_nothing_besides(
    name: str, kind: str, track: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fill of memory is a launch, too, for a kernel to overwrite it."""
    kernels = DeviceKernels(Silent())
    monkeypatch.setattr(backends.Choice, "kernels_for", lambda choice, device: kernels)
    run = side(GradScaler, kind, track=track)
    monkeypatch.setattr(run.optimizer, "step", lambda: None)
    backward(run)
    for _ in range(5):  # by then the table is uploaded
        with torch.autograd.profiler.profile() as seen:
            call(run, name)
        run.scaler.update()
    names = {event.name.removeprefix("aten::") for event in seen.function_events}
    assert names <= {*FREE, *OF_HOST}
