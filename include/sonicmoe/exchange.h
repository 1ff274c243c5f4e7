// Expert parallelism: the MoE layer over the GPUs of one node. Rank r of W owns the experts
// [r * E/W, (r + 1) * E/W). A step sends the row of a token at most once to each rank that owns one
// of its experts; each rank computes its own experts and sends one partial sum of the token back.
//
// A symmetric buffer is memory of the same size on every rank that all ranks can write: torch
// symmetric memory, CUDA IPC, or peer access within a process. A group of ranks needs one for all
// its layers. CUDA only.
//
// A training step, on every rank; args as for moe_forward and moe_backward:
//   Exchange* exchange = exchange_open(options, exec);  // then a barrier over all ranks
//   Sizes sizes = exchange_sizes(*exchange, problem, rows, Pass::kForward, exec);
//   exchange_forward(*exchange, problem, rows, forward_args, ExchangePart::kAll, exec);
//   exchange_backward(*exchange, problem, rows, backward_args, ExchangePart::kAll, exec);
//
// Functions throw Error (status.h). A refused argument leaves the step as it was, so that the call
// can be repeated. After Status::kCuda only exchange_reset or exchange_close helps.
#pragma once

#include "sonicmoe/moe.h"

namespace sonicmoe {

/// One rank's end of a group. It has one step in flight at a time and is used by one thread at a
/// time. Two groups, each with its own buffers, may have steps in flight at once.
struct Exchange;

/// The largest extents of any step of a group; equal on all ranks.
struct ExchangeShape {
  std::int32_t ranks = 0;       ///< W, 1 to 64
  std::int64_t max_tokens = 0;  ///< of one rank
  std::int64_t max_slots = 0;   ///< of one rank: T * K, or the length of a list of pairs
  std::int64_t hidden = 0;      ///< d
  DType dtype = DType::kBF16;   ///< of the rows, 16 bits
};

/// Bytes of the symmetric buffer of each rank.
SONICMOE_API std::int64_t exchange_bytes(const ExchangeShape& shape, const Exec& exec);

/// How rows travel. Results have the same bits for every value.
enum class ExchangeTransport : std::int32_t {
  kAuto = 0,  ///< kCopy for two ranks, else kPush
  kPush = 1,  ///< a kernel on few multiprocessors sends the rows that a rank needs
  kCopy = 2,  ///< the copy engines send all rows to all ranks and take no multiprocessor
};

struct ExchangeOptions {
  ExchangeShape shape{};
  std::int32_t rank = 0;
  /// W addresses: the symmetric buffer of each rank as mapped on this rank's device. 256-byte
  /// aligned.
  void* const* buffers = nullptr;
  std::int64_t buffer_bytes = 0;     ///< of each
  std::int64_t time_limit_ms = 0;    ///< of a wait for another rank; 0: 60,000
  std::int32_t multiprocessors = 0;  ///< that kPush uses; 0: 8
  ExchangeTransport transport = ExchangeTransport::kAuto;
};

/// Opens this rank's end and clears the flags of its own symmetric buffer; waits for the device. No
/// rank may begin a step before all ranks have opened: the caller puts a barrier between. Nothing
/// is allocated later. Buffers and the handle `exec.device` must outlive the exchange; the
/// addresses are copied. All later calls need a handle of the same GPU and engine.
SONICMOE_API Exchange* exchange_open(const ExchangeOptions& options, const Exec& exec);
/// Waits for the exchange's work; null is ignored.
SONICMOE_API void exchange_close(Exchange* exchange, const Exec& exec);

/// Throws if an earlier step failed: a rank that did not come within the time limit, or more rows
/// than `rows`. Every part of a step does the same first. It does not wait for the device: a fault
/// is seen once the failing kernel has run. A failed step fills out, dx and dweights with NaN on
/// every rank that learns of it in time. Gradients of weights are then not valid and have no NaN,
/// also where they were accumulated. The exchange stays broken until exchange_reset.
///
/// A rank that comes later than the time limit may finish a step that has failed elsewhere, and
/// learns of the fault in its next step. With kCopy the rows of its step may then have been
/// overwritten: copies that the other ranks had enqueued cannot be stopped.
SONICMOE_API void exchange_check(Exchange& exchange, const Exec& exec);

/// Makes a broken or aborted exchange usable again; waits for the device. All ranks call it. Before
/// it, each rank waits for its own device (waits for other ranks end within the time limit), then
/// comes a barrier of the caller's: a rank that still works would write flags that are cleared. A
/// second barrier follows the call, so that no rank begins early.
SONICMOE_API void exchange_reset(Exchange& exchange, const Exec& exec);

/// The parts of a step. kAll is the three of them. Between them the caller may enqueue its own work
/// on exec.stream: rows and partial sums travel on another stream. Arguments and exec are equal for
/// all parts of a step, except where a part needs less. A CUDA graph must hold whole steps.
enum class ExchangePart : std::int32_t {
  kAll = 0,
  kBegin = 1,  ///< sends routing and rows (backward: dout, then x); a forward needs no buffers yet
  kCompute = 2,  ///< waits for rows, computes this rank's experts, sends partial sums
  kFinish = 3,   ///< waits for partial sums and adds them in rank order
};

/// Rows that the current step routes to this rank's experts: the smallest `rows` that holds them.
/// After kBegin of a forward, before kCompute. The only function of a step that waits for the
/// device: for the routing of all ranks, not for their rows. It cannot be captured in a graph.
SONICMOE_API std::int64_t exchange_rows(Exchange& exchange, const Problem& problem,
                                        const Exec& exec);

/// As moe_sizes(). `problem` has this rank's tokens and all experts, in the ids or the pairs form;
/// `rows` is the capacity for rows of this rank's experts. Besides the layer's metadata, saved
/// keeps 12 bytes a row and one byte for each of W * max_tokens tokens. Scratch belongs to the step
/// from kBegin to the end of kFinish.
SONICMOE_API Sizes exchange_sizes(const Exchange& exchange, const Problem& problem,
                                  std::int64_t rows, Pass pass, const Exec& exec);

/// moe_forward over all ranks. `args.weights` are this rank's E/W experts; x, routing and out are
/// this rank's tokens, with expert numbers of the whole group. The result is that of one process
/// with all tokens and experts, with one more rounding: a rank's sum of a token's rows is rounded
/// to the dtype before it travels. Partial sums are added in fp32 in rank order, so equal inputs
/// give equal bits whatever arrives first.
SONICMOE_API void exchange_forward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                                   const ForwardArgs& args, ExchangePart part, const Exec& exec);

/// moe_backward over all ranks. `args.grads` are those of this rank's E/W experts; dx and dweights
/// those of this rank's tokens. x travels again and is not kept. All ranks ask for the same ones of
/// dx and dweights. kBegin needs the buffers too.
SONICMOE_API void exchange_backward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                                    const BackwardArgs& args, ExchangePart part, const Exec& exec);

}  // namespace sonicmoe
