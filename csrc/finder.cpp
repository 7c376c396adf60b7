// What one scaler does with the gradients of optimizers: find, run, agree, decide and, of a clip,
// run again.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <pybind11/stl.h>

#include "device_kernels.h"
#include "found.h"
#include "track.h"

namespace ampfast {

namespace {

// How an optimizer's gradients are used in a norm; `backends.core` has both enums, too.
enum class Use { kAsTheyAre, kScaled, kDeferred };
// What becomes of gradients whose norm is taken.
enum class Aim { kMeasure, kStep, kClip, kClipDecided };

// An optimizer in a norm.
struct Term {
  Term(PyObject* of, PyObject* its_turn, Use how) : optimizer(of), turn(its_turn), use(how) {}

  PyObject* optimizer;
  Turn turn;
  Use use;
  std::shared_ptr<Found> found;
  std::shared_ptr<Pass> pass;  // that reads
  py::object rows = py::none();
  Flags flags;
  bool writes = false;    // unscales or clips in place, in a second pass
  bool unscales = false;  // unscales as it reads
};

}  // namespace

// The way of one scaler to gradients: what it finds, and what it does with them.
struct Finder {
  explicit Finder(py::object kernels)
      : choice(std::move(kernels)), devices(choice.attr("devices").cast<uint64_t>()) {}

  py::object choice;                 // kernels by device
  uint64_t devices;                  // of these
  py::object ranks = py::none();     // to agree with, or None
  py::object tracking = py::none();  // tables by parameter, or None
  bool has_group = false;            // whether ranks agree on plain gradients, too
  bool keeps_norms = false;          // whether the tables' squares are kept as norms
  bool allow_fp16 = false;
  // Of the scale: its device, the state of which the first word counts the steps, and the passes.
  at::Tensor scale;
  py::object words = py::none();
  std::shared_ptr<Pass> unscaling, dividing;
  bool warned_of_duplicates = false;

  std::shared_ptr<Found> find(PyObject* optimizer, Reading reading, bool coalesces);
  std::shared_ptr<Found> find_in(py::object groups, Reading reading, bool coalesces);
  std::shared_ptr<Found> sorted(Walk walk, bool coalesces);
  py::object rows_of(const Turn& turn, Found& found, bool measures);
  Running running(const py::object& rows) const { return {rows, words}; }
  Reading reading(bool writes, bool takes_fp16) const;
  py::dict take(PyObject* optimizer, PyObject* turn, const Pass& pass);
  void agree(const Turn& turn);
  at::Tensor norm(const py::list& optimizers, const py::list& turns, const py::list& uses, Aim aim,
                  const py::object& limit, double order, const py::object& rule);

 private:
  struct Backend {
    at::Device device;
    py::object kernels;
    PyObject* launcher;  // null: the core's
    bool is_torch;
  };
  std::vector<Backend> backends_;

  const Backend* known_on(at::Device device) const;
  const Backend& backend_on(at::Device device);
  bool decides(const ClipObject& clip);
  void decide(const std::shared_ptr<ClipObject>& clip);

