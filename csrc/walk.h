// The walk over an optimizer's parameters that reads their gradients.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <vector>

#include "grad_list.h"

namespace ampfast {

namespace py = pybind11;

// A parameter, by its place in the optimizer.
struct Place {
  int64_t group;
  int64_t index;
  py::object param;
};

struct Walk {
  std::vector<GradList> lists;  // one per device
  // A parameter, its gradient, which takes torch's own op, and its number.
  std::vector<std::tuple<py::object, at::Tensor, int64_t>> set_aside;
  int64_t parameters = 0;  // with gradient or without
  uint64_t identity = 0;   // of all of them together: other ones have another
  // The first that torch refuses; the walk ends there.
  std::optional<Place> refused;
};

// Reads `.grad` of every parameter in `param_groups`, in order. A parameter that is not a tensor is
// refused, and, without `allow_fp16`, one whose gradient is float16. With `writes` the gradients
// are about to be written, with `bumps_versions` so that autograd knows. `devices` is the set of
// device types with kernels. `part_of`, unless None, is called with a parameter, its gradient or
// None, and its number, where either is no plain tensor; it returns the part of a distributed
// gradient that is read in its place, or None.
Walk walk_gradients(const py::handle& param_groups, bool allow_fp16, bool writes,
                    bool bumps_versions, uint64_t devices, const py::object& part_of);

// Tells whether a parameter that has a gradient lacks an entry of that name in the optimizer's
// state, a dict by parameter. Keys are told apart as tensors are: by identity.
bool lacks_state(const py::iterable& params, const py::dict& state, const py::str& name);

// The list of `tensors`, about to be written; nothing if one of them is not a regular tensor on
// `device`. Their parameters have the numbers of their places, or those of `parameters`.
std::optional<GradList> regular_list(
    const py::sequence& tensors, at::Device device,
    const std::optional<std::vector<int64_t>>& parameters = std::nullopt);

}  // namespace ampfast
