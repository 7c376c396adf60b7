// Calls over gradients and the update of a scale, for Python's steps. One that returns None has
// done nothing: Python continues with a walk that takes everything.
#include <ATen/MemoryOverlap.h>
#include <torch/csrc/Device.h>

#include <deque>
#include <string>

#include "bindings.h"
#include "cpu/multi_tensor.h"
#include "device_kernels.h"
#include "track.h"

namespace ampfast {

namespace {

// A 0-dim tensor on a device that kernels read or write, or null.
const at::Tensor* scalar_of(PyObject* object, at::ScalarType dtype, at::Device device = at::kCPU) {
  if (!THPVariable_CheckExact(object)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const bool is_known = tensor.dim() == 0 && tensor.device() == device &&
                        is_scalar(tensor, dtype, device_bit(device.type()));
  return is_known ? &tensor : nullptr;
}

#ifdef Py_GIL_DISABLED
constexpr bool kHasLock = false;
#else
constexpr bool kHasLock = true;
#endif

// A pass of the CPU's kernels.
cpu::Work work_of(const Pass& pass) {
  const char* name = pass.how == Factor::kDivide ? "grad_scale" : "inv_scale";
  const auto* factor = data_of<const float>(pass.tensor(Pass::kFactor), name, at::kCPU);
  const auto* coefficient =
      data_of<const double>(pass.tensor(Pass::kCoefficient), "coefficient", at::kCPU);
  cpu::Work work;
  work.write = pass.write;
  work.how = pass.how;
  work.factor = factor != nullptr ? *factor : 1;
  if (coefficient != nullptr) {
    work.coefficient = *coefficient;
  }
  if (pass[Pass::kClip] != Py_None) {
    const Clip clip = clip_of(pass[Pass::kClip], at::kCPU);
    work.coefficient = coefficient_of(clip, norm_of(clip), true);
  }
  if (pass.how == Factor::kTimesReciprocal) {
    work.how = Factor::kTimes;
    work.factor = inverse_scale(work.factor);
  }
  work.sums = data_of<double>(pass.tensor(Pass::kSums), "sums", at::kCPU, 2);
  if (const Marks marks = marks_of(pass, at::kCPU); marks.now != nullptr) {
    work.marks = cpu::Rows{marks.words, marks.parameters, *marks.now + 1};
  }
  return work;
}

// run(list, pass) -> found_inf, of the pass or a new one
PyObject* run(PyObject* const* args) {
  const GradList& list = list_of(args[0], at::kCPU);
  const Pass pass(args[1]);
  const cpu::Work work = work_of(pass);
  const at::Tensor* found_inf = pass.tensor(Pass::kFoundInf);
  const at::Tensor flag = found_inf != nullptr ? *found_inf : new_scalar<float>(0);
  float* written = data_of<float>(&flag, "found_inf", at::kCPU);
  const bool found = without_gil_if_long(list, [&] { return cpu::run(list, work); });
  if (found) {
    *written = 1;
  }
  return THPVariable_Wrap(flag);
}

// clip(clip)
PyObject* clip(PyObject* const* args) {
  clip_coefficient(clip_of(args[0], at::kCPU));
  return nullptr;
}

// Made as Python imports the core.
PyObject* const kFlagsName = PyUnicode_InternFromString("found_inf_per_device");
PyObject* const kGroupsName = PyUnicode_InternFromString("param_groups");
PyObject* const kStageName = PyUnicode_InternFromString("stage");
// Of optimizers that make their gradients float32 before anyone reads them.
PyObject* const kWidenName = PyUnicode_InternFromString("widen_gradients");

// The mark of an optimizer as unscaled, with a flag that says "skip" until its pass is over:
// whatever ends the pass early, nobody steps on gradients that are half written. Made before the
// walk, and with what it replaces kept until after the pass: what makes or drops objects may run
// Python, which could take gradients away.
class Mark {
 public:
  explicit Mark(PyObject* entry) : entry_(entry), flag_(new_scalar<float>(1)) {
    static PyObject* const device = THPDevice_New(at::Device(at::kCPU));
    flags_[device] = flag_;
    before_[0] = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(entry, kFlagsName));
    before_[1] = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(entry, kStageName));
  }