  struct Norm;
};

// The kernels for a device, or null before they were asked for.
const Finder::Backend* Finder::known_on(at::Device device) const {
  const auto known = std::find_if(backends_.begin(), backends_.end(),
                                  [&](const Backend& each) { return each.device == device; });
  return known == backends_.end() ? nullptr : &*known;
}

const Finder::Backend& Finder::backend_on(at::Device device) {
  if (const Backend* known = known_on(device)) {
    return *known;
  }
  static const py::handle torch_ops = py::module_::import("ampfast.backends.aten").release();
  const py::object kernels = choice.attr("kernels_for")(device_object(device));
  const py::object launcher = py::getattr(kernels, "launcher", py::none());
  return backends_.emplace_back(Backend{
      device, kernels, launcher.is_none() ? nullptr : launcher.ptr(), kernels.is(torch_ops)});
}

Reading Finder::reading(bool writes, bool takes_fp16) const {
  return {takes_fp16, writes, devices, ranks};
}

std::shared_ptr<Found> Finder::find(PyObject* optimizer, Reading reading, bool coalesces) {
  // Of optimizers that make their gradients float32 before anyone reads them.
  if (_PyType_Lookup(Py_TYPE(optimizer), names::widen_gradients) != nullptr) {
    py::getattr(optimizer, names::widen_gradients)();
  }
  return find_in(py::getattr(optimizer, names::param_groups), std::move(reading), coalesces);
}

std::shared_ptr<Found> Finder::find_in(py::object groups, Reading reading, bool coalesces) {
  if (!PySequence_Check(groups.ptr())) {
    groups = py::tuple(groups);  // an iterator is consumed once
  }
  Walk found = walk(groups.ptr(), reading);
  bool has_kernels = true;
  for (const GradList& list : found.lists) {
    if (known_on(list.device()) == nullptr) {
      found.hold();  // asking for kernels may run Python
    }
    has_kernels = has_kernels && !backend_on(list.device()).is_torch;
  }
  if (!has_kernels) {
    reading.devices &= device_bit(at::kCPU);  // a GPU without kernels
    found = walk(groups.ptr(), reading);
  }
  return sorted(std::move(found), coalesces);
}

std::shared_ptr<Found> Finder::sorted(Walk walk, bool coalesces) {
  auto found = std::make_shared<Found>();
  if (!walk.set_aside.empty()) {
    const auto lists_of = of_python("ampfast.gradients", "lists_aside");
    for (const py::handle aside : lists_of(walk.set_aside, coalesces)) {
      const auto device = aside.attr("device").cast<at::Device>();
      found->batches.push_back(
          {device, std::nullopt, nullptr, py::reinterpret_borrow<py::object>(aside)});
    }
  }
  found->walk = std::move(walk);
  bool runs_python = !found->walk.set_aside.empty() || found->walk.lists.size() > 1;
  for (GradList& list : found->walk.lists) {
    PyObject* launcher = backend_on(list.device()).launcher;
    runs_python |= launcher != nullptr || list.elements() >= kElementsWorthReleasing;
  }
  if (runs_python) {
    found->walk.hold();
  }
  for (GradList& list : found->walk.lists) {
    const at::Device device = list.device();
    found->batches.push_back({device, std::move(list), backend_on(device).launcher, {}});
  }
  found->walk.lists.clear();
  return found;
}

namespace {

py::object squares_in(const at::Tensor& marks) {
  return of_python("ampfast.backends.aten", "squares_in")(marks);
}

// Sets the sums of squares to -0, to which adding one makes 0, before a pass.
void reset_squares(const py::object& rows) {
  for (const auto& [device, table] : py::dict(rows.attr(names::counters))) {
    const auto marks = table.cast<at::Tensor>();
    if (!marks.is_cpu()) {
      squares_in(marks).attr("fill_")(-0.0);
      continue;
    }
    auto* words = marks.mutable_data_ptr<int64_t>();
    for (int64_t i = kSquares; i < marks.numel(); i += kMarkWords) {
      words[i] = bits_as<int64_t>(-0.0);
    }
  }
}

// Keeps the norms of one more step, of which the tables have the squares.
void keep_norms(const py::object& tracking, const py::object& rows) {
  const py::object norms = rows.attr(names::norms);
  const py::dict tables = rows.attr(names::counters);
  if (norms.is_none() || tables.size() != 1 || !tables.contains(device_object(at::kCPU))) {
    tracking.attr("keep_norms")(rows);
    return;
  }
  const auto marks = tensor_of(PyDict_GetItem(tables.ptr(), device_object(at::kCPU).ptr()));
  const auto values = norms.attr(names::values).cast<at::Tensor>();
  auto* count = data_of<int64_t>(norms.attr(names::count).cast<at::Tensor>(), "count", at::kCPU);
  const int64_t parameters = values.size(1);
  auto* row = data_of<float>(values, "norms", at::kCPU, values.numel()) +
              *count % values.size(0) * parameters;
  const auto* words = marks.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < parameters; ++i) {
    row[i] = static_cast<float>(std::sqrt(bits_as<double>(words[i * kMarkWords + kSquares])));
  }
  ++*count;
}

}  // namespace

