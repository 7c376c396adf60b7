// Names of Python's attributes and keys that a step asks for, made as Python imports the core: to
// make one takes longer than to use it.
#pragma once

#include <torch/csrc/python_headers.h>

namespace ampfast::names {

#define AMPFAST_NAME(name) inline PyObject* const name = PyUnicode_InternFromString(#name)

AMPFAST_NAME(agreement);
AMPFAST_NAME(count);
AMPFAST_NAME(counters);
AMPFAST_NAME(divides_by);
AMPFAST_NAME(divisor);
AMPFAST_NAME(ending);
AMPFAST_NAME(found_inf_per_device);
AMPFAST_NAME(fused);
AMPFAST_NAME(grad_scale);
AMPFAST_NAME(groups);
AMPFAST_NAME(is_capturing);
AMPFAST_NAME(known);
AMPFAST_NAME(last_flags);
AMPFAST_NAME(multi_tensor);
AMPFAST_NAME(norms);
AMPFAST_NAME(operators);
AMPFAST_NAME(param_groups);
AMPFAST_NAME(params);
AMPFAST_NAME(record);
AMPFAST_NAME(rows);
AMPFAST_NAME(stage);
AMPFAST_NAME(step);
AMPFAST_NAME(turn);
AMPFAST_NAME(update);
AMPFAST_NAME(values);
AMPFAST_NAME(widen_gradients);
AMPFAST_NAME(_step_supports_amp_scaling);

#undef AMPFAST_NAME

}  // namespace ampfast::names
