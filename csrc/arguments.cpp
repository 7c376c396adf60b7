// What kernels are given, as objects of Python.
#include <pybind11/stl.h>

#include "bindings.h"
#include "track.h"

namespace ampfast {

at::Tensor tensor_of(PyObject* object) {
  TORCH_CHECK_TYPE(object == Py_None || THPVariable_Check(object), "expected a tensor or None");
  return object == Py_None ? at::Tensor() : THPVariable_Unpack(object);
}

namespace {

PyObject* allocated_object(PyTypeObject* type, Py_ssize_t count) {
  PyObject* made = PyType_GenericAlloc(type, count);
  if (made == nullptr) {
    throw py::error_already_set();
  }
  return made;
}

// No exception of C++ may pass through CPython.
PyObject* new_object(PyTypeObject* type, PyObject*, PyObject*) {
  try {
    return py::detail::make_new_instance(type);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

}  // namespace

py::custom_type_setup may_lack_memory() {
  return py::custom_type_setup([](PyHeapTypeObject* type) {
    type->ht_type.tp_alloc = &allocated_object;
    type->ht_type.tp_new = &new_object;
  });
}

Marks marks_of(const Pass& pass, at::Device device) {
  if (!pass.marks.defined()) {
    return {};
  }
  TORCH_CHECK_TYPE(pass.now.defined(), "a pass with marks needs the number of steps");
  const int64_t parameters = pass.marks.dim() == 2 ? pass.marks.size(0) : 0;
  return {data_of<int64_t>(pass.marks, "marks", device, parameters * kMarkWords),
          data_of<int64_t>(pass.now, "steps", device, std::max<int64_t>(pass.now.numel(), 1))};
}

Clip ClipObject::on(at::Device device) const {
  TORCH_CHECK_TYPE(sums.defined() && norm.defined(), "a Clip has sums and a norm");
  Clip clip;
  clip.rows = sums.numel() / 2;
  clip.sums = data_of<const double>(sums, "sums", device, 2 * clip.rows);
  clip.max_norm = max_norm;
  clip.largest = largest;
  if (norm.scalar_type() == at::kDouble) {
    clip.wide_norm = data_of<double>(norm, "norm", device);
  } else {
    clip.norm = data_of<float>(norm, "norm", device);
  }
  clip.coefficient = data_of<double>(coefficient, "coefficient", device);
  clip.scale = data_of<const float>(scale, "scale", device);
  clip.divisor = data_of<float>(divisor, "divisor", device);
  clip.found_inf = data_of<float>(found_inf, "found_inf", device);
  clip.skip_above = skip_above;
  if (accepted_norms.defined()) {
    const int64_t size = accepted_norms.numel();
    auto* words = data_of<double>(accepted_norms, "accepted_norms", device, size);
    TORCH_CHECK_VALUE(size >= kNormRing + 2, "accepted_norms has no window of 2 or more norms");
    TORCH_CHECK_VALUE(!device.is_cpu() || (words[kNormCount] >= 0 && words[kNormCount] < 0x1p53),
                      "accepted_norms has no count of norms");
    clip.accepted_norms = {words, size - kNormRing};
  }
  return clip;
}

void ClipObject::take(const at::Tensor& its_sums, const at::Tensor& flag) {
  sums = its_sums;
  if (skip_above < INFINITY) {
    found_inf = flag;
  }
}

std::vector<at::Tensor> UpdateObject::flags() const {
  TORCH_CHECK_TYPE(PyList_Check(found_infs.ptr()) || PyTuple_Check(found_infs.ptr()),
                   "found_infs must be a list or tuple");
  std::vector<at::Tensor> flags;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(found_infs.ptr()); ++i) {
    flags.push_back(tensor_of(PySequence_Fast_GET_ITEM(found_infs.ptr(), i)));
  }
  return flags;
}

std::optional<Update> UpdateObject::known() const {
  if (!scale.defined() || !growth_tracker.defined() || !PyFloat_CheckExact(growth_factor.ptr()) ||
      !PyFloat_CheckExact(backoff_factor.ptr()) || !PyLong_CheckExact(growth_interval.ptr())) {
    return std::nullopt;
  }
  const at::Device device = scale.device();
  const auto is_scalar_there = [=](const at::Tensor& tensor, at::ScalarType dtype) {
    return is_scalar(tensor, dtype, kKernelDevices) && tensor.device() == device;
  };
  int overflow = 0;
  Update update;
  update.growth_interval = PyLong_AsLongLongAndOverflow(growth_interval.ptr(), &overflow);
  if (overflow != 0 || !is_scalar_there(scale, at::kFloat) || scale.is_inference() ||
      scale.requires_grad() || !is_scalar_there(growth_tracker, at::kInt) ||
      (norm.defined() && !is_scalar_there(norm, at::kFloat)) ||
      (state.defined() && (state.scalar_type() != at::kLong || state.numel() != kStateWords ||
                           !is_plain(state, kKernelDevices) || state.device() != device))) {
    return std::nullopt;
  }
  for (const at::Tensor& flag : flags()) {
    if (!flag.defined() || !is_scalar_there(flag, at::kFloat)) {
      return std::nullopt;
    }
  }
  update.scale = scale.mutable_data_ptr<float>();
  update.growth_tracker = growth_tracker.mutable_data_ptr<int32_t>();
  update.state = data_of<int64_t>(state, "state", device, kStateWords);
  update.norm = norm.defined() ? norm.const_data_ptr<float>() : nullptr;
  update.growth_factor = PyFloat_AS_DOUBLE(growth_factor.ptr());
  update.backoff_factor = PyFloat_AS_DOUBLE(backoff_factor.ptr());
  return update;
}

namespace {

// A class of Python whose fields have names, in their order as arguments of its constructor.
template <class T>
class Fields {
 public:
  Fields(py::module_& m, const char* name) : class_(m, name, may_lack_memory(), py::is_final()) {}

