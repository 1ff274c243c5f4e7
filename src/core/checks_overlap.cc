// Refusals of memory that is lent twice: a call may write its outputs and buffers in any order.
#include <vector>

#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe::checks {
namespace {

enum class Use { kRead, kWritten };

struct NamedTensor {
  const char* name;
  Tensor tensor;
  Use use = Use::kRead;
};
struct NamedBuffer {
  const char* name;
  Buffer buffer;
};

struct Range {
  std::uintptr_t begin = 0, end = 0;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

Range range_of(const Buffer& b) {
  const auto begin = reinterpret_cast<std::uintptr_t>(b.data);
  return {begin, begin + static_cast<std::uintptr_t>(b.bytes)};
}

// From the first to the last byte, gaps included. Checked tensors reach fewer than 2^63 bytes.
Range range_of(const Tensor& t) {
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  Range range{base, base + static_cast<std::uintptr_t>(dtype_bytes(t.dtype))};
  for (std::int32_t i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return {};
    const std::int64_t step = (t.shape[i] - 1) * t.stride[i] * dtype_bytes(t.dtype);
    (step < 0 ? range.begin : range.end) += static_cast<std::uintptr_t>(step);
  }
  return range;
}

[[noreturn]] void refuse_shared(const char* name, const char* other) {
  refuse(std::string(name) + " overlaps " + other + ", must be memory of its own");
}

// Tensors may interleave (gate and up rows of one gradient), so among them only a common first
// element counts; a buffer may share nothing.
void own_memory(const std::vector<NamedTensor>& tensors, const std::vector<NamedBuffer>& buffers) {
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Range range = range_of(buffers[i].buffer);
    if (range.begin == range.end) continue;
    for (std::size_t j = i + 1; j < buffers.size(); ++j) {
      if (range.overlaps(range_of(buffers[j].buffer))) {
        refuse_shared(buffers[i].name, buffers[j].name);
      }
    }
    for (const NamedTensor& t : tensors) {
      if (given(t.tensor) && range.overlaps(range_of(t.tensor))) {
        refuse_shared(buffers[i].name, t.name);
      }
    }
  }
  for (const NamedTensor& written : tensors) {
    if (written.use != Use::kWritten || !given(written.tensor)) continue;
    if (const Range r = range_of(written.tensor); r.begin == r.end) continue;
    for (const NamedTensor& other : tensors) {
      if (&other != &written && other.tensor.data == written.tensor.data) {
        refuse_shared(written.name, other.name);
      }
    }
  }
}

void add_inputs(const Routing& r, const Weights& w, std::vector<NamedTensor>& list) {
  const NamedTensor inputs[] = {
      {"routing.ids", r.ids},
      {"routing.weights", r.weights},
      {"routing.token", r.token},
      {"routing.expert", r.expert},
      {"routing.row_begin", r.row_begin},
      {"routing.row_count", r.row_count},
      {"weights.gate", w.gate},
      {"weights.up", w.up},
      {"weights.down", w.down},
      {"weights.b_gate", w.b_gate},
      {"weights.b_up", w.b_up},
      {"weights.b_down", w.b_down},
  };
  list.insert(list.end(), std::begin(inputs), std::end(inputs));
}

}  // namespace

void forward_overlap(const ForwardArgs& args) {
  std::vector<NamedTensor> tensors = {{"out", args.out, Use::kWritten}, {"x", args.x}};
  add_inputs(args.routing, args.weights, tensors);
  own_memory(tensors, {{"h", args.h}, {"saved", args.saved}, {"scratch", args.scratch}});
}

void backward_overlap(const BackwardArgs& args) {
  std::vector<NamedTensor> tensors = {
      {"dx", args.dx, Use::kWritten},
      {"dweights", args.dweights, Use::kWritten},
      {"grads.gate", args.grads.gate, Use::kWritten},
      {"grads.up", args.grads.up, Use::kWritten},
      {"grads.down", args.grads.down, Use::kWritten},
      {"grads.b_gate", args.grads.b_gate, Use::kWritten},
      {"grads.b_up", args.grads.b_up, Use::kWritten},
      {"grads.b_down", args.grads.b_down, Use::kWritten},
      {"x", args.x},
      {"dout", args.dout},
  };
  add_inputs(args.routing, args.weights, tensors);
  own_memory(tensors, {{"h", args.h}, {"saved", args.saved}, {"scratch", args.scratch}});
}

}  // namespace sonicmoe::checks
