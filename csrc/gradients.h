// Gradient lists: the gradients of one device as a flat table of (address, length) per dtype, and
// the walk over an optimizer's parameters that fills it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "element.h"

namespace ampfast {

namespace py = pybind11;

// The unit of work, in elements.
constexpr int64_t kChunk = 16 * 1024;

// From this many elements on, other threads may have the interpreter meanwhile.
constexpr int64_t kElementsWorthReleasing = 8 * kChunk;

constexpr int64_t chunk_count(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

struct Span {
  char* address;
  int64_t numel;
  int64_t first_chunk;
  int64_t parameter;      // its number among all of the optimizer, without gradient too
  float* wide = nullptr;  // as many float32 values, of a list that has them

  bool operator==(const Span& other) const {
    return address == other.address && numel == other.numel && parameter == other.parameter &&
           wide == other.wide;
  }
};

struct DtypeList {
  at::ScalarType dtype;
  std::vector<Span> spans;
  int64_t chunks = 0;
  int64_t elements = 0;
  bool is_paired = false;  // with float32 values, which a pass writes in place of 16-bit ones

  int64_t element_size() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  bool operator==(const DtypeList& other) const {
    return dtype == other.dtype && spans == other.spans;
  }
};

// Keeps the gradients alive, so it lives for one pass only.
class GradList {
 public:
  // `owner` holds references to all tensors that are added. One for all of them, since counting
  // references one by one takes as long as all the rest.
  GradList(at::Device device, std::shared_ptr<const void> owner)
      : device_(device), owner_(std::move(owner)) {}

  // Room for so many tensors of a dtype, taken with the first of them.
  void expect(size_t tensors) { expected_ = tensors; }

  // `tensor` must be one that `is_regular` takes, and the gradient of the parameter of that number.
  // With `writes`, its data may be written.
  void add(const at::Tensor& tensor, bool writes, int64_t parameter);

  // The same list, in which 16-bit tensors are paired with float32 ones: those of their parameters'
  // numbers, in the same order in memory.
  GradList paired(const std::unordered_map<int64_t, at::Tensor>& wide) const;

  // The gradients of the parameters of these numbers, and the others.
  std::pair<GradList, GradList> split(const std::unordered_set<int64_t>& parameters) const;

  at::Device device() const { return device_; }
  const std::vector<DtypeList>& lists() const { return lists_; }
  // Whether a float64 tensor was added, also one without elements.
  bool has_float64() const { return has_float64_; }
  int64_t chunks() const { return chunks_; }
  int64_t elements() const { return elements_; }

 private:
  void add(at::ScalarType dtype, char* address, int64_t numel, int64_t parameter,
           float* wide = nullptr);

  at::Device device_;
  std::shared_ptr<const void> owner_;
  std::vector<DtypeList> lists_;
  size_t expected_ = 0;
  bool has_float64_ = false;
  int64_t chunks_ = 0;
  int64_t elements_ = 0;
};

// Tells whether `tensor` is nothing but dense memory without overlap, on a device whose type is in
// the bit set `devices`.
bool is_plain(const at::Tensor& tensor, uint64_t devices);

// Tells whether `tensor` is a scalar to the kernels: plain, of `dtype`, with one element, on a
// device of the bit set `devices`, where no mode watches.
bool is_scalar(const at::Tensor& tensor, at::ScalarType dtype, uint64_t devices);

// The kernels' name of a dtype; throws if they do not know it.
Dtype dtype_of(at::ScalarType type);

// Tells whether the kernels can take `tensor`: plain, of a dtype that they know. Everything else
// takes torch's own op.
bool is_regular(const at::Tensor& tensor, uint64_t devices);

// Throws if the memory of a tensor, or of a sparse one's indices and values, was freed or became
// too small for its elements. Nothing is known of what a subclass dispatches to.
void require_storage(const at::Tensor& tensor);

// Tells whether a dispatch mode or a function transform watches this thread's ops: then all
// gradients take torch's own op, so that it sees them.
bool is_observed();

// The bit of a device type in the sets above.
constexpr uint64_t device_bit(at::DeviceType type) { return uint64_t{1} << static_cast<int>(type); }

// The device types with kernels.
constexpr uint64_t kKernelDevices = device_bit(at::kCPU) | device_bit(at::kCUDA);

// A parameter, its gradient, which takes torch's own op, and its number among all, without gradient
// too.
using SetAside = std::tuple<py::object, at::Tensor, int64_t>;
// Number of a group, place in it, and the parameter there.
using Place = std::tuple<int64_t, int64_t, py::object>;

// Reads `.grad` of every parameter in `param_groups`, in order. Returns one list per device, what
// is set aside, and the first parameter that torch refuses, where the walk ends: one that is not a
// tensor or, without `allow_fp16`, whose gradient is float16. With `writes` the gradients are about
// to be written, with `bumps_versions` so that autograd knows. `devices` is the set of device types
// with kernels. `local_shard_of`, unless None, is called with a parameter, its gradient or None,
// and its number, where either is no plain tensor; it returns the local shard of a distributed
// gradient, which is read in its place, or None.
std::tuple<std::vector<GradList>, std::vector<SetAside>, std::optional<Place>> walk_gradients(
    const py::handle& param_groups, bool allow_fp16, bool writes, uint64_t devices,
    bool bumps_versions, const py::object& local_shard_of);

// The gradients of parameters that nobody touches while Python's lock is held.
struct ShortWalk {
  std::vector<const at::Tensor*> grads;  // borrowed from the parameters
  std::vector<at::Tensor> owners;        // of a list for which the lock is released
  GradList list;

  explicit ShortWalk(at::Device device) : list(device, nullptr) {}
  void own();
};

// The same for plain lists of plain parameters, whose memory is fetched ahead. Nothing where there
// is no gradient, or one that `walk_gradients` must look at or that is elsewhere than on `device`;
// all is as before then.
std::optional<ShortWalk> short_walk(PyObject* param_groups, at::Device device, bool allow_fp16,
                                    bool writes);

// The 16-bit gradients of parameters on the CPU, and of others.
struct NarrowGrads {
  std::vector<int64_t> places;  // among the parameters, of those that kernels take
  std::vector<int64_t> others;
  std::vector<at::Tensor> wide;  // float32 tensors like the former, in `buffer`
  at::Tensor buffer;
};

// The buffer is the given one if nobody else holds its memory and it has the length. Without
// kernels all are others.
NarrowGrads narrow_grads(const std::vector<at::Tensor>& params,
                         const std::optional<at::Tensor>& buffer, uint64_t devices);

// Sets gradients of any dtype.
void set_grads(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& grads);

// Gives others the gradients of parameters.
void lend_grads(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& to);

// What changes where autograd sees an edit of parameters, or where these are others. Nothing where
// one is no plain tensor.
std::optional<std::string> stamp_of(const py::sequence& params);

// Tells whether a parameter that has a gradient lacks an entry of that name in the optimizer's
// state, a dict by parameter. Keys are told apart as tensors are: by identity.
bool lacks_state(const py::iterable& params, const py::dict& state, const py::str& name);

// The list of `tensors`, about to be written; nothing if one of them is not a regular tensor on
// `device`. Their parameters have the numbers of their places, or those of `parameters`.
std::optional<GradList> regular_list(
    const py::sequence& tensors, at::Device device,
    const std::optional<std::vector<int64_t>>& parameters = std::nullopt);

}  // namespace ampfast
