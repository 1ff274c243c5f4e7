#include "fuzz/world.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <set>

#include "verify/convert.h"

namespace sonicmoe::fuzz {
namespace {

// Bytes and elements of a tensor that has memory.
constexpr std::int64_t kMostPlaced = 1 << 20;
constexpr std::int64_t kMostElements = 1 << 14;
constexpr std::size_t kAlignment = 64;

bool is_dtype(std::int32_t t) { return t >= SMOE_F32 && t <= SMOE_I64; }
bool is_index(std::int32_t t) { return t == SMOE_I32 || t == SMOE_I64; }

// Bytes from the first to the last, and from the first to where `data` points; -1 if there are too
// many to be placed.
struct Reach {
  std::int64_t bytes = 0, before = 0;
};
Reach reach_of(const smoe_tensor& t) {
  if (!is_dtype(t.dtype) || t.rank < 0 || t.rank > 3) return {-1, 0};
  const std::int64_t element = dtype_bytes(static_cast<DType>(t.dtype));
  __int128 low = 0, high = 0, count = 1;
  for (std::int32_t i = 0; i < t.rank; ++i) {
    if (t.shape[i] <= 0) return {t.shape[i] < 0 ? -1 : 0, 0};
    if ((count *= t.shape[i]) > kMostElements) return {-1, 0};
    const __int128 step = static_cast<__int128>(t.shape[i] - 1) * t.stride[i];
    (step < 0 ? low : high) += step;
  }
  const __int128 bytes = (high - low + 1) * element;
  if (bytes > kMostPlaced) return {-1, 0};
  return {static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(-low) * element};
}

// Calls f(address) for the first byte of every element.
template <class F>
void for_elements(const Tensor& t, F&& f) {
  const std::int64_t count = oracle::element_count(t);
  for (std::int64_t i = 0; i < count; ++i) {
    f(static_cast<std::byte*>(t.data) + oracle::element_offset(t, i) * dtype_bytes(t.dtype));
  }
}

double tolerance(DType t) {
  if (t == DType::kF64) return 1e-9;
  if (t == DType::kF32) return 1e-3;
  return t == DType::kF16 ? 1e-2 : 6e-2;
}

}  // namespace

Tensor Arg::view() const {
  const smoe_tensor& t = c.tensor;
  Tensor view{t.data, static_cast<DType>(t.dtype), t.rank, {}, {}};
  std::copy_n(t.shape, 3, view.shape);
  std::copy_n(t.stride, 3, view.stride);
  return is_null ? Tensor{} : view;
}

Arg& World::tensor(const std::string& name, Access access, std::int32_t dtype,
                   std::vector<std::int64_t> shape) {
  Arg& arg = args_.emplace_back();
  arg.name = name;
  arg.access = access;
  arg.c.tensor.size = sizeof(smoe_tensor);
  arg.c.tensor.dtype = dtype;
  arg.c.tensor.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), arg.c.tensor.shape);
  lay_out(arg);
  return arg;
}

Arg& World::index(const std::string& name, std::int32_t dtype, std::vector<std::int64_t> shape,
                  std::int64_t first, std::int64_t last) {
  std::int64_t count = 1;
  for (const std::int64_t n : shape) count *= n;
  Arg& arg = tensor(name, Access::kParameter, dtype, std::move(shape));
  for (std::int64_t i = 0; i < count; ++i) arg.integers.push_back(random.in(first, last));
  return arg;
}

Lent& World::buffer(const std::string& name, std::int64_t needed) {
  Lent& lent = buffers_.emplace_back();
  lent.name = name;
  lent.needed = lent.bytes = needed;
  return lent;
}

// Any order of dimensions, gaps, dimensions that run backwards, and repeated ones where allowed.
void World::lay_out(Arg& arg) {
  smoe_tensor& t = arg.c.tensor;
  std::vector<std::int32_t> order;
  for (std::int32_t i = t.rank - 1; i >= 0; --i) order.push_back(i);
  if (random.percent(20)) std::reverse(order.begin(), order.end());
  std::int64_t stride = random.percent(10) ? 2 : 1;
  for (const std::int32_t i : order) {
    t.stride[i] = random.percent(6) ? -stride : stride;
    if (arg.access == Access::kRead && random.percent(4)) t.stride[i] = 0;
    stride = stride * std::max<std::int64_t>(t.shape[i], 1) + (random.percent(20) ? 3 : 0);
  }
}

