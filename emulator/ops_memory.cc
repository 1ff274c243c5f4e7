// ld, st, atom, red and mapa.
#include <algorithm>
#include <atomic>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>

#include "lanes.h"
#include "ops_copy.h"

namespace sonicmoe::emulator {
namespace {

enum class Space : std::uint32_t { kGeneric, kGlobal, kShared, kLocal, kParameter };

/// The fields in Instruction::detail of a memory instruction.
struct Access {
  Space space;
  bool wide_address;
  bool sign_extends;
  bool single_copy;  ///< volatile, relaxed, acquire or release: other threads write it meanwhile
  std::uint32_t element_bytes;
  std::uint32_t register_bytes;

  std::uint32_t pack() const {
    return static_cast<std::uint32_t>(space) | std::uint32_t{wide_address} << 3 |
           std::uint32_t{sign_extends} << 4 | std::uint32_t{single_copy} << 5 | element_bytes << 8 |
           register_bytes << 16;
  }
  static Access unpack(std::uint32_t d) {
    return {static_cast<Space>(d & 7), (d >> 3 & 1) != 0, (d >> 4 & 1) != 0,
            (d >> 5 & 1) != 0,         d >> 8 & 0xff,     d >> 16 & 0xff};
  }
};

std::uint32_t bytes_of_type(const std::string& type) {
  int bits = 0;
  std::from_chars(type.data() + 1, type.data() + type.size(), bits);
  if (type == "f16x2" || type == "bf16x2") bits = 32;
  if (type == "bf16") bits = 16;
  if (bits == 0 || bits > 64) throw Fault("memory accesses of type " + type + " are not emulated");
  return static_cast<std::uint32_t>(bits) / 8;
}

Space space_of(const Statement& s) {
  for (std::size_t i = 1; i < s.parts.size(); ++i) {
    const std::string& part = s.parts[i];
    if (part == "global" || part == "const") return Space::kGlobal;
    if (part.starts_with("shared")) return Space::kShared;
    if (part == "local") return Space::kLocal;
    if (part.starts_with("param")) return Space::kParameter;
  }
  return Space::kGeneric;
}

Access access_of(const Statement& s) {
  Access a{};
  a.space = space_of(s);
  a.element_bytes = bytes_of_type(s.parts.back());
  a.sign_extends = s.parts.back()[0] == 's';
  for (const char* part : {"volatile", "relaxed", "acquire", "release"}) {
    a.single_copy = a.single_copy || s.has(part);
  }
  return a;
}

/// Whether an instruction reads or writes, and whether it may race with other threads: atomics,
/// volatile, relaxed, acquire and release may.
enum class Use { kRead, kWrite, kRacingRead, kRacingWrite };

/// Notes the accesses of an instruction to shared memory.
template <Use kUse>
class Notes {
 public:
  explicit Notes(Warp& warp) : warp_(warp) {}
  void add(std::uint32_t address, std::size_t bytes) {
    if (kUse == Use::kRacingRead || kUse == Use::kRacingWrite) return;
    if (bytes < SharedMemory::kUnit) return;  // others may write the rest of the unit
    if (address >> kRankShift == 0) {
      if (!own_) own_.emplace(warp_.cta(), warp_.clock());
      return note(*own_, address, bytes);
    }
    SharedPass other(warp_.cta().owner(address), warp_.clock());
    note(other, address & kOffsetMask, bytes);
  }

 private:
  static void note(SharedPass& pass, std::uint32_t offset, std::size_t bytes) {
    kUse == Use::kRead ? pass.read(offset, bytes) : pass.write(offset, bytes);
  }

  Warp& warp_;
  std::optional<SharedPass> own_;
};

/// The host address that a lane accesses.
template <Use kUse>
std::byte* locate(Warp& warp, Notes<kUse>& notes, const Instruction& i, const Access& a, Slot base,
                  int lane, std::size_t bytes) {
  const std::uint64_t address = (a.wide_address ? warp.lanes_of<std::uint64_t>(base)[lane]
                                                : warp.lanes_of<std::uint32_t>(base)[lane]) +
                                static_cast<std::uint64_t>(i.value);
  if (address % std::min<std::size_t>(bytes, 16) != 0) {
    throw Fault("an access of " + std::to_string(bytes) + " bytes is not aligned");
  }
  switch (a.space) {
    case Space::kShared: {
      const auto shared = static_cast<std::uint32_t>(address);
      std::byte* at = warp.cta().shared(shared, bytes);
      const bool writes = kUse == Use::kWrite || kUse == Use::kRacingWrite;
      if (writes && shared >> kRankShift == 0) {
        warp.cta().note_write(shared, bytes, warp.index());
      }
      notes.add(shared, bytes);
      return at;
    }
    case Space::kLocal:
      return warp.local(lane, address, bytes);
    case Space::kGlobal:
      warp.grid().memory().check(address, bytes);
      return reinterpret_cast<std::byte*>(address);
    case Space::kParameter:
    case Space::kGeneric:
      break;
  }
  return warp.generic(lane, address, bytes);
}

template <class T>
std::uint64_t load_once(const std::byte* at) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(const_cast<std::byte*>(at)))
      .load(std::memory_order_acquire);
}

