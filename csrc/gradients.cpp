#include "gradients.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>

namespace ampfast {

namespace {

// Parameters looked at together.
constexpr Py_ssize_t kTogether = 16;

// In the order of `Dtype`.
constexpr std::array kDtypes{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
static_assert(kDtypes.size() == kDtypeCount);

// A subclass may do without a dispatch key of its own; then only its Python type tells.
bool has_plain_type(const at::Tensor& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object == nullptr || THPVariable_CheckExact(object);
}

// Memory that was not torch's may begin anywhere.
bool is_aligned(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const uintptr_t size = impl->itemsize();  // a power of 2
  return (reinterpret_cast<uintptr_t>(impl->unsafe_storage().data()) & (size - 1)) == 0;
}

C10_ALWAYS_INLINE void require_bytes(size_t needed, const c10::Storage& storage) {
  TORCH_CHECK(needed <= storage.nbytes(),
              "the storage of a gradient was freed or resized: ", storage.nbytes(),
              " bytes are left of ", needed);
}

// To the end of a dense tensor without gaps, from the beginning of its storage.
C10_ALWAYS_INLINE size_t bytes_of(const c10::TensorImpl* impl) {
  return (impl->storage_offset() + impl->numel()) * impl->itemsize();
}

// Where a dense tensor that is not empty begins.
C10_ALWAYS_INLINE char* memory_of(const at::Tensor& tensor, bool writes) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::Storage& storage = impl->unsafe_storage();
  require_bytes(bytes_of(impl), storage);
  void* base = writes ? storage.mutable_data() : const_cast<void*>(storage.data());
  return static_cast<char*>(base) + impl->storage_offset() * impl->itemsize();
}

}  // namespace

py::object of_python(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

// A dense tensor has the keys of its backend and of what every tensor has, and no others: no
// conjugate, no negative, no functorch wrapper, no Python subclass, no sparse or quantized layout.
bool is_dense(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet common =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  const c10::DispatchKeySet keys = tensor.key_set() - common;
  const c10::DispatchKeySet dense(c10::DispatchKey::Dense);
  return keys == (dense | (keys & c10::backend_bitset_mask));
}

bool has_memory(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return tensor.numel() == 0 || bytes_of(impl) <= impl->unsafe_storage().nbytes();
}

Dtype dtype_of(at::ScalarType type) {
  const auto* known = std::find(kDtypes.begin(), kDtypes.end(), type);
  TORCH_CHECK(known != kDtypes.end(), "ampfast has no kernel for ", type);
  return static_cast<Dtype>(known - kDtypes.begin());
}

bool is_observed() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool is_plain(const at::Tensor& tensor, uint64_t devices) {
  return (devices & device_bit(tensor.device().type())) != 0 && is_dense(tensor) &&
         has_plain_type(tensor) && tensor.is_non_overlapping_and_dense();
}

bool is_scalar(const at::Tensor& tensor, at::ScalarType dtype, uint64_t devices) {
  if (tensor.numel() != 1 || tensor.scalar_type() != dtype || !is_plain(tensor, devices) ||
      is_observed()) {
    return false;
  }
  TORCH_CHECK(has_memory(tensor), "the memory of a scalar was freed or resized");
  return true;
}

bool is_regular(const at::Tensor& tensor, uint64_t devices) {
  return std::find(kDtypes.begin(), kDtypes.end(), tensor.scalar_type()) != kDtypes.end() &&
         !tensor.is_inference() && is_plain(tensor, devices) && is_aligned(tensor);
}

int64_t kind_of(const at::Tensor& tensor) {
  const auto* known = std::find(kDtypes.begin(), kDtypes.end(), tensor.scalar_type());
  const int64_t device = std::hash<at::Device>()(tensor.device());
  const bool is_usual = known != kDtypes.end() && is_plain(tensor, ~uint64_t{0});
  return is_usual && tensor.numel() != 0 ? kDtypeCount * device + (known - kDtypes.begin()) : -1;
}

void require_storage(const at::Tensor& tensor) {
  // Nested tensors have no strides; torch's op refuses them.
  if (tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_nested()) {
    return;
  }
  if (tensor.is_sparse()) {
    const auto* sparse = static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    require_storage(sparse->indices());
    require_storage(sparse->values());
  } else if (tensor.layout() == at::kStrided && tensor.has_storage()) {
    require_bytes(at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                   tensor.element_size(), tensor.storage_offset()),
                  tensor.storage());
  }
}

at::Tensor real_view(const at::Tensor& tensor) {
  if (!tensor.is_complex() || tensor.layout() != at::kStrided) {
    return tensor;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor parts = at::view_as_real(tensor.is_conj() ? tensor.conj() : tensor);
  return parts.is_neg() ? parts._neg_view() : parts;
}

void GradList::add(const at::Tensor& tensor, bool writes, int64_t parameter) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype != dtype_) {
    dtype_ = dtype_ == at::ScalarType::Undefined ? dtype : c10::promoteTypes(dtype_, dtype);
  }
  if (tensor.numel() != 0) {
    add(dtype, memory_of(tensor, writes), tensor.numel(), parameter);
  }
}