void World::begin_exec() {
  exec = {};
  exec.size = sizeof(exec);
  exec.num_threads = static_cast<std::int32_t>(random.in(1, 3));
  size_field("exec.size", &exec.size);
  fields_.push_back({"exec.backend", [this] { exec.backend = random.pick({-1, 1, 2, 1 << 30}); }});
  fields_.push_back({"exec.num_threads", [this] { exec.num_threads = random.pick({-1, 4, 0}); }});
  field("exec.reserved", &exec.reserved);
  fields_.push_back({"exec is null", [this] { exec_is_null_ = true; }});
}

std::int64_t World::odd_count() {
  return random.pick<std::int64_t>({-1, 0, 1, 2, 7, INT32_MAX, 1LL << 31, (1LL << 30) + 4,
                                    (1LL << 31) - 8, 1LL << 40, (1LL << 61) - 1, 1LL << 62,
                                    INT64_MAX, INT64_MIN, INT64_MIN + 1});
}

// Near, or so far that no tensor may reach there.
std::int64_t World::odd_stride() {
  if (random.percent(60)) return random.in(-20, 20);
  return random.pick<std::int64_t>(
      {1LL << 55, (1LL << 61) - 1, 1LL << 62, -(1LL << 62), INT64_MAX, INT64_MIN, INT64_MIN + 1});
}

std::int64_t World::beside(std::int64_t value) {
  const auto v = static_cast<std::uint64_t>(value);
  return static_cast<std::int64_t>(random.percent(50) ? v + 1 : v - 1);
}

void World::field(const std::string& name, std::int64_t* value) {
  fields_.push_back(
      {name, [this, value] { *value = random.percent(30) ? beside(*value) : odd_count(); }});
}
void World::field(const std::string& name, std::int32_t* value) {
  fields_.push_back({name, [this, value] {
                       *value = random.percent(70) ? static_cast<std::int32_t>(random.in(-1, 11))
                                                   : random.pick({INT32_MIN, INT32_MAX, 1 << 20});
                     }});
}
void World::field(const std::string& name, double* value) {
  fields_.push_back({name, [this, value] {
                       *value = random.pick<double>(
                           {-1.0, 0.5, 1e300, -1e300, HUGE_VAL, NAN, 1e-300, 3.0, -0.0});
                     }});
}
void World::size_field(const std::string& name, std::uint32_t* value) {
  const std::uint32_t size = *value;
  fields_.push_back({name, [this, value, size] {
                       *value =
                           random.pick<std::uint32_t>({0, 4, size - 1, size - 8, 4097, UINT32_MAX});
                     }});
}

void World::spoil(Arg& arg) {
  smoe_tensor& t = arg.c.tensor;
  const auto i = static_cast<std::int32_t>(random.in(0, std::clamp(t.rank, 1, 3) - 1));
  switch (random.in(0, 11)) {
    case 0:
      t.size = random.pick<std::uint32_t>({0, 3, sizeof(smoe_tensor) - 8, 4097});
      break;
    case 1:  // a newer caller, who may use what this version does not know
      t.size = sizeof(Arg::Padded);
      if (random.percent(50)) arg.c.tail[random.in(0, 31)] = 1;
      break;
    case 2:
      t.dtype = static_cast<std::int32_t>(random.in(-1, 7));
      break;
    case 3:
      t.rank = random.pick({-1, 0, 1, 2, 3, 4, INT32_MAX, INT32_MIN});
      break;
    case 4:
      t.reserved = 1;
      break;
    case 5:
    case 6:
      t.shape[i] = random.percent(50) ? beside(t.shape[i]) : odd_count();
      break;
    case 7:
    case 8:
    case 9:
      t.stride[i] = odd_stride();
      break;
    case 10:
      t.data = nullptr;
      arg.name += " (no data)";
      break;
    default:
      arg.is_null = true;
  }
}

