#include "core/layer_model.h"

#include <algorithm>
#include <cmath>

#include "core/fp8_layout.h"
#include "core/plan.h"

namespace sonicmoe {
namespace {

/// How a product runs: its share of the tensor cores' sustained rate in the main loop, and the time
/// outside of the main loop of a tile, as elements of K that could be multiplied in it.
struct ProductModel {
  double share, lost_depth;
};

struct EngineModel {
  const char* machine;
  const char* engine;
  double flops_per_second;      ///< that a large GEMM sustains
  double bytes_per_second;      ///< that products reach
  double sum_bytes_per_second;  ///< that the sums O and dX reach
  double cache_bytes;           ///< of the L2 cache
  ProductModel a, y, dh, dx, dw;
  double rows_lost;     ///< of an expert, to tiles that are not full
  double launch;        ///< seconds
  double hidden;        ///< part of dX that runs beside weight gradients
  double forward_more;  ///< seconds of metadata and the like
  double backward_more;
  double code_flops_per_second;  ///< that a large product of fp8 codes sustains; 0: no model
};

// The rows of the H200 are a fit. Those of the B200: a large GEMM of bf16 sustains 1350 TFLOP/s in
// published runs, mma.sync 530, of which the portable engine's loop reaches 455 if the ratio is
// that of the H200; 6.6 TB/s were measured for sums of rows. What `blackwell` gains
// by launches that overlap is left out.
//
// Products of fp8 codes: 1950 TFLOP/s, which a published grouped GEMM of MXFP8 reaches; large
// products reach more (docs/notes/2026-11-blackwell.md has the sources). Not in the model: with
// codes an epilogue does not overlap with the next tile. That costs most where n is small.
constexpr EngineModel kModels[] = {
    {"h200",
     "hopper",
     725e12,
     4.0e12,
     4.1e12,
     50e6,
     {.94, 0},
     {.98, 30},
     {.80, 150},
     {.98, 30},
     {.93, 100},
     40,
     4e-6,
     0.7,
     25e-6,
     20e-6,
     0},
    {"h200",
     "portable",
     480e12,
     4.0e12,
     4.1e12,
     50e6,
     {.97, 150},
     {.97, 90},
     {.95, 450},
     {.97, 90},
     {.95, 100},
     40,
     6e-6,
     0,
     25e-6,
     20e-6,
     0},
    {"b200",
     "portable",
     455e12,
     6.6e12,
     6.5e12,
     126e6,
     {.97, 105},
     {.97, 64},
     {.95, 320},
     {.97, 64},
     {.95, 70},
     40,
     6e-6,
     0,
     25e-6,
     20e-6,
     0},
    {"b200",
     "blackwell",
     1350e12,
     6.6e12,
     6.5e12,
     126e6,
     {.93, 0},
     {.95, 32},
     {.88, 64},
     {.95, 32},
     {.92, 100},
     64,
     6e-6,
     0,
     25e-6,
     20e-6,
     1950e12},
};

/// Of the time of the shorter of arithmetic and memory, the part that the longer one does not hide.
constexpr double kNotHidden = 0.125;
constexpr double kTileRows = 128;

class Layer {
 public:
  Layer(const Problem& p, const EngineModel& m)
      : m_(m),
        is_coded_(p.precision == Precision::kFp8),
        keeps_codes_(fp8::keeps_codes(p)),
        tokens_(static_cast<double>(p.tokens)),
        rows_(tokens_ * static_cast<double>(p.top_k)),
        of_expert_(rows_ / static_cast<double>(p.experts)),
        d_(static_cast<double>(p.hidden)),
        n_(static_cast<double>(p.width)),
        h_(n_ * gate_factor(p.activation.kind)),
        down_(static_cast<double>(p.experts) * n_ * d_) {}

