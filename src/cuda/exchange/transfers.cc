// Rows and partial sums on the sending stream, by a kernel or by the copy engines.
#include "cuda/exchange/exchange.h"

namespace sonicmoe::cuda {
namespace {

void copy_bytes(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream),
             "copying rows to another rank");
}

void copy_rows(void* to, const Tensor& from, cudaStream_t stream) {
  const std::int64_t count = from.shape[0];
  const std::int64_t width = from.shape[1] * dtype_bytes(from.dtype);
  const std::int64_t step = from.stride[0] * dtype_bytes(from.dtype);  // any, if there is one row
  if (count == 0) return;
  if (count == 1 || step == width) {
    copy_bytes(to, from.data, width * count, stream);
    return;
  }
  if (step < width) {  // rows overlap, which cudaMemcpy2DAsync refuses
    for (std::int64_t t = 0; t < count; ++t) {
      copy_bytes(static_cast<std::uint8_t*>(to) + t * width,
                 static_cast<const std::uint8_t*>(from.data) + t * step, width, stream);
    }
    return;
  }
  check_cuda(cudaMemcpy2DAsync(to, width, from.data, step, width, count, cudaMemcpyDefault, stream),
             "copying rows to another rank");
}

}  // namespace

void fork(const Exchange& e, cudaStream_t stream) {
  check_cuda(cudaEventRecord(e.fork, stream), "recording an event");
  check_cuda(cudaStreamWaitEvent(e.sending, e.fork), "waiting for an event");
}
void mark_sent(const Exchange& e, SentMark mark) {
  check_cuda(cudaEventRecord(e.sent[mark], e.sending), "recording an event");
}
void join(const Exchange& e, SentMark mark, cudaStream_t stream) {
  check_cuda(cudaStreamWaitEvent(stream, e.sent[mark]), "waiting for an event");
}

void send_rows(const Exchange& e, const Tensor& rows, std::int64_t offset, Phase phase) {
  if (e.transport == ExchangeTransport::kPush) {
    push_rows(e.peers, e.shape, {rows.data, rows.stride[0], rows.shape[0], rows.shape[1]}, offset,
              e.multiprocessors, e.sending);
  } else {
    const std::int64_t bytes = e.shape.max_tokens * rows.shape[1] * dtype_bytes(rows.dtype);
    for (std::int32_t i = 1; i < e.peers.ranks; ++i) {
      const std::int32_t r = (e.peers.rank + i) % e.peers.ranks;
      copy_rows(e.peers.base[r] + offset + e.peers.place(e.peers.rank, r) * bytes, rows, e.sending);
    }
  }
  signal(e.peers, phase, e.sending);
}

void copy_own_rows(const Exchange& e, const Tensor& rows, std::int64_t offset) {
  copy_rows(e.peers.own<std::uint8_t>(offset), rows, e.sending);
}

void send_partials(const Exchange& e, const Tensor& sums, const std::uint8_t* has_row) {
  const std::int64_t d = sums.shape[1];
  if (e.transport == ExchangeTransport::kPush) {
    push_partials(e.peers, e.shape, {sums.data, d, sums.shape[0], d}, has_row, e.multiprocessors,
                  e.sending);
    return;
  }
  const std::int64_t bytes = e.shape.max_tokens * d * dtype_bytes(sums.dtype);
  for (std::int32_t i = 1; i < e.peers.ranks; ++i) {
    const std::int32_t r = (e.peers.rank + i) % e.peers.ranks;
    check_cuda(cudaMemcpyAsync(
                   e.peers.base[r] + e.layout.partials + e.peers.rank * bytes,
                   static_cast<std::uint8_t*>(sums.data) + e.peers.place(r, e.peers.rank) * bytes,
                   bytes, cudaMemcpyDefault, e.sending),
               "copying partial sums to another rank");
  }
}

}  // namespace sonicmoe::cuda
