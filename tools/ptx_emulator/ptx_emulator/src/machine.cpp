// Runs PTX kernels on the CPU, thread by thread in random order, so that results that depend on the
// order soon differ.
//
// Stricter than a GPU: stops at accesses outside of the launch's memory, misaligned accesses,
// shuffles or barriers that some threads do not reach and, on request, data races.
#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <random>

#include "arithmetic.h"
#include "listing.h"
#include "memory.h"

namespace ptx {

namespace {

constexpr int64_t kLanes = 32;
constexpr size_t kResident = 4;       // programs that run at once
constexpr int64_t kLongestTurn = 96;  // instructions
constexpr int64_t kMostSteps = int64_t{1} << 31;

enum class Waits { kNot, kForWarp, kForProgram, kIsDone };

struct Thread {
  int64_t number;  // in its program
  int64_t at;      // its next instruction
  Waits waits;
  std::vector<uint64_t> registers;
};

struct Program {
  int64_t number;
  std::vector<Thread> threads;
  std::vector<char> shared;
};

class Machine {
 public:
  Machine(const Kernel& kernel, Launch& launch)
      : kernel_(kernel),
        launch_(launch),
        threads_(launch.threads()),
        chance_(launch.seed),
        memory_(launch) {}

  void run() {
    std::vector<int64_t> order(launch_.programs());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), chance_);
    std::vector<std::unique_ptr<Program>> running;
    while (!order.empty() || !running.empty()) {
      while (!order.empty() && running.size() < kResident) {
        running.push_back(started(order.back()));
        order.pop_back();
      }
      const size_t which = chance_() % running.size();
      if (is_done_after_a_turn(*running[which])) {
        running.erase(running.begin() + static_cast<int64_t>(which));
      }
    }
  }

 private:
  std::unique_ptr<Program> started(int64_t number) const {
    auto program = std::make_unique<Program>();
    program->number = number;
    // Shared memory is uninitialised.
    program->shared.assign(kernel_.shared_bytes + launch_.dynamic_shared_bytes, '\x5a');
    for (int64_t i = 0; i < threads_; ++i) {
      program->threads.push_back(
          {i, 0, Waits::kNot, std::vector<uint64_t>(kernel_.registers, 0x5a5a5a5a5a5a5a5a)});
    }
    return program;
  }

  // A turn of one warp, and what it and its program wait for.
  bool is_done_after_a_turn(Program& program) {
    const int64_t warps = (threads_ + kLanes - 1) / kLanes;
    const int64_t first = static_cast<int64_t>(chance_() % warps) * kLanes;
    const int64_t end = std::min(first + kLanes, threads_);
    const int64_t turn = 1 + static_cast<int64_t>(chance_() % kLongestTurn);
    const int64_t ahead = static_cast<int64_t>(chance_() % kLanes);
    for (int64_t i = 0; i < end - first; ++i) {
      Thread& thread = program.threads[first + (i + ahead) % (end - first)];
      for (int64_t n = 0; n < turn && thread.waits == Waits::kNot; ++n) {
        step(program, thread);
      }
    }
    meet_in_warp(program, first, end);
    const auto is = [&](Waits waits) {
      return std::count_if(program.threads.begin(), program.threads.end(),
                           [&](const Thread& thread) { return thread.waits == waits; });
    };
    const int64_t done = is(Waits::kIsDone);
    if (done < threads_ && done + is(Waits::kForProgram) == threads_) {
      pass_barrier(program);
    }
    return done == threads_;
  }

  // Releases all threads from a barrier, which must be the same for all.
  void pass_barrier(Program& program) {
    const Thread& one = program.threads.front();
    for (Thread& thread : program.threads) {
      if (thread.at != one.at || thread.waits == Waits::kIsDone) {
        const Thread& waiting = one.waits == Waits::kIsDone ? thread : one;
        fail(kernel_.instructions[waiting.at - 1], program, waiting,
             "is not reached by all threads of its program");
      }
    }
    for (Thread& thread : program.threads) {
      thread.waits = Waits::kNot;
    }
    if (auto& races = memory_.races()) {
      races->barrier(program.number);
    }
  }