py::object Finder::rows_of(const Turn& turn, Found& found, bool measures) {
  if (tracking.is_none() || !scale.defined()) {
    return py::none();
  }
  const py::object record = py::handle(turn.object()).attr(names::record);
  py::object rows = record.attr(names::rows);
  if (rows.is_none() || !found.has_parameters(rows.attr(names::groups))) {
    found.walk.hold();
    rows = tracking.attr("start")(record, found.groups());
  }
  if (measures && keeps_norms) {
    reset_squares(rows);
  }
  return rows;
}

py::dict Finder::take(PyObject* optimizer, PyObject* object, const Pass& pass) {
  const bool checks = pass.how == Factor::kDivide;  // what the optimizer's step divides
  const Turn turn(object);
  const std::shared_ptr<Found> found =
      find(optimizer, reading(pass.write, checks || allow_fp16), /*coalesces=*/false);
  py::object agreement = py::none();
  if (has_group || !found->walk.shards.is_none()) {
    agreement = ranks.attr("agreement")(found->layouts().attr("values")());
  }
  // A launch over all gradients copies the scale, and ends the iteration of the last optimizer.
  Pass all = pass;
  const bool is_whole = agreement.is_none() && found->batches.size() == 1 &&
                        found->batches[0].list && found->batches[0].device == scale.device();
  if (is_whole) {
    const py::object ending = py::getattr(object, names::ending);
    if (!ending.is_none()) {
      all.ending = ending.cast<std::shared_ptr<UpdateObject>>();
    }
    if (checks && scale.dim() == 0 && is_scalar(scale, at::kFloat, kKernelDevices)) {
      all.factor_copy = allocated({}, scale.options());
    }
  }
  Running how = running(rows_of(turn, *found, false));
  how.turn = checks ? nullptr : &turn;
  how.agreement = agreement;
  const Flags flags = found->run(all, how);
  turn.flags(flags);
  if (checks) {
    const at::Tensor& copy = all.factor_copy;
    py::setattr(object, names::grad_scale, copy.defined() ? wrapped(copy) : py::none());
  } else {
    turn.unscaled();
  }
  if (!agreement.is_none()) {
    turn.set(names::agreement, agreement);
    agree(turn);
  }
  return turn.flags();
}

// Until then the turn has the agreement: `step` or `update` retries a collective that failed.
void Finder::agree(const Turn& turn) {
  const py::object agreement = py::handle(turn.object()).attr(names::agreement);
  py::list flags;
  flags.append(turn.flags());
  flags = agreement.attr("all_reduce")(flags, device_object(scale.device()));
  turn.flags(py::dict(flags[0]));
  turn.set(names::agreement, py::none());
}

// Whether kernels can decide a clip where its norm is.
bool Finder::decides(const ClipObject& clip) {
  const at::Device device = clip.norm.device();
  return !backend_on(device).is_torch && !is_observed() &&
         (!clip.scale.defined() ||
          (is_scalar(clip.scale, at::kFloat, kKernelDevices) && clip.scale.device() == device));
}

void Finder::decide(const std::shared_ptr<ClipObject>& clip) {
  const at::Device device = clip->norm.device();
  if (!decides(*clip) || clip->sums.scalar_type() != at::kDouble) {
    of_python("ampfast.backends.aten", "clip")(clip);
  } else if (PyObject* launcher = backend_on(device).launcher) {
    clip_on(launcher, clip);
  } else {
    clip_coefficient(clip->on(device));
  }
}

