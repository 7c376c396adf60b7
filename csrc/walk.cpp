#include "walk.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

namespace ampfast {

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

using Tensors = std::vector<at::Tensor>;

// Regular gradients, and the number of each one's parameter.
struct Regular {
  std::shared_ptr<Tensors> tensors = std::make_shared<Tensors>();
  std::vector<int64_t> parameters;

  // Takes a gradient that the kernels can take, and tells whether it did.
  bool take(at::Tensor& grad, uint64_t devices, int64_t parameter) {
    if (!grad.defined() || !is_regular(grad, devices)) {
      return false;
    }
    tensors->push_back(std::move(grad));
    parameters.push_back(parameter);
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

// What this rank holds of a gradient that `part_of` knows for a distributed tensor, else the
// gradient. Of a parameter that may be one it is told without gradient, too.
at::Tensor local_part(const py::object& part_of, const py::object& param, at::Tensor grad,
                      int64_t number) {
  if (part_of.is_none() || (!grad.defined() && THPVariable_CheckExact(param.ptr()))) {
    return grad;
  }
  const py::object part = part_of(param, grad.defined() ? py::cast(grad) : py::none(), number);
  return part.is_none() ? grad : py::cast<at::Tensor>(part);
}

void walk_group(const py::handle& params, int64_t group, bool allow_fp16, uint64_t devices,
                const py::object& part_of, Walk& walk, Regular& regular) {
  int64_t index = 0;
  for (const py::handle item : params) {
    const py::object param = py::reinterpret_borrow<py::object>(item);
    const bool is_tensor = THPVariable_Check(param.ptr());
    at::Tensor grad = is_tensor ? gradient_of(param) : at::Tensor();
    if (!is_tensor || (grad.defined() && !allow_fp16 && grad.scalar_type() == at::kHalf)) {
      walk.refused = Place{group, index, param};
      return;
    }
    if (!regular.take(grad, devices, walk.parameters)) {
      grad = local_part(part_of, param, std::move(grad), walk.parameters);
      if (!regular.take(grad, devices, walk.parameters) && grad.defined()) {
        require_storage(grad);
        walk.set_aside.emplace_back(param, std::move(grad), walk.parameters);
      }
    }
    walk.identity = mixed(walk.identity, reinterpret_cast<uintptr_t>(param.ptr()));
    ++index;
    ++walk.parameters;
  }
}

}  // namespace

Walk walk_gradients(const py::handle& param_groups, bool allow_fp16, bool writes,
                    bool bumps_versions, uint64_t devices, const py::object& part_of) {
  Walk walk;
  Regular regular;
  if (is_observed()) {
    devices = 0;
  }
  // Turns a warning of `.grad` on a non-leaf tensor into a Python warning.
  torch::PyWarningHandler warnings;
  try {
    int64_t index = 0;
    for (const py::handle group : param_groups) {
      const py::object params = py::reinterpret_borrow<py::object>(group)["params"];
      walk_group(params, index++, allow_fp16, devices, part_of, walk, regular);
      if (walk.refused) {
        return walk;
      }
    }
  } catch (...) {
    warnings.set_in_exception();
    throw;
  }
  for (size_t i = 0; i < regular.parameters.size(); ++i) {
    const at::Tensor& grad = (*regular.tensors)[i];
    if (bumps_versions) {
      grad.unsafeGetTensorImpl()->bump_version();
    }
    list_on(walk.lists, grad.device(), regular.tensors).add(grad, writes, regular.parameters[i]);
  }
  return walk;
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
  torch::PyWarningHandler warnings;
  try {
    for (const py::handle param : params) {
      if (have.count(param.ptr()) == 0 && gradient_of(param).defined()) {
        return true;
      }
    }
  } catch (...) {
    warnings.set_in_exception();
    throw;
  }
  return false;
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
  const size_t count = owner->size();
  GradList list(device, owner);
  for (size_t i = 0; i < count; ++i) {
    PyObject* item = PyTuple_GET_ITEM(owner->ptr(), i);
    if (!THPVariable_CheckExact(item)) {
      return std::nullopt;
    }
    const at::Tensor& tensor = THPVariable_Unpack(item);
    if (tensor.device() != device || !is_regular(tensor, device_bit(device.type()))) {
      return std::nullopt;
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const int64_t number = parameters ? parameters->at(i) : static_cast<int64_t>(i);
    list.add(THPVariable_Unpack(PyTuple_GET_ITEM(owner->ptr(), i)), true, number);
  }
  return list;
}

}  // namespace ampfast
