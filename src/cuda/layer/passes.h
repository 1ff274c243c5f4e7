// Forward and backward as lists of steps, and the scratch that they use.
#pragma once

#include "cuda/layer/engine.h"
#include "cuda/layer/steps.h"

namespace sonicmoe::cuda {

/// Room for the counters of dynamic tile order and of early release, one each a product.
inline constexpr std::int64_t kCounterBytes = 256;

/// Arrays in the scratch of forward. At inference the metadata live there too.
struct ForwardScratch {
  void* a;             ///< (C, n)
  void* y;             ///< (C, d)
  unsigned* counters;  ///< kCounterBytes
  void* metadata;      ///< working memory of build_metadata
  void* saved;         ///< the metadata themselves, at inference
  std::int64_t bytes;
};
/// `base` may be null, to learn the size.
ForwardScratch forward_scratch(const Problem& problem, Pass pass, void* base);

/// Arrays in the scratch of backward.
struct BackwardScratch {
  void* dh;                  ///< h_rows()
  void* a;                   ///< (C, n) A'
  void* dx;                  ///< (C, d) dX~
  float* row_weights;        ///< (C)
  float* weight_grad_parts;  ///< (C, Engine::weight_grad_parts())
  ExpertRecord* experts;     ///< (E), longest first
  unsigned* counters;        ///< kCounterBytes
  std::int64_t bytes;
};
BackwardScratch backward_scratch(const Problem& problem, const Engine& engine, void* base);

/// The steps of a pass with at least one token and one row.
Steps forward_steps(const PassContext& pass, const ForwardArgs& args,
                    const ForwardScratch& scratch);
Steps backward_steps(const PassContext& pass, const BackwardArgs& args,
                     const BackwardScratch& scratch, const Engine& engine);

}  // namespace sonicmoe::cuda