  template <class Get, class Set>
  Fields& property(const char* name, const Get& get, const Set& set) {
    class_.def_property(name, get, set);
    names_.push_back(name);
    return *this;
  }
  Fields& tensor(const char* name, at::Tensor T::* field) {
    return property(
        name, [field](const T& self) { return wrapped(self.*field); },
        [field](T& self, const py::object& value) { self.*field = tensor_of(value.ptr()); });
  }
  template <class Value>
  Fields& value(const char* name, Value T::* field) {
    return property(
        name, [field](const T& self) { return self.*field; },
        [field](T& self, Value value) { self.*field = std::move(value); });
  }

  void end() {
    class_.def(py::init([names = names_](const py::args& given, const py::kwargs& fields) {
      auto made = std::make_shared<T>();
      const py::object object = py::cast(made);
      TORCH_CHECK_TYPE(given.size() <= names.size(), "takes at most ", names.size(), " fields");
      for (size_t i = 0; i < given.size(); ++i) {
        py::setattr(object, names[i], given[i]);
      }
      for (const auto& [name, value] : fields) {
        py::setattr(object, name, value);
      }
      return made;
    }));
  }

 private:
  py::class_<T, std::shared_ptr<T>> class_;
  std::vector<const char*> names_;
};

}  // namespace

void bind_arguments(py::module_& m) {
  Fields<ClipObject>(m, "Clip")
      .tensor("sums", &ClipObject::sums)
      .value("max_norm", &ClipObject::max_norm)
      .value("largest", &ClipObject::largest)
      .tensor("norm", &ClipObject::norm)
      .tensor("coefficient", &ClipObject::coefficient)
      .tensor("scale", &ClipObject::scale)
      .tensor("divisor", &ClipObject::divisor)
      .tensor("found_inf", &ClipObject::found_inf)
      .value("skip_above", &ClipObject::skip_above)
      .tensor("accepted_norms", &ClipObject::accepted_norms)
      .end();
  Fields<Pass>(m, "Pass")
      .value("write", &Pass::write)
      .property(
          "how", [](const Pass& self) { return static_cast<int64_t>(self.how); },
          [](Pass& self, int64_t how) {
            TORCH_CHECK_VALUE(how >= 0 && how <= static_cast<int64_t>(Factor::kDivide),
                              "a pass has no factor of kind ", how);
            self.how = static_cast<Factor>(how);
          })
      .tensor("factor", &Pass::factor)
      .tensor("found_inf", &Pass::found_inf)
      .value("accumulate", &Pass::accumulate)
      .tensor("coefficient", &Pass::coefficient)
      .tensor("sums", &Pass::sums)
      .tensor("marks", &Pass::marks)
      .tensor("now", &Pass::now)
      .tensor("factor_copy", &Pass::factor_copy)
      .value("ending", &Pass::ending)
      .value("clip", &Pass::clip)
      .end();
  Fields<UpdateObject>(m, "Update")
      .tensor("scale", &UpdateObject::scale)
      .tensor("growth_tracker", &UpdateObject::growth_tracker)
      .value("found_infs", &UpdateObject::found_infs)
      .value("growth_factor", &UpdateObject::growth_factor)
      .value("backoff_factor", &UpdateObject::backoff_factor)
      .value("growth_interval", &UpdateObject::growth_interval)
      .tensor("state", &UpdateObject::state)
      .tensor("norm", &UpdateObject::norm)
      .value("applied", &UpdateObject::applied)
      .end();
}

}  // namespace ampfast