namespace {

// One flag of all terms, on a device; undefined for none.
at::Tensor joint(const std::vector<Term>& terms, at::Device device) {
  std::vector<at::Tensor> flags;
  for (const Term& term : terms) {
    for (const auto& [at, flag] : term.flags) {
      flags.push_back(flag);
    }
  }
  if (flags.empty()) {
    return {};
  }
  if (flags.size() == 1 && flags[0].device() == device && flags[0].dim() == 0 &&
      is_scalar(flags[0], at::kFloat, kKernelDevices)) {
    return flags[0];
  }
  const auto join = of_python("ampfast.backends.scalars", "joint_flag");
  return join(flags, device_object(device)).cast<at::Tensor>();
}

// Replaces each flag by the joint one, on its device.
void set_all(std::vector<Term>& terms, const at::Tensor& found) {
  for (Term& term : terms) {
    for (auto& [at, flag] : term.flags) {
      if (!flag.is_same(found)) {
        flag = found.to(at, at::kFloat, !at.is_cpu(), /*copy=*/true);
      }
    }
  }
}

}  // namespace

// One norm, in five steps.
struct Finder::Norm {
  Finder& finder;
  const Aim aim;
  const py::object& limit;  // a number, or a function that decides
  const double order;
  const py::object& rule;  // above which norm a step is skipped, or None

  const bool is_number = PyFloat_CheckExact(limit.ptr());
  const double max_norm = is_number ? PyFloat_AS_DOUBLE(limit.ptr()) : INFINITY;
  const bool is_read = aim == Aim::kMeasure;
  const bool is_clip = aim == Aim::kClip || aim == Aim::kClipDecided;
  const bool is_for_kernels = order == 2 || std::isinf(order);
  std::vector<Term> terms = {};
  py::object agreement = py::none();
  // The device of the first gradient, where torch has the norm; that of the scale; and the one
  // where norms of earlier steps are, with which it is compared.
  at::Device place = at::kCPU, here = at::kCPU, device = at::kCPU;
  std::shared_ptr<ClipObject> clip = std::make_shared<ClipObject>();

  void find(const py::list& optimizers, const py::list& turns, const py::list& uses);
  void prepare();
  void measure();
  void decide();
  void write();

 private:
  bool any(Use use) const {
    return std::any_of(terms.begin(), terms.end(), [use](const Term& t) { return t.use == use; });
  }
  bool is_one_pass();
  bool reads_parts() const;
  at::Tensor sums(at::ScalarType wide);
  at::Tensor sums_of_python();
  bool can_agree() const;
  at::Tensor agreed(const std::vector<at::Tensor>& rows);
};

void Finder::Norm::find(const py::list& optimizers, const py::list& turns, const py::list& uses) {
  const bool is_guard = finder.unscaling && !finder.unscaling->write;
  bool is_distributed = finder.has_group;
  for (size_t i = 0; i < optimizers.size(); ++i) {
    Term term(PyList_GET_ITEM(optimizers.ptr(), i), PyList_GET_ITEM(turns.ptr(), i),
              static_cast<Use>(PyLong_AsLong(PyList_GET_ITEM(uses.ptr(), i))));
    term.writes =
        !is_read && term.use != Use::kDeferred && !(is_guard && is_number && std::isinf(max_norm));
    const bool takes_fp16 = finder.allow_fp16 || term.use != Use::kScaled || is_read;
    const bool is_found = Py_TYPE(term.optimizer) == class_of<Found>();
    term.found = is_found
                     ? optimizers[i].cast<std::shared_ptr<Found>>()
                     : finder.find(term.optimizer, finder.reading(term.writes, takes_fp16), true);
    if (optimizers.size() > 1) {
      term.found->walk.hold();  // finding the next gradients may run Python
    }
    term.rows = is_read ? py::none() : finder.rows_of(term.turn, *term.found, true);
    term.pass = std::make_shared<Pass>();
    if (term.use != Use::kAsTheyAre) {
      const Pass& by = term.use == Use::kDeferred ? *finder.dividing : *finder.unscaling;
      term.pass->how = by.how;
      term.pass->factor = by.factor;
    }
    is_distributed |= !term.found->walk.shards.is_none();
    terms.push_back(std::move(term));
  }
  if (is_distributed && !finder.ranks.is_none()) {
    py::list layouts;
    for (const Term& term : terms) {
      layouts.attr("extend")(term.found->layouts().attr("values")());
    }
    agreement = finder.ranks.attr("agreement")(layouts);
  }
}

