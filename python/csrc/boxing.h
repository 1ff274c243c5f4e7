// Adapts a function of one struct of arguments to libtorch's boxed calling convention, and turns
// the library's errors into exceptions for which torch has a Python type.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "sonicmoe/status.h"
#include "views.h"

namespace sonicmoe_torch {

/// Throws an exception for which torch raises ValueError. torch 2.15 raises RuntimeError for every
/// exception of an operator. From 2.14 on the message begins with the name, by which _ops.py raises
/// ValueError in any case.
[[noreturn]] inline void refuse_argument(const std::string& sentence) {
  constexpr std::uint64_t kTorch214 = 2ULL << 56 | 14ULL << 48;
  static const bool named = aoti_torch_abi_version() >= kTorch214;
  throw std::invalid_argument(named ? "ValueError: " + sentence : sentence);
}

/// Throws an exception for which torch raises the right Python exception. torch raises
/// std::invalid_argument as ValueError, from a compiled graph too. It has no C++ exception for
/// NotImplementedError, so the message begins with that name; _ops.py removes the name and raises
/// NotImplementedError.
[[noreturn]] inline void rethrow(const sonicmoe::Error& error) {
  switch (error.status()) {
    case sonicmoe::Status::kInvalidArgument:
    case sonicmoe::Status::kOutOfRange:
    case sonicmoe::Status::kWorkspaceTooSmall:
      refuse_argument(error.what());
    case sonicmoe::Status::kUnsupported:
      throw std::runtime_error(std::string("NotImplementedError: ") + error.what());
    default:
      throw std::runtime_error(error.what());
  }
}

template <class Function>
struct ArgumentOf;
template <class Result, class Argument>
struct ArgumentOf<Result (*)(Argument&)> {
  using type = Argument;
};

template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};

/// The name of argument `index` of a schema such as "Tensor x, Tensor? gather, int k=0".
inline std::string argument_name(const std::string& schema, std::size_t index) {
  std::size_t begin = 0;
  for (; index > 0; --index) begin = schema.find(", ", begin) + 2;
  const std::size_t end = schema.find_first_of(",=", begin);
  const std::string argument = schema.substr(begin, end - begin);
  return argument.substr(argument.rfind(' ') + 1);
}

/// Refuses tensors on different devices: torch does not check them, and the backend of the first
/// one would take the addresses of the others for addresses of its own memory. A seed and the
/// addresses of buffers are always in host memory.
template <class Args>
void expect_one_device(Args& args) {
  std::optional<DeviceId> first;
  std::size_t index = 0, first_index = 0;
  const auto check = [&](const Array& t) {
    const DeviceId device = device_of(t);
    if (!first) {
      first = device;
      first_index = index;
    }
    if (device.type == first->type && device.index == first->index) return;
    const std::string name = argument_name(Args::schema(), index);
    if (name == "seed" || name == "addresses") return;
    throw std::invalid_argument(name + " is on " + text_of(device) + ", must be on " +
                                text_of(*first) + " as " +
                                argument_name(Args::schema(), first_index));
  };
  const auto visit = [&](const auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, Array>) check(field);
    if constexpr (std::is_same_v<Field, MaybeArray>) {
      if (field.has_value()) check(*field);
    }
    ++index;
  };
  std::apply([&](const auto&... field) { (visit(field), ...); }, args.fields());
}

/// The boxed kernel of kFunction: `Result f(Args&)`, where Args is a struct of arguments.h and
/// Result is a value or a tuple of values.
template <auto kFunction>
void box(StableIValue* stack, std::uint64_t num_args, std::uint64_t num_outputs) {
  typename ArgumentOf<decltype(kFunction)>::type args;
  auto fields = args.fields();
  constexpr std::size_t kArgs = std::tuple_size_v<decltype(fields)>;
  STD_TORCH_CHECK(num_args == kArgs, "the schema has ", num_args, " arguments, its kernel ", kArgs);
  // Take every argument off the stack before anything can throw: an argument that stays on the
  // stack is never freed.
  std::apply(
      [&](auto&... field) {
        std::size_t i = 0;
        ((field = torch::stable::detail::to<std::remove_reference_t<decltype(field)>>(stack[i++])),
         ...);
      },
      fields);
  auto results = [&] {
    try {
      expect_one_device(args);
      auto result = kFunction(args);
      if constexpr (IsTuple<decltype(result)>::value) {
        return result;
      } else {
        return std::make_tuple(std::move(result));
      }
    } catch (const sonicmoe::Error& error) {
      rethrow(error);
    } catch (const std::invalid_argument& error) {
      refuse_argument(error.what());
    }
  }();
  constexpr std::size_t kResults = std::tuple_size_v<decltype(results)>;
  STD_TORCH_CHECK(num_outputs == kResults, "the schema has ", num_outputs, " results, its kernel ",
                  kResults);
  std::apply(
      [&](auto&... result) {
        std::size_t i = 0;
        ((stack[i++] = torch::stable::detail::from(result)), ...);
      },
      results);
}

}  // namespace sonicmoe_torch
