// The cost of a layer whose experts are spread over W GPUs (expert parallelism), by arithmetic:
// bytes between the GPUs, time of transfers and products, memory. Every rank has the T tokens of
// the problem and owns E/W experts; a token chooses K of E experts evenly.
#pragma once

#include <cstdint>
#include <vector>

#include "core/plan.h"

namespace sonicmoe {

/// How rows travel between two GPUs of a node, and what was measured of it: each way, both ways at
/// once, between two H200 (NVLink of 450 GB/s each way), rows of 4 KB and more.
struct Transport {
  const char* name;
  double least, most;  ///< GB/s
};
/// "copy" (copy engines), "kernels" (8 multiprocessors) or "nccl"; refuses other names.
Transport transport_from_name(const std::string& name);
/// GB/s: the least of the measured rates, in proportion to the machine's NVLink. Refuses a machine
/// without NVLink.
double link_gbytes(const Machine& machine, const Transport& transport);

struct RankOptions {
  std::int64_t ranks = 1;
  std::int64_t ranks_per_node = 8;  ///< GPUs of one NVLink domain
  double link_gbytes = 0.0;         ///< GB/s a GPU, each way, inside a node
  double network_gbits = 0.0;       ///< Gbit/s a GPU, each way, between nodes
  double tflops = 0.0;              ///< rate of the products; 0: `share` of the roofline
  double share = ShareOfRoofline{}.mean;
  double imbalance = 1.0;  ///< rows of the busiest rank over the mean
  double arena = 1.3;      ///< bytes of the arena over those of the rows expected
  double hidden = 0.0;     ///< share of the shorter of products and transfers, 0 to 1
  std::int64_t layers = 1;
};

/// The probability that a token chooses at least one of `owned` given experts: 1 - C(E-owned, K) /
/// C(E, K).
double reach_probability(std::int64_t experts, std::int64_t top_k, std::int64_t owned);
/// The mean number of ranks that own an expert of a token. Rank r owns the experts from r*E/W up to
/// (r+1)*E/W, rounded down.
double expected_ranks(std::int64_t experts, std::int64_t top_k, std::int64_t ranks);

/// Rows that leave the busiest rank, or arrive there.
struct RankTransfer {
  const char* name;  ///< "X", "O", "X again", "dO", "dX"
  bool backward = false;
  double link_bytes = 0.0, network_bytes = 0.0;
  double seconds = 0.0;  ///< of the slower of the two, which run at the same time
};

struct RankPass {
  double alone = 0.0;      ///< as many rows and experts on one GPU, nothing sent
  double products = 0.0;   ///< with the passes that pack rows and add partial sums
  double transfers = 0.0;  ///< one after the other
  double exposed = 0.0;    ///< nothing hidden: products + transfers
  double hidden = 0.0;     ///< all hidden: the longer of products and transfers
  double assumed = 0.0;    ///< with RankOptions::hidden
};

/// Bytes of one GPU. What is kept and buffered has three sizes.
struct RankMemory {
  struct Sized {
    double exact = 0.0;  ///< of the rows expected
    double arena = 0.0;  ///< of an arena: RankOptions::arena times that, at most `worst`
    double worst = 0.0;  ///< if nothing may be lost whatever the routing
  };
  double weights = 0.0, gradients = 0.0;  ///< a layer
  double x = 0.0;                         ///< a layer: the rank's own tokens
  Sized kept;                             ///< a layer: H and metadata
  Sized buffers;  ///< rows that arrived: X, dO, partial sums; all layers share
  Sized scratch;  ///< dH, A' and dX~ of the rows: all layers share it
  Sized total;    ///< of all layers
};

struct RankPlan {
  double experts = 0.0;         ///< of the busiest rank
  double rows = 0.0;            ///< that it multiplies
  double distinct_ranks = 0.0;  ///< that a token reaches, its own among them
  double distinct_nodes = 0.0;  ///< likewise
  double sent_rows = 0.0;       ///< rows a token that leave the rank in one transfer
  std::vector<RankTransfer> transfers;
  RankPass forward, backward;
  RankMemory memory;

  /// Time of both passes over the same on one GPU without transfers.
  double over_alone(double RankPass::* time) const {
    return (forward.*time + backward.*time) / (forward.alone + backward.alone);
  }
};
/// Refuses options that make no sense together.
RankPlan plan_ranks(const Problem& problem, const Machine& machine, const RankOptions& options);

}  // namespace sonicmoe
