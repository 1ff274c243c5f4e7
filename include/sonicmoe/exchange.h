// Expert parallelism: the MoE layer over the GPUs of one node. CUDA only.
//
// A rank is one of W GPUs. Rank r owns the experts [r * E/W, (r + 1) * E/W). A step is one forward
// or one backward. It sends the row of a token once to each other rank that owns one of the token's
// experts (kCopy: to every other rank). Each rank computes its own experts and sends one partial
// sum of the token back.
//
// A symmetric buffer is memory of the same size on every rank, which all ranks can write: torch
// symmetric memory, CUDA IPC, or peer access within a process. One symmetric buffer on each rank
// serves all layers of a group of ranks.
//
// A training step, on every rank, with the arguments of moe_forward() and moe_backward():
//   Exchange* exchange = exchange_open(options, exec);  // then a barrier over all ranks
//   Sizes sizes = exchange_sizes(*exchange, problem, rows, Pass::kForward, exec);
//   exchange_forward(*exchange, problem, rows, forward_args, ExchangePart::kAll, exec);
//   exchange_backward(*exchange, problem, rows, backward_args, ExchangePart::kAll, exec);
//
// If a call is refused (status.h), the step is unchanged and the call can be repeated. After
// Status::kCuda the exchange must be reset or closed. On the CPU all calls throw
// Status::kUnsupported.
#pragma once

#include "sonicmoe/moe.h"

namespace sonicmoe {

/// The state that one rank of a group needs for expert parallelism: its mapping of all symmetric
/// buffers, its flags and its streams. An exchange runs one step at a time. Only one thread at a
/// time may use it. Two groups, each with its own buffers and exchanges, may run steps at the same
/// time.
struct Exchange;

/// The largest sizes of any step of a group; equal on all ranks.
struct ExchangeShape {
  std::int32_t ranks = 0;       ///< W, 1 to 64
  std::int64_t max_tokens = 0;  ///< of one rank
  std::int64_t max_slots = 0;   ///< of one rank: T * K, or the length of its list of pairs
  std::int64_t hidden = 0;      ///< d, at most this
  DType dtype = DType::kBF16;   ///< of the rows: bf16 or fp16
};

/// Bytes of the symmetric buffer of each rank: about 3 * W * max_tokens * d elements.
SONICMOE_API std::int64_t exchange_bytes(const ExchangeShape& shape, const Exec& exec);

/// How rows travel. Results have the same bits for every value.
enum class ExchangeTransport : std::int32_t {
  kAuto = 0,  ///< kCopy for up to four ranks, else kPush
  kPush = 1,  ///< a kernel on few multiprocessors sends each rank the rows that it needs
  kCopy = 2,  ///< the copy engines send all rows to all ranks, without using multiprocessors
};

/// Options of exchange_open(). Shape and buffer_bytes are equal on all ranks.
struct ExchangeOptions {
  ExchangeShape shape{};
  std::int32_t rank = 0;  ///< this rank, 0 to W - 1
  /// W addresses, aligned to 256 bytes: the symmetric buffer of each rank, as mapped on this rank's
  /// device.
  void* const* buffers = nullptr;
  std::int64_t buffer_bytes = 0;     ///< of each symmetric buffer; at least exchange_bytes()
  std::int64_t time_limit_ms = 0;    ///< the longest wait for another rank; 0: 60,000
  std::int32_t multiprocessors = 0;  ///< multiprocessors that kPush uses; 0: 8
  ExchangeTransport transport = ExchangeTransport::kAuto;
};

/// Opens the exchange of this rank and clears the flags in its own symmetric buffer. The host waits
/// for the device. Then the caller must run a barrier over all ranks: no rank may begin a step
/// before all ranks have opened. Later calls allocate nothing on the device. The buffers and the
/// handle `exec.device` must outlive the exchange; the array of addresses is copied. Later calls
/// need a handle of the same GPU and engine.
SONICMOE_API Exchange* exchange_open(const ExchangeOptions& options, const Exec& exec);
/// The host waits for the device, then frees the exchange. Null is ignored.
SONICMOE_API void exchange_close(Exchange* exchange, const Exec& exec);

/// Throws Status::kCuda if a step has failed: a rank did not send its data within the time limit,
/// or a rank got more than `rows` rows. The begin of a step, and BegunForward::rows(), make the
/// same check. The other parts do not, so all parts of a step that has begun can be enqueued. The
/// check does not wait for the device: it finds a fault only after the kernel that detects the
/// fault has run. All checks fail until exchange_reset().
///
/// A failed step fills out, dx and dweights with NaN on every rank that learns of the fault in
/// time. Gradients of weights, also accumulated ones, are not valid, but they are not NaN. A rank
/// that is later than the time limit may finish a step that has failed on the other ranks; it
/// learns of the fault in its next step. With kCopy the rows of its step may have been overwritten,
/// because copies that the other ranks have enqueued cannot be stopped.
SONICMOE_API void exchange_check(Exchange& exchange, const Exec& exec);

/// Makes an exchange usable again after a fault, or after a step that was not finished. The host
/// waits for the device. Every rank must do this:
/// 1. Wait for its own device. Waits for other ranks end within the time limit.
/// 2. Run a barrier. Without it, a rank that still works could write flags that another has
/// cleared.
/// 3. Call exchange_reset().
/// 4. Run a barrier, so that no rank begins a step before all ranks have reset.
SONICMOE_API void exchange_reset(Exchange& exchange, const Exec& exec);

/// The sizes of the buffers of a step, as moe_sizes(). `problem` describes this rank's tokens and
/// all E experts, in the form kIds or kPairs; E must be a multiple of W. `rows` is the capacity:
/// the largest number of rows that this rank's experts may get. In addition to the layer's
/// metadata, saved has 12 bytes a row. A step uses scratch until ComputedStep::finish().
SONICMOE_API Sizes exchange_sizes(const Exchange& exchange, const Problem& problem,
                                  std::int64_t rows, Pass pass, const Exec& exec);

/// Bytes of ExchangeBuffers::kept_x: W * max_tokens * d elements.
SONICMOE_API std::int64_t exchange_kept_bytes(const Exchange& exchange, const Problem& problem,
                                              const Exec& exec);

// The parts of a step are objects: begin is a constructor, and each part returns the object of the
// next one. Between two parts the caller may enqueue its own work on exec.stream: it runs while
// another stream transfers rows and partial sums. Begin checks and copies the arguments; tensors
// and buffers must stay valid until the step has finished. A CUDA graph must contain whole steps.

/// A step that has computed and sent partial sums.
struct ComputedStep {
  /// Waits for the partial sums of the other ranks and adds them in rank order.
  SONICMOE_API void finish() &&;

