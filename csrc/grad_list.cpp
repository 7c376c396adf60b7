#include "grad_list.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

namespace ampfast {

namespace {

// A plain tensor has the keys of its backend and of what every tensor has, and no others: no
// conjugate, no negative, no functorch wrapper, no Python subclass, no sparse or quantized layout.
bool has_only_dense_keys(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet common =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  const c10::DispatchKeySet keys = tensor.key_set() - common;
  const c10::DispatchKeySet dense(c10::DispatchKey::Dense);
  return keys == (dense | (keys & c10::backend_bitset_mask));
}

// A subclass may do without a dispatch key of its own; then only its Python type tells.
bool has_plain_type(const at::Tensor& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object == nullptr || THPVariable_CheckExact(object);
}

// Memory that was not torch's may begin anywhere.
bool is_aligned(const at::Tensor& tensor) {
  const uintptr_t size = tensor.element_size();  // a power of 2
  return (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & (size - 1)) == 0;
}

bool has_known_dtype(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

void require_bytes(size_t needed, const at::Tensor& tensor) {
  const size_t there = tensor.storage().nbytes();
  TORCH_CHECK(needed <= there, "the storage of a gradient was freed or resized: ", there,
              " bytes are left of ", needed);
}

}  // namespace

Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      TORCH_CHECK(false, "ampfast has no kernel for ", type);
  }
}

bool is_observed() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool is_plain(const at::Tensor& tensor, uint64_t devices) {
  return (devices & device_bit(tensor.device().type())) != 0 && has_only_dense_keys(tensor) &&
         has_plain_type(tensor) && tensor.is_non_overlapping_and_dense();
}

bool is_regular(const at::Tensor& tensor, uint64_t devices) {
  return has_known_dtype(tensor) && !tensor.is_inference() && is_plain(tensor, devices) &&
         is_aligned(tensor);
}

void require_storage(const at::Tensor& tensor) {
  if (tensor.key_set().has(c10::DispatchKey::Python)) {
    return;
  }
  if (tensor.is_sparse()) {
    const auto* sparse = static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    require_storage(sparse->indices());
    require_storage(sparse->values());
  } else if (tensor.layout() == at::kStrided && tensor.has_storage()) {
    require_bytes(at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                   tensor.element_size(), tensor.storage_offset()),
                  tensor);
  }
}

DtypeList& GradList::list_of(at::ScalarType dtype) {
  for (DtypeList& list : lists_) {
    if (list.dtype == dtype) {
      return list;
    }
  }
  return lists_.emplace_back(DtypeList{dtype, {}, 0});
}

void GradList::add(const at::Tensor& tensor, bool writes, int64_t parameter) {
  const int64_t numel = tensor.numel();
  has_float64_ |= tensor.scalar_type() == at::kDouble;
  if (numel == 0) {
    return;
  }
  require_bytes((tensor.storage_offset() + numel) * tensor.element_size(), tensor);
  void* address = writes ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  add(tensor.scalar_type(), static_cast<char*>(address), numel, parameter);
}

void GradList::add(at::ScalarType dtype, char* address, int64_t numel, int64_t parameter) {
  DtypeList& list = list_of(dtype);
  list.spans.push_back({address, numel, list.chunks, parameter});
  list.chunks += chunk_count(numel);
}

std::pair<GradList, GradList> GradList::split(const std::unordered_set<int64_t>& parameters) const {
  std::pair<GradList, GradList> parts{{device_, owner_}, {device_, owner_}};
  for (const DtypeList& list : lists_) {
    for (const Span& span : list.spans) {
      GradList& part = parameters.count(span.parameter) != 0 ? parts.first : parts.second;
      part.add(list.dtype, span.address, span.numel, span.parameter);
    }
  }
  return parts;
}

int64_t GradList::chunks() const {
  int64_t chunks = 0;
  for (const DtypeList& list : lists_) {
    chunks += list.chunks;
  }
  return chunks;
}

int64_t GradList::table_bytes() const {
  size_t bytes = 0;
  for (const DtypeList& list : lists_) {
    bytes += list.spans.capacity() * sizeof(Span) + list.spans.size() * sizeof(at::Tensor);
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace ampfast