void World::spoil(Lent& lent) {
  switch (random.in(0, 3)) {
    case 0:
      lent.bytes = random.percent(50) ? beside(lent.bytes) : lent.needed + random.pick({-64, 64});
      break;
    case 1:
      lent.bytes = odd_count();
      break;
    case 2:
      lent.misaligned = random.pick({1, 8, 32});
      break;
    default:
      lent.is_null = true;
  }
}

void World::spoil(std::int64_t percent) {
  value_seed_ = random.bits();
  while (random.percent(percent)) {
    const auto all = static_cast<std::int64_t>(args_.size() + buffers_.size() + fields_.size());
    std::int64_t choice = random.in(0, all);
    if (choice == all) {
      aliases_ = true;
      changes_.push_back("memory is shared");
    } else if (choice < std::ssize(args_)) {
      changes_.push_back(args_[choice].name);
      spoil(args_[choice]);
    } else if ((choice -= std::ssize(args_)) < std::ssize(buffers_)) {
      changes_.push_back(buffers_[choice].name);
      spoil(buffers_[choice]);
    } else {
      const Field& field = fields_[choice - std::ssize(buffers_)];
      changes_.push_back(field.name);
      field.change();
    }
    percent = 30;
  }
}

std::string World::changes() const {
  std::string text;
  for (const std::string& c : changes_) text += (text.empty() ? "" : ", ") + c;
  return text.empty() ? "nothing" : text;
}

std::string World::description() const {
  std::string text = "spoilt: " + changes() + "\n";
  const auto three = [](const std::int64_t* v) {
    // append(), because GCC 12 warns of `"(" + std::to_string(...)` by mistake.
    return std::string("(").append(std::to_string(v[0])) + ", " + std::to_string(v[1]) + ", " +
           std::to_string(v[2]) + ")";
  };
  for (const Arg& arg : args_) {
    const smoe_tensor& t = arg.c.tensor;
    text += "  " + arg.name + ": dtype " + std::to_string(t.dtype) + ", rank " +
            std::to_string(t.rank) + ", shape " + three(t.shape) + ", stride " + three(t.stride) +
            (arg.is_null ? ", null" : "") + "\n";
    for (const std::int64_t v : arg.integers) text.append(" ").append(std::to_string(v));
    if (!arg.integers.empty()) text += "\n";
  }
  for (const Lent& lent : buffers_) {
    text += "  " + lent.name + ": " + std::to_string(lent.bytes) + " bytes of " +
            std::to_string(lent.needed) + ", misaligned by " + std::to_string(lent.misaligned) +
            (lent.is_null ? ", null" : "") + "\n";
  }
  return text;
}

std::byte* World::allocate(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  auto* data = static_cast<std::byte*>(::operator new(size, std::align_val_t{kAlignment}));
  std::memset(data, 0xA5, size);
  Block& block = blocks_.emplace_back();
  block.data = {data, [](std::byte* p) { ::operator delete(p, std::align_val_t{kAlignment}); }};
  block.bytes = static_cast<std::int64_t>(size);
  return data;
}

void World::place(Arg& arg) {
  smoe_tensor& t = arg.c.tensor;
  arg.is_placed = false;
  if (arg.is_null || arg.name.ends_with(" (no data)")) return;
  const Reach reach = reach_of(t);
  t.data = allocate(std::max<std::int64_t>(reach.bytes, 0)) + reach.before;
  arg.is_placed = reach.bytes > 0;
  if (arg.is_placed) fill(arg);
}

void World::fill(const Arg& arg) {
  const Tensor t = arg.view();
  const std::int64_t count = oracle::element_count(t);
  Random values(value_seed_ ^ std::hash<std::string>{}(arg.name));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = oracle::element_offset(t, i);
    if (!is_index(arg.c.tensor.dtype)) {
      oracle::store(t.data, t.dtype, at, arg.access == Access::kWritten ? 7.25 : values.unit());
      continue;
    }
    const bool listed = std::ssize(arg.integers) == count;
    const std::int64_t value = listed ? arg.integers[i] : values.in(-3, 40);
    if (t.dtype == DType::kI64) {
      static_cast<std::int64_t*>(t.data)[at] = value;
    } else {
      static_cast<std::int32_t*>(t.data)[at] =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(value, INT32_MIN, INT32_MAX));
    }
  }
}

