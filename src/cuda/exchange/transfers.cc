// Transfers of rows, partial sums and flags, by kernels (kPush) or by the copy engines (kCopy).
#include "cuda/exchange/exchange.h"

namespace sonicmoe::cuda {
namespace {

void copy_bytes(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream),
             "copying to another rank");
}

void copy_rows(void* to, const Tensor& from, cudaStream_t stream) {
  const std::int64_t count = from.shape[0];
  const std::int64_t width = from.shape[1] * dtype_bytes(from.dtype);
  const std::int64_t step = from.stride[0] * dtype_bytes(from.dtype);  // not used if count is 1
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

Control* control(const Exchange& e, std::int32_t rank) {
  return reinterpret_cast<Control*>(e.peers.base[rank]);
}

/// Whether the copy engines send all rows of this rank to the next rank.
bool next_has_all(const Exchange& e) {
  return e.transport == ExchangeTransport::kCopy && e.peers.ranks > 1;
}
std::int32_t next_rank(const Exchange& e) { return (e.peers.rank + 1) % e.peers.ranks; }

/// The byte offset of this rank's rows in an array of rank `at` whose rows have the width and dtype
/// of `rows`.
std::int64_t place_at(const Exchange& e, std::int32_t at, const Tensor& rows) {
  return e.peers.place(e.peers.rank, at) * e.shape.max_tokens * rows.shape[1] *
         dtype_bytes(rows.dtype);
}

}  // namespace

void follow(const Exchange& e, cudaStream_t stream, cudaStream_t earlier) {
  check_cuda(cudaEventRecord(e.reached, earlier), "recording an event");
  check_cuda(cudaStreamWaitEvent(stream, e.reached), "waiting for an event");
}

void announce(const Exchange& e, Phase phase, cudaStream_t stream) {
  if (e.transport == ExchangeTransport::kPush) {
    announce_by_kernel(*e.device, e.peers, phase, stream);
    return;
  }
  for (std::int32_t i = 1; i < e.peers.ranks; ++i) {
    const std::int32_t r = (e.peers.rank + i) % e.peers.ranks;
    copy_bytes(&control(e, r)->flags[phase][e.peers.rank],
               &control(e, e.peers.rank)->announced[phase], sizeof(std::uint32_t), stream);
  }
}

void announce_own(const Exchange& e, Phase phase) {
  Control* own = control(e, e.peers.rank);
  const std::uint32_t* from = next_has_all(e)
                                  ? &control(e, next_rank(e))->flags[phase][e.peers.rank]
                                  : &own->announced[phase];
  copy_bytes(&own->flags[phase][e.peers.rank], from, sizeof(std::uint32_t), e.sending);
}

void send_rows(const Exchange& e, const Tensor& rows, const RowTarget& target) {
  if (e.transport == ExchangeTransport::kPush) {
    push_rows(e.peers, e.shape, {rows.data, rows.stride[0], rows.shape[0], rows.shape[1]}, target,
              e.multiprocessors, e.sending);
    return;
  }
  for (std::int32_t i = 1; i < e.peers.ranks; ++i) {
    const std::int32_t r = (e.peers.rank + i) % e.peers.ranks;
    copy_rows(e.peers.base[r] + target.offset + place_at(e, r, rows), rows, e.sending);
  }
  announce(e, target.phase, e.sending);
}

void copy_own_rows(const Exchange& e, const Tensor& rows, std::int64_t offset) {
  auto* own = e.peers.own<std::uint8_t>(offset);
  if (!next_has_all(e)) {
    copy_rows(own, rows, e.sending);
  } else if (rows.shape[0] != 0) {
    const std::int32_t next = next_rank(e);
    copy_bytes(own, e.peers.base[next] + offset + place_at(e, next, rows),
               rows.shape[0] * rows.shape[1] * dtype_bytes(rows.dtype), e.sending);
  }
}

void send_partials(const Exchange& e, const Tensor& sums, const std::uint8_t* has_row,
                   const TokenPart& part) {
  if (e.transport == ExchangeTransport::kPush) {
    push_partials(e.peers, e.shape, {sums.data, sums.shape[1], has_row, part}, e.multiprocessors,
                  e.sending);
    return;
  }
  const std::int64_t row = sums.shape[1] * dtype_bytes(sums.dtype);
  const auto place = [&](std::int32_t p) { return (p * e.shape.max_tokens + part.first) * row; };
  for (std::int32_t i = 1; i < e.peers.ranks; ++i) {
    const std::int32_t r = (e.peers.rank + i) % e.peers.ranks;
    copy_bytes(e.peers.base[r] + e.layout.partials + place(e.peers.rank),
               static_cast<std::uint8_t*>(sums.data) + place(e.peers.place(r, e.peers.rank)),
               part.count * row, e.sending);
  }
  announce(e, part.phase, e.sending);
}

}  // namespace sonicmoe::cuda
