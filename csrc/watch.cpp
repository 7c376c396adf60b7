// What find_nonfinite keeps of a forward: the largest magnitudes of tensors and of gradients.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>

#include "bindings.h"
#include "cpu/multi_tensor.h"
#include "table_layout.h"

namespace ampfast {

namespace {

namespace autograd = torch::autograd;

// Rows of a table that is added when the others are full.
constexpr int64_t kRows = 128;
// How deep structures of tensors are looked into.
constexpr int kDepth = 16;

// When a tensor was read, counted over all reads, and its row among the rows of its pass.
using Row = std::pair<int64_t, int64_t>;

// Who reads the tensors of a device, as find_nonfinite's `_way_of` says.
enum class Way { kTorchOps, kCpu, kCuda };

py::object of_python(const char* name) {
  return py::module_::import("ampfast.diagnose.find_nonfinite").attr(name);
}

// Tells whether a tensor's values are in memory as a dense one's, and may be infinite.
bool is_readable(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return (at::isFloatingType(dtype) || at::isComplexType(dtype)) && at::elementSize(dtype) > 1 &&
         tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_meta() &&
         (!tensor.key_set().has(c10::DispatchKey::Python) ||
          !py::hasattr(py::cast(tensor), "fake_mode"));
}

// A forward of a model, and its backward. Python keeps it, and Python's lock guards it.
class Reads : public std::enable_shared_from_this<Reads> {
 public:
  // `words` returns a scaler's state, or None.
  explicit Reads(py::object words) : words_(std::move(words)) {}

  // Numbers of a structure's tensors, and what was looked into, since structures may share parts.
  struct Collected {
    std::vector<int64_t> numbers{};
    std::unordered_map<PyObject*, py::object> seen{};
  };

  void collect(const py::object& value, Collected& into, int depth = kDepth) {
    PyObject* object = value.ptr();
    if (THPVariable_Check(object)) {
      if (const at::Tensor& tensor = THPVariable_Unpack(object); is_readable(tensor)) {
        into.numbers.push_back(value_of(tensor));
      }
    } else if (depth > 0 && !value.is_none() && !PyLong_Check(object) && !PyFloat_Check(object) &&
               !PyUnicode_Check(object) && into.seen.emplace(object, value).second) {
      const bool is_plain = PyTuple_Check(object) || PyList_Check(object);
      const py::object items = is_plain ? value : of_python("_parts_of")(value);
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
        collect(py::reinterpret_borrow<py::object>(item), into, depth - 1);
      }
    }
  }

  // Ends the forward of a model or a part of it; what it returned may be given to the next part.
  // torch converts no leaf that has a weak reference.
  void forget(const std::vector<int64_t>& returned) {
    for (auto each = known_.begin(); each != known_.end();) {
      const auto& [tensor, version, value, is_leaf] = each->second;
      const bool is_kept =
          !is_leaf && std::find(returned.begin(), returned.end(), value) != returned.end();
      each = is_kept ? std::next(each) : known_.erase(each);
    }
  }

  bool is_off = false;  // what still comes is not read
  std::vector<at::Tensor> tables{};
  // Row, unless it was not read, and dtype by the number of a value.
  std::vector<std::pair<std::optional<Row>, at::ScalarType>> values{};
  // Numbers and rows of values whose gradients came, in that order.
  std::vector<std::pair<int64_t, Row>> gradients{};
  std::optional<at::Tensor> updates{};  // a scaler's completed ones when the first gradient came

 private:
  // A hook that takes no frame of Python's, and does nothing once the pass is dropped.
  struct ReadGradient : autograd::FunctionPreHook {
    std::weak_ptr<Reads> reads;
    int64_t value;
    size_t output;

    ReadGradient(std::weak_ptr<Reads> of, int64_t number, size_t place)
        : reads(std::move(of)), value(number), output(place) {}
    autograd::variable_list operator()(const autograd::variable_list& gradients) override {
      const py::gil_scoped_acquire lock;
      if (const auto pass = reads.lock()) {
        pass->came(value, gradients[output]);
      }
      return gradients;
    }
    // Compiled autograd runs without it.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
  };

  struct Known {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    int64_t version;
    int64_t value;
    bool is_leaf;
  };

  // The table of a stream, in whose order it was filled with zeros.
  struct Filling {
    Way way = Way::kTorchOps;
    size_t table = 0;
    int64_t used = kRows;
  };