void World::place() {
  for (Arg& arg : args_) place(arg);
  for (Lent& lent : buffers_) {
    if (lent.is_null) {
      lent.data = nullptr;
      continue;
    }
    const std::int64_t bytes = std::clamp<std::int64_t>(lent.bytes, 0, lent.needed);
    if (lent.base == nullptr || !lent.is_read) lent.base = allocate(bytes + lent.misaligned);
    lent.data = lent.base + lent.misaligned;
  }
  if (aliases_) alias();
}

// Moves a tensor or buffer into the memory of another.
void World::alias() {
  Arg& host = args_[random.in(0, std::ssize(args_) - 1)];
  Arg& guest = args_[random.in(0, std::ssize(args_) - 1)];
  const Reach room = reach_of(host.c.tensor), need = reach_of(guest.c.tensor);
  if (host.view().data == nullptr || guest.view().data == nullptr || need.bytes <= 0) return;
  if (&host == &guest || room.bytes < need.bytes) return;
  const std::int64_t element = dtype_bytes(static_cast<DType>(guest.c.tensor.dtype));
  const std::int64_t shift = random.in(0, (room.bytes - need.bytes) / element) * element;
  auto* first = static_cast<std::byte*>(host.c.tensor.data) - room.before;
  if (reinterpret_cast<std::uintptr_t>(first) % static_cast<std::uintptr_t>(element) != 0) return;
  guest.c.tensor.data = first + shift + need.before;
}

bool World::shares_memory() const {
  for (const Arg& written : args_) {
    if (written.access != Access::kWritten || written.view().data == nullptr) continue;
    if (reach_of(written.c.tensor).bytes <= 0) continue;
    std::set<const std::byte*> bytes;
    const auto size = dtype_bytes(written.view().dtype);
    for_elements(written.view(), [&](const std::byte* at) {
      for (std::int64_t i = 0; i < size; ++i) bytes.insert(at + i);
    });
    for (const Arg& other : args_) {
      if (&other == &written || other.view().data == nullptr) continue;
      if (reach_of(other.c.tensor).bytes <= 0) continue;
      bool shared = false;
      for_elements(other.view(), [&](const std::byte* at) {
        for (std::int64_t i = 0; i < dtype_bytes(other.view().dtype); ++i) {
          shared = shared || bytes.contains(at + i);
        }
      });
      if (shared) return true;
    }
  }
  return false;
}

// A tensor that the library may accept, but that is too large to be given memory here.
bool World::claims_memory_that_is_not_there() const {
  static constexpr __int128 kRefused = __int128{1} << 55;
  return std::any_of(args_.begin(), args_.end(), [](const Arg& arg) {
    const smoe_tensor& t = arg.c.tensor;
    if (arg.is_null || t.data == nullptr || reach_of(t).bytes >= 0) return false;
    if (!is_dtype(t.dtype) || t.rank < 0 || t.rank > 3) return false;
    __int128 count = 1, span = 1;
    for (std::int32_t i = 0; i < t.rank; ++i) {
      if (t.shape[i] < 0) return false;
      const __int128 stride = t.stride[i];
      count = std::min(kRefused, count * std::max<std::int64_t>(t.shape[i], 1));
      span += (stride < 0 ? -stride : stride) * std::max<std::int64_t>(t.shape[i] - 1, 1);
    }
    const auto element = dtype_bytes(static_cast<DType>(t.dtype));
    return count * element < kRefused && span * element < kRefused;
  });
}

