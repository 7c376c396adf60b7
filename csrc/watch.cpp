// What find_nonfinite keeps of a forward: the largest magnitudes of tensors and of gradients.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <unordered_set>

#include "bindings.h"
#include "cpu/multi_tensor.h"
#include "table_layout.h"

namespace ampfast {

namespace {

namespace autograd = torch::autograd;

// Rows of a table that is added when the others are full.
constexpr int64_t kRows = 128;

constexpr const char* kPython = "ampfast.diagnose.find_nonfinite";

// Tells whether a tensor's values are in memory as a dense one's, and may be infinite.
bool is_readable(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return (at::isFloatingType(dtype) || at::isComplexType(dtype)) && at::elementSize(dtype) > 1 &&
         tensor.layout() == at::kStrided && !tensor.is_meta() &&
         (!tensor.key_set().has(c10::DispatchKey::Python) ||
          !py::hasattr(py::cast(tensor), "fake_mode"));
}

// A forward of a model, and its backward. Python keeps it, and Python's lock guards it.
class Reads : public std::enable_shared_from_this<Reads> {
 public:
  // `words` returns a scaler's state, or None.
  explicit Reads(py::object words) : words_(std::move(words)) {}

  // Numbers of the values of a structure's tensors.
  std::vector<int64_t> values_of(const py::object& structure) {
    std::vector<int64_t> numbers;
    std::vector<py::object> parts{structure};
    std::unordered_set<PyObject*> seen;  // structures may share parts
    for (size_t place = 0; place < parts.size(); ++place) {
      const py::object part = parts[place];
      PyObject* object = part.ptr();
      if (THPVariable_Check(object)) {
        if (const at::Tensor& tensor = THPVariable_Unpack(object); is_readable(tensor)) {
          numbers.push_back(value_of(tensor));
        }
      } else if (!part.is_none() && !PyLong_Check(object) && !PyFloat_Check(object) &&
                 !PyUnicode_Check(object) && seen.insert(object).second) {
        const bool is_plain = PyTuple_Check(object) || PyList_Check(object);
        const py::object items = is_plain ? part : of_python(kPython, "_parts_of")(part);
        for (const py::handle item : items) {
          parts.push_back(py::reinterpret_borrow<py::object>(item));
        }
      }
    }
    return numbers;
  }

  // Ends the forward of a model or of a part: torch converts no leaf that has a weak reference.
  void forget() { known_.clear(); }

  // Values, gradients, and tables with a scaler's completed updates as the last. Copies: another
  // thread may add to them while Python's objects are made.
  auto so_far() const {
    std::vector<at::Tensor> rows;
    for (const Table& table : tables_) {
      rows.push_back(table.rows);
    }
    if (updates_.has_value()) {
      rows.push_back(updates_->unsqueeze(0));
    }
    return std::make_tuple(values_, gradients_, rows);
  }

  bool has_gradients() const { return !gradients_.empty(); }

  bool is_off = false;  // what still comes is not read

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
  };

  struct Table {
    c10::Stream stream;  // in whose order it was filled with zeros
    at::Tensor rows;
    std::string backend;  // whose kernels write it; torch's ops if the core has none
    int64_t used = 0;
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
    const auto number = static_cast<int64_t>(values_.size());
    values_.emplace_back(std::nullopt, tensor.scalar_type());
    if (autograd::get_current_graph_task_id() == -1) {
      values_[number].first = read(tensor);
    }
    const c10::weak_intrusive_ptr reference(tensor.getIntrusivePtr());
    known_.insert_or_assign(impl, Known{reference, version, number});
    if (!tensor.requires_grad()) {
      return number;
    }
    auto hook = std::make_unique<ReadGradient>(weak_from_this(), number, tensor.output_nr());
    if (const auto& function = tensor.grad_fn()) {
      function->add_tensor_pre_hook(std::move(hook));
      return number;
    }
    // A leaf outlives the pass: the newest hook of a finder replaces the one before.
    auto& hooks = autograd::impl::hooks(tensor);
    const auto is_old = [&](const std::unique_ptr<autograd::FunctionPreHook>& each) {
      const auto* ours = dynamic_cast<const ReadGradient*>(each.get());
      const auto pass = ours != nullptr ? ours->reads.lock() : nullptr;
      return ours != nullptr && (pass == nullptr || pass->words_.is(words_));
    };
    hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_old), hooks.end());
    hooks.push_back(std::move(hook));
    return number;
  }

  void came(int64_t value, const at::Tensor& gradient) {
    if (is_off || !gradient.defined() || !is_readable(gradient)) {
      return;
    }
    if (gradients_.empty()) {
      // On the device: neither does the host wait, nor does a replayed graph keep an old number.
      if (const py::object words = words_(); !words.is_none()) {
        updates_ = of_python(kPython, "_updates_in")(words).cast<at::Tensor>();
      }
    }
    if (const auto row = read(gradient)) {
      gradients_.emplace_back(value, *row);
    }
  }

  // The row of a tensor's largest magnitude, unless its class refuses to be read.
  std::optional<int64_t> read(const at::Tensor& tensor) {
    const at::Device device = tensor.device();
    const c10::DeviceGuard here(device);
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    auto place = std::find_if(tables_.begin(), tables_.end(), [&](const Table& each) {
      return each.stream == stream && each.used < kRows;
    });
    if (place == tables_.end()) {
      const auto [rows, backend] =
          of_python(kPython, "_new_table")(device, int64_t{kRows}, int{kPeakWords})
              .cast<std::pair<at::Tensor, std::string>>();
      place = tables_.insert(tables_.end(), Table{stream, rows, backend});
    }
    const at::Tensor table = place->rows;
    const int64_t row = place->used++;
    const bool by_cuda = place->backend == "cuda";
    const int64_t result = (place - tables_.begin()) * kRows + row;
    if (!(by_cuda || place->backend == "cpu") || tensor.numel() == 0 ||
        !is_regular(tensor, kKernelDevices)) {
      const bool is_read = of_python(kPython, "_read_by_ops")(tensor, table, row).cast<bool>();
      return is_read ? std::optional(result) : std::nullopt;
    }
    double* words = table.mutable_data_ptr<double>() + row * kPeakWords;
    GradList list(device);
    list.add(tensor, false, 0);
    if (by_cuda) {
      cuda::read_peak(list, words);
    } else {
      *words = without_gil_if_long(list, [&] { return cpu::run(list, {}); });
    }
    return result;
  }

  const py::object words_;
  std::vector<Table> tables_{};
  // Row, unless it was not read, and dtype by the number of a value.
  std::vector<std::pair<std::optional<int64_t>, at::ScalarType>> values_{};
  // Numbers and rows of values whose gradients came, in that order.
  std::vector<std::pair<int64_t, int64_t>> gradients_{};
  std::optional<at::Tensor> updates_{};  // a scaler's completed ones when the first gradient came
  std::unordered_map<const void*, Known> known_{};
};

}  // namespace

void bind_watch(py::module_& m) {
  py::class_<Reads, std::shared_ptr<Reads>>(m, "Reads")
      .def(py::init<py::object>())
      .def("values_of", &Reads::values_of)
      .def("forget", &Reads::forget)
      .def("so_far", &Reads::so_far)
      .def_readwrite("is_off", &Reads::is_off)
      .def_property_readonly("has_gradients", &Reads::has_gradients);
}

}  // namespace ampfast