C10_ALWAYS_INLINE void GradList::add(at::ScalarType dtype, char* address, int64_t numel,
                                     int64_t parameter) {
  auto list = std::find_if(lists_.begin(), lists_.end(),
                           [=](const DtypeList& each) { return each.dtype == dtype; });
  if (list == lists_.end()) {
    list = lists_.insert(list, DtypeList{dtype});
  }
  list->spans.push_back({address, numel, list->chunks, parameter});
  list->chunks += chunk_count(numel);
  list->elements += numel;
  elements_ += numel;
}

std::pair<GradList, GradList> GradList::split(const std::unordered_set<int64_t>& parameters) const {
  std::pair<GradList, GradList> both{device_, device_};
  for (const DtypeList& list : lists_) {
    for (const Span& span : list.spans) {
      GradList& grads = parameters.count(span.parameter) != 0 ? both.first : both.second;
      grads.add(list.dtype, span.address, span.numel, span.parameter);
    }
  }
  return both;
}

namespace {

// A walk that is under way.
class Walker {
 public:
  // One that borrows ends where a gradient is irregular, or elsewhere than the first one.
  Walker(const Reading& reading, bool borrows)
      : reading_(reading), borrows_(borrows), devices_(is_observed() ? 0 : reading.devices) {
    if (!borrows) {
      found.owners = std::make_shared<std::deque<at::Tensor>>();
    }
  }

  // Returns whether the walk continues.
  bool take_group(py::object params) {
    if (!borrows_) {
      // Reading a gradient may run Python, which may change a list.
      params = py::tuple(params);
    }
    PyObject* const* items = PySequence_Fast_ITEMS(params.ptr());
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(params.ptr());
    found.groups.push_back(std::move(params));
    found.grads.reserve(found.grads.size() + size);
    for (Py_ssize_t i = 0; i < size;) {
      const Py_ssize_t taken = take_some(items + i, std::min(kTogether, size - i), i);
      if (taken == 0) {
        return false;
      }
      i += taken;
    }
    parameters_ += size;
    return true;
  }

  void take_grad(const at::Tensor& grad, int64_t number) { sort(py::none(), grad, number); }

  // Sorts the gradients into their lists: by now no Python runs that could free their memory.
  Walk finish() {
    for (const GradRef& ref : found.grads) {
      list_on(ref.grad->device()).add(*ref.grad, reading_.writes, ref.number);
    }
    return std::move(found);
  }

  Walk found;

