#include "cpu/metadata.h"

#include <algorithm>

#include "cpu/routing_access.h"
#include "sonicmoe/status.h"

namespace sonicmoe::cpu {
namespace {

constexpr std::int64_t kAlignment = 64;
constexpr std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct Layout {
  std::int64_t offsets = 0;
  std::int64_t row_token = 0;
  std::int64_t row_source = 0;
  std::int64_t token_offsets = 0;
  std::int64_t token_rows = 0;
  std::int64_t bytes = 0;
};

Layout layout_of(const Problem& p) {
  const std::int64_t rows = aligned(row_capacity(p) * 4);
  Layout l;
  l.row_token = l.offsets + aligned((p.experts + 1) * 8);
  l.row_source = l.row_token + rows;
  l.token_offsets = l.row_source + rows;
  l.token_rows = l.token_offsets + aligned((p.tokens + 1) * 4);
  l.bytes = l.token_rows + rows;
  return l;
}

/// The token and the expert of source `s` of the ids or pairs form; expert -1 for an empty slot.
struct Choice {
  std::int64_t token;
  std::int64_t expert;
};

Choice choice_at(const Problem& p, const Routing& routing, std::int64_t s) {
  const bool ids = p.form == RoutingForm::kIds;
  Choice c;
  c.token = ids ? s / p.top_k : index_at(routing.token, s);
  c.expert = ids ? index_at(routing.ids, s / p.top_k, s % p.top_k) : index_at(routing.expert, s);
  const bool empty = c.token < 0 || c.token >= p.tokens || c.expert < 0 || c.expert >= p.experts;
  return empty ? Choice{-1, -1} : c;
}

/// While the lists are filled, entry i advances from the begin of list i to its end. This function
/// shifts the entries by one: the end of list i is the begin of list i + 1.
template <class T>
void ends_to_begins(T* offsets, std::int64_t count) {
  for (std::int64_t i = count; i > 0; --i) offsets[i] = offsets[i - 1];
  offsets[0] = 0;
}

/// Sorts the sources by token and then by expert. Both sorts count and are stable.
void sort_choices(const Problem& p, const Routing& routing, const Metadata& m) {
  const std::int64_t sources = row_capacity(p);
  std::fill_n(m.token_offsets, p.tokens + 1, 0);
  std::fill_n(m.offsets, p.experts + 1, std::int64_t{0});
  for (std::int64_t s = 0; s < sources; ++s) {
    const Choice c = choice_at(p, routing, s);
    if (c.expert < 0) continue;
    ++m.token_offsets[c.token + 1];
    ++m.offsets[c.expert + 1];
  }
  for (std::int64_t t = 0; t < p.tokens; ++t) m.token_offsets[t + 1] += m.token_offsets[t];
  for (std::int64_t e = 0; e < p.experts; ++e) m.offsets[e + 1] += m.offsets[e];

  for (std::int64_t s = 0; s < sources; ++s) {
    const Choice c = choice_at(p, routing, s);
    if (c.expert >= 0) m.token_rows[m.token_offsets[c.token]++] = static_cast<std::int32_t>(s);
  }
  ends_to_begins(m.token_offsets, p.tokens);

  for (std::int64_t t = 0; t < p.tokens; ++t) {
    for (std::int32_t i = m.token_offsets[t]; i < m.token_offsets[t + 1]; ++i) {
      const std::int32_t source = m.token_rows[i];
      const std::int64_t row = m.offsets[choice_at(p, routing, source).expert]++;
      m.row_token[row] = static_cast<std::int32_t>(t);
      m.row_source[row] = source;
      m.token_rows[i] = static_cast<std::int32_t>(row);
    }
  }
  ends_to_begins(m.offsets, p.experts);
}

/// The part of rows [begin, begin + count) that is inside a buffer of `size` rows.
struct Clamped {
  std::int64_t begin;
  std::int64_t end;
};
Clamped clamped(std::int64_t begin, std::int64_t count, std::int64_t size) {
  if (count <= 0 || begin >= size) return {0, 0};
  if (begin < 0) {
    count += begin;
    begin = 0;
  }
  return {begin, begin + std::min(std::max<std::int64_t>(count, 0), size - begin)};
}

/// Grouped rows are sorted already; rows in no group are left out. A row in two groups belongs to
/// the first.
void collect_groups(const Problem& p, const Routing& routing, const Metadata& m) {
  std::int32_t* row_of_token = m.token_offsets;  // row + 1, until the offsets overwrite it
  std::fill_n(row_of_token, p.tokens + 1, 0);
  std::int32_t row = 0;
  m.offsets[0] = 0;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    const Clamped range =
        clamped(index_at(routing.row_begin, e), index_at(routing.row_count, e), p.tokens);
    for (std::int64_t t = range.begin; t < range.end; ++t) {
      if (row_of_token[t] != 0) continue;
      m.row_token[row] = m.row_source[row] = static_cast<std::int32_t>(t);
      row_of_token[t] = ++row;
    }
    m.offsets[e + 1] = row;
  }
  std::int32_t used = 0;
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    const std::int32_t own = row_of_token[t];
    m.token_offsets[t] = used;
    if (own != 0) m.token_rows[used++] = own - 1;
  }
  m.token_offsets[p.tokens] = used;
}

}  // namespace

