// wgmma, mma, ldmatrix and stmatrix.
#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "deferred.h"
#include "wgmma.h"

namespace sonicmoe::emulator {
namespace {

constexpr int kMatrixRows = 8;  // of ldmatrix and stmatrix; a row has 16 bytes
constexpr int kRowBytes = 16;
constexpr int kWarpgroupWarps = 4;

/// m64n128k16: M, N and K.
struct Shape {
  int m = 0, n = 0, k = 0;
};

std::optional<Shape> shape_of(const std::string& part) {
  Shape s;
  const char* at = part.data();
  const char* end = at + part.size();
  for (const auto& [letter, number] : {std::pair{'m', &s.m}, {'n', &s.n}, {'k', &s.k}}) {
    if (at == end || *at != letter) return std::nullopt;
    const auto [next, error] = std::from_chars(at + 1, end, *number);
    if (error != std::errc{}) return std::nullopt;
    at = next;
  }
  return at == end ? std::optional(s) : std::nullopt;
}

std::optional<ElementType> type_of(const std::string& part) {
  if (part == "bf16") return ElementType::kBF16;
  if (part == "f16") return ElementType::kF16;
  if (part == "e4m3") return ElementType::kE4M3;
  if (part == "e5m2") return ElementType::kE5M2;
  return std::nullopt;
}

// Fragments as words of K: (depth in words, rows).

/// Registers of A come in pairs, rows 0 to 7 and rows 8 to 15; a pair has four words of K.
void words_of_a(Warp& warp, const Slot* registers, int count, std::uint32_t* words) {
  for (int i = 0; i < count; ++i) {
    const std::uint32_t* lanes = warp.lanes_of<std::uint32_t>(registers[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int word = i / 2 * 4 + lane % 4;
      const int row = (i & 1) * 8 + lane / 4;
      words[word * kProductRows + position_of(row, kProductRows)] = lanes[lane];
    }
  }
}

/// A register of B has eight columns and four words of K.
void words_of_b(Warp& warp, const Slot* registers, int count, std::uint32_t* words) {
  constexpr int kColumns = 8;
  for (int i = 0; i < count; ++i) {
    const std::uint32_t* lanes = warp.lanes_of<std::uint32_t>(registers[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      words[(i * 4 + lane % 4) * kColumns + position_of(lane / 4, kColumns)] = lanes[lane];
    }
  }
}

Slot result(Builder& b, const Operand& operand) {
  const Slot slot = b.target(operand);
  if (slot == kNoSlot) throw Fault("a result of a matrix instruction has no register");
  return slot;
}

void widen_fragment(ElementType type, const std::uint32_t* words, int depth_words, int rows,
                    float* out) {
  for (int w = 0; w < depth_words; ++w) {
    widen_words(type, words + w * rows, rows, rows, out + w * per_word(type) * rows);
  }
}

// wgmma.mma_async. List: the accumulators, A (a descriptor or four registers), B, scale-d.

constexpr int kRegistersOfA = 4;

/// Instruction::detail and value of a wgmma.
struct WgmmaForm {
  ElementType type_a, type_b;
  Major major_a, major_b;
  bool a_in_registers;
  bool is_negative;      ///< the scales of A and B have different signs
  bool negates_scale_d;  ///< the predicate is read inverted
  int columns;

  void pack(Instruction* i) const {
    i->detail = static_cast<std::uint32_t>(type_a) | static_cast<std::uint32_t>(type_b) << 2 |
                static_cast<std::uint32_t>(major_a) << 4 |
                static_cast<std::uint32_t>(major_b) << 5 | std::uint32_t{a_in_registers} << 6 |
                std::uint32_t{is_negative} << 7 | std::uint32_t{negates_scale_d} << 8;
    i->value = columns;
  }
  static WgmmaForm unpack(const Instruction& i) {
    const auto bit = [&](int n) { return (i.detail >> n & 1) != 0; };
    return {static_cast<ElementType>(i.detail & 3),
            static_cast<ElementType>(i.detail >> 2 & 3),
            static_cast<Major>(i.detail >> 4 & 1),
            static_cast<Major>(i.detail >> 5 & 1),
            bit(6),
            bit(7),
            bit(8),
            static_cast<int>(i.value)};
  }
};

std::uint64_t uniform_descriptor(Warp& warp, Slot slot) {
  const std::uint64_t* lanes = warp.lanes_of<std::uint64_t>(slot);
  for (int lane = 1; lane < kLanes; ++lane) {
    if (lanes[lane] != lanes[0]) throw Fault("the lanes have different matrix descriptors");
  }
  return lanes[0];
}

SharedMatrix shared_matrix(Warp& warp, std::uint64_t descriptor, Major major, ElementType type) {
  Cta& cta = warp.cta();
  return {&cta,
          cta.own_shared(0, 0),
          cta.shared_bytes(),
          warp.index(),
          MatrixDescriptor::decode(descriptor),
          major,
          type};
}

/// The work of one warp for a wgmma: 16 of the 64 rows.
struct Wgmma {
  Warp* warp;
  const Slot* accumulators;
  WgmmaForm form;
  bool accumulates;
  SharedMatrix b;
  std::optional<SharedMatrix> a;
  std::array<std::uint32_t, kRegistersOfA * kLanes> a_words;  ///< if A is in registers
  Stamp read;                                                 ///< of shared memory
  ClockCopy known;

  void run() const {
    SharedPass pass(warp->cta(), read, *known);
    constexpr int kMostFloats = kMostDepth * kMostColumns;
    alignas(64) float left[kMostDepth * kProductRows];
    alignas(64) float right[kMostFloats];
    alignas(64) float sums[kProductRows * kMostColumns];
    const int depth = kDepthBytes / bytes_of(form.type_b);
    if (a) {
      const int first = warp->index() % kWarpgroupWarps * kProductRows;
      read_matrix(*a, pass, first, kProductRows, left);
    } else {
      widen_fragment(form.type_a, a_words.data(), kDepthBytes / 4, kProductRows, left);
    }
    if (form.is_negative) {
      for (int i = 0; i < depth * kProductRows; ++i) left[i] = -left[i];
    }
    read_matrix(b, pass, 0, form.columns, right);
    if (accumulates) {
      load_sums(*warp, accumulators, form.columns, sums);
    } else {
      std::memset(sums, 0, sizeof(float) * kProductRows * form.columns);
    }
    const bool is_narrow = bytes_of(form.type_a) == 1;
    (is_narrow ? &multiply_add_14_bits : &multiply_add)(left, right, sums, depth, form.columns);
    store_sums(*warp, accumulators, form.columns, sums);
  }
};

/// Shared memory is read and the accumulators are written later, at the latest in wait_group: until
/// then a program may touch neither. Products of a warp stay in their order.
Next run_wgmma(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  const WgmmaForm form = WgmmaForm::unpack(i);
  const Slot* accumulators = list_of(warp, i);
  const Slot* slot_a = accumulators + form.columns / 2;
  const Slot* slot_b = slot_a + (form.a_in_registers ? kRegistersOfA : 1);
  const std::uint32_t scale_d = warp.predicate(slot_b[1]);
  if (scale_d != 0 && scale_d != kAllLanes) throw Fault("the lanes have different scale-d");
  Wgmma product{&warp,
                accumulators,
                form,
                (scale_d != 0) != form.negates_scale_d,
                shared_matrix(warp, uniform_descriptor(warp, slot_b[0]), form.major_b, form.type_b),
                std::nullopt,
                {},
                warp.clock().issue(Agent::kProducts),
                warp.clock().release()};
  if (form.a_in_registers) {
    words_of_a(warp, slot_a, kRegistersOfA, product.a_words.data());
  } else {
    product.a = shared_matrix(warp, uniform_descriptor(warp, slot_a[0]), form.major_a, form.type_a);
  }
  CopyTask task = defer(warp, i, [previous = warp.products().last(), product] {
    if (previous != nullptr) previous->finish();
    product.run();
  });
  warp.products().issue(std::move(task), lanes, product.read.number);
  return Next::kAdvance;
}

/// D, A, B, scale-d, scale-a, scale-b {, transpose-a} {, transpose-b}
void decode_product(const Statement& s, Builder& b, Instruction* i) {
  constexpr std::size_t kParts = 8;
  if (s.parts.size() != kParts || s.parts[5] != "f32") return decode_unknown(s, b, i);
  const auto shape = shape_of(s.parts[4]);
  const auto type_a = type_of(s.parts[6]);
  const auto type_b = type_of(s.parts[7]);
  if (!shape || !type_a || !type_b || bytes_of(*type_a) != bytes_of(*type_b) ||
      shape->k * bytes_of(*type_a) != kDepthBytes) {
    return decode_unknown(s, b, i);
  }
  const std::vector<Operand>& accumulators = s.operands.at(0).elements;
  if (accumulators.size() * 2 != static_cast<std::size_t>(shape->n) || shape->n % 8 != 0 ||
      shape->n > kMostColumns) {
    throw Fault("wgmma has another number of accumulators than its shape");
  }
  std::vector<Slot> list;
  for (const Operand& o : accumulators) list.push_back(result(b, o));
  const Operand& a = s.operands.at(1);
  const bool a_in_registers = a.kind == Operand::Kind::kVector;
  if (a_in_registers && a.elements.size() != kRegistersOfA) throw Fault("A has four registers");
  if (a_in_registers) {
    for (const Operand& o : a.elements) list.push_back(b.source(o, 4));
  } else {
    list.push_back(b.source(a, 8));
  }
  list.push_back(b.source(s.operands.at(2), 8));
  list.push_back(b.source(s.operands.at(3), 0));
  b.set_list(i, list);
  const auto major_at = [&](std::size_t operand) {
    const bool transposes = operand < s.operands.size() && s.operands[operand].value != 0;
    return transposes ? Major::kMN : Major::kK;
  };
  constexpr std::size_t kTranspose = 6;
  WgmmaForm form{};
  form.type_a = *type_a;
  form.type_b = *type_b;
  form.major_a = a_in_registers ? Major::kK : major_at(kTranspose);
  form.major_b = major_at(a_in_registers ? kTranspose : kTranspose + 1);
  form.a_in_registers = a_in_registers;
  form.is_negative = s.operands.at(4).value != s.operands.at(5).value;
  form.negates_scale_d = s.operands[3].negated;
  form.columns = shape->n;
  form.pack(i);
  i->run = &run_wgmma;
}

Next run_fence(Warp& warp, const Instruction&, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  return Next::kAdvance;
}

Next run_commit(Warp& warp, const Instruction&, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  warp.products().commit(lanes);
  return Next::kAdvance;
}

Next run_wait(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  warp.wait_for_group(Agent::kProducts, lanes, i.value);
  return Next::kAdvance;
}

void decode_wgmma(const Statement& s, Builder& b, Instruction* i) {
  if (s.has("mma_async") && !s.has("sp")) return decode_product(s, b, i);
  if (s.has("fence")) {
    i->run = &run_fence;
  } else if (s.has("commit_group")) {
    i->run = &run_commit;
  } else if (s.has("wait_group")) {
    i->value = s.operands.at(0).value;
    i->run = &run_wait;
  } else {
    decode_unknown(s, b, i);
  }
}

// mma. List: D (4), A (K / 4), B (K / 8), C (4). Detail: the types of A and B. Value: K / 8.

constexpr int kMmaColumns = 8;
constexpr int kMmaSums = 4;
constexpr int kMmaMostDepth = 16;

Next run_mma(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  const int steps = static_cast<int>(i.value);
  const Slot* d = list_of(warp, i);
  const Slot* a = d + kMmaSums;
  const Slot* b = a + 2 * steps;
  const Slot* c = b + steps;
  std::uint32_t words[kMmaMostDepth / 2 * kProductRows];
  alignas(64) float left[kMmaMostDepth * kProductRows];
  alignas(64) float right[kMmaMostDepth * kMmaColumns];
  alignas(64) float sums[kProductRows * kMmaColumns];
  words_of_a(warp, a, 2 * steps, words);
  widen_fragment(static_cast<ElementType>(i.detail & 3), words, 4 * steps, kProductRows, left);
  words_of_b(warp, b, steps, words);
  widen_fragment(static_cast<ElementType>(i.detail >> 2), words, 4 * steps, kMmaColumns, right);
  load_sums(warp, c, kMmaColumns, sums);
  multiply_add(left, right, sums, 8 * steps, kMmaColumns);
  store_sums(warp, d, kMmaColumns, sums);
  return Next::kAdvance;
}

/// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 D, A, B, C
void decode_mma(const Statement& s, Builder& b, Instruction* i) {
  constexpr std::size_t kParts = 10;
  const auto shape = s.parts.size() == kParts ? shape_of(s.parts[3]) : std::nullopt;
  if (!shape || shape->m != kProductRows || shape->n != kMmaColumns ||
      (shape->k != 8 && shape->k != kMmaMostDepth)) {
    return decode_unknown(s, b, i);
  }
  const auto type_a = type_of(s.parts[7]);
  const auto type_b = type_of(s.parts[8]);
  if (s.parts[4] != "row" || s.parts[5] != "col" || s.parts[6] != "f32" || s.parts[9] != "f32" ||
      !type_a || !type_b || bytes_of(*type_a) != 2 || bytes_of(*type_b) != 2) {
    return decode_unknown(s, b, i);
  }
  const int steps = shape->k / 8;
  const std::size_t counts[] = {kMmaSums, static_cast<std::size_t>(2 * steps),
                                static_cast<std::size_t>(steps), kMmaSums};
  std::vector<Slot> list;
  for (std::size_t n = 0; n < std::size(counts); ++n) {
    const Operand& o = s.operands.at(n);
    const std::vector<Operand> registers =
        o.kind == Operand::Kind::kVector ? o.elements : std::vector<Operand>{o};
    if (registers.size() != counts[n]) throw Fault("mma has another number of registers");
    for (const Operand& r : registers) list.push_back(n == 0 ? result(b, r) : b.source(r, 4));
  }
  b.set_list(i, list);
  i->detail = static_cast<std::uint32_t>(*type_a) | static_cast<std::uint32_t>(*type_b) << 2;
  i->value = steps;
  i->run = &run_mma;
}

// ldmatrix and stmatrix. List: the address, then a register for each matrix.

/// Bits of Instruction::detail.
constexpr std::uint32_t kTransposes = 1;
constexpr std::uint32_t kIsGeneric = 2;  // the address
constexpr std::uint32_t kStores = 4;

/// The host addresses of the rows of all matrices; lane i gives that of row i % 8 of matrix i / 8.
std::array<std::byte*, kLanes> matrix_rows(Warp& warp, const Instruction& i, int matrices) {
  const Slot* list = list_of(warp, i);
  std::array<std::byte*, kLanes> rows{};
  for (int lane = 0; lane < matrices * kMatrixRows; ++lane) {
    const std::uint64_t address = address_at(warp, list, lane);
    check_aligned(address, kRowBytes, "the address of a matrix row");
    rows[lane] = (i.detail & kIsGeneric) != 0
                     ? warp.generic(lane, address, kRowBytes)
                     : warp.cta().own_shared(static_cast<std::uint32_t>(address), kRowBytes);
  }
  return rows;
}

/// Calls f(half word of the lane's register, element in shared memory) for each element of a
/// matrix.
template <class F>
void for_each_element(std::byte* const* rows, std::uint32_t* lanes, bool transposes, const F& f) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int half = 0; half < 2; ++half) {
      const int major = lane / 4;
      const int minor = lane % 4 * 2 + half;
      std::byte* element = transposes ? rows[minor] + 2 * major : rows[major] + 2 * minor;
      f(reinterpret_cast<std::byte*>(lanes + lane) + 2 * half, element);
    }
  }
}

/// Notes the accesses to the rows, which are in shared memory.
void note_rows(Warp& warp, const Instruction& i, int rows) {
  SharedPass pass(warp.cta(), warp.clock());
  for (int lane = 0; lane < rows; ++lane) {
    const std::uint32_t offset = shared_address_at(warp, list_of(warp, i), lane);
    if ((i.detail & kStores) == 0) {
      pass.read(offset, kRowBytes);
    } else {
      pass.write(offset, kRowBytes);
      warp.cta().note_write(offset, kRowBytes, warp.index());
    }
  }
}

template <class Move>
Next run_matrices(Warp& warp, const Instruction& i, std::uint32_t lanes, const Move& move) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  const Slot* registers = list_of(warp, i) + kAddressEntries;
  const int matrices = static_cast<int>(i.count - kAddressEntries);
  // All addresses are read before a register is written: one of them may be the address.
  const std::array<std::byte*, kLanes> rows = matrix_rows(warp, i, matrices);
  if ((i.detail & kIsGeneric) == 0) note_rows(warp, i, matrices * kMatrixRows);
  for (int m = 0; m < matrices; ++m) {
    for_each_element(rows.data() + m * kMatrixRows, warp.lanes_of<std::uint32_t>(registers[m]),
                     (i.detail & kTransposes) != 0, move);
  }
  return Next::kAdvance;
}

