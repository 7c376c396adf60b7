// Master weights: the casts of 16-bit gradients to float32, and what a step does for all
// parameters.
#pragma once

#include "gradients.h"

namespace ampfast {

// Float32 gradients of an optimizer instead of 16-bit ones: made before a pass, written by it, and
// set after it.
class Casts {
 public:
  // Forgets a pass that did not come to its end.
  void reset();

  // Pairs all 16-bit gradients on a device with float32 tensors: on the CPU in the memory of the
  // last pass, if nobody holds that any more.
  void start(at::Device device, Reused<GradRef>& grads);

  // Sets the gradients.
  void finish();

 private:
  struct Wide {
    at::Tensor memory;
    Reused<at::Tensor> grads;   // in it
    Reused<py::object> params;  // to which they are to be set
  };

  Wide on_cpu_;
  std::vector<Wide> elsewhere_;
};

}  // namespace ampfast
