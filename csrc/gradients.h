// Gradient lists: the gradients of one device as a flat table of (address, length) per dtype, and
// the walk over an optimizer's parameters that fills it.
#pragma once

// What nearly all files use.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "element.h"
#include "names.h"

namespace ampfast {

namespace py = pybind11;

// A name of one of the package's modules.
py::object of_python(const char* module, const char* name);

// The unit of work, in elements.
constexpr int64_t kChunk = 16 * 1024;

// From this many elements on, other threads may have the interpreter during a pass.
constexpr int64_t kElementsWorthReleasing = 8 * kChunk;

constexpr int64_t chunk_count(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

struct Span {
  char* address;
  int64_t numel;
  int64_t first_chunk;
  int64_t parameter;  // its number among all of the optimizer, without gradient too
};

// A vector in memory of an earlier one of its thread. After a backward, malloc first sorts all that
// autograd has freed when it is asked for more than a kilobyte, which takes several times as long
// as a walk. A pool with a lock might leave it locked in a forked child.
template <class T>
class Reused : public std::vector<T> {
 public:
  Reused() {
    if (!spares().empty()) {
      this->swap(spares().back());
      spares().pop_back();
    }
  }
  Reused(const Reused&) = default;
  Reused(Reused&&) = default;
  Reused& operator=(const Reused&) = default;
  Reused& operator=(Reused&&) = default;
  ~Reused() {
    if (this->capacity() != 0 && spares().size() < kSpares) {
      this->clear();
      spares().push_back(std::move(*this));
    }
  }

 private:
  static constexpr size_t kSpares = 4;

  static std::vector<std::vector<T>>& spares() {
    static thread_local std::vector<std::vector<T>> vectors;
    return vectors;
  }
};

struct DtypeList {
  at::ScalarType dtype;
  Reused<Span> spans{};
  int64_t chunks = 0;
  int64_t elements = 0;

  int64_t element_size() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
};

class GradList {
 public:
  explicit GradList(at::Device device) : device_(device) {}

  // `tensor` must be one that `is_regular` takes, and the gradient of the parameter of that number.
  // With `writes`, its data may be written.
  void add(const at::Tensor& tensor, bool writes, int64_t parameter);

  // Keeps what holds the gradients, for a list that may outlive them.
  void hold(std::shared_ptr<const void> owner) { owner_ = std::move(owner); }

  // The gradients of the parameters of these numbers, and the others.
  std::pair<GradList, GradList> split(const std::unordered_set<int64_t>& parameters) const;

  at::Device device() const { return device_; }
  const c10::SmallVectorImpl<DtypeList>& lists() const { return lists_; }
  // To which the dtypes of all tensors promote, also of those without elements.
  at::ScalarType dtype() const { return dtype_; }
  bool has_float64() const { return dtype_ == at::kDouble; }
  int64_t elements() const { return elements_; }

 private:
  void add(at::ScalarType dtype, char* address, int64_t numel, int64_t parameter);

  at::Device device_;
  std::shared_ptr<const void> owner_;
  c10::SmallVector<DtypeList, 1> lists_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  int64_t elements_ = 0;
};

// Tells whether `tensor` is only memory with strides.
bool is_dense(const at::Tensor& tensor);

// Tells whether the memory of a dense tensor without gaps is still there.
bool has_memory(const at::Tensor& tensor);

// Tells whether `tensor` is only dense memory without overlap, on a device whose type is in
// the bit set `devices`.
bool is_plain(const at::Tensor& tensor, uint64_t devices);

// Tells whether `tensor` is a scalar to the kernels: plain, of `dtype`, with one element, on a
// device of the bit set `devices`, where no mode watches. Throws if its memory was freed.
bool is_scalar(const at::Tensor& tensor, at::ScalarType dtype, uint64_t devices);

// The kernels' name of a dtype; throws if they do not know it.
Dtype dtype_of(at::ScalarType type);

// Tells whether the kernels can take `tensor`: plain, of a dtype that they know. Everything else
// takes torch's own op.
bool is_regular(const at::Tensor& tensor, uint64_t devices);

// A number for each device and dtype of gradients that torch's multi-tensor ops take together:
// plain, not empty, of a dtype that the kernels know. -1 for all others.
int64_t kind_of(const at::Tensor& tensor);

// Throws if the memory of a tensor, or of a sparse one's indices and values, was freed or became
// too small for its elements. Nothing is known of what a subclass dispatches to.
void require_storage(const at::Tensor& tensor);

// The real and imaginary parts of a complex tensor as its memory holds them, which a conjugate and
// a negative tensor read with other signs. Any other tensor, and a sparse one, itself.
at::Tensor real_view(const at::Tensor& tensor);

// Tells whether a dispatch mode or a function transform watches this thread's ops: then all
// gradients take torch's own op, so that it sees them.
bool is_observed();

// What autograd keeps of a tensor; null where that is nothing.
inline torch::autograd::AutogradMeta* meta_of(const at::Tensor& tensor) {
  return static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
}

// Asks for memory that is read soon.
inline void prefetch(const void* address, int cache_lines) {
#if defined(__GNUC__)
  for (int line = 0; line < cache_lines; ++line) {
    __builtin_prefetch(static_cast<const char*>(address) + 64 * line);
  }
#endif
}

// The bit of a device type in the sets above.
constexpr uint64_t device_bit(at::DeviceType type) { return uint64_t{1} << static_cast<int>(type); }

// The device types with kernels.
constexpr uint64_t kKernelDevices = device_bit(at::kCPU) | device_bit(at::kCUDA);

// A parameter, its gradient, which takes torch's own op, its number among all, without gradient
// too, and the kind of the gradient.
using SetAside = std::tuple<py::object, at::Tensor, int64_t, int64_t>;

// A gradient that the kernels can take, borrowed, and the number of its parameter.
struct GradRef {
  const at::Tensor* grad;
  int64_t number;
};

// How a walk reads gradients.
struct Reading {
  bool allow_fp16 = false;
  bool writes = false;                // they are about to be written
  uint64_t devices = kKernelDevices;  // the set of device types with kernels
  // Unless None, their `local_shards` makes a collector where a parameter or gradient may be
  // distributed. That is called with the parameter, its gradient or None, and its number; it
  // returns the local shard of a distributed gradient, which is read in its place.
  py::object ranks = py::none();
};

// A tensor that may be written outside of inference mode, too; its values are not set.
inline at::Tensor allocated(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const c10::InferenceMode usual(false);
  if (options.device().is_cpu() && !options.pinned_memory() && !is_observed()) {
    return at::detail::empty_cpu(sizes, c10::typeMetaToScalarType(options.dtype()));
  }
  return at::empty(sizes, options);
}

// What a walk over parameters has found, in order.
struct Walk {
  std::vector<GradList> lists;  // one for each device
  Reused<GradRef> grads;        // the gradients of all lists
  std::vector<SetAside> set_aside;
  py::object shards = py::none();  // the collector of local shards, where one was made
  bool has_complex = false;        // gradients, which are read by their real view
  std::vector<py::object> groups;  // the parameters of each
  // Keeps the gradients that it does not borrow: counting references takes as long as the walk.
  std::shared_ptr<std::deque<at::Tensor>> owners;

  // Makes a walk that borrows its gradients keep them alive.
  void hold();
};

// Reads `.grad` of every parameter in `param_groups`. Raises for the first parameter that torch
// refuses: one that is not a tensor or, unless float16 is allowed, whose gradient is float16. The
// caller turns what torch warns of, as of non-leaf tensors, into Python's warnings. Plain lists of
// plain parameters with gradients on one device are borrowed from, without a call of Python: until
// the walk is held, nothing may run that could drop them.
Walk walk(PyObject* param_groups, const Reading& reading);

// The same for gradients themselves.
Walk walk_over(const py::sequence& grads, const Reading& reading);

// The list of `tensors`, about to be written; nothing if one of them is not a regular tensor on
// `device`. Their parameters have the numbers of their places.
std::optional<GradList> regular_list(const py::sequence& tensors, at::Device device);

// Tells whether nobody but the list `memory` holds its tensors or their memory, and each is float32
// and else like the dense tensor in that place of the list `like`.
bool can_be_reused(const py::list& memory, const py::list& like);

// Bytes for each dense tensor that differ after an edit that autograd sees, or of other data.
py::bytes looks_of(const py::list& tensors);

}  // namespace ampfast
