#include "runtime/configuration.h"

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace sonicmoe::emulator {
namespace {

/// Ends the program without destructors: those of the devices would ask for the configuration,
/// which is not read yet.
[[noreturn]] void end_program() {
  std::fflush(stderr);
  std::_Exit(EXIT_FAILURE);
}

std::uint64_t number_of(const char* name, const char* value, std::uint64_t least,
                        std::uint64_t most) {
  const std::string_view text(value);
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || number < least || number > most) {
    std::fprintf(stderr, "emulator: %s is '%s' but must be a number from %llu to %llu\n", name,
                 value, static_cast<unsigned long long>(least),
                 static_cast<unsigned long long>(most));
    end_program();
  }
  return number;
}

std::uint64_t number_or(const char* name, std::uint64_t otherwise, std::uint64_t least,
                        std::uint64_t most) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : number_of(name, value, least, most);
}

/// A number, or with `today/N` another number from 1 to N each day.
std::uint64_t seed_or(const char* name, std::uint64_t otherwise) {
  constexpr std::string_view kToday = "today/";
  const char* value = std::getenv(name);
  if (value == nullptr) return otherwise;
  if (!std::string_view(value).starts_with(kToday)) return number_of(name, value, 0, UINT64_MAX);
  const auto day = std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now());
  const std::uint64_t seeds = number_of(name, value + kToday.size(), 1, UINT64_MAX);
  return 1 + static_cast<std::uint64_t>(day.time_since_epoch().count()) % seeds;
}

std::string dotted(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

/// From the table of compute capabilities in the CUDA Programming Guide.
constexpr Limits kLimits[] = {
    {80, 163 * 1024, 2048},  {86, 99 * 1024, 1536},   {87, 163 * 1024, 1536},
    {89, 99 * 1024, 1536},   {90, 227 * 1024, 2048},  {100, 227 * 1024, 2048},
    {103, 227 * 1024, 2048}, {110, 227 * 1024, 1536}, {120, 99 * 1024, 1536},
    {121, 99 * 1024, 1536},
};

Limits limits_or(const char* name, const Limits& otherwise) {
  const char* value = std::getenv(name);
  if (value == nullptr) return otherwise;
  std::string known;
  for (const Limits& limits : kLimits) {
    if (value == dotted(limits.capability)) return limits;
    known += " " + dotted(limits.capability);
  }
  std::fprintf(stderr, "emulator: %s is '%s' but must be one of%s\n", name, value, known.c_str());
  end_program();
}

}  // namespace

const Configuration& configuration() {
  static const Configuration read = [] {
    Configuration c;
    c.limits = limits_or("SONICMOE_EMULATED_CAPABILITY", c.limits);
    c.devices = static_cast<int>(number_or("SONICMOE_EMULATED_GPUS", c.devices, 0, kMostDevices));
    c.multiprocessors = static_cast<int>(
        number_or("SONICMOE_EMULATED_MULTIPROCESSORS", c.multiprocessors, 1, 1024));
    c.seed = seed_or("SONICMOE_EMULATED_SEED", c.seed);
    c.patience_s =
        static_cast<int>(number_or("SONICMOE_EMULATED_PATIENCE", c.patience_s, 1, 86400));
    if (const char* spot = std::getenv("SONICMOE_EMULATED_WITHOUT")) c.without = spot;
    if (const char* change = std::getenv("SONICMOE_EMULATED_INSTEAD")) c.instead = change;
    if (const char* log = std::getenv("SONICMOE_EMULATED_LOG")) c.log = log;
    return c;
  }();
  return read;
}

}  // namespace sonicmoe::emulator
