// Threads of the kernels: fibers. Without a sanitizer's instrumentation, which would take its own
// memory for theirs.
#include "host_cuda.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#if defined(HOST_CUDA_THREAD)
#include <sanitizer/tsan_interface.h>
#endif
#if defined(HOST_CUDA_ADDRESS)
#include <sanitizer/common_interface_defs.h>
#endif

namespace host_cuda {
namespace {

constexpr size_t kStackBytes = size_t{1} << 17;
constexpr unsigned int kLanes = 32;
constexpr unsigned int kMostWorkers = 4;

// Those that wait for each other.
struct Group {
  unsigned int size = 0;
  unsigned int arrived = 0;
  std::vector<unsigned int> waiting;
};

struct Fiber {
  ucontext_t context;
  void* sanitizer = nullptr;
  Here here;
  unsigned int shuffles = 0;
  bool is_done = false;
};

// One program, or rather its thread of the host.
struct Program {
  unsigned int thread = 0;  // that runs
  std::vector<Fiber> fibers;
  std::vector<unsigned int> ready;
  std::vector<std::atomic<uint64_t>> slots;  // of two shuffles of each lane
  std::vector<Group> warps;
  Group all;
  char* stacks = nullptr;
  ucontext_t scheduler;
  void* scheduler_sanitizer = nullptr;
  void* scheduler_fake = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_bytes = 0;
  std::mt19937 random;
  Call call = nullptr;
  void* kernel = nullptr;
  void* argument = nullptr;
  char order = 0;  // what orders the launch and its threads, and barriers
};

thread_local Program* running = nullptr;

void released(void* place) {
#if defined(HOST_CUDA_THREAD)
  __tsan_release(place);
#endif
  (void)place;
}

void acquired(void* place) {
#if defined(HOST_CUDA_THREAD)
  __tsan_acquire(place);
#endif
  (void)place;
}

void leave(bool for_good) {
  Program& program = *running;
  Fiber& fiber = program.fibers[program.thread];
#if defined(HOST_CUDA_ADDRESS)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, program.scheduler_stack,
                                 program.scheduler_bytes);
#endif
#if defined(HOST_CUDA_THREAD)
  __tsan_switch_to_fiber(program.scheduler_sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
  if (for_good) {
    setcontext(&program.scheduler);
  }
  swapcontext(&fiber.context, &program.scheduler);
#if defined(HOST_CUDA_ADDRESS)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void begin() {
  Program& program = *running;
#if defined(HOST_CUDA_ADDRESS)
  __sanitizer_finish_switch_fiber(nullptr, &program.scheduler_stack, &program.scheduler_bytes);
#endif
  acquired(&program.order);
  program.call(program.kernel, program.argument);
  released(&program.order);
  program.fibers[program.thread].is_done = true;
  leave(true);
}

void enter(unsigned int thread) {
  Program& program = *running;
  program.thread = thread;
#if defined(HOST_CUDA_ADDRESS)
  __sanitizer_start_switch_fiber(&program.scheduler_fake, program.stacks + thread * kStackBytes,
                                 kStackBytes);
#endif
#if defined(HOST_CUDA_THREAD)
  __tsan_switch_to_fiber(program.fibers[thread].sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&program.scheduler, &program.fibers[thread].context);
#if defined(HOST_CUDA_ADDRESS)
  __sanitizer_finish_switch_fiber(program.scheduler_fake, nullptr, nullptr);
#endif
}

void wait(Group& group) {
  Program& program = *running;
  group.waiting.push_back(program.thread);
  if (++group.arrived == group.size) {
    group.arrived = 0;
    program.ready.insert(program.ready.end(), group.waiting.begin(), group.waiting.end());
    group.waiting.clear();
  }
  leave(false);
}

// Returns whether all threads came to their end.
bool run(Program& program, Index number, Index programs, unsigned int threads) {
  running = &program;
  program.fibers = std::vector<Fiber>(threads);
  program.slots = std::vector<std::atomic<uint64_t>>(2 * threads);
  program.warps.assign((threads + kLanes - 1) / kLanes, {});
  program.all.size = threads;
  program.ready.clear();
  for (unsigned int thread = 0; thread < threads; ++thread) {
    Fiber& fiber = program.fibers[thread];
    fiber.here = {{thread}, number, programs};
    ++program.warps[thread / kLanes].size;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = program.stacks + thread * kStackBytes;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, begin, 0);
#if defined(HOST_CUDA_THREAD)
    fiber.sanitizer = __tsan_create_fiber(0);
#endif
    program.ready.push_back(thread);
  }
  released(&program.order);
  while (!program.ready.empty()) {
    const size_t next = program.random() % program.ready.size();
    std::swap(program.ready[next], program.ready.back());
    const unsigned int thread = program.ready.back();
    program.ready.pop_back();
    enter(thread);
  }
  acquired(&program.order);
  bool is_done = true;
  for (const Fiber& fiber : program.fibers) {
    is_done &= fiber.is_done;
#if defined(HOST_CUDA_THREAD)
    __tsan_destroy_fiber(fiber.sanitizer);
#endif
  }
  return is_done;
}

}  // namespace

const Here& here() { return running->fibers[running->thread].here; }

bool run(Call call, void* kernel, void* argument, unsigned int programs, unsigned int threads) {
  static unsigned int launches = 0;
  const unsigned int seed = ++launches;
  std::atomic<unsigned int> next = 0;
  std::atomic<bool> is_done = true;
  const auto work = [&](unsigned int worker) {
    Program program;
    program.call = call;
    program.kernel = kernel;
    program.argument = argument;
    program.random.seed(seed * kMostWorkers + worker);
    const size_t bytes = threads * kStackBytes;
    program.stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
#if defined(HOST_CUDA_THREAD)
    program.scheduler_sanitizer = __tsan_get_current_fiber();
#endif
    for (unsigned int number; (number = next++) < programs;) {
      if (!run(program, {number}, {programs}, threads)) {
        is_done = false;
      }
    }
    munmap(program.stacks, bytes);
  };
  std::vector<std::thread> workers;
  for (unsigned int worker = 1; worker < std::min(programs, kMostWorkers); ++worker) {
    workers.emplace_back(work, worker);
  }
  work(0);
  for (std::thread& worker : workers) {
    worker.join();
  }
  return is_done;
}

void barrier() {
  Program& program = *running;
  released(&program.order);
  wait(program.all);
  acquired(&program.order);
}

uint64_t shuffled(uint64_t value, unsigned int lane) {
  Program& program = *running;
  const unsigned int thread = program.thread;
  // A lane is at most one shuffle ahead of those that have yet to read.
  const size_t half = program.fibers[thread].shuffles++ % 2 * program.fibers.size();
  program.slots[half + thread].store(value, std::memory_order_relaxed);
  wait(program.warps[thread / kLanes]);
  const unsigned int other = thread / kLanes * kLanes + lane % kLanes;
  return program.slots[half + other].load(std::memory_order_relaxed);
}

}  // namespace host_cuda