// Refuses what cannot be written, now or by the step; of a clip, what is listed twice is unscaled
// before it is measured, and all else, if nothing is left to clip, as it is measured.
void Finder::Norm::prepare() {
  Tensors grads;
  if (aim == Aim::kClip && (any(Use::kScaled) || any(Use::kDeferred))) {
    for (const Term& term : terms) {
      term.found->add_grads(grads);
    }
  }
  const bool unscales_first = has_duplicates(grads);
  if (unscales_first) {
    if (!std::exchange(finder.warned_of_duplicates, true)) {
      of_python("ampfast.gradients", "warn_of_duplicates")();
    }
    for (Term& term : terms) {
      if (term.use != Use::kAsTheyAre) {
        term.found = finder.find(term.optimizer, finder.reading(true, finder.allow_fp16), true);
        term.found->walk.hold();
        term.writes = true;
      }
    }
  }
  for (const Term& term : terms) {
    if (term.writes || (term.use == Use::kDeferred && !is_read)) {
      if (term.use != Use::kAsTheyAre) {
        term.found->require("require_unscalable");
      }
      if (aim != Aim::kStep) {
        term.found->require("require_writable");  // which autograd sees, as it sees a clip
      }
    }
  }
  for (Term& term : terms) {
    if (unscales_first && term.use != Use::kAsTheyAre) {
      term.turn.begin(agreement);
      Pass pass = *finder.unscaling;  // each gradient as often as it is listed, as torch does
      pass.write = true;
      term.found->run(pass, finder.running(term.rows));
      term.use = Use::kAsTheyAre;
      term.pass = std::make_shared<Pass>();
    }
  }
  if (is_number && std::isinf(max_norm) && agreement.is_none() && is_for_kernels) {
    for (Term& term : terms) {
      term.unscales = term.pass->write = term.writes && term.use == Use::kScaled;
      term.writes &= !term.unscales;
    }
  }
}

// Whether the largest magnitude is not that of the parts of complex gradients.
bool Finder::Norm::reads_parts() const {
  return std::isinf(order) && std::any_of(terms.begin(), terms.end(), [](const Term& term) {
           return term.found->walk.has_complex;
         });
}

// Whether the one pass of this norm is by kernels that can decide it, too.
bool Finder::Norm::is_one_pass() {
  const Found& found = *terms.front().found;
  return terms.size() == 1 && aim != Aim::kClipDecided && agreement.is_none() && is_for_kernels &&
         !reads_parts() && found.batches.size() == 1 && found.batches[0].list &&
         found.walk.shards.is_none() && found.batches[0].device == device && finder.decides(*clip);
}

// The sums of a clip, a row for each list; the terms get their flags.
at::Tensor Finder::Norm::sums(at::ScalarType wide) {
  if (!is_for_kernels || reads_parts() || !(agreement.is_none() || can_agree())) {
    return sums_of_python();
  }
  std::vector<at::Tensor> rows;
  for (Term& term : terms) {
    Running how = finder.running(term.rows);
    how.sums = &rows;
    how.turn = term.unscales ? &term.turn : nullptr;
    term.flags = term.found->run(*term.pass, how);
  }
  if (!agreement.is_none()) {
    return agreed(rows);
  }
  if (rows.size() == 1 && rows[0].device() == device) {
    return rows[0].dim() == 2 ? rows[0] : rows[0].unsqueeze(0);
  }
  if (rows.empty()) {
    return allocated({1, 2}, at::TensorOptions(wide).device(device)).zero_();
  }
  for (at::Tensor& row : rows) {
    row = moved(row.reshape({2}), device);
  }
  return at::stack(rows);
}

