// The cost of a layer whose experts are spread over W GPUs (expert parallelism), by arithmetic:
// bytes between the GPUs, time of transfers and products, memory. Every rank has the T tokens of
// the problem and owns E/W experts; a token chooses K of E experts evenly.
#pragma once

#include <cstdint>
#include <vector>

#include "core/plan.h"

namespace sonicmoe {

/// A way in which rows travel between two GPUs of a node, and its measured rates in each direction
/// while both directions transfer: two H200 (NVLink of 450 GB/s each way), rows of 4 KB and more.
struct Transport {
  const char* name;
  double least, most;  ///< GB/s
};
/// "copy" (copy engines), "kernels" (8 multiprocessors) or "nccl"; refuses other names.
Transport transport_from_name(const std::string& name);
/// The least of the measured rates in GB/s, scaled by the NVLink rate of `machine`. Refuses a
/// machine without NVLink.
double link_gbytes(const Machine& machine, const Transport& transport);

struct RankOptions {
  std::int64_t ranks = 1;
  std::int64_t ranks_per_node = 8;  ///< GPUs of one NVLink domain
  double link_gbytes = 0.0;         ///< GB/s a GPU, each way, inside a node
  double network_gbits = 0.0;       ///< Gbit/s a GPU, each way, between nodes
  double tflops = 0.0;              ///< rate of the products; 0: `share` of the roofline
  double share = ShareOfRoofline{}.mean;
  double imbalance = 1.0;  ///< rows of the busiest rank over the mean
  double arena = 1.3;      ///< rows for which an arena has room over the expected rows
  double hidden = 0.0;     ///< hidden part of the shorter of products and transfers, 0 to 1
  std::int64_t layers = 1;
};

/// The probability that a token chooses at least one of `owned` given experts: 1 - C(E-owned, K) /
/// C(E, K).
double reach_probability(std::int64_t experts, std::int64_t top_k, std::int64_t owned);
/// The mean number of ranks that own at least one expert of a token. Rank r owns the experts from
/// r*E/W up to (r+1)*E/W, both rounded down.
double expected_ranks(std::int64_t experts, std::int64_t top_k, std::int64_t ranks);

/// One transfer: the rows that leave the busiest rank, or arrive there.
struct RankTransfer {
  const char* name;  ///< "X", "O", "X again", "dO", "dX"
  bool backward = false;
  double link_bytes = 0.0, network_bytes = 0.0;
  double seconds = 0.0;  ///< of the slower of link and network, which work at the same time
};

struct RankPass {
  double alone = 0.0;      ///< time of one GPU with as many rows and experts and no transfers
  double products = 0.0;   ///< products, and (without RankOptions::tflops) packing and adding
  double transfers = 0.0;  ///< all transfers, one after the other
  double exposed = 0.0;    ///< nothing hidden: products + transfers
  double hidden = 0.0;     ///< all hidden: the longer of products and transfers
  double assumed = 0.0;    ///< with RankOptions::hidden
};

/// Bytes of one GPU. Memory whose size depends on the routing has three sizes.
struct RankMemory {
  struct Sized {
    double exact = 0.0;  ///< for the rows expected
    double arena = 0.0;  ///< for RankOptions::arena times the rows expected, at most `worst`
    double worst = 0.0;  ///< for the rows of any routing
  };
  double weights = 0.0, gradients = 0.0;  ///< of one layer
  double x = 0.0;                         ///< of one layer: X of the rank's own tokens
  Sized kept;                             ///< of one layer: H and metadata
  Sized buffers;  ///< X, dO and partial sums that arrive; all layers share them
  Sized scratch;  ///< dH, A' and dX~; all layers share it
  Sized total;    ///< of all layers
};

struct RankPlan {
  double experts = 0.0;         ///< of the busiest rank
  double rows = 0.0;            ///< rows that the busiest rank multiplies
  double distinct_ranks = 0.0;  ///< ranks that a token reaches, its own included
  double distinct_nodes = 0.0;  ///< nodes that a token reaches, its own included
  double sent_rows = 0.0;       ///< rows of a token that leave its rank in one transfer
  std::vector<RankTransfer> transfers;
  RankPass forward, backward;
  RankMemory memory;

  /// Time of both passes divided by RankPass::alone of both.
  double over_alone(double RankPass::* time) const {
    return (forward.*time + backward.*time) / (forward.alone + backward.alone);
  }
};
/// Refuses options that contradict each other.
RankPlan plan_ranks(const Problem& problem, const Machine& machine, const RankOptions& options);

}  // namespace sonicmoe
