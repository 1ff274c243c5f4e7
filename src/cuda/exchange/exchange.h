// The exchange's functions of the CUDA backend, and its state.
#pragma once

#include "cuda/device/device.h"
#include "cuda/exchange/kernels.h"
#include "sonicmoe/exchange.h"

namespace sonicmoe::cuda {

/// Moments on the sending stream that the caller's stream waits for.
enum SentMark : std::int32_t {
  kRowsSent,  ///< kPhaseRows is announced
  kAllSent,   ///< everything up to here
  kSentMarks,
};

}  // namespace sonicmoe::cuda

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
  cudaEvent_t fork = nullptr;           ///< the caller's stream has reached what is sent
  cudaEvent_t sent[cuda::kSentMarks] = {};
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
/// What is enqueued next on the sending stream comes after what is on `stream`.
void fork(const Exchange& exchange, cudaStream_t stream);
/// Marks the end of what is on the sending stream.
void mark_sent(const Exchange& exchange, SentMark mark);
/// What is enqueued next on `stream` comes after the mark.
void join(const Exchange& exchange, SentMark mark, cudaStream_t stream);
/// Sends rows (T, d) of this rank's tokens to the array at byte `offset` of the other ranks'
/// buffers and announces `phase`.
void send_rows(const Exchange& exchange, const Tensor& rows, std::int64_t offset, Phase phase);
/// Copies rows (T, d) to the array at byte `offset` of this rank's buffer.
void copy_own_rows(const Exchange& exchange, const Tensor& rows, std::int64_t offset);
/// Sends each rank the partial sums of its tokens; sums are (W * max_tokens, d).
void send_partials(const Exchange& exchange, const Tensor& sums, const std::uint8_t* has_row);

}  // namespace cuda
}  // namespace sonicmoe