// Where torch's ops take the norms, or ranks hold parts of a gradient.
at::Tensor Finder::Norm::sums_of_python() {
  py::list given;
  for (const Term& term : terms) {
    term.found->walk.hold();
    const py::handle turn = is_read ? Py_None : term.turn.object();
    given.append(
        py::make_tuple(py::handle(term.optimizer), turn, term.found, term.pass, term.rows));
  }
  const py::tuple measured = of_python("ampfast.clip.global_norm", "measured")(
      given, order, device_object(device), agreement, finder.words);
  const py::list flags = measured[1];
  for (size_t i = 0; i < terms.size(); ++i) {
    for (const auto& [at, flag] : py::dict(flags[i])) {
      terms[i].flags.emplace_back(at.cast<at::Device>(), flag.cast<at::Tensor>());
    }
  }
  return measured[0].cast<at::Tensor>();
}

// Whether ranks agree on what lists of the CPU tell, of which every gradient counts, or none.
bool Finder::Norm::can_agree() const {
  static const py::handle replicated = of_python("ampfast.distributed", "_marks").release();
  bool can = device.is_cpu() && !is_observed() && PyDict_Size(replicated.ptr()) == 0;
  for (const Term& term : terms) {
    can = can && term.found->walk.shards.is_none();
    for (const Batch& batch : term.found->batches) {
      can = can && batch.list && batch.device.is_cpu();
    }
  }
  return can;
}

// The sums and flags of all ranks by one collective, as by `Agreement.all_reduce_norm`.
at::Tensor Finder::Norm::agreed(const std::vector<at::Tensor>& rows) {
  constexpr double kOverflow = 0x1p32;  // `_FOUND` in distributed.py
  for (const Term& term : terms) {
    if (!is_read && term.turn.is_ready()) {
      term.turn.flags(term.flags);
      term.turn.set(names::agreement, agreement);
    }
  }
  const bool largest = std::isinf(order);
  double sum = 0, peak = 0;
  if (agreement.attr("counts")(py::none()).cast<bool>()) {
    for (const at::Tensor& row : rows) {
      const auto* values = row.const_data_ptr<double>();
      sum += values[0];
      peak = larger_or_nan(peak, values[1]);
    }
  }
  // The bits of floats that are not negative keep their order, with NaN on top.
  const at::Tensor all = allocated({1 + static_cast<int64_t>(terms.size())}, at::kDouble);
  auto* const values = all.mutable_data_ptr<double>();
  values[0] = largest ? peak : sum;
  for (size_t i = 0; i < terms.size(); ++i) {
    values[i + 1] = terms[i].flags.empty() ? 0 : 1;
    for (const auto& [at, flag] : terms[i].flags) {
      values[i + 1] += *flag.const_data_ptr<float>() != 0 ? kOverflow : 0;
    }
  }
  const auto op = py::module_::import("torch.distributed").attr("ReduceOp");
  agreement.attr("reduce_")(largest ? all.view(at::kLong) : all, op.attr(largest ? "MAX" : "SUM"));
  for (size_t i = 0; i < terms.size(); ++i) {
    terms[i].flags.clear();
    if (values[i + 1] > 0) {
      terms[i].flags.emplace_back(at::kCPU, new_scalar<float>(values[i + 1] >= kOverflow ? 1 : 0));
    }
  }
  const at::Tensor sums = allocated({1, 2}, at::kDouble);
  std::fill_n(sums.mutable_data_ptr<double>(), 2, values[0]);
  return sums;
}

