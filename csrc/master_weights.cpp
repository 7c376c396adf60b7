#include "master_weights.h"

#include "bindings.h"

namespace ampfast {
namespace {

bool is_16_bit(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// Place in float32 memory from 64 bytes on: vectors of the gradient that are aligned are so there,
// too.
int64_t phase_of(const at::Tensor& grad) {
  constexpr uintptr_t kVector = 16;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(grad.const_data_ptr()) % kVector / 2);
}

// The memory that a gradient takes, in elements.
int64_t room_of(const at::Tensor& grad) {
  constexpr int64_t kAlignment = 64 / sizeof(float);
  return (phase_of(grad) + grad.numel() + kAlignment - 1) / kAlignment * kAlignment;
}

// A tensor in that memory, no view to autograd.
at::Tensor tensor_in(const at::Tensor& memory, const at::Tensor& grad, int64_t offset) {
  at::Tensor made = at::detail::make_tensor<at::TensorImpl>(c10::Storage(memory.storage()),
                                                            memory.key_set(), memory.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(grad.sizes(), grad.strides(), offset);
  return made;
}

}  // namespace

void Casts::reset() {
  on_cpu_ = {on_cpu_.memory, {}, {}};
  elsewhere_.clear();
}

void Casts::start(at::Device device, Reused<GradRef>& grads) {
  const auto is_cast = [device](const GradRef& ref) {
    return is_16_bit(*ref.grad) && ref.grad->device() == device;
  };
  int64_t length = 0;
  size_t count = 0;
  for (const GradRef& ref : grads) {
    if (is_cast(ref)) {
      length += room_of(*ref.grad);
      ++count;
    }
  }
  if (count == 0) {
    return;
  }
  const c10::InferenceMode usual(false);
  // The allocator of a GPU returns the memory of the last pass again.
  Wide& wide = device.is_cpu() ? on_cpu_ : elsewhere_.emplace_back();
  // A gradient, a view of one or its storage in Python holds the memory, too.
  if (!wide.memory.defined() || wide.memory.numel() != length ||
      wide.memory.storage().use_count() != 1) {
    wide.memory = at::empty({length}, at::TensorOptions(at::kFloat).device(device));
  }
  wide.grads.reserve(count);
  wide.params.reserve(count);
  int64_t offset = 0;
  for (GradRef& ref : grads) {
    if (is_cast(ref)) {
      ref.wide =
          &wide.grads.emplace_back(tensor_in(wide.memory, *ref.grad, offset + phase_of(*ref.grad)));
      wide.params.push_back(py::reinterpret_borrow<py::object>(ref.param));
      offset += room_of(*ref.grad);
    }
  }
}

void Casts::finish() {
  // Dropping tensors may run Python, which comes last.
  Reused<at::Tensor> dropped;
  std::vector<Wide> all = std::exchange(elsewhere_, {});
  all.push_back(std::exchange(on_cpu_, {on_cpu_.memory, {}, {}}));
  for (auto& [memory, grads, params] : all) {
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& param = THPVariable_Unpack(params[i].ptr());
      const auto dtype = param.grad_dtype();
      if (dtype.has_value() && *dtype != at::kFloat) {
        param.set_grad_dtype(std::nullopt);
      }
      dropped.push_back(std::exchange(param.mutable_grad(), std::move(grads.at(i))));
    }
  }
}

namespace {

// The gradient of a leaf; null without one.
const at::Tensor* grad_of(const at::Tensor& tensor) {
  const auto* meta = meta_of(tensor);
  return meta != nullptr && meta->grad_.defined() ? &meta->grad_ : nullptr;
}

// Fetches what a loop over tensors will read a few turns later.
void fetch_ahead(PyObject* const* items, Py_ssize_t i, Py_ssize_t count) {
  constexpr Py_ssize_t kTurns = 4;
  if (i + 3 * kTurns < count) {
    prefetch(items[i + 3 * kTurns], 1);
  }
  PyObject* item = i + 2 * kTurns < count ? items[i + 2 * kTurns] : Py_None;
  if (THPVariable_CheckExact(item)) {
    prefetch(THPVariable_Unpack(item).unsafeGetTensorImpl(), 4);
  }
  item = i + kTurns < count ? items[i + kTurns] : Py_None;
  if (THPVariable_CheckExact(item)) {
    const at::Tensor& tensor = THPVariable_Unpack(item);
    prefetch(meta_of(tensor), 2);
    prefetch(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), 2);
  }
}

// Calls `body(group, param, weight)` for each parameter of the groups, and the item of a tuple in
// that order; false as soon as it says false or the groups are unusual.
template <class Body>
bool for_each_param(PyObject* param_groups, PyObject* weights, const Body& body) {
  int64_t group = 0;
  Py_ssize_t number = 0;
  if (weights != nullptr) {
    require_tuple(weights, "the master weights");
  }
  return for_each_plain_group(param_groups, [&](PyObject* params) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i, ++number) {
      PyObject* item = PyList_GET_ITEM(params, i);
      fetch_ahead(reinterpret_cast<PyListObject*>(params)->ob_item, i, PyList_GET_SIZE(params));
      PyObject* weight = Py_None;
      if (weights != nullptr) {
        if (number >= PyTuple_GET_SIZE(weights)) {
          return false;
        }
        fetch_ahead(reinterpret_cast<PyTupleObject*>(weights)->ob_item, number,
                    PyTuple_GET_SIZE(weights));
        weight = PyTuple_GET_ITEM(weights, number);
      }
      if (!THPVariable_Check(item) || !(weight == Py_None || THPVariable_Check(weight)) ||
          !body(group, item, weight)) {
        return false;
      }
    }
    ++group;
    return true;
  });
}

