// Whether gradients share memory, which is unscaled and clipped as often as it is shared.
#include <ATen/MemoryOverlap.h>

#include "found.h"

namespace ampfast {

namespace {

// Where a tensor's memory begins and ends; of one that is empty or not dense, the tensor itself.
std::pair<const char*, const char*> extent_of(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (tensor.numel() == 0 || !is_dense(tensor)) {
    const char* begin = reinterpret_cast<const char*>(impl);
    return {begin, begin + 1};
  }
  const char* begin = static_cast<const char*>(impl->unsafe_storage().data()) +
                      impl->storage_offset() * impl->itemsize();
  return {begin, begin + at::detail::computeStorageNbytes(impl->sizes(), impl->strides(),
                                                          impl->itemsize())};
}

// Tells whether a tensor's memory is that of no other, unless the tensor itself is listed twice: it
// is torch's own, with one owner.
bool is_alone(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || impl->unsafe_storage().unsafeGetStorageImpl() == nullptr) {
    return true;
  }
  static const c10::DeleterFnPtr deleter = c10::GetAllocator(at::kCPU)->raw_deleter();
  const c10::Storage& storage = impl->unsafe_storage();
  return storage.use_count() == 1 &&
         storage.data_ptr().get_deleter() ==
             (storage.device_type() == at::kCPU
                  ? deleter
                  : c10::GetAllocator(storage.device_type())->raw_deleter());
}

// Tells whether elements of a tensor share memory, as in windows made by as_strided. An expanded
// tensor does not count: torch refuses to write it.
bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided ||
      at::has_internal_overlap(tensor) != at::MemOverlap::TooHard) {
    return false;
  }
  Reused<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reached = 0;
  for (const auto& [stride, size] : dims) {
    if (size > 1 && stride <= reached) {
      return true;
    }
    reached += stride * (size - 1);
  }
  return false;
}

}  // namespace

bool have_shared_memory(const Tensors& tensors) {
  if (std::any_of(tensors.begin(), tensors.end(),
                  [](const auto* t) { return overlaps_itself(*t); })) {
    return true;
  }
  size_t slots = 16;
  while (slots < 2 * tensors.size()) {
    slots *= 2;
  }
  Reused<const void*> seen;  // a hash table
  seen.assign(slots, nullptr);
  bool are_alone = true;
  for (const at::Tensor* tensor : tensors) {
    const void* impl = tensor->unsafeGetTensorImpl();
    are_alone = are_alone && is_alone(*tensor);
    size_t slot = reinterpret_cast<uintptr_t>(impl) * uint64_t{0x9e3779b97f4a7c15} >> 32;
    while (seen[slot &= slots - 1] != nullptr) {
      if (seen[slot++] == impl) {
        return true;
      }
    }
    seen[slot] = impl;
  }
  if (are_alone) {
    return false;
  }
  Reused<std::pair<const char*, const char*>> extents;
  for (const at::Tensor* tensor : tensors) {
    extents.push_back(extent_of(*tensor));
  }
  std::sort(extents.begin(), extents.end());
  const auto meet = [](const auto& a, const auto& b) { return a.second > b.first; };
  return std::adjacent_find(extents.begin(), extents.end(), meet) != extents.end();
}

}  // namespace ampfast