// The sums, and the flags of the terms.
void Finder::Norm::measure() {
  place = here = finder.scale.defined() ? finder.scale.device() : at::Device(at::kCPU);
  bool is_wide = false;
  const Batch* first = nullptr;
  for (const Term& term : terms) {
    for (const Batch& batch : term.found->batches) {
      is_wide |=
          batch.list ? batch.list->has_float64() : batch.aside.attr("has_float64").cast<bool>();
      if (first == nullptr || (batch.list && !first->list)) {
        first = &batch;
        place = batch.device;
      }
    }
  }
  device = rule.is_none() ? place : here;
  const bool has_float64 =
      !finder.backend_on(device).is_torch ||
      of_python("ampfast.backends.scalars", "has_float64")(device_object(device)).cast<bool>();
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(device);
  const at::TensorOptions wide = options.dtype(has_float64 ? at::kDouble : at::kFloat);
  clip->max_norm = max_norm;
  clip->largest = order != 2;
  clip->norm = allocated({}, is_wide ? wide : options);
  if (is_clip) {
    clip->coefficient = allocated({}, wide);
  }
  if (any(Use::kDeferred) && !is_read) {
    clip->scale = finder.dividing->factor;
    clip->divisor = allocated({}, at::TensorOptions(at::kFloat).device(here));
  }
  if (!rule.is_none()) {
    const py::tuple fields = rule;
    clip->skip_above = fields[0].cast<double>();
    clip->accepted_norms = tensor_of(py::object(fields[1]).ptr());
  }
  if (is_one_pass()) {
    terms.front().pass->clip = clip;
  }
  clip->sums = sums(c10::typeMetaToScalarType(wide.dtype()));
  if (aim == Aim::kClipDecided) {
    for (Term& term : terms) {
      term.flags.clear();
      for (const auto& [at, flag] : term.turn.flags()) {
        at::Tensor found = flag.cast<at::Tensor>();
        term.flags.emplace_back(at.cast<at::Device>(), rule.is_none() ? found : found.clone());
      }
    }
  }
}

// The norm, the coefficient and whether the step is skipped, unless the pass has decided that.
void Finder::Norm::decide() {
  if (!terms.front().pass->clip) {
    if (!rule.is_none()) {
      clip->found_inf = joint(terms, device);
    }
    finder.decide(clip);
  }
  if (!is_number) {
    const at::Tensor found = clip->found_inf.defined() ? clip->found_inf : joint(terms, device);
    limit(clip, found);
  }
  if (clip->found_inf.defined()) {
    set_all(terms, clip->found_inf);
  }
}

// Writes what is clipped, or was measured first; turns say "skip" until all is done.
void Finder::Norm::write() {
  for (Term& term : terms) {
    term.turn.set(names::agreement, py::none());
    const bool is_kept = aim == Aim::kStep && term.use == Use::kDeferred;
    if (term.unscales) {
      term.turn.unscaled();  // says "skip" since it was measured, if it has gradients
    } else if (aim != Aim::kClipDecided && !is_kept) {
      term.turn.begin(py::none());
    }
  }
  for (Term& term : terms) {
    if (!term.writes || (term.pass->how == Factor::kNone && is_number && std::isinf(max_norm))) {
      continue;
    }
    Pass pass = *term.pass;
    pass.write = true;
    pass.clip.reset();
    if (is_clip) {
      pass.coefficient = clip->coefficient;
    }
    term.found->run(pass, {});  // overflows were marked as they were read
  }
  if (terms.size() > 1 && finder.scale.defined()) {
    const at::Tensor found = joint(terms, here);
    if (found.defined()) {
      set_all(terms, found);
    }
  }
  for (Term& term : terms) {
    if (term.use == Use::kDeferred) {
      term.turn.set(names::divisor, wrapped(clip->divisor));
    }
    term.turn.flags(term.flags);
  }
}

at::Tensor Finder::norm(const py::list& optimizers, const py::list& turns, const py::list& uses,
                        Aim aim, const py::object& limit, double order, const py::object& rule) {
  Norm norm{*this, aim, limit, order, rule};
  norm.find(optimizers, turns, uses);
  norm.prepare();
  norm.measure();
  norm.decide();
  if (!norm.is_read) {
    norm.write();
  }
  for (const Term& term : norm.terms) {  // without rows if only read
    if (keeps_norms && !term.rows.is_none()) {
      ampfast::keep_norms(tracking, term.rows);
    }
  }
  return moved(norm.clip->norm, norm.place);
}