// Tells whether a parameter may have a master weight, were it 16 bit.
bool can_have_master(const at::Tensor& param) {
  return param.layout() == at::kStrided && !param.is_nested() && !param.is_inference();
}

// What changes where autograd sees an edit of a parameter, or a group has another one.
struct Fingerprint {
  static constexpr size_t kVersion = 3;
  int64_t words[5];

  Fingerprint(int64_t group, PyObject* item) {
    const at::Tensor& param = THPVariable_Unpack(item);
    const auto* meta = meta_of(param);
    const bool needs = meta != nullptr && (meta->requires_grad_ || meta->grad_.defined());
    words[0] = group * 2 + (needs ? 1 : 0);
    words[1] = reinterpret_cast<int64_t>(item);
    words[2] = words[kVersion] = 0;
    words[4] = static_cast<int64_t>(param.scalar_type());
    if (!can_have_master(param)) {
      return;  // it may have no address, version or sizes
    }
    words[2] = reinterpret_cast<int64_t>(param.const_data_ptr());
    words[kVersion] = static_cast<int64_t>(param._version());
    for (const c10::IntArrayRef extents : {param.sizes(), param.strides()}) {
      for (const int64_t extent : extents) {
        words[4] = words[4] * 1'000'003 + extent;
      }
    }
  }
};

// `known` if it has the bytes of these values, else a new bytearray.
template <class T>
PyObject* bytes_of(const Reused<T>& values, PyObject* known) {
  const auto* bytes = reinterpret_cast<const char*>(values.data());
  const auto size = static_cast<Py_ssize_t>(values.size() * sizeof(T));
  const bool is_same = PyByteArray_Check(known) && PyByteArray_GET_SIZE(known) == size &&
                       std::equal(bytes, bytes + size, PyByteArray_AS_STRING(known));
  return is_same ? Py_NewRef(known) : PyByteArray_FromStringAndSize(bytes, size);
}

// fingerprint_of(param_groups, known) -> the fingerprints of plain parameters
PyObject* fingerprint_of(PyObject* const* args) {
  Reused<Fingerprint> fingerprints;
  const bool are_plain = for_each_param(args[0], nullptr, [&](auto group, auto* item, auto*) {
    if (THPVariable_CheckExact(item)) {
      fingerprints.emplace_back(group, item);
    }
    return THPVariable_CheckExact(item);
  });
  return are_plain ? bytes_of(fingerprints, args[1]) : nullptr;
}

// take_grads(weights), which may be None
PyObject* take_grads(PyObject* const* args) {
  require_tuple(args[0], "the master weights");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); ++i) {
    const at::Tensor* weight = tensor_of(PyTuple_GET_ITEM(args[0], i));
    if (weight != nullptr && grad_of(*weight) != nullptr) {
      meta_of(*weight)->grad_.reset();
    }
  }
  return nullptr;
}

// lend_grads(param_groups, weights, known) -> a byte for each parameter, 1 if it was lent
PyObject* lend_grads(PyObject* const* args) {
  Reused<char> lent;
  const bool are_lent = for_each_param(args[0], args[1], [&](auto, auto* item, auto* weight) {
    const at::Tensor* grad = weight != Py_None ? grad_of(THPVariable_Unpack(item)) : nullptr;
    if (grad != nullptr && is_16_bit(*grad)) {
      return false;
    }
    if (grad != nullptr) {
      THPVariable_Unpack(weight).mutable_grad() = *grad;
    }
    lent.push_back(grad != nullptr ? 1 : 0);
    return true;
  });
  return are_lent ? bytes_of(lent, args[2]) : take_grads(args + 1);
}

