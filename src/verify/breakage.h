// Negative controls: a sound implementation, the way to break it, and the fault that the harness
// must find.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "verify/blocks.h"
#include "verify/convert.h"
#include "verify/judge.h"

namespace sonicmoe::verify {

using Break = std::function<Implementation(const Implementation&)>;

struct Expectation {
  const char* case_name;
  Fault fault;
};

struct Control {
  const char* name;
  std::vector<Expectation> expectations;
  Break breakage;
};

// --- Helpers that change device memory.

// Downloads a view, calls f on the host copy and uploads it.
template <class F>
void edit(const Memory& memory, Tensor t, F f) {
  const std::int64_t bytes = extent(t) * dtype_bytes(t.dtype);
  std::vector<std::uint8_t> image(static_cast<std::size_t>(bytes));
  void* device = t.data;
  memory.download(image.data(), device, bytes);
  t.data = image.data();
  f(t);
  memory.upload(device, image.data(), bytes);
}

// Writes one byte at `offset` from `data`.
inline void scribble(const Memory& memory, void* data, std::int64_t offset) {
  const std::uint8_t value = 0;
  memory.upload(static_cast<std::uint8_t*>(data) + offset, &value, 1);
}

inline std::int64_t row_length(const Tensor& t) { return t.shape[t.rank - 1]; }
inline std::int64_t row_count(const Tensor& t) { return oracle::element_count(t) / row_length(t); }

inline void zero_rows(const Tensor& t, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin * row_length(t); i < end * row_length(t); ++i) {
    oracle::store(t.data, t.dtype, oracle::element_offset(t, i), 0.0);
  }
}
inline void zero_middle_row(const Tensor& t) {
  zero_rows(t, row_count(t) / 2, row_count(t) / 2 + 1);
}
// Moves the rows [begin, end) down by one and the last row to the front.
inline void rotate_rows(const Tensor& t, std::int64_t begin, std::int64_t end) {
  std::vector<double> values = oracle::read(t);
  const std::int64_t n = row_length(t);
  std::rotate(values.begin() + begin * n, values.begin() + (end - 1) * n, values.begin() + end * n);
  oracle::write(t, values);
}
inline void swap_middle_rows(const Tensor& t) {
  rotate_rows(t, row_count(t) / 2, row_count(t) / 2 + 2);
}
// --- Breakages of results: f changes memory after a sound call.

using ForwardHook = std::function<void(const Memory&, const Problem&, const ForwardArgs&)>;
using BackwardHook = std::function<void(const Memory&, const Problem&, const BackwardArgs&)>;

inline Break after_forward(ForwardHook hook) {
  return [hook](const Implementation& sound) {
    Implementation broken = sound;
    broken.moe_forward = [sound, hook](const Problem& p, const ForwardArgs& args) {
      sound.moe_forward(p, args);
      hook(sound.memory, p, args);
    };
    return broken;
  };
}

/// Gradients replace what they are to be added to.
inline Break writing_where_to_add() {
  return [](const Implementation& sound) {
    Implementation broken = sound;
    broken.moe_backward = [sound](const Problem& p, BackwardArgs args) {
      args.grad_mode = GradMode::kWrite;
      sound.moe_backward(p, args);
    };
    return broken;
  };
}

inline Break after_backward(BackwardHook hook) {
  return [hook](const Implementation& sound) {
    Implementation broken = sound;
    broken.moe_backward = [sound, hook](const Problem& p, const BackwardArgs& args) {
      sound.moe_backward(p, args);
      hook(sound.memory, p, args);
    };
    return broken;
  };
}

// --- Breakages of arguments: a sound implementation gets changed arguments.

// Changed copies of views in device memory, freed after one call.
class DeviceCopies {
 public:
  explicit DeviceCopies(const Memory& memory) : memory_(memory) {}
  ~DeviceCopies() {
    for (void* address : addresses_) memory_.release(address);
  }
  // A copy of a view, with the same strides and changed values; absent if the view is absent.
  template <class F>
  Tensor changed(const Tensor& t, F f) {
    if (t.data == nullptr) return t;
    Tensor copy = t;
    const std::int64_t bytes = extent(t) * dtype_bytes(t.dtype);
    copy.data = memory_.allocate(bytes);
    addresses_.push_back(copy.data);
    std::vector<std::uint8_t> image(static_cast<std::size_t>(bytes));
    memory_.download(image.data(), t.data, bytes);
    memory_.upload(copy.data, image.data(), bytes);
    edit(memory_, copy, f);
    return copy;
  }
  // A copy of a buffer with changed bytes.
  template <class F>
  Buffer changed(const Buffer& buffer, F f) {
    std::vector<std::uint8_t> image(static_cast<std::size_t>(buffer.bytes));
    memory_.download(image.data(), buffer.data, buffer.bytes);
    f(image.data());
    addresses_.push_back(memory_.allocate(buffer.bytes));
    memory_.upload(addresses_.back(), image.data(), buffer.bytes);
    return {addresses_.back(), buffer.bytes};
  }

 private:
  const Memory& memory_;
  std::vector<void*> addresses_;
};

// f changes the problem, the routing and the weights of every call.
template <class F>
Break with_inputs(F f) {
  return [f](const Implementation& sound) {
    Implementation broken = sound;
    const auto change = [f](DeviceCopies& copies, Problem& p, auto& args) { f(copies, p, args); };
    broken.moe_forward = [=](Problem p, ForwardArgs args) {
      DeviceCopies copies(sound.memory);
      change(copies, p, args);
      sound.moe_forward(p, args);
    };
    broken.moe_backward = [=](Problem p, BackwardArgs args) {
      DeviceCopies copies(sound.memory);
      change(copies, p, args);
      sound.moe_backward(p, args);
    };
    return broken;
  };
}

/// The controls of the router.
std::vector<Control> controls_of_the_router();
/// The controls of batch invariance.
std::vector<Control> controls_of_batches();
/// The controls of unpack_weights().
std::vector<Control> controls_of_packed_weights();
/// The controls of low-rank factors.
std::vector<Control> controls_of_factors();
/// The controls of Precision::kFp8. controls_of_fp8_sums() breaks the oracle instead of a backend.
std::vector<Control> controls_of_fp8();
std::vector<Control> controls_of_fp8_sums();

}  // namespace sonicmoe::verify
