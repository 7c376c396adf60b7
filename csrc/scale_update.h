// The scale update on the CPU, alone or behind the check that decides it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "scale_state.h"

namespace ampfast {

// Tells whether `tensor` is what the kernels read and write as a scalar: plain, of `dtype`, with
// one element, on a device whose type is in the bit set `devices`.
bool is_scalar(const at::Tensor& tensor, at::ScalarType dtype, uint64_t devices);

// Writes the next scale and growth tracker in place. All tensors are on the CPU: `scale`,
// `found_infs` and `norm` float32 scalars, `growth_tracker` an int32 one, `state` as
// scale_state.h lays it out; the last two may be missing.
class ScaleUpdate {
 public:
  ScaleUpdate(at::Tensor scale, at::Tensor growth_tracker, std::vector<at::Tensor> found_infs,
              std::optional<at::Tensor> state, std::optional<at::Tensor> norm, double growth_factor,
              double backoff_factor, int64_t growth_interval);

  // `found_inf` is one more flag than those of the constructor.
  void apply(bool found_inf);

  // Restores what `apply` replaced; needs a state.
  void undo();

  // Tells autograd that the scale was written, as torch's op does.
  void bump_version() const;

  bool applied() const { return applied_; }

 private:
  Update update() const;

  at::Tensor scale_;
  at::Tensor growth_tracker_;
  std::vector<at::Tensor> found_infs_;
  std::optional<at::Tensor> state_;
  std::optional<at::Tensor> norm_;
  double growth_factor_;
  double backoff_factor_;
  int64_t growth_interval_;
  bool applied_ = false;
};

}  // namespace ampfast