  // The number of a tensor's value, which is read unless it was before, or its block runs again.
  int64_t value_of(const at::Tensor& tensor) {
    const int64_t version = tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version());
    const void* impl = tensor.unsafeGetTensorImpl();
    if (const auto known = known_.find(impl); known != known_.end() &&
                                              known->second.version == version &&
                                              !known->second.tensor.expired()) {
      return known->second.value;
    }
    const auto number = static_cast<int64_t>(values.size());
    values.emplace_back(std::nullopt, tensor.scalar_type());
    if (autograd::get_current_graph_task_id() == -1) {
      values[number].first = read(tensor);
    }
    const c10::weak_intrusive_ptr reference(tensor.getIntrusivePtr());
    known_.insert_or_assign(impl, Known{reference, version, number, tensor.is_leaf()});
    if (!tensor.requires_grad()) {
      return number;
    }
    if (const auto& function = tensor.grad_fn()) {
      function->add_tensor_pre_hook(
          std::make_unique<ReadGradient>(weak_from_this(), number, tensor.output_nr()));
      return number;
    }
    // A leaf outlives the pass: the newest hook of a finder replaces the one before.
    auto& hooks = autograd::impl::hooks(tensor);
    const auto is_old = [&](const std::unique_ptr<autograd::FunctionPreHook>& each) {
      const auto* hook = dynamic_cast<const ReadGradient*>(each.get());
      const auto pass = hook != nullptr ? hook->reads.lock() : nullptr;
      return hook != nullptr && (pass == nullptr || pass->words_.is(words_));
    };
    hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_old), hooks.end());
    hooks.push_back(std::make_unique<ReadGradient>(weak_from_this(), number, 0));
    return number;
  }

  void came(int64_t value, const at::Tensor& gradient) {
    if (is_off || !gradient.defined() || !is_readable(gradient)) {
      return;
    }
    if (gradients.empty()) {
      // On the device: neither does the host wait, nor does a replayed graph keep an old number.
      if (const py::object words = words_(); !words.is_none()) {
        updates = of_python("_updates_in")(words).cast<at::Tensor>();
      }
    }
    if (const auto row = read(gradient)) {
      gradients.emplace_back(value, *row);
    }
  }

  std::optional<Row> read(const at::Tensor& tensor) {
    static int64_t time = 0;
    const at::Device device = tensor.device();
    const c10::DeviceGuard here(device);
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    // A copy: as Python runs, other threads may read, and drop this pass.
    Filling filling{};
    if (const auto place = filling_.find(stream); place != filling_.end()) {
      filling = place->second;
    } else {
      filling.way = static_cast<Way>(of_python("_way_of")(device).cast<int>());
    }
    if (filling.used == kRows) {
      filling.table = tables.size();
      tables.push_back(
          of_python("_new_table")(device, int64_t{kRows}, int{kPeakWords}).cast<at::Tensor>());
      filling.used = 0;
    }
    const at::Tensor table = tables[filling.table];
    const int64_t row = filling.used++;
    const Row result{time++, static_cast<int64_t>(filling.table) * kRows + row};
    filling_.insert_or_assign(stream, filling);
    if (filling.way == Way::kTorchOps || tensor.numel() == 0 ||
        !is_regular(tensor, kKernelDevices)) {
      const bool is_read = of_python("_read_by_ops")(tensor, table, row).cast<bool>();
      return is_read ? std::optional(result) : std::nullopt;
    }
    double* words = table.mutable_data_ptr<double>() + row * kPeakWords;
    GradList list(device, nullptr);
    list.add(tensor, false, 0);
    if (filling.way == Way::kCuda) {
      cuda::read_peak(list, words);
    } else {
      *words = without_gil_if_long(list, [&] { return cpu::run(list, {}); });
    }
    return result;
  }

  const py::object words_;
  std::unordered_map<c10::Stream, Filling> filling_{};
  std::unordered_map<const void*, Known> known_{};
};

}  // namespace

void bind_watch(py::module_& m) {
  py::class_<Reads, std::shared_ptr<Reads>>(m, "Reads")
      .def(py::init<py::object>())
      .def("values_of",
           [](Reads& reads, const py::object& structure) {
             Reads::Collected collected;
             reads.collect(structure, collected);
             return collected.numbers;
           })
      .def("forget", &Reads::forget)
      .def_readwrite("is_off", &Reads::is_off)
      .def_property_readonly("has_gradients",
                             [](const Reads& reads) { return !reads.gradients.empty(); })
      // Copies: another thread may add to the vectors while Python's objects are made.
      .def("so_far", [](const Reads& reads) {
        return std::make_tuple(reads.values, reads.gradients, reads.tables, reads.updates);
      });
}

}  // namespace ampfast
