#include "gradients.h"

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace ampfast {

namespace {

using Tensors = std::vector<at::Tensor>;

// Parameters looked at together.
constexpr Py_ssize_t kTogether = 16;

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
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const uintptr_t size = impl->itemsize();  // a power of 2
  return (reinterpret_cast<uintptr_t>(impl->unsafe_storage().data()) & (size - 1)) == 0;
}

bool has_known_dtype(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

void require_bytes(size_t needed, const c10::Storage& storage) {
  const size_t there = storage.nbytes();
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

bool is_scalar(const at::Tensor& tensor, at::ScalarType dtype, uint64_t devices) {
  return tensor.numel() == 1 && tensor.scalar_type() == dtype && is_plain(tensor, devices) &&
         !is_observed();
}

bool is_regular(const at::Tensor& tensor, uint64_t devices) {
  return has_known_dtype(tensor) && !tensor.is_inference() && is_plain(tensor, devices) &&
         is_aligned(tensor);
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

void GradList::add(const at::Tensor& tensor, bool writes, int64_t parameter) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const at::ScalarType dtype = tensor.scalar_type();
  const int64_t numel = impl->numel();
  has_float64_ |= dtype == at::kDouble;
  if (numel == 0) {
    return;
  }
  const c10::Storage& storage = impl->unsafe_storage();
  const size_t size = impl->itemsize();
  require_bytes((impl->storage_offset() + numel) * size, storage);
  void* base = writes ? storage.mutable_data() : const_cast<void*>(storage.data());
  add(dtype, static_cast<char*>(base) + impl->storage_offset() * size, numel, parameter);
}

void GradList::add(at::ScalarType dtype, char* address, int64_t numel, int64_t parameter,
                   float* wide) {
  const bool is_paired = wide != nullptr;
  auto list = std::find_if(lists_.begin(), lists_.end(), [=](const DtypeList& each) {
    return each.dtype == dtype && each.is_paired == is_paired;
  });
  if (list == lists_.end()) {
    list = lists_.insert(list, DtypeList{dtype, {}, 0, 0, is_paired});
    list->spans.reserve(expected_);
  }
  list->spans.push_back({address, numel, list->chunks, parameter, wide});
  list->chunks += chunk_count(numel);
  list->elements += numel;
  chunks_ += chunk_count(numel);
  elements_ += numel;
}

std::pair<GradList, GradList> GradList::split(const std::unordered_set<int64_t>& parameters) const {
  std::pair<GradList, GradList> both{{device_, owner_}, {device_, owner_}};
  for (const DtypeList& list : lists_) {
    for (const Span& span : list.spans) {
      GradList& grads = parameters.count(span.parameter) != 0 ? both.first : both.second;
      grads.add(list.dtype, span.address, span.numel, span.parameter, span.wide);
    }
  }
  return both;
}

GradList GradList::paired(const std::unordered_map<int64_t, at::Tensor>& wide) const {
  const auto owners = std::make_shared<std::pair<std::shared_ptr<const void>, Tensors>>();
  owners->first = owner_;
  GradList pairs(device_, owners);
  pairs.has_float64_ = has_float64_;
  for (const DtypeList& list : lists_) {
    for (const Span& span : list.spans) {
      const auto found = list.element_size() == 2 ? wide.find(span.parameter) : wide.end();
      float* values = nullptr;
      if (found != wide.end()) {
        const at::Tensor& tensor = found->second;
        TORCH_CHECK(
            tensor.scalar_type() == at::kFloat && tensor.device() == device_ &&
                is_regular(tensor, device_bit(device_.type())) && tensor.numel() == span.numel,
            "number ", span.parameter, " needs ", span.numel, " dense float32 values on ", device_);
        require_storage(tensor);
        values = tensor.mutable_data_ptr<float>();
        owners->second.push_back(tensor);
      }
      pairs.add(list.dtype, span.address, span.numel, span.parameter, values);
    }
  }
  return pairs;
}

namespace {

// Python's own attribute for subclasses, which may define it anew.
at::Tensor gradient_of(const py::handle& param) {
  if (THPVariable_CheckExact(param.ptr())) {
    return THPVariable_Unpack(param.ptr()).grad();
  }
  const py::object grad = param.attr("grad");
  if (grad.is_none()) {
    return at::Tensor();
  }
  if (!THPVariable_Check(grad.ptr())) {
    py::getattr(grad, "dtype");  // raises as reading it in Python does
    throw py::type_error("a gradient must be a tensor");
  }
  return THPVariable_Unpack(grad.ptr());
}

// Turns a warning of `.grad` on a non-leaf tensor into a Python warning.
template <class Body>
void with_python_warnings(const Body& body) {
  torch::PyWarningHandler warnings;
  try {
    body();
  } catch (...) {
    warnings.set_in_exception();
    throw;
  }
}

// What a walk has found so far.
struct Walk {
  // Gradients that the kernels can take, and the number of each one's parameter.
  std::shared_ptr<Tensors> regular = std::make_shared<Tensors>();
  std::vector<int64_t> numbers;
  std::vector<SetAside> set_aside;
  std::optional<Place> refused;
  int64_t parameters = 0;  // with gradient or without

  // Takes a gradient that the kernels can take, and tells whether it did.
  bool take(at::Tensor& grad, uint64_t devices) {
    if (!grad.defined() || !is_regular(grad, devices)) {
      return false;
    }
    regular->push_back(std::move(grad));
    numbers.push_back(parameters);
    return true;
  }
};

GradList& list_on(std::vector<GradList>& lists, at::Device device,
                  const std::shared_ptr<const Tensors>& owner) {
  for (GradList& list : lists) {
    if (list.device() == device) {
      return list;
    }
  }
  return lists.emplace_back(device, owner);
}

// The local shard of a distributed gradient, else the gradient. A parameter that may be distributed
// is passed on without gradient, too.
at::Tensor local_shard(const py::object& local_shard_of, const py::object& param, at::Tensor grad,
                       int64_t number) {
  if (local_shard_of.is_none() || (!grad.defined() && THPVariable_CheckExact(param.ptr()))) {
    return grad;
  }
  const py::object shard =
      local_shard_of(param, grad.defined() ? py::cast(grad) : py::none(), number);
  return shard.is_none() ? grad : py::cast<at::Tensor>(shard);
}

void walk_group(const py::handle& params, int64_t group, bool allow_fp16, uint64_t devices,
                const py::object& local_shard_of, Walk& walk) {
  int64_t index = 0;
  for (const py::handle item : params) {
    const py::object param = py::reinterpret_borrow<py::object>(item);
    const bool is_tensor = THPVariable_Check(param.ptr());
    at::Tensor grad = is_tensor ? gradient_of(param) : at::Tensor();
    if (!is_tensor || (grad.defined() && !allow_fp16 && grad.scalar_type() == at::kHalf)) {
      walk.refused = {group, index, param};
      return;
    }
    if (!walk.take(grad, devices)) {
      grad = local_shard(local_shard_of, param, std::move(grad), walk.parameters);
      if (!walk.take(grad, devices) && grad.defined()) {
        require_storage(grad);
        walk.set_aside.emplace_back(param, std::move(grad), walk.parameters);
      }
    }
    ++index;
    ++walk.parameters;
  }
}

}  // namespace

std::tuple<std::vector<GradList>, std::vector<SetAside>, std::optional<Place>> walk_gradients(
    const py::handle& param_groups, bool allow_fp16, bool writes, uint64_t devices,
    bool bumps_versions, const py::object& local_shard_of) {
  Walk walk;
  with_python_warnings([&] {
    int64_t index = 0;
    for (const py::handle group : param_groups) {
      const py::object params = py::reinterpret_borrow<py::object>(group)["params"];
      walk_group(params, index++, allow_fp16, is_observed() ? 0 : devices, local_shard_of, walk);
      if (walk.refused) {
        return;
      }
    }
  });
  std::vector<GradList> lists;
  for (size_t i = 0; i < walk.numbers.size() && !walk.refused; ++i) {
    const at::Tensor& grad = (*walk.regular)[i];
    if (bumps_versions) {
      grad.unsafeGetTensorImpl()->bump_version();
    }
    list_on(lists, grad.device(), walk.regular).add(grad, writes, walk.numbers[i]);
  }
  return {std::move(lists), std::move(walk.set_aside), std::move(walk.refused)};
}

namespace {

void prefetch(const void* address, int cache_lines) {
#if defined(__GNUC__)
  for (int line = 0; line < cache_lines; ++line) {
    __builtin_prefetch(static_cast<const char*>(address) + 64 * line);
  }
#endif
}

// Takes the gradients of at most `kTogether` parameters, the first of which has this number: the
// memory of one arrives while the next is asked for.
bool take_some(PyObject* const* params, Py_ssize_t count, int64_t first, bool allow_fp16,
               bool writes, ShortWalk& walk) {
  const at::Device device = walk.list.device();
  int64_t numbers[kTogether];
  const torch::autograd::AutogradMeta* metas[kTogether];
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!THPVariable_CheckExact(params[i])) {
      return false;
    }
    prefetch(THPVariable_Unpack(params[i]).unsafeGetTensorImpl(), 1);
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    metas[i] = static_cast<const torch::autograd::AutogradMeta*>(
        THPVariable_Unpack(params[i]).unsafeGetTensorImpl()->autograd_meta());
    prefetch(metas[i], 2);
  }
  const size_t before = walk.grads.size();
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (metas[i] == nullptr) {
      continue;
    }
    if (metas[i]->grad_.defined()) {
      numbers[walk.grads.size() - before] = first + i;
      walk.grads.push_back(&metas[i]->grad_);
      prefetch(metas[i]->grad_.unsafeGetTensorImpl(), 4);
    } else if (metas[i]->grad_fn_) {
      return false;  // not a leaf: reading its gradient may warn
    }
  }
  for (size_t i = before; i < walk.grads.size(); ++i) {
    prefetch(walk.grads[i]->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), 2);
  }
  for (size_t i = before; i < walk.grads.size(); ++i) {
    const at::Tensor& grad = *walk.grads[i];
    if (!is_regular(grad, device_bit(device.type())) || grad.device() != device ||
        (!allow_fp16 && grad.scalar_type() == at::kHalf)) {
      return false;
    }
    walk.list.add(grad, writes, numbers[i - before]);
  }
  return true;
}

}  // namespace

