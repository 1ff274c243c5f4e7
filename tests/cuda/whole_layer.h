// A layer in device memory that owns its inputs, with many rows for one expert. It returns the bits
// of its results.
#pragma once

#include <random>
#include <vector>

#include "device_layer.h"

namespace sonicmoe::testing {

using Bits = std::vector<std::vector<std::uint8_t>>;

/// A layer that owns its inputs.
struct WholeLayer {
  WholeLayer(const LayerShape& s, const Exec& exec)
      : weights(s),
        x(s.tokens * s.hidden, 1),
        dout(s.tokens * s.hidden, 2),
        ids(s.tokens * s.top_k * 4),
        scores(s.tokens * s.top_k * 4),
        layer(s, weights, {x.data(), dout.data(), ids.data(), scores.data()}, exec) {
    std::mt19937 random(8);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    std::vector<std::int32_t> experts;
    std::vector<float> values;
    for (std::int64_t i = 0; i < s.tokens * s.top_k; ++i) {
      // A third of all slots go to the first expert.
      const auto any = static_cast<std::int32_t>(random() % s.experts);
      experts.push_back(random() % 3 == 0 ? 0 : any);
      values.push_back(
          uniform(random));  // sums over slots are rounded, so that another order changes bits
    }
    ids.set(experts);
    scores.set(values);
  }
  Bits run(const Exec& exec) {
    layer.poison();
    layer.step(exec);
    must(cudaStreamSynchronize(static_cast<cudaStream_t>(exec.stream)));
    Bits bits;
    for (const DeviceArray* a : layer.results()) bits.push_back(a->get());
    return bits;
  }

  LayerWeights weights;
  Periodic x, dout;
  DeviceArray ids, scores;
  DeviceLayer layer;
};

}  // namespace sonicmoe::testing
