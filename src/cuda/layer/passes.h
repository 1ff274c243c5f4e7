// Forward and backward as lists of steps, and the scratch that they use.
#pragma once

#include "cuda/layer/engine.h"
#include "cuda/layer/lora.h"
#include "cuda/layer/steps.h"

namespace sonicmoe::cuda {

/// Bytes for the tile counters and release counters of a pass's products.
inline constexpr std::int64_t kCounterBytes = 256;
/// The first of the tile counters of low-rank products (LoraPass::counters).
inline constexpr int kLoraCounters = 16;

/// Arrays in the scratch of forward. Inference keeps the metadata there too.
struct ForwardScratch {
  CodedRows x;         ///< (T, d) q(X), d in whole blocks, with Precision::kFp8 only
  StoredRows a;        ///< (C, n); with Precision::kFp8 codes, and elements for a down_rank
  void* y;             ///< (C, d)
  unsigned* counters;  ///< kCounterBytes
  void* metadata;      ///< scratch of build_metadata
  void* saved;         ///< the metadata, at inference only
  LoraScratch lora;
  RangeLists range;  ///< for packed weights
  std::int64_t bytes;
};
/// The array of a range's records, with room for those of all experts.
RangeLists take_range_lists(const Problem& problem, Carver<256>& carver);
/// With base == nullptr only `bytes` is valid.
ForwardScratch forward_scratch(const Problem& problem, Pass pass, void* base);

/// Arrays in the scratch of backward.
struct BackwardScratch {
  void* dh;               ///< dh_rows()
  void* a;                ///< (C, n) A'
  void* dx;               ///< (C, d) dX~
  float* row_weights;     ///< (C)
  float* score_parts;     ///< (C, Engine::score_tiles())
  ExpertRecord* experts;  ///< (E), longest first
  unsigned* counters;     ///< kCounterBytes
  CodedRows dout;         ///< (T, d) q(dO), d in whole blocks, with Precision::kFp8 only
  CodedRows dh_codes;     ///< (C, G n) q(dH), n in whole blocks, with Precision::kFp8 only
  LoraScratch lora;
  RangeLists range;  ///< for packed weights
  std::int64_t bytes;
};
BackwardScratch backward_scratch(const Problem& problem, const Engine& engine, void* base);

/// A = act(X W1), of all rows, without a low-rank term.
RowProduct up_product(const PassContext& pass, const ForwardArgs& args,
                      const ForwardScratch& scratch);
/// Y = A W2 to `out` (C, d), of all rows, without a low-rank term.
RowProduct down_product(const PassContext& pass, const ForwardArgs& args,
                        const ForwardScratch& scratch, const Tensor& out);

/// Appends the steps of a pass. It must have at least one token and a capacity of at least one row.
void add_forward_steps(const PassContext& pass, const ForwardArgs& args,
                       const ForwardScratch& scratch, Steps& steps);
void add_backward_steps(const PassContext& pass, const BackwardArgs& args,
                        const BackwardScratch& scratch, const Engine& engine, Steps& steps);

}  // namespace sonicmoe::cuda