 private:
  // Takes the gradients of at most `kTogether` parameters: the memory of one arrives while the next
  // is asked for. Returns of how many, 0 where the walk ends.
  Py_ssize_t take_some(PyObject* const* items, Py_ssize_t count, Py_ssize_t index) {
    const at::Tensor* params[kTogether];
    const torch::autograd::AutogradMeta* metas[kTogether] = {};
    for (Py_ssize_t i = 0; i < count; ++i) {
      params[i] = THPVariable_CheckExact(items[i]) ? &THPVariable_Unpack(items[i]) : nullptr;
      if (params[i] != nullptr) {
        prefetch(params[i]->unsafeGetTensorImpl(), 1);
      } else if (borrows_) {
        return 0;
      }
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      metas[i] = params[i] != nullptr ? meta_of(*params[i]) : nullptr;
      prefetch(metas[i], 2);
    }
    const auto has_grad = [&metas](Py_ssize_t i) {
      return metas[i] != nullptr && metas[i]->grad_.defined();
    };
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (has_grad(i)) {
        prefetch(metas[i]->grad_.unsafeGetTensorImpl(), 4);
      }
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (has_grad(i)) {
        prefetch(metas[i]->grad_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), 2);
      }
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      const int64_t number = parameters_ + index + i;
      if (has_grad(i) && is_accepted(metas[i]->grad_)) {
        accept(metas[i]->grad_, number);
      } else if (has_grad(i) || params[i] == nullptr || (metas[i] && metas[i]->grad_fn_)) {
        // It runs Python, after which the others must be read again.
        if (borrows_) {
          return 0;
        }
        take_irregular(items[i], index + i, number);
        return i + 1;
      }
    }
    return count;
  }

  // Every gradient asks this: a call within would take a tenth of the walk's time.
  [[gnu::flatten]] bool is_accepted(const at::Tensor& grad) const {
    return is_regular(grad, devices_) && (reading_.allow_fp16 || grad.scalar_type() != at::kHalf) &&
           (!borrows_ || found.grads.empty() || grad.device() == found.grads[0].grad->device());
  }

  void take_irregular(PyObject* item, Py_ssize_t index, int64_t number) {
    const bool is_tensor = THPVariable_Check(item);
    at::Tensor grad;
    if (THPVariable_CheckExact(item)) {
      grad = THPVariable_Unpack(item).grad();
    } else if (is_tensor) {  // a subclass may redefine the attribute
      const py::object own = py::handle(item).attr("grad");
      grad = own.is_none() ? at::Tensor() : py::cast<at::Tensor>(own);
    }
    if (!is_tensor || (grad.defined() && !reading_.allow_fp16 &&
                       c10::toRealValueType(grad.scalar_type()) == at::kHalf)) {
      const auto refusal = of_python("ampfast.gradients", "refusal");
      const py::object error = refusal(found.groups.size() - 1, index, py::handle(item));
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
      throw py::error_already_set();
    }
    // A parameter that may be distributed is passed on without gradient, too.
    const bool may_be_distributed =
        grad.defined() ? !has_plain_type(grad) : !THPVariable_CheckExact(item);
    if (may_be_distributed && !reading_.ranks.is_none()) {
      if (found.shards.is_none()) {
        found.shards = reading_.ranks.attr("local_shards")();
      }
      const py::object shard =
          found.shards(py::handle(item), grad.defined() ? py::cast(grad) : py::none(), number);
      grad = shard.is_none() ? grad : py::cast<at::Tensor>(shard);
    }
    if (grad.defined()) {
      sort(py::reinterpret_borrow<py::object>(item), grad, number);
    }
  }

  void sort(const py::object& param, at::Tensor grad, int64_t number) {
    found.has_complex |= grad.is_complex();
    grad = real_view(grad);
    if (is_accepted(grad)) {
      accept(grad, number);
    } else {
      require_storage(grad);
      found.set_aside.emplace_back(param, grad, number, kind_of(grad));
    }
  }

  GradList& list_on(at::Device device) {
    for (GradList& list : found.lists) {
      if (list.device() == device) {
        return list;
      }
    }
    return found.lists.emplace_back(device);
  }

  void accept(const at::Tensor& grad, int64_t number) {
    found.grads.push_back({borrows_ ? &grad : &found.owners->emplace_back(grad), number});
  }

  const Reading& reading_;
  bool borrows_;
  uint64_t devices_;
  int64_t parameters_ = 0;
};

