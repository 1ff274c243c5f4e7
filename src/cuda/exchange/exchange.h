// The exchange's functions of the CUDA backend, and its state.
#pragma once

#include "cuda/device/device.h"
#include "cuda/exchange/kernels.h"
#include "sonicmoe/exchange.h"

namespace sonicmoe {

/// The state is fixed at exchange_open(), except `step`.
struct Exchange {
  /// Which part of which pass comes next; kAll: a part has failed.
  struct Step {
    Pass pass = Pass::kInference;
    ExchangePart next = ExchangePart::kBegin;
  };

  const cuda::Device* device = nullptr;
  ExchangeShape shape{};
  cuda::ExchangeLayout layout{};
  cuda::Peers peers{};
  ExchangeTransport transport = ExchangeTransport::kPush;
  int multiprocessors = 0;
  cuda::WaitLimits limits{};
  cuda::FaultRecord* record = nullptr;  ///< pinned; limits.record is its device address
  std::int64_t* row_count = nullptr;    ///< pinned, of exchange_rows()
  cudaStream_t sending = nullptr;       ///< rows and partial sums travel on it
  cudaStream_t aside = nullptr;         ///< of sums beside the weight gradients
  cudaEvent_t reached = nullptr;        ///< of follow()
  Step step{};
};

namespace cuda {

std::int64_t exchange_bytes(const ExchangeShape& shape, const Exec& exec);
Exchange* exchange_open(const ExchangeOptions& options, const Exec& exec);
void exchange_close(Exchange* exchange, const Exec& exec);
void exchange_check(Exchange& exchange, const Exec& exec);
void exchange_reset(Exchange& exchange, const Exec& exec);
std::int64_t exchange_rows(Exchange& exchange, const Problem& problem, const Exec& exec);
Sizes exchange_sizes(const Exchange& exchange, const Problem& problem, std::int64_t rows, Pass pass,
                     const Exec& exec);
void exchange_forward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                      const ForwardArgs& args, ExchangePart part, const Exec& exec);
void exchange_backward(Exchange& exchange, const Problem& problem, std::int64_t rows,
                       const BackwardArgs& args, ExchangePart part, const Exec& exec);

/// Refuses a handle of another GPU or engine than the one that opened the exchange.
void check_handle(const Exchange& exchange, const Exec& exec);
/// What is enqueued next on `stream` comes after what is on `earlier`.
void follow(const Exchange& exchange, cudaStream_t stream, cudaStream_t earlier);
/// Announces the phase's epoch (begin_phases()) to the other ranks: everything before it in the
/// stream is visible to a rank that has waited for it. A rank that has given up announces nothing.
/// The copy engines announce what they copy: products fill the multiprocessors, and a kernel would
/// start when they are done.
void announce(const Exchange& exchange, Phase phase, cudaStream_t stream);
/// Sends rows (T, d) of this rank's tokens to the array at byte `offset` of the other ranks'
/// buffers, on the sending stream.
void send_rows(const Exchange& exchange, const Tensor& rows, std::int64_t offset);
/// Copies rows (T, d), which send_rows() has sent, to the array at byte `offset` of this rank's
/// buffer, on the sending stream. cudaMemcpyAsync within a GPU runs on multiprocessors and would
/// start when the products at work are done. So the copy engines fetch the rows back from another
/// rank.
void copy_own_rows(const Exchange& exchange, const Tensor& rows, std::int64_t offset);
/// Announces the phase's epoch to this rank after what is before it on the sending stream. Follows
/// announce().
void announce_own(const Exchange& exchange, Phase phase);
/// Sends each rank the partial sums of a part of its tokens, on the sending stream; sums are
/// (W * max_tokens, d).
void send_partials(const Exchange& exchange, const Tensor& sums, const std::uint8_t* has_row,
                   const TokenPart& part);

}  // namespace cuda
}  // namespace sonicmoe