std::int64_t metadata_bytes(const Problem& problem) { return layout_of(problem).bytes; }

Metadata metadata_at(const Problem& problem, void* base) {
  const Layout l = layout_of(problem);
  auto* bytes = static_cast<std::byte*>(base);
  return {reinterpret_cast<std::int64_t*>(bytes + l.offsets),
          reinterpret_cast<std::int32_t*>(bytes + l.row_token),
          reinterpret_cast<std::int32_t*>(bytes + l.row_source),
          reinterpret_cast<std::int32_t*>(bytes + l.token_offsets),
          reinterpret_cast<std::int32_t*>(bytes + l.token_rows)};
}

std::int64_t count_rows(const Problem& p, const Routing& routing) {
  std::int64_t rows = 0;
  if (p.form == RoutingForm::kGrouped) {
    for (std::int64_t e = 0; e < p.experts && rows < p.tokens; ++e) {
      const Clamped range =
          clamped(index_at(routing.row_begin, e), index_at(routing.row_count, e), p.tokens);
      rows += range.end - range.begin;
    }
    return std::min(rows, p.tokens);
  }
  if (p.form == RoutingForm::kPairs) {
    for (std::int64_t s = 0; s < p.capacity; ++s) rows += choice_at(p, routing, s).expert >= 0;
    return rows;
  }
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    for (std::int64_t k = 0; k < p.top_k; ++k) {
      const std::int64_t e = index_at(routing.ids, t, k);
      rows += e >= 0 && e < p.experts;
    }
  }
  return rows;
}

void build_metadata(const Problem& problem, const Routing& routing, const Metadata& metadata) {
  if (problem.form == RoutingForm::kGrouped) return collect_groups(problem, routing, metadata);
  sort_choices(problem, routing, metadata);
}

void check_metadata(const Problem& p, const Metadata& m) {
  const auto in_order = [](const auto* offsets, std::int64_t lists, std::int64_t end) {
    const auto* last = offsets + lists;
    return offsets[0] == 0 && *last <= end && std::is_sorted(offsets, last + 1);
  };
  const auto below = [](const std::int32_t* numbers, std::int64_t count, std::int64_t end) {
    return std::all_of(numbers, numbers + count,
                       [end](std::int32_t number) { return number >= 0 && number < end; });
  };
  const std::int64_t capacity = row_capacity(p);
  if (in_order(m.offsets, p.experts, capacity) && in_order(m.token_offsets, p.tokens, capacity)) {
    const std::int64_t rows = m.offsets[p.experts];
    if (m.token_offsets[p.tokens] == rows && below(m.row_token, rows, p.tokens) &&
        below(m.row_source, rows, capacity) && below(m.token_rows, rows, rows)) {
      return;
    }
  }
  throw Error(Status::kInvalidArgument, "saved has other bytes than a forward of this call wrote");
}

double source_weight(const Problem& problem, const Tensor& weights, std::int64_t source) {
  if (weights.data == nullptr) return 1.0;
  const std::int64_t at =
      problem.form == RoutingForm::kIds
          ? source / problem.top_k * weights.stride[0] + source % problem.top_k * weights.stride[1]
          : source * weights.stride[0];
  return weights.dtype == DType::kF64 ? static_cast<const double*>(weights.data)[at]
                                      : static_cast<const float*>(weights.data)[at];
}

}  // namespace sonicmoe::cpu