/// An element of memory that other threads may write at the same time.
std::uint64_t load_single(const std::byte* at, std::uint32_t bytes) {
  switch (bytes) {
    case 1:
      return load_once<std::uint8_t>(at);
    case 2:
      return load_once<std::uint16_t>(at);
    case 4:
      return load_once<std::uint32_t>(at);
    default:
      return load_once<std::uint64_t>(at);
  }
}

template <class T>
void store_once(std::byte* at, std::uint64_t value) {
  std::atomic_ref<T>(*reinterpret_cast<T*>(at))
      .store(static_cast<T>(value), std::memory_order_release);
}

void store_single(std::byte* at, std::uint64_t value, std::uint32_t bytes) {
  switch (bytes) {
    case 1:
      return store_once<std::uint8_t>(at, value);
    case 2:
      return store_once<std::uint16_t>(at, value);
    case 4:
      return store_once<std::uint32_t>(at, value);
    default:
      return store_once<std::uint64_t>(at, value);
  }
}

std::uint64_t extend(std::uint64_t value, std::uint32_t bytes) {
  const int shift = 64 - 8 * static_cast<int>(bytes);
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(value << shift) >> shift);
}

void put(Warp& warp, Slot slot, int lane, std::uint64_t value, std::uint32_t bytes) {
  std::memcpy(warp.lanes_of<std::byte>(slot) + std::size_t{bytes} * lane, &value, bytes);
}

std::uint64_t get(Warp& warp, Slot slot, int lane, std::uint32_t bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, warp.lanes_of<std::byte>(slot) + std::size_t{bytes} * lane, bytes);
  return value;
}

/// Elements that fill their registers, which is most of them.
template <class T>
Next run_plain_load(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Access a = Access::unpack(i.detail);
  const Slot* targets = list_of(warp, i);
  Notes<Use::kRead> notes(warp);
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const std::byte* at = locate(warp, notes, i, a, i.slots[0], lane, sizeof(T) * i.count);
    for (std::uint32_t k = 0; k < i.count; ++k, at += sizeof(T)) {
      if (targets[k] != kNoSlot) std::memcpy(warp.lanes_of<T>(targets[k]) + lane, at, sizeof(T));
    }
  }
  return Next::kAdvance;
}

template <class T>
Next run_plain_store(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Access a = Access::unpack(i.detail);
  const Slot* sources = list_of(warp, i);
  Notes<Use::kWrite> notes(warp);
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    std::byte* at = locate(warp, notes, i, a, i.slots[0], lane, sizeof(T) * i.count);
    for (std::uint32_t k = 0; k < i.count; ++k, at += sizeof(T)) {
      std::memcpy(at, warp.lanes_of<T>(sources[k]) + lane, sizeof(T));
    }
  }
  warp.grid().note_progress();
  return Next::kAdvance;
}

template <Use kUse>
Next run_load(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Access a = Access::unpack(i.detail);
  const Slot* targets = list_of(warp, i);
  Notes<kUse> notes(warp);
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const std::byte* at = locate(warp, notes, i, a, i.slots[0], lane, a.element_bytes * i.count);
    for (std::uint32_t k = 0; k < i.count; ++k, at += a.element_bytes) {
      if (targets[k] == kNoSlot) continue;
      std::uint64_t value = load_single(at, a.element_bytes);
      if (a.sign_extends) value = extend(value, a.element_bytes);
      put(warp, targets[k], lane, value, a.register_bytes);
    }
  }
  return Next::kAdvance;
}

