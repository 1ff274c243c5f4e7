#include "runtime/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "runtime/device.h"
#include "runtime/error.h"

namespace sonicmoe::emulator {
namespace {

/// Address space that is reserved at the start; less if a sanitizer or a limit forbids so much. It
/// takes no memory.
constexpr std::size_t kReserved = std::size_t{1} << 44;
constexpr std::size_t kPage = 4096;
/// An allocation begins kAlignment bytes after the beginning of a page, so it has exactly this
/// alignment.
constexpr std::size_t kAlignment = 512;
/// New memory holds this byte, which is NaN in every float type. Larger allocations keep the zeros
/// of the system, because pages that nobody touches take no memory.
constexpr int kFresh = 0xff;
constexpr std::size_t kMostFilled = std::size_t{64} << 20;

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }
std::uint64_t number(const void* address) { return reinterpret_cast<std::uint64_t>(address); }

/// Pages of an allocation, from the page in which it begins.
std::uint64_t first_page(std::uint64_t begin) { return begin - kAlignment; }
std::size_t page_bytes(std::size_t bytes) {
  return (kAlignment + bytes + kPage - 1) / kPage * kPage;
}

void must(void* mapped) {
  if (mapped == MAP_FAILED) throw ApiError{cudaErrorMemoryAllocation};
}
void map_memory(std::uint64_t at, std::size_t bytes) {
  must(mmap(pointer(at), bytes, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1,
            0));
}
void map_file(std::uint64_t at, std::size_t bytes, int file) {
  must(mmap(pointer(at), bytes, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED, file, 0));
}
void map_nothing(std::uint64_t at, std::size_t bytes) {
  must(mmap(pointer(at), bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
            -1, 0));
}

/// The last extent that begins at or below the address, or the end of the table.
Memory::Table::const_iterator below(const Memory::Table& table, std::uint64_t address) {
  const auto behind = std::upper_bound(
      table.begin(), table.end(), address,
      [](std::uint64_t wanted, const Extent& extent) { return wanted < extent.begin; });
  return behind == table.begin() ? table.end() : behind - 1;
}

Extent lookup(const Memory::Table& table, std::uint64_t address, std::size_t bytes) {
  const auto found = below(table, address);
  return found != table.end() && found->contains(address, bytes) ? *found : Extent{};
}

}  // namespace

Memory& memory() {
  static Memory& all = *new Memory;  // streams may use it until the process ends
  return all;
}

Memory::Memory() {
  void* reserved = MAP_FAILED;
  for (std::size_t wanted = kReserved; reserved == MAP_FAILED && wanted > kPage; wanted /= 2) {
    reserved = mmap(nullptr, wanted, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bytes_ = wanted;
  }
  must(reserved);
  begin_ = next_ = number(reserved);
}

std::uint64_t Memory::take_pages(std::size_t bytes) {
  const std::size_t with_gap = page_bytes(bytes) + kPage;
  if (bytes > bytes_ || with_gap > begin_ + bytes_ - next_) {
    throw ApiError{cudaErrorMemoryAllocation};
  }
  const std::uint64_t begin = next_ + kAlignment;
  next_ += with_gap;
  return begin;
}

void Memory::publish(Table table) {
  table_ = std::make_shared<Table>(std::move(table));
  generation_.fetch_add(1, std::memory_order_release);
}

void* Memory::allocate(std::size_t bytes, int owner, Extent::Kind kind) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t begin = take_pages(bytes);
  map_memory(first_page(begin), page_bytes(bytes));
  if (bytes <= kMostFilled) std::memset(pointer(begin), kFresh, bytes);
  Table table = *table_;
  table.push_back({begin, bytes, owner, kind});  // the highest address so far
  publish(std::move(table));
  return pointer(begin);
}

void Memory::unmap(const Extent& extent) {
  map_nothing(first_page(extent.begin), page_bytes(extent.bytes));
  const auto shared = files_.find(extent.begin);
  if (shared == files_.end()) return;
  close(shared->second);
  files_.erase(shared);
}