  void put(PyObject* unscaled) const {
    const py::dict entry = py::reinterpret_borrow<py::dict>(entry_);
    entry[kFlagsName] = flags_;
    entry[kStageName] = unscaled;
  }

  const at::Tensor& flag() const { return flag_; }
  void set(float found) const { *flag_.mutable_data_ptr<float>() = found; }

  // The flag of a pass that a device runs.
  void set(const at::Tensor& found) const {
    py::dict flags;
    flags[py::reinterpret_steal<py::object>(THPDevice_New(found.device()))] = found;
    py::reinterpret_borrow<py::dict>(entry_)[kFlagsName] = flags;
  }

 private:
  PyObject* entry_;
  at::Tensor flag_;
  py::dict flags_;
  py::object before_[2];
};

// An optimizer's gradients, if a plain walk takes them and the factor of a pass over them is plain.
struct Gradients {
  py::object groups;
  std::optional<Walk> walk;

  Gradients(PyObject* optimizer, PyObject* pass, bool writes, bool allow_fp16, at::Device device,
            bool is_launched) {
    PyObject* factor = PyTuple_GET_ITEM(pass, Pass::kFactor);
    if (!kHasLock || (factor != Py_None && scalar_of(factor, at::kFloat, device) == nullptr)) {
      return;
    }
    if (_PyType_Lookup(Py_TYPE(optimizer), kWidenName) != nullptr) {
      py::getattr(optimizer, kWidenName)();
    }
    groups = py::getattr(optimizer, kGroupsName);
    Reading reading;
    reading.allow_fp16 = allow_fp16;
    reading.writes = writes;
    walk = plain_walk(groups.ptr(), device, reading);
    if (walk && (is_launched || list().elements() >= kElementsWorthReleasing)) {
      walk->hold();
    }
  }

  const GradList& list() const { return walk->lists.front(); }
};

// Where a tensor's memory begins and ends; of one that is empty or not dense, the tensor itself.
std::pair<const char*, const char*> extent_of(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (tensor.numel() == 0 || !is_dense(tensor)) {
    const char* begin = reinterpret_cast<const char*>(impl);
    return {begin, begin + 1};
  }
  const char* begin = static_cast<const char*>(impl->unsafe_storage().data()) +
                      impl->storage_offset() * impl->itemsize();
  return {begin, begin + at::detail::computeStorageNbytes(impl->sizes(), impl->strides(),
                                                          impl->itemsize())};
}

// Tells whether a tensor's memory is that of no other, unless the tensor itself is listed twice: it
// is torch's own, with one owner.
bool is_alone(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || impl->unsafe_storage().unsafeGetStorageImpl() == nullptr) {
    return true;
  }
  static const c10::DeleterFnPtr deleter = c10::GetAllocator(at::kCPU)->raw_deleter();
  const c10::Storage& storage = impl->unsafe_storage();
  return storage.use_count() == 1 &&
         storage.data_ptr().get_deleter() ==
             (storage.device_type() == at::kCPU
                  ? deleter
                  : c10::GetAllocator(storage.device_type())->raw_deleter());
}

// Tells whether elements of a tensor share memory, as in windows made by as_strided. An expanded
// tensor does not count: torch refuses to write it.
bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided ||
      at::has_internal_overlap(tensor) != at::MemOverlap::TooHard) {
    return false;
  }
  Reused<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reached = 0;
  for (const auto& [stride, size] : dims) {
    if (size > 1 && stride <= reached) {
      return true;
    }
    reached += stride * (size - 1);
  }
  return false;
}

