"""What `torch.cuda.amp.GradScaler` is while patched."""

from torch.cuda.amp import grad_scaler

from ampfast.patching.old_names import stand_in

GradScaler = stand_in(grad_scaler.GradScaler, "cuda", __name__)
