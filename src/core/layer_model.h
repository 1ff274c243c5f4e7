// A model of the time of a whole layer with an engine, fitted to the records of one H200.
#pragma once

#include <string>
#include <vector>

#include "core/machines.h"
#include "sonicmoe/moe.h"

namespace sonicmoe {

/// The time that the model expects under sustained load.
struct ModelledLayer {
  std::string engine;
  double forward_seconds = 0.0, backward_seconds = 0.0;
};

/// The layer with each engine for which there is a model on this machine, its default engine first:
/// hopper and portable on an H200, portable and blackwell on a B200; in fp8 blackwell on a B200
/// alone. Empty for other machines and for dtypes of more than 16 bits.
///
/// On the H200 the model is within 12 % of the records hot.json and portable.json in
/// benchmarks/results/h200, for their layers of 16384 tokens and more. On the B200 it is a forecast
/// from that fit and from published rates of single products: no B200 has run this library.
std::vector<ModelledLayer> modelled_layers(const Problem& problem, const Machine& machine);

}  // namespace sonicmoe