// Tells whether some of these tensors share memory; one that is listed twice or overlaps itself
// does.
bool have_shared_memory(const Reused<const at::Tensor*>& tensors) {
  if (std::any_of(tensors.begin(), tensors.end(),
                  [](const auto* t) { return overlaps_itself(*t); })) {
    return true;
  }
  size_t slots = 16;
  while (slots < 2 * tensors.size()) {
    slots *= 2;
  }
  Reused<const void*> seen;  // a hash table
  seen.assign(slots, nullptr);
  bool are_alone = true;
  for (const at::Tensor* tensor : tensors) {
    const void* impl = tensor->unsafeGetTensorImpl();
    are_alone = are_alone && is_alone(*tensor);
    size_t slot = reinterpret_cast<uintptr_t>(impl) * uint64_t{0x9e3779b97f4a7c15} >> 32;
    while (seen[slot &= slots - 1] != nullptr) {
      if (seen[slot++] == impl) {
        return true;
      }
    }
    seen[slot] = impl;
  }
  if (are_alone) {
    return false;
  }
  Reused<std::pair<const char*, const char*>> extents;
  for (const at::Tensor* tensor : tensors) {
    extents.push_back(extent_of(*tensor));
  }
  std::sort(extents.begin(), extents.end());
  const auto meet = [](const auto& a, const auto& b) { return a.second > b.first; };
  return std::adjacent_find(extents.begin(), extents.end(), meet) != extents.end();
}

// share_memory(groups) -> whether gradients of these lists of parameters share memory
PyObject* share_memory(PyObject* const* args) {
  std::deque<at::Tensor> made;  // by subclasses
  Reused<const at::Tensor*> grads;
  for (const py::handle group : py::handle(args[0])) {
    for (const py::handle param : group) {
      if (THPVariable_CheckExact(param.ptr())) {
        const auto* meta = meta_of(THPVariable_Unpack(param.ptr()));
        if (meta != nullptr && meta->grad_.defined()) {
          grads.push_back(&meta->grad_);
        }
      } else if (const py::object grad = py::getattr(param, "grad", py::none());
                 THPVariable_Check(grad.ptr())) {
        grads.push_back(&made.emplace_back(THPVariable_Unpack(grad.ptr())));
      }
    }
  }
  return PyBool_FromLong(have_shared_memory(grads));
}

// The arguments of a pass or a clip over an optimizer's gradients, for what a launcher launches or,
// where that is null, for the kernels of the CPU.
struct Over {
  PyObject* launcher;
  PyObject *optimizer, *entry, *unscaled, *pass;
  bool allow_fp16;
  at::Device device;

  Over(PyObject* by, PyObject* const* args)
      : launcher(by),
        optimizer(args[0]),
        entry(args[1]),
        unscaled(args[2]),
        pass(args[3]),
        allow_fp16(args[4] == Py_True),
        device(at::kCPU) {
    const at::Tensor* scale = tensor_of(args[5]);
    TORCH_CHECK_TYPE(scale != nullptr, "expected the scale");
    device = scale->device();
  }

  Gradients gradients(bool writes) const {
    return {optimizer, pass, writes, allow_fp16, device, launcher != nullptr};
  }
};

PyObject* pass_over(const Over& over) {
  std::optional<Mark> mark;
  if (over.entry != Py_None) {
    TORCH_CHECK_TYPE(PyDict_Check(over.entry), "expected the turn of an optimizer");
    mark.emplace(over.entry);
  }
  const Pass pass(over.pass);
  Gradients gradients = over.gradients(pass.write);
  if (!gradients.walk) {
    return nullptr;
  }
  std::optional<cpu::Work> work;
  if (over.launcher == nullptr) {
    work = work_of(pass);
  }
  if (mark) {
    mark->put(over.unscaled);
  }
  const GradList& list = gradients.list();
  at::Tensor flag;
  if (work) {
    const bool found = without_gil_if_long(list, [&] { return cpu::run(list, *work); });
    flag = mark ? mark->flag() : new_scalar<float>(0);
    *flag.mutable_data_ptr<float>() = found ? 1 : 0;
  } else {
    flag = run_on(over.launcher, list, over.pass);
  }
  if (mark && !work) {
    mark->set(flag);
  }
  return THPVariable_Wrap(flag);
}