  Exchange* exchange;
  Pass pass;  ///< kForward (also of inference) or kBackward
  Exec exec;
};

/// The buffers of a forward, as in ForwardArgs.
struct ExchangeBuffers {
  Buffer h{};
  Buffer saved{};
  Buffer scratch{};
  /// exchange_kept_bytes(): the rows of x that have come are kept here, for BegunBackward. Without
  /// it backward sends them again.
  Buffer kept_x{};
};

/// moe_forward() over all ranks. `args.weights` are this rank's E/W experts, and with
/// Precision::kFp8 `args.fp8_weights` are their quantised weights: quantize_weights() of a problem
/// with E/W experts. x, routing and out belong to this rank's tokens, and expert ids are in [0, E).
/// `problem` and `rows` are as in exchange_sizes().
///
/// The result equals the result of one process with all tokens and experts, except for one more
/// rounding: a rank rounds its partial sum of a token to the dtype before it sends the sum. Partial
/// sums are added in fp32 in rank order. So equal inputs give equal bits, in whatever order the
/// sums arrive.
struct BegunForward {
  /// Sends routing and rows of x. Ignores the buffers of `args`.
  SONICMOE_API BegunForward(Exchange& exchange, const Problem& problem, const ForwardArgs& args,
                            const Exec& exec);
  /// The number of rows that the step routes to this rank's experts: the smallest `rows` with which
  /// the step does not fail. The host waits for the routing of all ranks, not for their rows; no
  /// other function of a step waits for the device. A CUDA graph cannot contain this call.
  SONICMOE_API std::int64_t rows() const;
  /// Waits for rows, computes this rank's experts, sends partial sums.
  SONICMOE_API ComputedStep compute(std::int64_t rows, const ExchangeBuffers& buffers) &&;

  Exchange* exchange;
  Exec exec;
};

/// moe_backward() over all ranks. `args.grads` are the gradients of this rank's E/W experts; dx and
/// dweights are those of this rank's tokens. All ranks must ask for the same gradients among dx and
/// dweights.
struct BegunBackward {
  /// Sends rows of dout, then of x. `kept_x` is as forward wrote it, and is only read: with it x is
  /// not sent. Either all ranks pass it or none does: otherwise the step fails, because a rank
  /// waits for rows that others do not send. Results have the same bits.
  SONICMOE_API BegunBackward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                             const BackwardArgs& args, const Exec& exec, const Buffer& kept_x = {});
  /// As BegunForward::compute().
  SONICMOE_API ComputedStep compute() &&;

  Exchange* exchange;
  Exec exec;
};

/// A part of a step by its number, for callers that cannot hold an object; kAll runs all three.
enum class ExchangePart : std::int32_t { kAll = 0, kBegin = 1, kCompute = 2, kFinish = 3 };

/// The same steps by numbers. kBegin reads all arguments except a forward's `rows` and buffers, to
/// which kept_x belongs; kCompute of a forward reads these, and no other part reads any. A part
/// that is not the next one throws Status::kInvalidArgument.
SONICMOE_API void exchange_forward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                                   const ForwardArgs& args, ExchangePart part, const Exec& exec,
                                   const Buffer& kept_x = {});
SONICMOE_API void exchange_backward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                                    const BackwardArgs& args, ExchangePart part, const Exec& exec,
                                    const Buffer& kept_x = {});
/// BegunForward::rows() after kBegin of a forward.
SONICMOE_API std::int64_t exchange_rows(Exchange& exchange, const Exec& exec);

}  // namespace sonicmoe
