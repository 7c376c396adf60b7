// The one way to gradients: what a walk has found, sorted by the kernels that take it, and the one
// loop that runs a pass over all of it.
#pragma once

#include "bindings.h"

namespace ampfast {

// Python's object of a device.
py::object device_object(at::Device device);

// A scalar on a device; a sync only if the CPU will read it.
at::Tensor moved(const at::Tensor& scalar, at::Device device);

// A flag for each device that has a gradient, in order.
using Flags = c10::SmallVector<std::pair<at::Device, at::Tensor>, 1>;

py::dict dict_of(const Flags& flags);

using Tensors = Reused<const at::Tensor*>;

// Gradients of one device: a list for kernels or, without one, a list for torch's ops.
struct Batch {
  at::Device device;
  std::optional<GradList> list;
  PyObject* launcher = nullptr;  // of kernels that are launched; null: the CPU's run
  py::object aside;
};

// An optimizer's turn, a dict of Python. Made before the walk: what makes objects may run Python,
// which could take gradients away. What it replaces is kept until after the pass, for the same
// reason.
class Turn {
 public:
  explicit Turn(PyObject* turn);

  // Marks the optimizer as unscaled, with a flag that says "skip", on all ranks if there is an
  // agreement yet to come: whatever ends a pass early, nobody steps on gradients that are half
  // written.
  void begin(const py::object& agreement) const;

  bool is_ready() const;
  void unscaled() const;
  void flags(const Flags& flags) const;
  void flags(const py::dict& flags) const;
  py::dict flags() const;
  void set(PyObject* name, const py::object& value) const;
  const at::Tensor& flag() const { return flag_; }
  PyObject* object() const { return turn_; }

 private:
  PyObject* turn_;
  at::Tensor flag_;
  py::dict flags_;
  py::object before_[2];
};

// How a pass runs over what was found.
struct Running {
  // The tables of tracking of these parameters, and the state whose first word counts the steps.
  py::object rows = py::none();
  py::object words = py::none();
  // Gets the sums of each batch, if it is given.
  std::vector<at::Tensor>* sums = nullptr;
  // Begins right before the first write, after torch's refusals, if it is given.
  const Turn* turn = nullptr;
  py::object agreement = py::none();
};

class Found {
 public:
  std::vector<Batch> batches;  // those for torch's ops first
  Walk walk;

  Flags run(const Pass& pass, const Running& how);

  // The gradients of the parameters of these numbers, and the others.
  std::pair<std::shared_ptr<Found>, std::shared_ptr<Found>> split(
      const std::unordered_set<int64_t>& numbers) const;

  // Throws torch's error for the first gradient that its ops refuse to unscale or to write, by
  // `aten.require_unscalable` or `aten.require_writable`.
  void require(const char* name) const;

  bool has_parameters(const py::tuple& known) const;
  py::tuple groups() const;
  py::object layouts() const;
  // To which all promote, if they are one list for kernels, in which none is twice.
  std::optional<at::ScalarType> dtype() const;
  void add_grads(Tensors& grads) const;
};

// Tells whether a tensor is listed twice.
bool has_duplicates(const Tensors& tensors);

// A pass of the CPU's kernels.
at::Tensor run_on_cpu(const GradList& list, const Pass& pass, const at::Tensor& new_flag = {});

// Of finder.cpp: Found and Finder.
void bind_found(py::module_& m);

}  // namespace ampfast