// pass_over(optimizer, entry, unscaled, pass, allow_fp16, scale) -> a new found_inf
PyObject* pass_over(PyObject* const* args) { return pass_over(Over(nullptr, args)); }

// pass_over_on(launcher, ...)
PyObject* pass_over_on(PyObject* const* args) { return pass_over(Over(args[0], args + 1)); }

// The norm of a clip on the CPU, which is done.
at::Tensor clipped(const Gradients& gradients, const Pass& pass, const ClipTuple& fields,
                   const Mark& mark, PyObject* unscaled) {
  cpu::Work work = work_of(pass);
  const GradList& list = gradients.list();
  const at::Tensor norm = list.has_float64() ? new_scalar<double>(0) : new_scalar<float>(0);
  double row[2] = {};
  work.sums = row;
  double coefficient = 1;
  Clip clip;
  clip.sums = row;
  clip.rows = 1;
  clip.max_norm = float_of(fields[ClipTuple::kMaxNorm]);
  clip.largest = fields.is_true(ClipTuple::kLargest);
  clip.coefficient = &coefficient;
  if (list.has_float64()) {
    clip.wide_norm = norm.mutable_data_ptr<double>();
  } else {
    clip.norm = norm.mutable_data_ptr<float>();
  }
  float found = 0;
  clip.found_inf = &found;
  clip.skip_above = float_of(fields[ClipTuple::kSkipAbove]);
  clip.accepted_norms = accepted_norms_of(fields.tensor(ClipTuple::kAcceptedNorms), at::kCPU);
  mark.put(unscaled);
  gradients.walk->bump_versions();
  without_gil_if_long(list, [&] {
    found = cpu::run(list, work) ? 1 : 0;
    clip_coefficient(clip);
    work.write = true;
    work.coefficient = coefficient;
    work.sums = nullptr;
    work.marks = std::nullopt;
    cpu::run(list, work);
  });
  mark.set(found);
  return norm;
}

// The norm of a clip that is launched.
at::Tensor clipped_on(const Over& over, const Gradients& gradients, const Pass& pass,
                      const ClipTuple& fields, const Mark& mark) {
  const GradList& list = gradients.list();
  const at::TensorOptions wide = at::TensorOptions(at::kDouble).device(over.device);
  const at::Tensor sums = allocated({2}, wide);
  const at::Tensor norm = allocated({}, list.has_float64() ? wide : wide.dtype(at::kFloat));
  const py::object coefficient = py::cast(allocated({}, wide));
  mark.put(over.unscaled);
  gradients.walk->bump_versions();
  const py::object measures = with_fields(over.pass, {{Pass::kSums, py::cast(sums).ptr()}});
  const at::Tensor flag = run_on(over.launcher, list, measures.ptr());
  const double max_norm = float_of(fields[ClipTuple::kMaxNorm]);
  const bool finds_spikes = fields[ClipTuple::kAcceptedNorms] != Py_None ||
                            float_of(fields[ClipTuple::kSkipAbove]) != INFINITY;
  // Kernels that write gradients compute the coefficient themselves.
  const bool writes_nothing = pass.how == Factor::kNone && max_norm == INFINITY;
  const bool is_one_launch = !finds_spikes && !writes_nothing;
  const py::object rows = py::cast(sums.unsqueeze(0)), found = py::cast(flag);
  const py::object clip = with_fields(
      fields.tuple(), {{ClipTuple::kSums, rows.ptr()},
                       {ClipTuple::kNorm, py::cast(norm).ptr()},
                       {ClipTuple::kCoefficient, is_one_launch ? Py_None : coefficient.ptr()},
                       {ClipTuple::kFoundInf, finds_spikes ? found.ptr() : Py_None}});
  if (!is_one_launch) {
    clip_on(over.launcher, clip.ptr());
  }
  if (!writes_nothing) {
    const py::object writes =
        with_fields(over.pass, {{Pass::kWrite, Py_True},
                                {Pass::kMarks, Py_None},
                                {Pass::kNow, Py_None},
                                {Pass::kSums, Py_None},
                                {Pass::kCoefficient, is_one_launch ? Py_None : coefficient.ptr()},
                                {Pass::kClip, is_one_launch ? clip.ptr() : Py_None}});
    run_on(over.launcher, list, writes.ptr());
  }
  mark.set(flag);
  return norm;
}