  double forward() const {
    const double a =
        rows(m_.a, h_, d_, gathered(operand()) + up() + kept_h() + operand() * rows_ * n_);
    const double y = rows(m_.y, d_, n_, operand() * (rows_ * n_ + down_) + row_bytes(d_));
    return quantise() + a + y + sum() + m_.forward_more;
  }
  double backward() const {
    // dH is also stored as codes, for dX~.
    const double grads = row_bytes(h_) + (is_coded_ ? rows_ * h_ * kCodeBytes : 0);
    const double dh = rows(
        m_.dh, n_, d_, gathered(operand()) + operand() * down_ + kept_h() + grads + row_bytes(n_));
    const double dx = rows(m_.dx, d_, h_, operand() * rows_ * h_ + up() + row_bytes(d_));
    const double of_x = gathered(kElementBytes);
    const double dw2 = grad(n_, row_bytes(n_) + of_x + kElementBytes * down_);
    const double dw1 = grad(h_, row_bytes(h_) + of_x + kElementBytes * down_ * h_ / n_);
    return quantise() + dh + dx + dw2 + dw1 + (1 - m_.hidden) * sum() + m_.backward_more;
  }

 private:
  static constexpr double kElementBytes = 2;
  /// With its part of a scale.
  static constexpr double kCodeBytes = 1 + 4.0 / fp8::kBlock;

  /// Bytes of an element of a row product's operands.
  double operand() const { return is_coded_ ? kCodeBytes : kElementBytes; }
  double kept_h() const { return rows_ * h_ * (keeps_codes_ ? kCodeBytes : kElementBytes); }
  /// Bytes of W1 as an operand of a row product.
  double up() const { return operand() * down_ * h_ / n_; }
  double row_bytes(double width) const { return kElementBytes * rows_ * width; }
  /// Bytes of X or dO read from memory while its rows of elements of `bytes` are gathered: each row
  /// once if half of the cache holds them all, up to once for each routed row.
  double gathered(double bytes) const {
    const double once = bytes * tokens_ * d_, fit = once / (m_.cache_bytes / 2);
    return std::min(bytes * rows_ * d_, once * (1 + std::clamp((fit - 1) / 2, 0.0, 1.0)));
  }
  double sum() const {
    return (row_bytes(d_) + kElementBytes * tokens_ * d_) / m_.sum_bytes_per_second;
  }
  /// The kernel that quantises X or dO.
  double quantise() const {
    if (!is_coded_) return 0;
    return (kElementBytes + kCodeBytes) * tokens_ * d_ / m_.sum_bytes_per_second + m_.launch;
  }
  /// `speed`: of the tensor cores, relative to 16-bit elements. The time outside of the main loop
  /// does not depend on it.
  double product(const ProductModel& p, double speed, double width, double depth, double full,
                 double bytes) const {
    const double rate =
        m_.flops_per_second * p.share * depth / (depth / speed + p.lost_depth) * full;
    // Two operations for each element of a row, of a column and of K; for a weight gradient the
    // rows are K, so the count is the same.
    const double compute = 2 * rows_ * d_ * width / rate, memory = bytes / m_.bytes_per_second;
    return std::max(compute, memory) + kNotHidden * std::min(compute, memory) + m_.launch;
  }
  double code_speed() const {
    return is_coded_ ? m_.code_flops_per_second / m_.flops_per_second : 1;
  }
  /// D has `columns`; the product of columns and depth is d times n or h.
  double rows(const ProductModel& p, double columns, double depth, double bytes) const {
    const double tiles = std::ceil(of_expert_ / kTileRows) * kTileRows;
    const double full =
        of_expert_ < kTileRows ? of_expert_ / tiles : of_expert_ / (of_expert_ + m_.rows_lost);
    return product(p, code_speed(), columns * depth / d_, depth, full, bytes);
  }
  double grad(double width, double bytes) const {
    return product(m_.dw, 1, width, of_expert_, 1, bytes);
  }

  const EngineModel& m_;
  bool is_coded_, keeps_codes_;
  double tokens_, rows_, of_expert_, d_, n_, h_;
  double down_;  ///< elements of W2
};

}  // namespace

std::vector<ModelledLayer> modelled_layers(const Problem& p, const Machine& machine) {
  std::vector<ModelledLayer> layers;
  if (dtype_bytes(p.dtype) != 2 || p.tokens == 0) return layers;
  for (const EngineModel& m : kModels) {
    if (machine.name != m.machine) continue;
    if (p.precision == Precision::kFp8 && m.code_flops_per_second == 0) continue;
    const Layer layer(p, m);
    layers.push_back({m.engine, layer.forward(), layer.backward()});
  }
  return layers;
}

}  // namespace sonicmoe
