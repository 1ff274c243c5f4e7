// Router formulas in fp64 with a plain sort, to judge values. Ids, pairs and their order are judged
// by routing_reference.h, which rounds as the backends do.
#pragma once

#include "sonicmoe/routing.h"
#include "verify/matrix.h"
#include "verify/oracle.h"

namespace sonicmoe::oracle {

struct Routed {
  Matrix<std::int64_t> ids;  ///< (T, K), -1 in empty slots
  Matrix<double> weights;    ///< (T, K)
};

/// Top-k and weights. `options.bias` is host memory.
Routed route(const RouteOptions& options, const Matrix<double>& logits);

/// The weights of given ids (T, K), as route() computes them after its choice.
Matrix<double> route_weights(const RouteOptions& options, const Matrix<double>& logits,
                             const Matrix<std::int64_t>& ids);

/// d(weights)/d(logits) at fixed ids: dweights (T, K) -> dlogits (T, E). kSame: every step in fp32.
Matrix<double> route_backward(const RouteOptions& options, const Matrix<double>& logits,
                              const Matrix<std::int64_t>& ids, const Matrix<double>& dweights,
                              Precision precision = Precision::kExact);

/// As route_backward(), for rounded pairs: dweights (T, E), 0 where there is no pair. Pairs that
/// are not among `ids` have the weight p * scale, p over all E.
Matrix<double> round_backward(const RouteOptions& options, const Matrix<double>& logits,
                              const Matrix<std::int64_t>& ids, const Matrix<double>& dweights,
                              Precision precision);

struct Losses {
  double load_balancing = 0.0;
  double z = 0.0;
  std::vector<std::int64_t> tokens_per_expert;
};
Losses router_losses(const RouteOptions& options, const Matrix<double>& logits,
                     const Matrix<std::int64_t>& ids);
/// dlogits for given gradients of the two losses; counts are constants.
Matrix<double> router_losses_backward(const RouteOptions& options, const Matrix<double>& logits,
                                      const std::vector<std::int64_t>& tokens_per_expert,
                                      double dload_balancing, double dz);

}  // namespace sonicmoe::oracle