// A walk that borrows; nothing where it had to end or a container is unusual, and all is as before.
std::optional<Walk> borrowing_walk(PyObject* param_groups, const Reading& reading) {
#ifdef Py_GIL_DISABLED  // another thread may change the lists
  return std::nullopt;
#endif
  if (!PyList_CheckExact(param_groups) || is_observed()) {
    return std::nullopt;
  }
  Walker walker(reading, true);
  try {
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(param_groups); ++g) {
      PyObject* group = PyList_GET_ITEM(param_groups, g);
      PyObject* params =
          PyDict_CheckExact(group) ? PyDict_GetItemWithError(group, names::params) : nullptr;
      if (params == nullptr || !PyList_CheckExact(params) ||
          !walker.take_group(py::reinterpret_borrow<py::object>(params))) {
        return std::nullopt;
      }
    }
    return walker.finish();
  } catch (const c10::Error&) {  // memory that was freed
  }
  return std::nullopt;
}

}  // namespace

void Walk::hold() {
  if (owners != nullptr) {
    return;
  }
  owners = std::make_shared<std::deque<at::Tensor>>();
  for (GradRef& ref : grads) {
    ref.grad = &owners->emplace_back(*ref.grad);
  }
}

Walk walk(PyObject* param_groups, const Reading& reading) {
  if (std::optional<Walk> found = borrowing_walk(param_groups, reading)) {
    return std::move(*found);
  }
  Walker walker(reading, false);
  for (const py::handle group : py::handle(param_groups)) {
    walker.take_group(py::reinterpret_borrow<py::object>(group)["params"]);
  }
  return walker.finish();
}

Walk walk_over(const py::sequence& grads, const Reading& reading) {
  Walker walker(reading, false);
  for (size_t i = 0; i < grads.size(); ++i) {
    walker.take_grad(py::cast<at::Tensor>(grads[i]), static_cast<int64_t>(i));
  }
  return walker.finish();
}

std::optional<GradList> regular_list(const py::sequence& tensors, at::Device device) {
  if (is_observed()) {
    return std::nullopt;
  }
  // References to Python's objects: taking one from C++ to a tensor that only Python holds is slow.
  const auto items = std::make_shared<const py::tuple>(tensors);
  GradList list(device);
  list.hold(items);
  for (size_t i = 0; i < items->size(); ++i) {
    PyObject* item = PyTuple_GET_ITEM(items->ptr(), i);
    if (!THPVariable_CheckExact(item)) {
      return std::nullopt;
    }
    const at::Tensor& tensor = THPVariable_Unpack(item);
    if (tensor.device() != device || !is_regular(tensor, device_bit(device.type()))) {
      return std::nullopt;
    }
    list.add(tensor, true, static_cast<int64_t>(i));
  }
  return list;
}

bool can_be_reused(const py::list& memory, const py::list& like) {
#ifdef Py_GIL_DISABLED  // counts of references are approximate there
  return false;
#endif
  const auto fits = [](py::handle item, py::handle other) {
    const at::Tensor& tensor = THPVariable_Unpack(item.ptr());
    const at::Tensor& model = THPVariable_Unpack(other.ptr());
    return Py_REFCNT(item.ptr()) == 1 && is_dense(tensor) && tensor.use_count() == 1 &&
           tensor.storage().use_count() == 1 && tensor.scalar_type() == at::kFloat &&
           !tensor.requires_grad() && THPVariable_CheckExact(other.ptr()) && is_dense(model) &&
           tensor.device() == model.device() && tensor.sizes() == model.sizes() &&
           tensor.strides() == model.strides();
  };
  return memory.size() == like.size() &&
         std::equal(memory.begin(), memory.end(), like.begin(), fits);
}

py::bytes looks_of(const py::list& tensors) {
  Reused<int64_t> words;
  for (const py::handle item : tensors) {
    const at::Tensor& tensor = THPVariable_Unpack(item.ptr());
    auto form = static_cast<int64_t>(tensor.scalar_type());
    for (const c10::IntArrayRef extents : {tensor.sizes(), tensor.strides()}) {
      for (const int64_t extent : extents) {
        form = form * 1'000'003 + extent;
      }
    }
    words.push_back(form);
    words.push_back(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
    words.push_back(static_cast<int64_t>(tensor._version()));
  }
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t)};
}

}  // namespace ampfast