void ShortWalk::own() {
  owners.clear();
  owners.reserve(grads.size());
  for (const at::Tensor* grad : grads) {
    owners.push_back(*grad);
  }
}

std::optional<ShortWalk> short_walk(PyObject* param_groups, at::Device device, bool allow_fp16,
                                    bool writes) {
  static PyObject* const name = PyUnicode_InternFromString("params");
  if (!PyList_CheckExact(param_groups) || is_observed() ||
      at::impl::torch_function_mode_enabled()) {
    return std::nullopt;
  }
  ShortWalk walk(device);
  int64_t parameters = 0;
  for (Py_ssize_t g = 0; g < PyList_GET_SIZE(param_groups); ++g) {
    PyObject* group = PyList_GET_ITEM(param_groups, g);
    PyObject* params = PyDict_CheckExact(group) ? PyDict_GetItemWithError(group, name) : nullptr;
    if (params == nullptr || !PyList_CheckExact(params)) {
      return std::nullopt;
    }
    const Py_ssize_t size = PyList_GET_SIZE(params);
    walk.grads.reserve(walk.grads.size() + size);
    walk.list.expect(walk.grads.capacity());
    PyObject* const* items = reinterpret_cast<PyListObject*>(params)->ob_item;
    for (Py_ssize_t i = 0; i < size; i += kTogether) {
      try {
        if (!take_some(items + i, std::min(kTogether, size - i), parameters + i, allow_fp16, writes,
                       walk)) {
          return std::nullopt;
        }
      } catch (const c10::Error&) {  // memory that was freed
        return std::nullopt;
      }
    }
    parameters += size;
  }
  if (walk.grads.empty()) {
    return std::nullopt;
  }
  if (walk.list.elements() >= kElementsWorthReleasing) {
    walk.own();
  }
  return walk;
}