Next run_load_matrices(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  return run_matrices(warp, i, lanes, [](std::byte* half, const std::byte* element) {
    std::memcpy(half, element, 2);
  });
}

Next run_store_matrices(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  return run_matrices(warp, i, lanes, [](const std::byte* half, std::byte* element) {
    std::memcpy(element, half, 2);
  });
}

/// ldmatrix registers, [address]; stmatrix [address], registers
void decode_matrices(const Statement& s, Builder& b, Instruction* i) {
  if (!s.has("m8n8") || !s.has("b16")) return decode_unknown(s, b, i);
  const bool loads = s.opcode() == "ldmatrix";
  const std::vector<Operand> registers = elements_of(s.operands.at(loads ? 0 : 1));
  std::string count = "x";
  count += std::to_string(registers.size());
  if (!s.has(count)) {
    throw Fault("the number of registers is not that of the matrices");
  }
  std::vector<Slot> list;
  append_address(b, s.operands.at(loads ? 1 : 0), &list);
  for (const Operand& r : registers) list.push_back(loads ? result(b, r) : b.source(r, 4));
  b.set_list(i, list);
  const bool is_shared = s.has("shared") || s.has("shared::cta");
  i->detail =
      (s.has("trans") ? kTransposes : 0) | (is_shared ? 0 : kIsGeneric) | (loads ? 0 : kStores);
  i->run = loads ? &run_load_matrices : &run_store_matrices;
}

}  // namespace

void add_matrix_opcodes(OpcodeTable& table) {
  table["wgmma"] = &decode_wgmma;
  table["mma"] = &decode_mma;
  table["ldmatrix"] = &decode_matrices;
  table["stmatrix"] = &decode_matrices;
}

}  // namespace sonicmoe::emulator