void World::require_untouched(const std::vector<std::vector<std::byte>>& before,
                              bool refused) const {
  std::set<const std::byte*> writable;
  if (!refused) {
    for (const Arg& arg : args_) {
      if (arg.access != Access::kWritten || arg.view().data == nullptr) continue;
      const auto size = dtype_bytes(arg.view().dtype);
      for_elements(arg.view(), [&](const std::byte* at) {
        for (std::int64_t i = 0; i < size; ++i) writable.insert(at + i);
      });
    }
  }
  const auto lent = [&](const std::byte* at) {
    return !refused && std::any_of(buffers_.begin(), buffers_.end(), [at](const Lent& b) {
      return !b.is_read && b.data != nullptr && at >= b.data && at < b.data + b.needed;
    });
  };
  for (std::size_t b = 0; b < before.size(); ++b) {
    const std::byte* now = blocks_[b].data.get();
    if (std::memcmp(now, before[b].data(), before[b].size()) == 0) continue;
    for (std::size_t i = 0; i < before[b].size(); ++i) {
      if (now[i] == before[b][i] || writable.contains(now + i) || lent(now + i)) continue;
      throw Fault(refused ? "a refused call wrote a byte" : "a byte that is no output was written");
    }
  }
}

bool World::call(const std::function<smoe_status()>& run) {
  if (claims_memory_that_is_not_there()) return false;
  std::vector<std::vector<std::byte>> before;
  for (const Block& block : blocks_) {
    before.emplace_back(block.data.get(), block.data.get() + block.bytes);
  }
  const smoe_status status = run();
  require_untouched(before, status != SMOE_OK);
  if (status == SMOE_OK) {
    if (aliases_ && shares_memory()) throw Fault("an output that shares memory was accepted");
    return true;
  }
  const std::string sentence = smoe_last_error();
  if (sentence.empty()) throw Fault("refused without a sentence");
  if (status < SMOE_INVALID_ARGUMENT || status > SMOE_WORKSPACE_TOO_SMALL) {
    throw Fault("status " + std::to_string(status) + ": " + sentence);
  }
  if (!spoilt()) throw Fault("a good call was refused: " + sentence);
  return false;
}

Tensor World::expected(const Arg& arg) {
  Tensor want = arg.view();
  if (want.data == nullptr) return {};
  const std::int64_t count = oracle::element_count(want);
  std::int64_t stride = 1;
  for (std::int32_t i = want.rank - 1; i >= 0; --i) {
    want.stride[i] = stride;
    stride *= want.shape[i];
  }
  want.data = allocate(count * dtype_bytes(want.dtype));
  const Tensor now = arg.view();
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<std::byte*>(want.data) + i * dtype_bytes(want.dtype),
                static_cast<std::byte*>(now.data) +
                    oracle::element_offset(now, i) * dtype_bytes(want.dtype),
                static_cast<std::size_t>(dtype_bytes(want.dtype)));
  }
  return want;
}

void World::compare(const Arg& arg, const Tensor& want) const {
  // Shared memory makes floats of integers: NaN and infinities, which have no reference here.
  if (want.data == nullptr || aliases_) return;
  const Tensor got = arg.view();
  const std::vector<double> a = oracle::read(got), b = oracle::read(want);
  double scale = 1.0;
  for (const double v : b) scale = std::max(scale, std::isfinite(v) ? std::fabs(v) : 0.0);
  const bool exact = got.dtype == DType::kI32 || got.dtype == DType::kI64;
  const double allowed =
      exact ? 0.0 : std::max(tolerance(got.dtype), tolerance(rounded_to)) * scale;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::fabs(a[i] - b[i]) <= allowed || (std::isnan(a[i]) && std::isnan(b[i])) || a[i] == b[i])
      continue;
    throw Fault(arg.name + "[" + std::to_string(i) + "] is " + std::to_string(a[i]) +
                ", expected " + std::to_string(b[i]));
  }
}

std::vector<std::vector<double>> World::rows(const Tensor& t) {
  const std::vector<double> values = oracle::read(t);
  std::vector<std::vector<double>> rows;
  for (std::int64_t i = 0; i < t.shape[0]; ++i) {
    rows.emplace_back(values.begin() + i * t.shape[1], values.begin() + (i + 1) * t.shape[1]);
  }
  return rows;
}

}  // namespace sonicmoe::fuzz
