// One case of the router: top-k or token rounding, and its gradient. Ids and pairs must be exact;
// weights and gradients follow the twice rule.
#include <algorithm>
#include <limits>

#include "verify/caller.h"
#include "verify/convert.h"
#include "verify/inputs.h"
#include "verify/oracle_router.h"
#include "verify/routing_reference.h"

namespace sonicmoe::verify {
namespace {

using oracle::Matrix;
using oracle::Precision;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// An output that must be equal: the exact values also serve as the reference.
Expected exactly(const std::string& what, const BlockView& tensor, Matrix<double> values) {
  return {what, tensor, values, values, values.rows};
}

/// The common part of route() and token_round(): logits, bias, dlogits, two runs of each call.
class RouterRun {
 public:
  RouterRun(const Case& c, const Implementation& implementation, CaseResult& result)
      : case_(c), implementation_(implementation), caller_(c, implementation, result) {
    const Problem& p = c.problem;
    logits_ = blocks().add_view("logits", tensor2(nullptr, p.dtype, p.tokens, p.experts));
    dlogits_ = blocks().add_view("dlogits", logits_.view);
    fill_logits(c, logits_);
    if (c.router.bias) {
      bias_ = blocks().add_view("bias", tensor1(nullptr, DType::kF32, p.experts));
      fill_normal(c, 1, bias_);
    }
    values_ = Matrix<double>(p.tokens, p.experts);
    std::vector<float> row(static_cast<std::size_t>(p.experts));
    const std::vector<double> given = oracle::read(logits_.on_host());
    const RouteOptions options = options_on(&BlockView::on_host);
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      for (std::int64_t e = 0; e < p.experts; ++e) {
        row[e] = reference::cleaned<float>(given[t * p.experts + e], p.dtype);
        values_(t, e) = row[e];
      }
      rows_.push_back(row);
      choices_.push_back(reference::choose(options, row));
    }
  }

 protected:
  Blocks& blocks() { return caller_.blocks(); }

  RouteOptions options_on(Tensor (BlockView::*where)() const) const {
    RouteOptions options = case_.router.options;
    if (bias_.block != nullptr) options.bias = (bias_.*where)();
    return options;
  }

  Matrix<std::int64_t> chosen_ids() const {
    Matrix<std::int64_t> ids(case_.problem.tokens, case_.problem.top_k);
    for (std::size_t t = 0; t < choices_.size(); ++t) {
      std::copy(choices_[t].ids.begin(), choices_[t].ids.end(),
                ids.row(static_cast<std::int64_t>(t)));
    }
    return ids;
  }

  /// Runs twice on outputs with different initial bytes; both runs must give the same bits.
  void run_twice(const std::string& what, const std::vector<Expected>& outputs,
                 const std::vector<Block*>& scratch, const std::function<void()>& run) {
    caller_.call({what, kPoison, scratch, {}}, outputs, run);
    caller_.judge(outputs, kPoison);
    const Caller::Bits bits = Caller::bits(outputs);
    caller_.call({what, kOtherPoison, scratch, {}}, outputs, run);
    Caller::require_same(bits, outputs, what + " on other bytes");
  }

  Expected expect_dlogits(Matrix<double> exact, Matrix<double> same) const {
    oracle::round_all(dlogits_.view.dtype, same.values);
    const std::int64_t rows = exact.rows;
    return {"dlogits", dlogits_, std::move(exact), std::move(same), rows};
  }

  const Case& case_;
  const Implementation& implementation_;
  Caller caller_;
  BlockView logits_, dlogits_, bias_;
  Matrix<double> values_;  // logits after their cleaning: no NaN, no +inf
  std::vector<std::vector<float>> rows_;
  std::vector<reference::Choice<float>> choices_;
};

class RouteRun : public RouterRun {
 public:
  using RouterRun::RouterRun;

  void run() {
    const Problem& p = case_.problem;
    const BlockView ids =
        blocks().add_view("ids", tensor2(nullptr, case_.index_dtype, p.tokens, p.top_k));
    const Tensor line = tensor2(nullptr, DType::kF32, p.tokens, p.top_k);
    const BlockView weights = blocks().add_view("weights", line);
    const BlockView dweights = blocks().add_view("dweights", line);
    const RouteOptions on_host = options_on(&BlockView::on_host);
    const RouteOptions options = options_on(&BlockView::on_device);

    const Matrix<std::int64_t> chosen = chosen_ids();
    Matrix<double> same(p.tokens, p.top_k);
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      std::copy(choices_[t].weights.begin(), choices_[t].weights.end(), same.row(t));
    }
    run_twice("route",
              {exactly("ids", ids, oracle::cast<double>(chosen)),
               {"weights", weights, oracle::route_weights(on_host, values_, chosen),
                std::move(same), p.tokens}},
              {}, [&] {
                implementation_.route(options, logits_.on_device(), ids.on_device(),
                                      weights.on_device());
              });

    Matrix<double> gradient = fill_dweights(chosen, dweights);
    run_twice("route_backward",
              {expect_dlogits(
                  oracle::route_backward(on_host, values_, chosen, gradient),
                  oracle::route_backward(on_host, values_, chosen, gradient, Precision::kSame))},
              {}, [&] {
                implementation_.route_backward(options, logits_.on_device(), ids.on_device(),
                                               dweights.on_device(), dlogits_.on_device());
              });
  }

 private:
  // Normal values; NaN in empty slots, which no result may depend on.
  Matrix<double> fill_dweights(const Matrix<std::int64_t>& chosen,
                               const BlockView& dweights) const {
    fill_normal(case_, 2, dweights);
    Matrix<double> gradient(chosen.rows, chosen.cols);
    gradient.values = oracle::read(dweights.on_host());
    for (std::size_t i = 0; i < gradient.values.size(); ++i) {
      if (chosen.values[i] >= 0) continue;
      gradient.values[i] = 0.0;
      oracle::store(dweights.on_host().data, DType::kF32, static_cast<std::int64_t>(i), kNaN);
    }
    return gradient;
  }
};

