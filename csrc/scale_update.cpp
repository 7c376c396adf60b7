#include "scale_update.h"

#include <utility>

#include "grad_list.h"

namespace ampfast {

bool is_scalar(const at::Tensor& tensor, at::ScalarType dtype, uint64_t devices) {
  return tensor.numel() == 1 && tensor.scalar_type() == dtype && is_plain(tensor, devices) &&
         !is_observed();
}

ScaleUpdate::ScaleUpdate(at::Tensor scale, at::Tensor growth_tracker,
                         std::vector<at::Tensor> found_infs, std::optional<at::Tensor> state,
                         std::optional<at::Tensor> norm, double growth_factor,
                         double backoff_factor, int64_t growth_interval)
    : scale_(std::move(scale)),
      growth_tracker_(std::move(growth_tracker)),
      found_infs_(std::move(found_infs)),
      state_(std::move(state)),
      norm_(std::move(norm)),
      growth_factor_(growth_factor),
      backoff_factor_(backoff_factor),
      growth_interval_(growth_interval) {}

Update ScaleUpdate::update() const {
  Update update;
  update.scale = scale_.mutable_data_ptr<float>();
  update.growth_tracker = growth_tracker_.mutable_data_ptr<int32_t>();
  update.state = state_ ? state_->mutable_data_ptr<int64_t>() : nullptr;
  update.norm = norm_ ? norm_->const_data_ptr<float>() : nullptr;
  update.growth_factor = growth_factor_;
  update.backoff_factor = backoff_factor_;
  update.growth_interval = growth_interval_;
  return update;
}

void ScaleUpdate::apply(bool found_inf) {
  for (const at::Tensor& flag : found_infs_) {
    found_inf |= *flag.const_data_ptr<float>() != 0;
  }
  ampfast::apply(update(), found_inf);
  applied_ = true;
}

void ScaleUpdate::undo() {
  TORCH_CHECK(state_, "an update without a state cannot be undone");
  ampfast::undo(update());
  applied_ = false;
}

void ScaleUpdate::bump_version() const { scale_.unsafeGetTensorImpl()->bump_version(); }

}  // namespace ampfast
