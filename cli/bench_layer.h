// A layer with random values, whose forward and backward can be repeated.
#pragma once

#include "core/plan.h"
#include "inputs.h"
#include "sonicmoe/moe.h"
#include "target.h"

namespace sonicmoe::cli {

enum class BenchRouting { kTopK, kRounded, kSkewed };

class BenchLayer {
 public:
  BenchLayer(const LayerShape& shape, const Problem& problem, BenchRouting routing,
             const Target& target);
  void forward(KernelObserver* observer = nullptr) const;
  void backward(KernelObserver* observer = nullptr) const;
  /// fp8 only. The constructor calls it once.
  void quantize_weights() const;
  /// Routed (token, expert) rows.
  std::int64_t rows() const { return rows_; }

 private:
  void route_tokens(const LayerShape& shape, BenchRouting routing);
  void fill_pairs(const LayerShape& shape, const Tensor& logits);

  Problem problem_;
  Target target_;
  std::int64_t rows_ = 0;
  OwnedTensor x_, dout_, out_, dx_, gate_, up_, down_, dgate_, dup_, ddown_;
  OwnedTensor ids_, weights_, dweights_, token_, expert_, offsets_;
  Block h_, saved_, scratch_, fp8_weights_;
  ForwardArgs forward_;
  BackwardArgs backward_;
};

/// Bytes that a BenchLayer of this problem allocates.
double bench_bytes(const Problem& problem, const Exec& exec);

}  // namespace sonicmoe::cli