NarrowGrads narrow_grads(const std::vector<at::Tensor>& params,
                         const std::optional<at::Tensor>& buffer, uint64_t devices) {
  constexpr int64_t kAlignment = 64 / sizeof(float);
  // Vectors of the gradient that are aligned are so in float32, too.
  const auto phase = [](const at::Tensor& grad) {
    constexpr uintptr_t kVector = 16;
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(grad.const_data_ptr()) % kVector / 2);
  };
  const auto room = [&phase](const at::Tensor& grad) {
    return (phase(grad) + grad.numel() + kAlignment - 1) / kAlignment * kAlignment;
  };
  devices = is_observed() ? 0 : devices;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  NarrowGrads found;
  int64_t length = 0;
  std::optional<at::Device> device;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& grad = params[i].grad();
    if (!grad.defined() ||
        (grad.scalar_type() != at::kHalf && grad.scalar_type() != at::kBFloat16)) {
      continue;
    }
    const bool takes = is_regular(grad, devices) && (!device || grad.device() == *device);
    device = takes ? grad.device() : device;
    (takes ? found.places : found.others).push_back(static_cast<int64_t>(i));
    length += takes ? room(grad) : 0;
  }
  if (found.places.empty()) {
    found.buffer = buffer ? *buffer : at::Tensor();
    return found;
  }
  at::Tensor memory;
  if (device->is_cpu()) {
    const bool is_free = buffer && buffer->numel() == length && buffer->storage().use_count() == 1;
    memory = is_free ? *buffer : at::Tensor(at::detail::empty_cpu({length}, at::kFloat));
    found.buffer = memory;
  } else {
    // The allocator of a device hands the memory of the last step out again.
    memory = at::empty({length}, at::TensorOptions(at::kFloat).device(*device));
    found.buffer = buffer ? *buffer : at::Tensor();
  }
  found.wide.reserve(found.places.size());
  int64_t offset = 0;
  for (const int64_t place : found.places) {
    const at::Tensor& grad = params[place].grad();
    const int64_t first = offset + phase(grad);
    found.wide.push_back(at::as_strided(memory, grad.sizes(), grad.strides(), first));
    offset += room(grad);
  }
  return found;
}