  // Shuffles and reductions, once all lanes have arrived.
  void meet_in_warp(Program& program, int64_t first, int64_t end) {
    Thread* lanes = program.threads.data() + first;
    const int64_t count = end - first;
    const auto waits = [](const Thread& lane) { return lane.waits == Waits::kForWarp; };
    if (std::none_of(lanes, lanes + count, waits)) {
      return;
    }
    const bool all_wait = std::all_of(lanes, lanes + count, waits);
    const bool will_wait = std::any_of(
        lanes, lanes + count, [](const Thread& lane) { return lane.waits == Waits::kNot; });
    if (!all_wait && will_wait) {
      return;
    }
    const Instruction& in = kernel_.instructions[lanes[0].at];
    if (count != kLanes) {
      fail(in, program, lanes[0], "is for a whole warp");
    }
    std::vector<uint64_t> results(count);
    std::vector<uint64_t> values(count);
    for (int64_t i = 0; i < count; ++i) {
      if (!all_wait || lanes[i].at != lanes[0].at) {
        fail(in, program, lanes[i], "is not reached by all lanes of its warp");
      }
      values[i] = value(in.from[0], program, lanes[i]);
      if (truncated(value(in.from.back(), program, lanes[i]), 32) != 0xffffffff) {
        fail(in, program, lanes[i], "is not for all lanes");
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      if (in.does.op == Op::kShfl) {
        const uint64_t lane = value(in.from[1], program, lanes[i]);
        if (value(in.from[2], program, lanes[i]) != kLanes - 1) {
          fail(in, program, lanes[i], "shuffles in parts of the warp");
        }
        results[i] = values[in.is_butterfly ? i ^ (lane & (kLanes - 1)) : lane & (kLanes - 1)];
      } else {
        results[i] = values[0];
        for (int64_t k = 1; k < count; ++k) {
          results[i] = combined(in, results[i], values[k]);
        }
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      write(in.to[0], truncated(results[i], in.does.type.bits), lanes[i]);
      if (in.to.size() > 1) {
        write(in.to[1], 1, lanes[i]);
      }
      lanes[i].waits = Waits::kNot;
      ++lanes[i].at;
    }
  }

  void step(Program& program, Thread& thread) {
    const Instruction& in = kernel_.instructions[thread.at];
    if (++steps_ > kMostSteps) {
      fail(in, program, thread, "comes after 2^31 instructions: an endless loop?");
    }
    if (in.predicate >= 0 && (thread.registers[in.predicate] != 0) != in.runs_if) {
      ++thread.at;
      return;
    }
    try {
      perform(in, program, thread);
    } catch (const Error& error) {
      fail(in, program, thread, error.text, error.is_unsupported);
    }
  }

  void perform(const Instruction& in, Program& program, Thread& thread) {
    switch (in.does.op) {
      case Op::kBra:
        thread.at = in.target;
        return;
      case Op::kRet:
        thread.waits = Waits::kIsDone;
        return;
      case Op::kBar:
        thread.waits = Waits::kForProgram;
        break;
      case Op::kFence:
        if (auto& races = memory_.races()) {
          races->fence(index(program, thread));
        }
        break;
      case Op::kShfl:
      case Op::kRedux:
        thread.waits = Waits::kForWarp;
        return;
      case Op::kMov:
        move(in, program, thread);
        break;
      case Op::kLd:
        load(in, program, thread);
        break;
      case Op::kSt:
        store(in, program, thread);
        break;
      case Op::kAtom:
        exchange(in, program, thread);
        break;
      default: {
        uint64_t from[4] = {};
        for (size_t i = 0; i < in.from.size(); ++i) {
          from[i] = value(in.from[i], program, thread);
        }
        write(in.to[0], calculated(in.does, from), thread);
      }
    }
    ++thread.at;
  }

  // Also packs several registers into one, or unpacks one.
  void move(const Instruction& in, const Program& program, Thread& thread) {
    const int joined = in.does.type.bits / static_cast<int>(in.from.size());
    const int split = in.does.type.bits / static_cast<int>(in.to.size());
    uint64_t whole = 0;
    for (size_t i = 0; i < in.from.size(); ++i) {
      whole |= truncated(value(in.from[i], program, thread), joined) << (joined * i);
    }
    for (size_t i = 0; i < in.to.size(); ++i) {
      write(in.to[i], truncated(whole >> (split * i), split), thread);
    }
  }

  void load(const Instruction& in, Program& program, Thread& thread) {
    const int64_t bytes = in.does.type.bits / 8;
    const int64_t count = static_cast<int64_t>(in.to.size());
    const char* from = place(in, program, thread, bytes * count, Access::kRead);
    for (int64_t i = 0; i < count; ++i) {
      uint64_t loaded = 0;
      std::memcpy(&loaded, from + i * bytes, bytes);
      const bool is_signed = in.does.type.kind == Kind::kSigned;
      write(in.to[i],
            is_signed ? static_cast<uint64_t>(extended(loaded, in.does.type.bits)) : loaded,
            thread);
    }
  }

  void store(const Instruction& in, Program& program, Thread& thread) {
    const int64_t bytes = in.does.type.bits / 8;
    const int64_t count = static_cast<int64_t>(in.from.size());
    char stored[16];
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t part = value(in.from[i], program, thread);
      std::memcpy(stored + i * bytes, &part, bytes);
    }
    char* to = place(in, program, thread, bytes * count, Access::kWrite, stored);
    std::memcpy(to, stored, bytes * count);
  }

  void exchange(const Instruction& in, Program& program, Thread& thread) {
    const int64_t bytes = in.does.type.bits / 8;
    char* at = place(in, program, thread, bytes, Access::kAtomic);
    uint64_t before = 0;
    std::memcpy(&before, at, bytes);
    const uint64_t after = combined(in, before, value(in.from[0], program, thread));
    std::memcpy(at, &after, bytes);
    if (!in.to.empty()) {
      write(in.to[0], before, thread);
    }
    if (auto& races = memory_.races()) {
      const auto address = reinterpret_cast<uint64_t>(at);
      races->synchronize(index(program, thread), address, in.is_ordered);
    }
  }

  static uint64_t combined(const Instruction& in, uint64_t a, uint64_t b) {
    if (in.combine == Op::kInc) {
      return a >= b ? 0 : a + 1;
    }
    Operation does = in.does;
    does.op = in.combine;
    const uint64_t from[3] = {a, b, 0};
    return calculated(does, from);
  }

  // Address at which an instruction reads, or writes `stored`.
  char* place(const Instruction& in, Program& program, const Thread& thread, int64_t bytes,
              Access access, const char* stored = nullptr) {
    const uint64_t base = in.base.place == Place::kNowhere ? 0 : value(in.base, program, thread);
    return memory_.access(in.space, base + static_cast<uint64_t>(in.offset), bytes, access,
                          index(program, thread), program.shared, stored);
  }

  uint64_t value(const Operand& operand, const Program& program, const Thread& thread) const {
    switch (operand.place) {
      case Place::kRegister:
        return thread.registers[operand.value];
      case Place::kNumber:
        return static_cast<uint64_t>(operand.value);
      case Place::kSpecial:
        return static_cast<uint64_t>(special(operand.value, program, thread));
      case Place::kNowhere:
        break;
    }
    refuse();
  }

  // Special registers by the index that assembler.py gives them.
  int64_t special(int64_t index, const Program& program, const Thread& thread) const {
    const int64_t axis = index % 3;
    switch (index / 3) {
      case 0:
        return along(axis, thread.number, launch_.block);
      case 1:
        return launch_.block[axis];
      case 2:
        return along(axis, program.number, launch_.grid);
      default:
        return launch_.grid[axis];
    }
  }

  static int64_t along(int64_t axis, int64_t number, const int64_t* sizes) {
    for (int64_t i = 0; i < axis; ++i) {
      number /= sizes[i];
    }
    return number % sizes[axis];
  }

  static void write(const Operand& operand, uint64_t value, Thread& thread) {
    if (operand.place == Place::kRegister) {
      thread.registers[operand.value] = value;
    }
  }

  int64_t index(const Program& program, const Thread& thread) const {
    return program.number * threads_ + thread.number;
  }

  [[noreturn]] static void fail(const Instruction& in, const Program& program, const Thread& thread,
                                const std::string& why, bool is_unsupported = false) {
    throw Error{"`" + in.text + "` in thread " + std::to_string(thread.number) + " of program " +
                    std::to_string(program.number) + " " + why,
                is_unsupported};
  }

  const Kernel& kernel_;
  const Launch& launch_;
  const int64_t threads_;  // of a program
  std::mt19937_64 chance_;
  Memory memory_;
  int64_t steps_ = 0;
};

thread_local std::string last_error;

template <class Call>
int guarded(const Call& call) {
  try {
    call();
    return 0;
  } catch (const Error& error) {
    last_error = error.text;
    return error.is_unsupported ? 2 : 1;
  } catch (const std::exception& error) {  // memory runs out, for instance
    last_error = error.what();
    return 1;
  }
}

}  // namespace

}  // namespace ptx

extern "C" {

const char* ptx_error() { return ptx::last_error.c_str(); }

// Both return 0, or 1 after an illegal operation, 2 where something is not supported.
int ptx_load(const char* listing, const ptx::Kernel** kernel) {
  return ptx::guarded([&] { *kernel = new ptx::Kernel(ptx::kernel_of(listing)); });
}

int ptx_run(const ptx::Kernel* kernel, ptx::Launch* launch) {
  return ptx::guarded([&] { ptx::Machine(*kernel, *launch).run(); });
}
}