PyObject* clip_over(const Over& over, PyObject* clip) {
  TORCH_CHECK_TYPE(PyDict_Check(over.entry), "expected the turn of an optimizer");
  const Mark mark(over.entry);
  const Pass pass(over.pass);
  const ClipTuple fields(clip);
  const Gradients gradients = over.gradients(true);
  if (!gradients.walk) {
    return nullptr;
  }
  Reused<const at::Tensor*> grads;
  for (const GradRef& ref : gradients.walk->grads) {
    grads.push_back(ref.grad);
  }
  if (have_shared_memory(grads)) {
    return nullptr;
  }
  return THPVariable_Wrap(over.launcher == nullptr
                              ? clipped(gradients, pass, fields, mark, over.unscaled)
                              : clipped_on(over, gradients, pass, fields, mark));
}

// clip_over(optimizer, entry, unscaled, pass, allow_fp16, scale, clip) -> norm. The pass reads;
// then gradients are unscaled and clipped, and the entry is marked. Of the clip the limits count,
// its tensors except for `accepted_norms` are made. Gradients that share memory are left to Python.
PyObject* clip_over(PyObject* const* args) { return clip_over(Over(nullptr, args), args[6]); }

// clip_over_on(launcher, ...)
PyObject* clip_over_on(PyObject* const* args) {
  return clip_over(Over(args[0], args + 1), args[7]);
}

// is_found(flags) -> bool, as torch adds flags on the CPU
PyObject* is_found(PyObject* const* args) {
  if (!kHasLock || !PyDict_CheckExact(args[0])) {
    return nullptr;
  }
  double sum = 0;  // of Python's floats
  PyObject *key = nullptr, *flag = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(args[0], &place, &key, &flag) != 0;) {
    const at::Tensor* tensor = scalar_of(flag, at::kFloat);
    if (tensor == nullptr) {
      return nullptr;
    }
    sum += *tensor->const_data_ptr<float>();
  }
  return PyBool_FromLong(sum != 0);
}

// can_update(update) -> whether kernels know its tensors and numbers exactly
PyObject* can_update(PyObject* const* args) {
  return PyBool_FromLong(update_of(args[0]).has_value());
}

// update(update) -> True, with the scale and its tracker written
PyObject* update(PyObject* const* args) {
  const std::optional<Update> update = update_of(args[0]);
  const at::Tensor* scale = update ? tensor_of(PyTuple_GET_ITEM(args[0], kScale)) : nullptr;
  if (scale == nullptr || !scale->is_cpu()) {
    return nullptr;
  }
  float sum = 0;  // as torch adds them
  PyObject* flags = PyTuple_GET_ITEM(args[0], kFlags);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(flags); ++i) {
    sum += *THPVariable_Unpack(PySequence_Fast_GET_ITEM(flags, i)).const_data_ptr<float>();
  }
  update_scale(*update, sum);
  scale->unsafeGetTensorImpl()->bump_version();  // as torch's op
  return Py_NewRef(Py_True);
}

