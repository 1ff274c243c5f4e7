// The table of cases: shapes, routings, layouts, dtypes and data, each under a name.
#pragma once

#include <string>
#include <vector>

#include "sonicmoe/moe.h"
#include "sonicmoe/packed.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::verify {

/// The values of a case, which decide how its results are judged.
enum class Data {
  kIntegers,   ///< small integers, no sum ever rounds: equality
  kRoundings,  ///< integers whose fp32 sums are exact but whose r(.) rounds: equality to the bit
  kRandom,     ///< x, dO ~ N(0, 1), W ~ N(0, 1)/sqrt(fan-in): the twice rule
};

/// How tokens are routed.
enum class Pattern {
  kDistinct,    ///< ids: K distinct experts a token
  kRepeated,    ///< ids: with replacement, so that a token may name an expert twice
  kCounts,      ///< ids: Case::counts rows an expert in random slots, the other slots empty
  kHot,         ///< ids: every token's first slot at expert 0
  kEmpty,       ///< ids, pairs, grouped: no row at all
  kSentinels,   ///< ids: a third of the slots out of range on either side
  kAliases,     ///< ids: int64 values that are valid experts once narrowed to 32 bits
  kShuffled,    ///< pairs: any number a token, random order, empty slots in between
  kSorted,      ///< pairs: by (expert, token) with an empty tail, as token_round makes them
  kContiguous,  ///< grouped: Case::counts, one after the other, a tail in no group
  kGaps,        ///< grouped: Case::counts, begins aligned to 16, experts in reverse order
  kOverlong,    ///< grouped: ranges beyond either end of the buffer, negative counts
};

/// Memory layout of weights and of their gradients.
enum class Layout {
  kSeparate,      ///< gate, up (E, n, d), down (E, d, n), each contiguous
  kConcatenated,  ///< W1 (E, 2n, d) = [gate; up]
  kInterleaved,   ///< W1 (E, 2n, d), gate and up rows alternate
  kTransposed,    ///< W1 (E, d, 2n) = [gate | up], W2 (E, n, d)
  kPaired,        ///< W1 (E, d, 2n), gate and up columns alternate, W2 (E, n, d)
  kPadded,        ///< as kSeparate, 8 elements of padding after every row of every tensor
  kReversed,      ///< everything in reverse order of dimensions: nothing has a last stride of 1
  kPairedUp,      ///< W1 as kPaired, W2 (E, d, n)
};

/// Distribution of logits. Ids must be exact for all of them.
enum class Logits {
  kNormal,     ///< N(0, 1)
  kFewValues,  ///< three values: ties everywhere
  kSpecials,   ///< with infinities, NaN, both zeros and huge values
  kEmptyRows,  ///< rows with at most one expert to choose
  kOneHot,     ///< nearly every token chooses the same expert
};

/// A case of the router. T, E, K and the dtype of the logits are those of Case::problem.
struct RouterCase {
  RouteOptions options{};  ///< without its bias
  Logits logits = Logits::kNormal;
  bool bias = false;
  RoundingMode mode = RoundingMode::kNearest;
  std::int64_t tile = 0;
};

/// How the weights of a case of unpack_weights() are packed. E, rows and columns are E, n and d of
/// Case::problem.
struct PackedForm {
  PackedFormat format = PackedFormat::kNF4;
  std::int64_t block = 0;
  bool nested = false;
};

/// The tokens (for grouped rows: the rows) from `begin` to `end` - 1.
struct TokenRange {
  std::int64_t begin, end;
};

/// The function under test. Grouped GEMMs use `problem` with other letters: T is R (rows), d the
/// width of a (k; m in varlen-K), n that of b or d, and Case::counts the rows of each expert.
enum class Subject { kLayer, kGroupedGemm, kGroupedGemmK, kRoute, kTokenRound, kUnpack };

struct Case {
  std::string name;
  Subject subject = Subject::kLayer;
  Problem problem;
  Pattern pattern = Pattern::kDistinct;
  std::vector<std::int64_t> counts;
  Data data = Data::kRandom;
  Layout layout = Layout::kSeparate;
  DType index_dtype = DType::kI64;
  DType grad_dtype = DType::kF32;  ///< of dW and of accumulated db; other db: problem.dtype
  GradMode grad_mode = GradMode::kWrite;
  bool bias = false;
  std::vector<std::string> wanted;  ///< gradients asked for, as "dx", "dgate"; empty: all
  double bias_shift = 0.0;          ///< added to the random bias of gate (of up without a gate)
  bool gather = false;              ///< grouped GEMMs: rows of a through an index
  bool out_of_range = false;        ///< grouped GEMMs: some offsets and indices are out of range
  bool row_weights = true;          ///< grouped form: whether rows have weights
  bool cancelling = false;          ///< K = 384: the first and the last 128 cancel in H and dA'
  RouterCase router;
  PackedForm packed;
  /// Each part also runs as a batch of its own; its results must have the whole batch's bits.
  std::vector<TokenRange> parts;
  bool cpu_only = false;  ///< sizes or strides that only the CPU serves
};

/// Whether the case asks for this gradient.
bool wants(const Case& c, const std::string& output);

enum class Extent { kQuick, kFull };

/// The cases of Precision::kFp8, a part of all_cases().
void add_fp8_cases(Extent extent, std::vector<Case>& cases);

/// Cases with Case::parts in every precision, a part of all_cases(). Their names contain "batch/".
void add_batch_cases(Extent extent, std::vector<Case>& cases);

/// Adds low-rank factors to some of `cases` and appends these as "lora/...", a part of all_cases().
void add_lora_cases(Extent extent, std::vector<Case>& cases);

/// The cases of unpack_weights(), "unpack/...", a part of all_cases().
void add_packed_cases(Extent extent, std::vector<Case>& cases);

/// The cases whose names contain `filter`.
std::vector<Case> all_cases(Extent extent, const std::string& filter);

}  // namespace sonicmoe::verify