void Memory::release(void* address, Extent::Kind kind) {
  const std::lock_guard lock(mutex_);
  Table table = *table_;
  const auto found = below(table, number(address));
  require(found != table.end() && found->begin == number(address) && found->kind == kind,
          cudaErrorInvalidValue);
  const Extent extent = *found;
  table.erase(found);
  publish(std::move(table));
  unmap(extent);
}

void Memory::release_all(int owner) {
  const std::lock_guard lock(mutex_);
  Table kept;
  for (const Extent& extent : *table_) {
    if (extent.owner == owner) {
      unmap(extent);
    } else {
      kept.push_back(extent);
    }
  }
  publish(std::move(kept));
}

SharedMemoryName Memory::share(const void* address) {
  const std::lock_guard lock(mutex_);
  const Extent extent = lookup(*table_, number(address), 1);
  require(extent.begin == number(address) && extent.kind == Extent::Kind::kDevice,
          cudaErrorInvalidValue);
  const auto [entry, is_new] = files_.try_emplace(extent.begin, -1);
  if (is_new) {
    const std::size_t mapped = page_bytes(extent.bytes);
    const int file = memfd_create("emulated device memory", MFD_CLOEXEC);
    void* copy = MAP_FAILED;
    if (file >= 0 && ftruncate(file, static_cast<off_t>(mapped)) == 0) {
      copy = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    must(copy);
    std::memcpy(copy, pointer(first_page(extent.begin)), mapped);
    munmap(copy, mapped);
    map_file(first_page(extent.begin), mapped, file);
    entry->second = file;
  }
  return {static_cast<std::int32_t>(getpid()), entry->second, extent.bytes};
}

void* Memory::import(const SharedMemoryName& name, int owner) {
  const std::string path =
      "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  require(file >= 0, cudaErrorMapBufferObjectFailed);
  const std::lock_guard lock(mutex_);
  const std::uint64_t begin = take_pages(name.bytes);
  map_file(first_page(begin), page_bytes(name.bytes), file);
  close(file);  // the mapping stays
  Table table = *table_;
  table.push_back({begin, name.bytes, owner, Extent::Kind::kImported});
  publish(std::move(table));
  return pointer(begin);
}

std::shared_ptr<const Memory::Table> Memory::table() const {
  const std::lock_guard lock(mutex_);
  return table_;
}

Extent Memory::find(const void* address, std::size_t bytes) const {
  return lookup(*table(), number(address), bytes);
}

bool Memory::is_ours(const void* address) const { return number(address) - begin_ < bytes_; }

std::size_t Memory::used_by(int owner) const {
  std::size_t sum = 0;
  for (const Extent& extent : *table()) {
    if (extent.owner == owner) sum += page_bytes(extent.bytes);
  }
  return sum;
}

void GridMemory::check(std::uint64_t address, std::size_t bytes) const {
  const std::uint64_t generation = memory().generation();
  if (generation != generation_) {
    table_ = memory().table();
    generation_ = generation;
    recent_ = {};
  }
  for (const Extent& extent : recent_) {
    if (extent.contains(address, bytes)) return;
  }
  const Extent found = lookup(*table_, address, bytes);
  if (found.bytes == 0 || !device_.reaches(found.owner)) refuse(address, bytes);
  recent_[oldest_] = found;
  oldest_ = (oldest_ + 1) % recent_.size();
}

void GridMemory::refuse(std::uint64_t address, std::size_t bytes) const {
  violated_ = true;
  char text[200];
  std::snprintf(text, sizeof(text), "%zu bytes of global memory at 0x%llx", bytes,
                static_cast<unsigned long long>(address));
  std::string sentence = text;
  const auto nearest = below(*table_, address);
  if (lookup(*table_, address, bytes).bytes != 0) {
    sentence += " are of device " + std::to_string(nearest->owner) + ", but device " +
                std::to_string(device_.ordinal()) + " has no access to its memory";
  } else {
    sentence += " are in no live allocation";
    if (nearest != table_->end()) {
      sentence += "; the last one below has " + std::to_string(nearest->bytes) +
                  " bytes and begins " + std::to_string(address - nearest->begin) + " bytes before";
    }
  }
  throw Fault(sentence);
}

}  // namespace sonicmoe::emulator