// overrides(scaler, hooks) -> whether its class or the scaler itself has another method than the
// one given for one of the names
PyObject* overrides(PyObject* const* args) {
  const py::object own =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(args[0], nullptr));
  if (!own) {
    throw py::error_already_set();
  }
  PyObject *name = nullptr, *original = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(args[1], &place, &name, &original) != 0;) {
    if (_PyType_Lookup(Py_TYPE(args[0]), name) != original ||
        PyDict_GetItemWithError(own.ptr(), name) != nullptr) {
      return Py_NewRef(Py_True);
    }
  }
  return Py_NewRef(Py_False);
}

// has_parameters(param_groups, params) -> whether these plain lists have the same parameters as the
// tuples of each group
PyObject* has_parameters(PyObject* const* args) {
  Py_ssize_t group = 0;
  const auto are_same = [&](PyObject* params) {
    PyObject* known = PyTuple_GET_ITEM(args[1], group++);
    require_tuple(known, "the parameters of a group");
    PyObject** items = reinterpret_cast<PyListObject*>(params)->ob_item;
    return PyTuple_GET_SIZE(known) == PyList_GET_SIZE(params) &&
           std::equal(items, items + PyList_GET_SIZE(params),
                      reinterpret_cast<PyTupleObject*>(known)->ob_item);
  };
  require_tuple(args[1], "parameters");
  return PyBool_FromLong(PyList_CheckExact(args[0]) &&
                         PyList_GET_SIZE(args[0]) == PyTuple_GET_SIZE(args[1]) &&
                         for_each_plain_group(args[0], are_same));
}

// kinds_of(params) -> bytes, two for each dtype and device type of the parameters that are trained
PyObject* kinds_of(PyObject* const* args) {
  const py::object params = py::reinterpret_steal<py::object>(
      PySequence_Fast(args[0], "the parameters of a group must be a sequence"));
  if (!params) {
    return nullptr;
  }
  c10::SmallVector<uint16_t, 8> kinds;
  PyObject** const items = PySequence_Fast_ITEMS(params.ptr());
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params.ptr()); ++i) {
    if (!THPVariable_Check(items[i])) {
      continue;
    }
    const at::Tensor& param = THPVariable_Unpack(items[i]);
    const auto dtype = static_cast<uint16_t>(param.scalar_type());
    const auto kind =
        static_cast<uint16_t>(dtype << 8 | static_cast<uint8_t>(param.device().type()));
    const bool is_trained = param.requires_grad() || param.grad().defined();
    if (is_trained && std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) {
      kinds.push_back(kind);
    }
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(kinds.data()),
                                   static_cast<Py_ssize_t>(kinds.size() * sizeof(uint16_t)));
}

// drop_unheld(values) drops the tensors of a dict that are held by nothing else.
PyObject* drop_unheld(PyObject* const* args) {
#ifndef Py_GIL_DISABLED  // counts of references are approximate there
  std::vector<py::object> unheld;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(args[0], &place, &key, &value) != 0;) {
    if (Py_REFCNT(key) == 1 && THPVariable_Unpack(key).use_count() == 1) {
      unheld.push_back(py::reinterpret_borrow<py::object>(key));
    }
  }
  for (const py::object& tensor : unheld) {
    if (PyDict_DelItem(args[0], tensor.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
#endif
  return nullptr;
}

}  // namespace

void bind_steps(py::module_& m) {
  add_call<run, 2>(m, "run");
  add_call<clip, 1>(m, "clip");
  add_call<pass_over, 6>(m, "pass_over");
  add_call<pass_over_on, 7>(m, "pass_over_on");
  add_call<clip_over, 7>(m, "clip_over");
  add_call<clip_over_on, 8>(m, "clip_over_on");
  add_call<share_memory, 1>(m, "share_memory");
  add_call<is_found, 1>(m, "is_found");
  add_call<has_parameters, 2>(m, "has_parameters");
  add_call<kinds_of, 1>(m, "kinds_of");
  add_call<drop_unheld, 1>(m, "drop_unheld");
  add_call<overrides, 2>(m, "overrides");
  add_call<can_update, 1>(m, "can_update");
  add_call<update, 1>(m, "update");
}

}  // namespace ampfast