void set_grads(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& grads) {
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].grad_dtype().has_value() && params[i].grad_dtype() != grads.at(i).scalar_type()) {
      params[i].set_grad_dtype(std::nullopt);
    }
    params[i].mutable_grad() = grads.at(i);
  }
}

void lend_grads(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    to[i].mutable_grad() = params.empty() ? at::Tensor() : params.at(i).grad();
  }
}

std::optional<std::string> stamp_of(const py::sequence& params) {
  std::string stamp;
  for (const py::handle item : params) {
    if (!THPVariable_CheckExact(item.ptr())) {
      return std::nullopt;
    }
    const at::Tensor& param = THPVariable_Unpack(item.ptr());
    const int64_t words[] = {
        reinterpret_cast<int64_t>(item.ptr()), reinterpret_cast<int64_t>(param.const_data_ptr()),
        static_cast<int64_t>(param._version()), param.requires_grad() || param.grad().defined()};
    stamp.append(reinterpret_cast<const char*>(words), sizeof(words));
  }
  return stamp;
}

bool lacks_state(const py::iterable& params, const py::dict& state, const py::str& name) {
  // Reading the dict from end to end: looking one tensor up calls its hash in Python.
  ska::flat_hash_set<PyObject*> have;
  have.reserve(state.size());
  PyObject* key = nullptr;
  PyObject* entries = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(state.ptr(), &place, &key, &entries) != 0;) {
    if (!PyDict_Check(entries)) {
      continue;
    }
    PyObject* entry = PyDict_GetItemWithError(entries, name.ptr());
    if (entry != nullptr && entry != Py_None) {
      have.insert(key);
    }
  }
  bool lacks = false;
  with_python_warnings([&] {
    for (const py::handle param : params) {
      lacks = lacks || (have.count(param.ptr()) == 0 && gradient_of(param).defined());
    }
  });
  return lacks;
}

std::optional<GradList> regular_list(const py::sequence& tensors, at::Device device,
                                     const std::optional<std::vector<int64_t>>& parameters) {
  if (is_observed()) {
    return std::nullopt;
  }
  // References to Python's objects: taking one from C++ to a tensor that only Python holds is slow.
  // A list's own items, as torch reads them, whatever a subclass iterates over.
  PyObject* items =
      PyList_Check(tensors.ptr()) ? PyList_AsTuple(tensors.ptr()) : PySequence_Tuple(tensors.ptr());
  if (items == nullptr) {
    throw py::error_already_set();
  }
  const auto owner = std::make_shared<const py::tuple>(py::reinterpret_steal<py::tuple>(items));
  GradList list(device, owner);
  for (size_t i = 0; i < owner->size(); ++i) {
    PyObject* item = PyTuple_GET_ITEM(owner->ptr(), i);
    if (!THPVariable_CheckExact(item)) {
      return std::nullopt;
    }
    const at::Tensor& tensor = THPVariable_Unpack(item);
    if (tensor.device() != device || !is_regular(tensor, device_bit(device.type()))) {
      return std::nullopt;
    }
    list.add(tensor, true, parameters ? parameters->at(i) : static_cast<int64_t>(i));
  }
  return list;
}

}  // namespace ampfast
