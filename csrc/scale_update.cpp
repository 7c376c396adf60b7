#include "scale_update.h"

#include <utility>

#include "grad_list.h"

namespace ampfast {

bool is_scalar(const at::Tensor& tensor, at::ScalarType dtype, uint64_t devices) {
  return tensor.numel() == 1 && tensor.scalar_type() == dtype && is_plain(tensor, devices) &&
         !is_observed();
}

ScaleUpdate::ScaleUpdate(at::Tensor scale, at::Tensor growth_tracker,
                         std::vector<at::Tensor> found_infs, double growth_factor,
                         double backoff_factor, int64_t growth_interval)
    : scale_(std::move(scale)),
      growth_tracker_(std::move(growth_tracker)),
      found_infs_(std::move(found_infs)),
      growth_factor_(growth_factor),
      backoff_factor_(backoff_factor),
      growth_interval_(growth_interval) {}

void ScaleUpdate::apply(bool found_inf) {
  for (const at::Tensor& flag : found_infs_) {
    found_inf |= *flag.const_data_ptr<float>() != 0;
  }
  before_ = {*scale_.const_data_ptr<float>(), *growth_tracker_.const_data_ptr<int32_t>()};
  write(next_scale(before_, found_inf, growth_factor_, backoff_factor_, growth_interval_));
  applied_ = true;
}

void ScaleUpdate::undo() {
  write(before_);
  applied_ = false;
}

void ScaleUpdate::write(ScaleState state) {
  *scale_.mutable_data_ptr<float>() = state.scale;
  *growth_tracker_.mutable_data_ptr<int32_t>() = state.growth_tracker;
}

void ScaleUpdate::bump_version() const { scale_.unsafeGetTensorImpl()->bump_version(); }

}  // namespace ampfast