template <Use kUse>
Next run_store(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Access a = Access::unpack(i.detail);
  const Slot* sources = list_of(warp, i);
  Notes<kUse> notes(warp);
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    std::byte* at = locate(warp, notes, i, a, i.slots[0], lane, a.element_bytes * i.count);
    for (std::uint32_t k = 0; k < i.count; ++k, at += a.element_bytes) {
      store_single(at, get(warp, sources[k], lane, a.register_bytes), a.element_bytes);
    }
  }
  warp.grid().note_progress();
  return Next::kAdvance;
}

Handler load_handler(const Access& a) {
  if (a.single_copy) return &run_load<Use::kRacingRead>;
  if (a.element_bytes != a.register_bytes) return &run_load<Use::kRead>;
  switch (a.element_bytes) {
    case 1:
      return &run_plain_load<std::uint8_t>;
    case 2:
      return &run_plain_load<std::uint16_t>;
    case 4:
      return &run_plain_load<std::uint32_t>;
    default:
      return &run_plain_load<std::uint64_t>;
  }
}

Handler store_handler(const Access& a) {
  if (a.single_copy) return &run_store<Use::kRacingWrite>;
  if (a.element_bytes != a.register_bytes) return &run_store<Use::kWrite>;
  switch (a.element_bytes) {
    case 1:
      return &run_plain_store<std::uint8_t>;
    case 2:
      return &run_plain_store<std::uint16_t>;
    case 4:
      return &run_plain_store<std::uint32_t>;
    default:
      return &run_plain_store<std::uint64_t>;
  }
}

void decode_load(const Statement& s, Builder& b, Instruction* i) {
  Access a = access_of(s);
  std::vector<Slot> targets;
  a.register_bytes = a.element_bytes;
  for (const Operand& o : elements_of(s.operands.at(0))) {
    targets.push_back(b.target(o));
    if (targets.back() != kNoSlot) a.register_bytes = static_cast<std::uint32_t>(b.width(o));
  }
  b.set_list(i, targets);
  i->slots[0] = b.address(s.operands.at(1), &i->value, &a.wide_address);
  i->detail = a.pack();
  i->run = load_handler(a);
}

void decode_store(const Statement& s, Builder& b, Instruction* i) {
  if (s.has("async")) return decode_store_async(s, b, i);
  Access a = access_of(s);
  std::vector<Slot> sources;
  a.register_bytes = a.element_bytes;
  for (const Operand& o : elements_of(s.operands.at(1))) {
    if (o.kind == Operand::Kind::kRegister) {
      a.register_bytes = static_cast<std::uint32_t>(b.width(o));
    }
  }
  for (const Operand& o : elements_of(s.operands.at(1))) {
    sources.push_back(b.source(o, static_cast<int>(a.register_bytes)));
  }
  b.set_list(i, sources);
  i->slots[0] = b.address(s.operands.at(0), &i->value, &a.wide_address);
  i->detail = a.pack();
  i->run = store_handler(a);
}

enum class Atomic { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor, kExch, kCas };

/// The new value of a word; T is the type that the instruction names.
template <class T>
T combine(Atomic operation, T old, T b, T c) {
  if constexpr (std::is_floating_point_v<T>) {
    if (operation == Atomic::kAdd) return old + b;
    if (operation == Atomic::kExch) return b;
    throw Fault("this atomic is not emulated for floating-point numbers");
  } else {
    switch (operation) {
      case Atomic::kAdd:
        return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) +
                              static_cast<std::make_unsigned_t<T>>(b));
      case Atomic::kMin:
        return std::min(old, b);
      case Atomic::kMax:
        return std::max(old, b);
      case Atomic::kInc:
        return old >= b ? T{0} : static_cast<T>(old + 1);
      case Atomic::kDec:
        return old == 0 || old > b ? b : static_cast<T>(old - 1);
      case Atomic::kAnd:
        return old & b;
      case Atomic::kOr:
        return old | b;
      case Atomic::kXor:
        return old ^ b;
      case Atomic::kExch:
        return b;
      default:
        return old == b ? c : old;
    }
  }
}

template <class T>
std::uint64_t exchange(Atomic operation, std::byte* at, std::uint64_t b, std::uint64_t c) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  std::atomic_ref<Bits> word(*reinterpret_cast<Bits*>(at));
  Bits old = word.load();
  Bits next;
  do {
    next = std::bit_cast<Bits>(combine(operation, std::bit_cast<T>(old),
                                       std::bit_cast<T>(static_cast<Bits>(b)),
                                       std::bit_cast<T>(static_cast<Bits>(c))));
  } while (!word.compare_exchange_weak(old, next));
  return old;
}

