// A pass as a list of steps on one stream: products, sums and index lists. forward.cc and
// backward.cc make the list on the host without a launch, so that tests can read it and any engine
// can compute it; run() launches it.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <variant>

#include "cuda/device/device.h"
#include "cuda/layer/packed_product.h"
#include "cuda/layer/product.h"
#include "cuda/sums/factors.h"
#include "cuda/sums/gradients.h"
#include "cuda/sums/sum_rows.h"

namespace sonicmoe::cuda {

/// Builds the metadata from the routing: rows by expert, rows by token, tile records.
struct BuildMetadata {
  Routing routing;
  MetadataWork work;
};

/// Builds the lists that backward's products read besides the metadata, and clears dweights, which
/// may be absent.
struct BuildRowLists {
  Tensor weights;
  RowLists lists;
  Tensor dweights;
};

/// out = codes and scales of `rows`, a 16-bit matrix. `out` has its columns, rounded up to whole
/// blocks; the codes past them are 0.
struct QuantizeRows {
  Tensor rows;
  CodedRows out;  ///< scales by row: block_stride is 0
};

/// out[t] = r(sum over the rows p of token t of weight * rows[p]).
struct TokenSum {
  const void* rows;  ///< (C, d)
  Tensor weights;    ///< as Routing::weights; absent: 1
  Tensor out;        ///< (T, d)
  TokenRange tokens;
  Start start;                                ///< kAfterPrevious or kIndependent
  const RankSums* ranks = nullptr;            ///< sums of other ranks that are added
  BesideWhat beside = BesideWhat::kPrevious;  ///< with kIndependent
};

/// Sets every element of rows (T, d) to zero; their last stride is 1.
struct ClearRows {
  Tensor out;
};

using Work = std::variant<BuildMetadata, BuildRowLists, QuantizeRows, RowProduct, PackedProduct,
                          DepthProduct, TokenSum, ScoreGrad, ColumnSum, ClearRows, CopyFactors>;

struct Step {
  const char* name;  ///< as in docs/notation.md: "A", "dH", ...; passed to observers
  Work work;
};

/// Steps in stream order. A step never moves in memory, because later steps may point to it; so the
/// list cannot be copied.
class Steps {
 public:
  Steps() = default;
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  template <class T>
  const T& add(const char* name, T work) {
    return std::get<T>(steps_.at(count_++).emplace(Step{name, Work(std::move(work))}).work);
  }
  std::size_t size() const { return count_; }
  const Step& operator[](std::size_t i) const { return *steps_[i]; }

 private:
  static constexpr std::size_t kMost = 32;
  std::array<std::optional<Step>, kMost> steps_;
  std::size_t count_ = 0;
};

/// The problem and the metadata, used by all steps of a pass.
struct PassContext {
  const Problem& problem;
  Metadata metadata;
  PackedPass packed{};
};

/// Adds a product with weights of the layer: `weights` of the pass's packed ones if it has them.
/// The result is the product in its step.
const RowProduct& add_product(const PassContext& pass, const char* name, const RowProduct& product,
                              PackedWeights PackedLayer::* weights, Steps& steps);

/// Launches ClearRows on `stream`.
void clear_rows(const Tensor& out, cudaStream_t stream);

/// Launches every step on exec's stream, in order.
void run(const Steps& steps, const PassContext& pass, const Device& device, const Exec& exec);

}  // namespace sonicmoe::cuda
