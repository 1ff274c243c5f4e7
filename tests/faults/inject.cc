#include "inject.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace sonicmoe::faults {
namespace {

std::atomic<bool> armed{false};
std::atomic<std::int64_t> allocations{0};
std::atomic<std::int64_t> worker_allocations{0};
std::atomic<std::int64_t> threads{0};
Fault fault;
pthread_t caller;

bool strikes(std::int64_t number, std::int64_t one, std::int64_t from) {
  return number == one || (from >= 0 && number >= from);
}

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (armed) {
    if (pthread_equal(pthread_self(), caller) == 0) ++worker_allocations;
    if (strikes(allocations++, fault.allocation, fault.allocations_from)) return nullptr;
  }
  const std::size_t size = (bytes + alignment) / alignment * alignment;
  return std::aligned_alloc(alignment, size);
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* memory = allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

constexpr std::size_t kPlain = alignof(std::max_align_t);

}  // namespace

void arm(const Fault& next) {
  fault = next;
  caller = pthread_self();
  allocations = worker_allocations = threads = 0;
  armed = true;
}

Demand disarm() {
  armed = false;
  return {allocations, threads, worker_allocations};
}

namespace {

using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

int create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
           void* argument) {
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (armed && strikes(threads++, fault.thread, fault.threads_from)) return EAGAIN;
  return real(thread, attributes, body, argument);
}

}  // namespace
}  // namespace sonicmoe::faults

using sonicmoe::faults::allocate_or_throw;
using sonicmoe::faults::kPlain;

void* operator new(std::size_t bytes) { return allocate_or_throw(bytes, kPlain); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes, kPlain); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return sonicmoe::faults::allocate(bytes, kPlain);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return sonicmoe::faults::allocate(bytes, kPlain);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  return sonicmoe::faults::create(thread, attributes, body, argument);
}
