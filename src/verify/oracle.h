// The layer computed by the formulas of oracle_formulas.h, from public descriptors on the host to
// doubles: the specification of every backend.
#pragma once

#include "sonicmoe/moe.h"
#include "verify/matrix.h"

namespace sonicmoe::oracle {

/// One routed row: the `slot`-th entry of the caller's routing sends `token` to `expert`.
struct Row {
  std::int64_t token = 0;
  std::int64_t expert = 0;
  std::int64_t slot = 0;
  double weight = 1.0;
};

/// Low-rank factors of one projection, or their gradients: one matrix an expert, or empty.
struct Factors {
  std::vector<Matrix<double>> a, b, gate_b;
  double scale = 1.0;
};

/// A problem with its values, dense and in fp64.
struct Layer {
  Problem problem;
  std::vector<Row> rows;                       ///< sorted by (expert, token, slot)
  std::int64_t slots = 0;                      ///< entries of the caller's routing weights
  Matrix<double> x;                            ///< (T, d)
  std::vector<Matrix<double>> gate, up, down;  ///< one an expert; gate empty without a gate
  Matrix<double> b_gate, b_up, b_down;         ///< (E, n), (E, n), (E, d), or empty
  Factors lora_up, lora_down;
};

/// Entries of the caller's routing weights: C.
std::int64_t slot_count(const Problem& problem);

/// The rows of a routing on the host, sorted by (expert, token, slot). Row::weight is not read.
std::vector<Row> routed_rows(const Problem& problem, const Routing& routing);

/// Reads descriptors of host memory. Rows of x without a routed row and weights of empty slots are
/// never read.
Layer read_layer(const Problem& problem, const Tensor& x, const Routing& routing,
                 const Weights& weights, const Lora& lora = {});

/// A layer that has weights only: no rows and no x.
Layer read_weights(const Problem& problem, const Weights& weights);

enum class Precision {
  kExact,    ///< fp64 sums and no rounding (extended sums when the tensors are fp64)
  kRounded,  ///< the rounding points of docs/method.md, fp64 sums
  kSame,  ///< the rounding points of docs/method.md; fp32 sums (fp64 for fp64) in one fixed order
  /// As kSame, but fp8 products sum over all of K in an accumulator of 14 bits, as the tensor cores
  /// of Hopper do without promotion to fp32. For a negative control.
  kUnpromoted,
};

/// H by row of Layer::rows: gate (R, n) (empty without a gate) and up (R, n). In fp8: the
/// kept H, dequantised if it is kept as codes.
struct HiddenRows {
  Matrix<double> gate;
  Matrix<double> up;
};

struct Forward {
  Matrix<double> out;  ///< (T, d)
  HiddenRows h;
};

/// Gradients of weights and biases are not rounded: the caller rounds them to the dtype in which
/// they are stored.
struct Backward {
  Matrix<double> dx;             ///< (T, d)
  std::vector<double> dweights;  ///< (slots)
  std::vector<Matrix<double>> dgate, dup, ddown;
  Matrix<double> db_gate, db_up, db_down;  ///< computed even without biases
  Factors dlora_up, dlora_down;
};

Forward forward(const Layer& layer, Precision precision);
/// `h` as forward returned it, in the same precision.
Backward backward(const Layer& layer, const HiddenRows& h, const Matrix<double>& dout,
                  Precision precision);

/// A (rows, cols) or (rows) tensor as a matrix; a vector is one column.
Matrix<double> read_matrix(const Tensor& t);

}  // namespace sonicmoe::oracle