class RoundRun : public RouterRun {
 public:
  RoundRun(const Case& c, const Implementation& implementation, CaseResult& result)
      : RouterRun(c, implementation, result),
        pairs_(reference::round_tokens(round_options(&BlockView::on_host), rows_,
                                       static_cast<int>(c.problem.experts))) {}

  void run() {
    const Problem& p = case_.problem;
    const RoundOptions options = round_options(&BlockView::on_device);
    const std::int64_t capacity = round_capacity(options, p.tokens, p.experts);
    const auto add_view = [&](const char* what, DType dtype, std::int64_t count) {
      return blocks().add_view(what, tensor1(nullptr, dtype, count));
    };
    const BlockView token = add_view("token", DType::kI32, capacity);
    const BlockView expert = add_view("expert", DType::kI32, capacity);
    const BlockView weight = add_view("weight", DType::kF32, capacity);
    const BlockView offsets = add_view("offsets", DType::kI64, p.experts + 1);
    const BlockView dweight = add_view("dweight", DType::kF32, capacity);
    Block& scratch =
        blocks().add("scratch", implementation_.round_scratch_bytes(options, p.tokens, p.experts));
    const Pairs pairs = {token.on_device(), expert.on_device(), weight.on_device(),
                         offsets.on_device()};
    const Buffer scratch_buffer = {scratch.device(), scratch.bytes()};

    run_twice(
        "token_round",
        {exactly("offsets", offsets, column(pairs_.offsets, p.experts + 1, 0)),
         exactly("token", token, column(pairs_.token, capacity, -1)),
         exactly("expert", expert, column(pairs_.expert, capacity, p.experts)),
         {"weight", weight, exact_weights(capacity), column(pairs_.weight, capacity, 0), capacity}},
        {&scratch},
        [&] { implementation_.token_round(options, logits_.on_device(), pairs, scratch_buffer); });

    const Matrix<double> gradient = fill_dweight(dweight);
    const auto dlogits = [&](Precision precision) {
      return oracle::round_backward(options_on(&BlockView::on_host), values_, chosen_ids(),
                                    gradient, precision);
    };
    run_twice("token_round_backward",
              {expect_dlogits(dlogits(Precision::kExact), dlogits(Precision::kSame))}, {&scratch},
              [&] {
                implementation_.token_round_backward(options, logits_.on_device(), pairs,
                                                     dweight.on_device(), dlogits_.on_device(),
                                                     scratch_buffer);
              });
  }

 private:
  RoundOptions round_options(Tensor (BlockView::*where)() const) const {
    RoundOptions options;
    options.route = options_on(where);
    options.tile = case_.router.tile;
    options.mode = case_.router.mode;
    options.seed = 17;
    return options;
  }

  // A list as a matrix of one column; elements past its end are `rest`.
  template <class T>
  static Matrix<double> column(const std::vector<T>& values, std::int64_t count,
                               std::int64_t rest) {
    Matrix<double> m(count, 1);
    std::fill(m.values.begin(), m.values.end(), static_cast<double>(rest));
    std::copy(values.begin(), values.end(), m.values.begin());
    return m;
  }

  // Chosen pairs keep route()'s weight, added ones have p * scale.
  Matrix<double> exact_weights(std::int64_t capacity) const {
    const RouteOptions options = options_on(&BlockView::on_host);
    const Matrix<std::int64_t> ids = chosen_ids();
    const Matrix<double> chosen = oracle::route_weights(options, values_, ids);
    RouteOptions all = options;
    all.top_k = case_.problem.experts;
    all.renormalize = 0;
    if (all.score == ScoreMode::kSoftmaxAfterTopK) all.score = ScoreMode::kSoftmaxBeforeTopK;
    Matrix<std::int64_t> every(ids.rows, case_.problem.experts);
    for (std::size_t i = 0; i < every.values.size(); ++i) {
      every.values[i] = static_cast<std::int64_t>(i) % every.cols;
    }
    const Matrix<double> added = oracle::route_weights(all, values_, every);
    Matrix<double> weights(capacity, 1);
    for (std::size_t i = 0; i < pairs_.token.size(); ++i) {
      const std::int64_t t = pairs_.token[i];
      const std::int64_t* slots = ids.row(t);
      const std::int64_t* slot = std::find(slots, slots + ids.cols, pairs_.expert[i]);
      weights.values[i] =
          slot == slots + ids.cols ? added(t, pairs_.expert[i]) : chosen(t, slot - slots);
    }
    return weights;
  }

  // Normal values; NaN where there is no pair.
  Matrix<double> fill_dweight(const BlockView& dweight) const {
    fill_normal(case_, 2, dweight);
    const std::vector<double> given = oracle::read(dweight.on_host());
    Matrix<double> gradient(case_.problem.tokens, case_.problem.experts);
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (i < pairs_.token.size()) {
        gradient(pairs_.token[i], pairs_.expert[i]) = given[i];
      } else {
        oracle::store(dweight.on_host().data, DType::kF32, static_cast<std::int64_t>(i), kNaN);
      }
    }
    return gradient;
  }

  reference::PairList<float> pairs_;
};

}  // namespace

void run_route(const Case& c, const Implementation& implementation, CaseResult& result) {
  RouteRun(c, implementation, result).run();
}

void run_token_round(const Case& c, const Implementation& implementation, CaseResult& result) {
  RoundRun(c, implementation, result).run();
}

}  // namespace sonicmoe::verify