namespace {

// finder.run(optimizer, turn, pass, allow_fp16) -> flags
PyObject* call_run_hook(PyObject* const* args) {
  auto& finder = object_of<Finder>(args[0]);
  const auto& pass = object_of<Pass>(args[3]);
  const auto found = finder.find(args[1], finder.reading(pass.write, args[4] == Py_True), false);
  const py::object rows = finder.rows_of(Turn(args[2]), *found, false);
  return dict_of(found->run(pass, finder.running(rows))).release().ptr();
}

// finder.take(optimizer, turn, pass) -> flags
PyObject* call_take(PyObject* const* args) {
  auto& finder = object_of<Finder>(args[0]);
  return finder.take(args[1], args[2], object_of<Pass>(args[3])).release().ptr();
}

// finder.agree(turn)
PyObject* call_agree(PyObject* const* args) {
  object_of<Finder>(args[0]).agree(Turn(args[1]));
  return nullptr;
}

// finder.norm(optimizers, turns, uses, aim, limit, order, rule) -> norm
PyObject* call_norm(PyObject* const* args) {
  const auto object = [args](int i) { return py::reinterpret_borrow<py::object>(args[i]); };
  auto& finder = object_of<Finder>(args[0]);
  const at::Tensor norm =
      finder.norm(object(1), object(2), object(3), static_cast<Aim>(PyLong_AsLong(args[4])),
                  object(5), PyFloat_AsDouble(args[6]), object(7));
  return wrapped(norm).release().ptr();
}

// found.run(pass, rows, words, measures) -> flags, or flags and sums
PyObject* call_run(PyObject* const* args) {
  std::vector<at::Tensor> sums;
  Running how{py::reinterpret_borrow<py::object>(args[2]),
              py::reinterpret_borrow<py::object>(args[3])};
  how.sums = args[4] == Py_True ? &sums : nullptr;
  const auto& pass = object_of<Pass>(args[1]);
  const py::dict flags = dict_of(object_of<Found>(args[0]).run(pass, how));
  const py::object result = how.sums == nullptr ? py::object(flags) : py::make_tuple(flags, sums);
  return Py_NewRef(result.ptr());
}

}  // namespace

void bind_found(py::module_& m) {
  py::class_<Found, std::shared_ptr<Found>> found(m, "Found", may_lack_memory(), py::is_final());
  found.def("split", &Found::split)
      .def_property_readonly("groups", &Found::groups)
      .def_property_readonly("shards", [](const Found& self) { return self.walk.shards; })
      .def_property_readonly("has_complex", [](const Found& self) { return self.walk.has_complex; })
      .def_property_readonly("dtype", &Found::dtype)
      .def_property_readonly("devices", [](const Found& self) {
        py::list devices;
        for (const Batch& batch : self.batches) {
          devices.append(device_object(batch.device));
        }
        return devices;
      });
  add_call<call_run, 4, true>(found, "run");
  py::class_<Finder> finder(m, "Finder", may_lack_memory(), py::is_final());
  finder.def(py::init<py::object>())
      .def_readwrite("ranks", &Finder::ranks)
      .def_readwrite("tracking", &Finder::tracking)
      .def_readwrite("has_group", &Finder::has_group)
      .def_readwrite("keeps_norms", &Finder::keeps_norms)
      .def_readwrite("allow_fp16", &Finder::allow_fp16)
      .def("set_scale",
           [](Finder& self, const at::Tensor& scale, py::object words,
              std::shared_ptr<Pass> unscaling, std::shared_ptr<Pass> dividing) {
             self.scale = scale;
             self.words = std::move(words);
             self.unscaling = std::move(unscaling);
             self.dividing = std::move(dividing);
           })
      .def("find_in",
           [](Finder& self, py::object groups, bool writes, bool takes_fp16) {
             auto found = self.find_in(std::move(groups), self.reading(writes, takes_fp16), false);
             found->walk.hold();
             return found;
           })
      .def("find_over", [](Finder& self, const py::sequence& grads, bool writes) {
        return self.sorted(walk_over(grads, self.reading(writes, true)), false);
      });
  add_call<call_run_hook, 4, true>(finder, "run");
  add_call<call_take, 3, true>(finder, "take");
  add_call<call_agree, 1, true>(finder, "agree");
  add_call<call_norm, 7, true>(finder, "norm");
}

}  // namespace ampfast
