// The state that the parts of a step share.
#pragma once

#include "cuda/exchange/exchange.h"
#include "cuda/metadata/split.h"

namespace sonicmoe::cuda {

/// The arrays of a step in the caller's buffers `saved` and `scratch`.
struct StepMemory {
  PairList pairs;
  Buffer layer_saved;
  Buffer layer_scratch;
  RecordSplit split;
  void* partials;      ///< (W * max_tokens, d), the output of the layer
  float* score_grads;  ///< (rows), backward only
  std::int64_t saved_bytes;
  std::int64_t scratch_bytes;
};

struct StepBuffers {
  void* saved;
  void* scratch;
};
/// Divides the buffers into the arrays of a step. With null buffers only the sizes are valid.
StepMemory step_memory(const Problem& layer, Pass pass, const StepBuffers& buffers,
                       const Exec& exec);
StepMemory step_memory(const Problem& layer, const ExchangeStep& step);

/// The layer of one rank: tokens of all ranks, its own experts, at most `rows` pairs.
Problem layer_problem(const Exchange& exchange, const Problem& problem, std::int64_t rows);

/// The step that an exchange runs.
struct Run {
  const Exchange& exchange;
  const Problem& problem;
  Problem layer;
  StepMemory memory;
  const Exec& exec;
  cudaStream_t stream;

  explicit Run(const Exchange& e)
      : exchange(e),
        problem(e.step.problem),
        layer(layer_problem(e, problem, e.step.rows)),
        memory(step_memory(layer, e.step)),
        exec(e.step.exec),
        stream(stream_of(exec)) {}

  Tensor rows_at(void* data) const {
    return tensor2(data, layer.dtype, layer.tokens, layer.hidden);
  }
  /// The array (W * max_tokens, d) at byte `offset` of this rank's symmetric buffer.
  Tensor received(std::int64_t offset) const {
    return rows_at(exchange.peers.own<std::uint8_t>(offset));
  }
  /// Whether forward keeps the rows of x that have come, and backward does not send them again.
  bool keeps_rows() const { return exchange.step.kept_x.data != nullptr; }
  /// Whether the list of pairs is in the order of positions (list_positions()): if this rank's own
  /// routing is ids. Other ranks may have another form.
  bool lists_positions() const { return problem.form == RoutingForm::kIds; }
  /// The layer's metadata, from `base` on.
  Metadata metadata(void* base) const {
    Metadata m = metadata_layout(layer, base);
    if (lists_positions()) m.position_slot = nullptr;
    return m;
  }
  Routing pairs() const {
    Routing routing;
    routing.token = tensor1(memory.pairs.token, DType::kI32, layer.capacity);
    routing.expert = tensor1(memory.pairs.expert, DType::kI32, layer.capacity);
    routing.weights = tensor1(memory.pairs.weight, DType::kF32, layer.capacity);
    return routing;
  }
  void wait(const Awaited& awaited, cudaStream_t on) const {
    wait_for(*exchange.device, exchange.peers, awaited, exchange.limits, on);
  }
};

/// Waits for the routing of all ranks, then makes the list of pairs, and token_offsets of
/// `metadata` if the list is in the order of positions.
void list_rows(const Run& run, const Metadata& metadata);
/// The part kCompute of forward and backward: makes the list of pairs (forward), computes the layer
/// and sends partial sums.
void compute_forward(const Run& run, const ForwardArgs& args);
void compute_backward(const Run& run, const BackwardArgs& args);
/// The part kFinish: adds the partial sums of all ranks for this rank's tokens. Forward computes
/// `out` on the caller's stream, backward computes `dx` on the stream `aside`.
void finish_forward(const Run& run, const ForwardArgs& args);
void finish_backward(const Run& run, const BackwardArgs& args);

}  // namespace sonicmoe::cuda