// stepped_pairs(param_groups, weights, lent, fingerprint) -> pairs to write the parameters
PyObject* stepped_pairs(PyObject* const* args) {
  require_tuple(args[1], "the master weights");
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(args[1]));
  const auto has_bytes = [](PyObject* object, size_t size) {
    return PyByteArray_Check(object) && static_cast<size_t>(PyByteArray_GET_SIZE(object)) == size;
  };
  if (is_observed() || !has_bytes(args[2], count) ||
      !has_bytes(args[3], count * sizeof(Fingerprint))) {
    return nullptr;
  }
  const char* const lent = PyByteArray_AS_STRING(args[2]);
  char* const fingerprint = PyByteArray_AS_STRING(args[3]);
  // Who has the weights has their parameters, too.
  const auto owner =
      std::make_shared<const py::object>(py::reinterpret_borrow<py::object>(args[1]));
  std::optional<GradList> list;
  Reused<Fingerprint> fingerprints;
  Reused<std::pair<c10::TensorImpl*, size_t>> written;
  Reused<const at::Tensor*> losing;
  const bool takes = for_each_param(args[0], args[1], [&](auto group, auto* item, auto* weight) {
    if (!THPVariable_CheckExact(item)) {
      return false;
    }
    const size_t number = fingerprints.size();
    const Fingerprint& now = fingerprints.emplace_back(group, item);
    if (weight == Py_None) {
      return true;
    }
    if (std::memcmp(&now, fingerprint + number * sizeof(now), sizeof(now)) != 0) {
      return false;
    }
    if (lent[number] == 0) {
      return true;
    }
    const at::Tensor& param = THPVariable_Unpack(item);
    if (!list) {
      list.emplace(param.device(), owner);
    }
    if (!add_if_regular(*list, item, weight, static_cast<int64_t>(number))) {
      return false;
    }
    written.emplace_back(param.unsafeGetTensorImpl(), number);
    if (grad_of(THPVariable_Unpack(weight)) == nullptr) {
      losing.push_back(&param);
    }
    return true;
  });
  if (!takes) {
    return nullptr;
  }
  // Parameters may share a version.
  for (const auto& [impl, number] : written) {
    impl->bump_version();
  }
  for (const auto& [impl, number] : written) {
    fingerprints[number].words[Fingerprint::kVersion] =
        static_cast<int64_t>(impl->version_counter().current_version());
  }
  if (!list) {
    list.emplace(at::Device(at::kCPU), owner);
  }
  py::object made = py::cast(std::move(*list));
  std::copy_n(reinterpret_cast<const char*>(fingerprints.data()),
              fingerprints.size() * sizeof(Fingerprint), fingerprint);
  // Dropping tensors may run Python, which comes last.
  Reused<at::Tensor> dropped;
  for (const at::Tensor* param : losing) {
    dropped.push_back(std::move(param->mutable_grad()));
  }
  return made.release().ptr();
}

// have_same_entries(a, keys, b, other_keys) -> bool
PyObject* have_same_entries(PyObject* const* args) {
  require_tuple(args[1], "keys");
  require_tuple(args[3], "keys");
  const Py_ssize_t count = PyTuple_GET_SIZE(args[1]);
  if (!PyDict_Check(args[0]) || !PyDict_Check(args[2]) || PyDict_GET_SIZE(args[0]) != count ||
      PyDict_GET_SIZE(args[2]) != count || PyTuple_GET_SIZE(args[3]) != count) {
    return Py_NewRef(Py_False);
  }
  PyObject *key = nullptr, *value = nullptr, *other_key = nullptr, *other = nullptr;
  Py_ssize_t place = 0, other_place = 0;
  for (Py_ssize_t i = 0; PyDict_Next(args[0], &place, &key, &value) != 0; ++i) {
    if (PyDict_Next(args[2], &other_place, &other_key, &other) == 0 || value != other ||
        key != PyTuple_GET_ITEM(args[1], i) || other_key != PyTuple_GET_ITEM(args[3], i)) {
      return Py_NewRef(Py_False);
    }
  }
  return Py_NewRef(Py_True);
}

}  // namespace

void bind_master_weights(py::module_& m) {
  py::class_<Casts>(m, "Casts").def(py::init<>()).def("finish", &Casts::finish);
  add_call<fingerprint_of, 2>(m, "fingerprint_of");
  add_call<lend_grads, 3>(m, "lend_grads");
  add_call<take_grads, 1>(m, "take_grads");
  add_call<stepped_pairs, 4>(m, "stepped_pairs");
  add_call<have_same_entries, 4>(m, "have_same_entries");
}

}  // namespace ampfast
