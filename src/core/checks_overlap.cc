// Refusals of memory that is lent twice: a call may write its outputs and buffers in any order.
#include <array>

#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe::checks {
namespace {

enum class Use { kRead, kWritten };

struct Range {
  std::uintptr_t begin = 0, end = 0;
  bool empty() const { return begin == end; }
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

// What a call is lent, by name. Every call builds one: no allocation.
class Lent {
 public:
  void add(const char* name, const Tensor& tensor, Use use = Use::kRead) {
    if (given(tensor)) tensors_[count_++] = {name, tensor.data, range_of(tensor), use};
  }

  void add(const Routing& r, const Weights& w) {
    add("routing.ids", r.ids);
    add("routing.weights", r.weights);
    add("routing.token", r.token);
    add("routing.expert", r.expert);
    add("routing.row_begin", r.row_begin);
    add("routing.row_count", r.row_count);
    add("weights.gate", w.gate);
    add("weights.up", w.up);
    add("weights.down", w.down);
    add("weights.b_gate", w.b_gate);
    add("weights.b_up", w.b_up);
    add("weights.b_down", w.b_down);
  }

  // Tensors may interleave (gate and up rows of one gradient), so among them only a common first
  // element counts; a buffer may share nothing.
  void own_memory(const Buffer& h, const Buffer& saved, const Buffer& scratch) const {
    const NamedRange buffers[] = {
        {"h", range_of(h)}, {"saved", range_of(saved)}, {"scratch", range_of(scratch)}};
    for (const NamedRange& buffer : buffers) {
      if (buffer.range.empty()) continue;
      for (const NamedRange* other = &buffer + 1; other != std::end(buffers); ++other) {
        if (buffer.range.overlaps(other->range)) refuse_shared(buffer.name, other->name);
      }
      for (std::size_t i = 0; i < count_; ++i) {
        if (buffer.range.overlaps(tensors_[i].range)) refuse_shared(buffer.name, tensors_[i].name);
      }
    }
    for (std::size_t i = 0; i < count_; ++i) {
      const NamedTensor& written = tensors_[i];
      if (written.use != Use::kWritten || written.range.empty()) continue;
      for (std::size_t j = 0; j < count_; ++j) {
        if (i != j && tensors_[j].data == written.data) {
          refuse_shared(written.name, tensors_[j].name);
        }
      }
    }
  }

 private:
  struct NamedRange {
    const char* name;
    Range range;
  };
  struct NamedTensor {
    const char* name;
    const void* data;
    Range range;
    Use use;
  };

  std::array<NamedTensor, 22> tensors_;
  std::size_t count_ = 0;
};

}  // namespace

void forward_overlap(const ForwardArgs& args) {
  Lent lent;
  lent.add("out", args.out, Use::kWritten);
  lent.add("x", args.x);
  lent.add(args.routing, args.weights);
  lent.own_memory(args.h, args.saved, args.scratch);
}

void backward_overlap(const BackwardArgs& args) {
  Lent lent;
  lent.add("dx", args.dx, Use::kWritten);
  lent.add("dweights", args.dweights, Use::kWritten);
  lent.add("grads.gate", args.grads.gate, Use::kWritten);
  lent.add("grads.up", args.grads.up, Use::kWritten);
  lent.add("grads.down", args.grads.down, Use::kWritten);
  lent.add("grads.b_gate", args.grads.b_gate, Use::kWritten);
  lent.add("grads.b_up", args.grads.b_up, Use::kWritten);
  lent.add("grads.b_down", args.grads.b_down, Use::kWritten);
  lent.add("x", args.x);
  lent.add("dout", args.dout);
  lent.add(args.routing, args.weights);
  lent.own_memory(args.h, args.saved, args.scratch);
}

}  // namespace sonicmoe::checks
