"""What `torch.cpu.amp.GradScaler` is while patched."""

from torch.cpu.amp import grad_scaler

from ampfast.patching.old_names import stand_in

GradScaler = stand_in(grad_scaler.GradScaler, "cpu", __name__)