using Exchange = std::uint64_t (*)(Atomic, std::byte*, std::uint64_t, std::uint64_t);

template <Exchange kExchange>
Next run_atomic(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Access a = Access::unpack(i.detail);
  const auto operation = static_cast<Atomic>(i.count);
  Notes<Use::kRacingWrite> notes(warp);
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    std::byte* at = locate(warp, notes, i, a, i.slots[1], lane, a.element_bytes);
    const std::uint64_t b = get(warp, i.slots[2], lane, a.element_bytes);
    const std::uint64_t c =
        i.slots[3] == kNoSlot ? 0 : get(warp, i.slots[3], lane, a.element_bytes);
    const std::uint64_t old = kExchange(operation, at, b, c);
    if (i.slots[0] != kNoSlot) put(warp, i.slots[0], lane, old, a.element_bytes);
  }
  warp.grid().note_progress();
  return Next::kAdvance;
}

Handler atomic_handler(const std::string& type) {
  if (type == "f32") return &run_atomic<&exchange<float>>;
  if (type == "f64") return &run_atomic<&exchange<double>>;
  if (type == "s32") return &run_atomic<&exchange<std::int32_t>>;
  if (type == "s64") return &run_atomic<&exchange<std::int64_t>>;
  if (type == "u32" || type == "b32") return &run_atomic<&exchange<std::uint32_t>>;
  if (type == "u64" || type == "b64") return &run_atomic<&exchange<std::uint64_t>>;
  throw Fault("atomics of type " + type + " are not emulated");
}

void decode_atomic(const Statement& s, Builder& b, Instruction* i) {
  static const std::map<std::string, Atomic, std::less<>> operations{
      {"add", Atomic::kAdd},   {"min", Atomic::kMin}, {"max", Atomic::kMax}, {"inc", Atomic::kInc},
      {"dec", Atomic::kDec},   {"and", Atomic::kAnd}, {"or", Atomic::kOr},   {"xor", Atomic::kXor},
      {"exch", Atomic::kExch}, {"cas", Atomic::kCas}};
  Access a = access_of(s);
  const bool returns = s.opcode() == "atom";
  const std::size_t first = returns ? 1 : 0;
  if (returns) i->slots[0] = b.target(s.operands.at(0));
  i->slots[1] = b.address(s.operands.at(first), &i->value, &a.wide_address);
  for (std::size_t k = first + 1; k < s.operands.size() && k < first + 3; ++k) {
    i->slots[k - first + 1] = b.source(s.operands[k], static_cast<int>(a.element_bytes));
  }
  const auto operation = operations.find(s.parts.at(s.parts.size() - 2));
  if (operation == operations.end()) throw Fault("an unknown atomic operation");
  i->count = static_cast<std::uint32_t>(operation->second);
  i->detail = a.pack();
  i->run = atomic_handler(s.parts.back());
}

template <class T>
Next run_map(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const T own = warp.lanes_of<T>(i.slots[1])[lane];
    const std::uint32_t rank = warp.lanes_of<std::uint32_t>(i.slots[2])[lane];
    if (rank >= warp.cta().cluster().ctas.size()) throw Fault("mapa to a rank that is not there");
    constexpr T kOffsets = (T{1} << kRankShift) - 1;
    constexpr T kWindow = sizeof(T) == 8 ? static_cast<T>(kWindowMask) : T{0};
    warp.lanes_of<T>(i.slots[0])[lane] = (own & (kOffsets | kWindow)) | static_cast<T>(rank + 1)
                                                                            << kRankShift;
  }
  return Next::kAdvance;
}

void decode_map(const Statement& s, Builder& b, Instruction* i) {
  const bool wide = s.parts.back() == "u64";
  i->slots[0] = b.target(s.operands.at(0));
  i->slots[1] = b.source(s.operands.at(1), wide ? 8 : 4);
  i->slots[2] = b.source(s.operands.at(2), 4);
  i->run = wide ? &run_map<std::uint64_t> : &run_map<std::uint32_t>;
}

}  // namespace

void add_memory_opcodes(OpcodeTable& table) {
  table["ld"] = &decode_load;
  table["ldu"] = &decode_load;
  table["st"] = &decode_store;
  table["atom"] = &decode_atomic;
  table["red"] = &decode_atomic;
  table["mapa"] = &decode_map;
}

}  // namespace sonicmoe::emulator
