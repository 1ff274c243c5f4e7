/* One MoE layer through the C interface alone: forward and backward against plain loops, refusals,
 * and the rule of struct sizes. Prints what differs; the exit code is 1 if anything does. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sonicmoe/c_api.h"

enum { T = 5, D = 3, N = 2, E = 4, K = 2 };

static int failures = 0;

static void expect(int holds, const char* what) {
  if (holds) return;
  ++failures;
  printf("FAILED: %s (last error: %s)\n", what, smoe_last_error());
}

static void expect_near(const float* got, const double* want, int count, const char* what) {
  int i;
  for (i = 0; i < count; ++i) {
    if (!(fabs((double)got[i] - want[i]) <= 1e-5 * (1.0 + fabs(want[i])))) {
      ++failures;
      printf("FAILED: %s[%d] is %.8g, expected %.8g\n", what, i, (double)got[i], want[i]);
    }
  }
}

static void expect_sentence(smoe_status got, smoe_status want, const char* sentence) {
  if (got == want && strcmp(smoe_last_error(), sentence) == 0) return;
  ++failures;
  printf("FAILED: status %d, sentence \"%s\"; expected %d, \"%s\"\n", (int)got, smoe_last_error(),
         (int)want, sentence);
}

static smoe_tensor dense(const void* data, int32_t dtype, int32_t rank, int64_t n0, int64_t n1,
                         int64_t n2) {
  smoe_tensor t;
  memset(&t, 0, sizeof(t));
  t.size = sizeof(t);
  t.dtype = dtype;
  t.rank = rank;
  t.data = (void*)data;
  t.shape[0] = n0;
  t.shape[1] = n1;
  t.shape[2] = n2;
  t.stride[rank - 1] = 1;
  if (rank > 1) t.stride[rank - 2] = t.shape[rank - 1];
  if (rank > 2) t.stride[0] = n1 * n2;
  return t;
}

/* Small numbers without a pattern, the same on every run. */
static float pseudo_random(void) {
  static uint32_t state = 12345u;
  state = state * 1664525u + 1013904223u;
  return (float)((double)(state >> 8) / 16777216.0 - 0.5);
}

static void fill(float* values, int count) {
  int i;
  for (i = 0; i < count; ++i) values[i] = pseudo_random();
}

/* The memory a call borrows, aligned as the library asks. */
static void* aligned_block(int64_t bytes, void** to_free) {
  const size_t size = (size_t)bytes + 256;
  unsigned char* raw = (unsigned char*)malloc(size);
  if (raw == NULL) exit(99);
  memset(raw, 0xFF, size);
  *to_free = raw;
  return raw + (256 - (uintptr_t)raw % 256) % 256;
}

typedef struct layer {
  float x[T * D], gate[E * N * D], up[E * N * D], down[E * D * N], s[T * K], dout[T * D];
  int32_t ids[T * K];
} layer;

typedef struct result {
  double out[T * D], dx[T * D], ds[T * K], dgate[E * N * D], dup[E * N * D], ddown[E * D * N];
} result;

static double dot(const float* a, const float* b) {
  double sum = 0;
  int i;
  for (i = 0; i < D; ++i) sum += (double)a[i] * b[i];
  return sum;
}

/* One slot of one token: what it adds to the output and to every gradient. */
static void add_slot(const layer* l, int slot, result* r) {
  const int t = slot / K, e = l->ids[slot];
  const float* x = l->x + t * D;
  int i, j;
  if (e < 0 || e >= E) return;
  for (j = 0; j < N; ++j) {
    const int row = (e * N + j) * D;
    const double g = dot(x, l->gate + row), u = dot(x, l->up + row);
    const double sigmoid = 1.0 / (1.0 + exp(-g)), silu = g * sigmoid;
    const double slope = sigmoid * (1.0 + g * (1.0 - sigmoid));
    double da = 0;
    for (i = 0; i < D; ++i) {
      const int w = (e * D + i) * N + j;
      r->out[t * D + i] += l->s[slot] * l->down[w] * silu * u;
      r->ddown[w] += l->s[slot] * l->dout[t * D + i] * silu * u;
      da += (double)l->dout[t * D + i] * l->down[w];
    }
    r->ds[slot] += da * silu * u;
    for (i = 0; i < D; ++i) {
      const double dg = l->s[slot] * da * slope * u, du = l->s[slot] * da * silu;
      r->dgate[row + i] += dg * x[i];
      r->dup[row + i] += du * x[i];
      r->dx[t * D + i] += dg * l->gate[row + i] + du * l->up[row + i];
    }
  }
}

static smoe_problem make_problem(void) {
  smoe_problem p;
  memset(&p, 0, sizeof(p));
  p.size = sizeof(p);
  p.tokens = T;
  p.hidden = D;
  p.width = N;
  p.experts = E;
  p.top_k = K;
  return p;
}

static smoe_sizes sizes_of(const smoe_problem* p, int32_t pass) {
  smoe_sizes s;
  memset(&s, 0, sizeof(s));
  s.size = sizeof(s);
  expect(smoe_moe_sizes(p, pass, NULL, &s) == SMOE_OK, "smoe_moe_sizes");
  return s;
}

/* The tensors of a layer, with the structs that point to them. */
typedef struct views {
  smoe_tensor x, ids, s, gate, up, down, out;
  smoe_routing routing;
  smoe_weights weights;
} views;

static void make_views(views* v, const layer* l, const float* out) {
  memset(v, 0, sizeof(*v));
  v->x = dense(l->x, SMOE_F32, 2, T, D, 0);
  v->ids = dense(l->ids, SMOE_I32, 2, T, K, 0);
  v->s = dense(l->s, SMOE_F32, 2, T, K, 0);
  v->gate = dense(l->gate, SMOE_F32, 3, E, N, D);
  v->up = dense(l->up, SMOE_F32, 3, E, N, D);
  v->down = dense(l->down, SMOE_F32, 3, E, D, N);
  v->out = dense(out, SMOE_F32, 2, T, D, 0);
  v->routing.size = sizeof(v->routing);
  v->routing.ids = &v->ids;
  v->routing.weights = &v->s;
  v->weights.size = sizeof(v->weights);
  v->weights.gate = &v->gate;
  v->weights.up = &v->up;
  v->weights.down = &v->down;
}

static void make_layer(layer* l) {
  static const int32_t ids[T * K] = {0, 3, 3, 1, -1, 0, 1, 0, 3, E}; /* expert 2 gets no token */
  fill(l->x, T * D);
  fill(l->gate, E * N * D);
  fill(l->up, E * N * D);
  fill(l->down, E * D * N);
  fill(l->s, T * K);
  fill(l->dout, T * D);
  memcpy(l->ids, ids, sizeof(ids));
  l->s[4] = l->s[9] = (float)NAN; /* weights of empty slots never reach an output */
}

/* H of the first rows: expert 0 has tokens 0, 2 and 3, in this order. */
static void test_h_views(const layer* l, const views* v, void* h, int64_t bytes) {
  static const int token[3] = {0, 2, 3};
  smoe_problem p = make_problem();
  smoe_weights weights = v->weights;
  smoe_tensor gate = dense(NULL, 0, 1, 0, 0, 0), up = gate;
  int row, j;
  expect(smoe_h_views(&p, &weights, h, bytes, NULL, &gate, &up) == SMOE_OK, "smoe_h_views");
  expect(gate.rank == 2 && gate.shape[0] == T * K && gate.shape[1] == N, "the shape of gate");
  expect(up.rank == 2 && up.shape[0] == T * K && up.shape[1] == N, "the shape of up");
  for (row = 0; row < 3; ++row) {
    for (j = 0; j < N; ++j) {
      const double g = dot(l->x + token[row] * D, l->gate + j * D);
      const double u = dot(l->x + token[row] * D, l->up + j * D);
      expect_near((float*)gate.data + row * gate.stride[0] + j * gate.stride[1], &g, 1, "gate");
      expect_near((float*)up.data + row * up.stride[0] + j * up.stride[1], &u, 1, "up");
    }
  }
  expect(smoe_h_views(&p, &weights, NULL, 0, NULL, &gate, &up) == SMOE_OK && gate.data == NULL &&
             up.data == NULL && up.shape[1] == N,
         "views without data");
  expect(smoe_h_views(&p, &weights, h, bytes - 1, NULL, &gate, &up) == SMOE_WORKSPACE_TOO_SMALL,
         "an h that is too small");
  expect_sentence(smoe_h_views(&p, &weights, h, bytes, NULL, NULL, &up), SMOE_INVALID_ARGUMENT,
                  "gate is null, must not be null");
  p.activation = SMOE_SILU;
  weights.gate = NULL;
  expect(smoe_h_views(&p, &weights, h, bytes, NULL, &gate, &up) == SMOE_OK && gate.rank == 0 &&
             gate.data == NULL && up.data == h,
         "no gate");
}

static void test_forward_and_backward(void) {
  static layer l;
  static result want;
  static float out[T * D], dx[T * D], ds[T * K], dgate[E * N * D], dup[E * N * D], ddown[E * D * N];
  const smoe_problem p = make_problem();
  smoe_forward_args f;
  smoe_backward_args b;
  smoe_sizes forward, backward;
  smoe_tensor t_dout, t_dx, t_ds, t_dgate, t_dup, t_ddown;
  smoe_weights grads;
  views v;
  void* block[4];
  int slot;

  make_layer(&l);
  for (slot = 0; slot < T * K; ++slot) add_slot(&l, slot, &want);
  make_views(&v, &l, out);
  forward = sizes_of(&p, SMOE_FORWARD);
  backward = sizes_of(&p, SMOE_BACKWARD);

  memset(&f, 0, sizeof(f));
  f.size = sizeof(f);
  f.x = &v.x;
  f.routing = &v.routing;
  f.weights = &v.weights;
  f.out = &v.out;
  f.h = aligned_block(f.h_bytes = forward.h_bytes, &block[0]);
  f.saved = aligned_block(f.saved_bytes = forward.saved_bytes, &block[1]);
  f.scratch = aligned_block(f.scratch_bytes = forward.scratch_bytes, &block[2]);
  expect(smoe_moe_forward(&p, &f, NULL) == SMOE_OK, "smoe_moe_forward");
  expect_near(out, want.out, T * D, "out");
  test_h_views(&l, &v, f.h, f.h_bytes);

  t_dout = dense(l.dout, SMOE_F32, 2, T, D, 0);
  t_dx = dense(dx, SMOE_F32, 2, T, D, 0);
  t_ds = dense(ds, SMOE_F32, 2, T, K, 0);
  t_dgate = dense(dgate, SMOE_F32, 3, E, N, D);
  t_dup = dense(dup, SMOE_F32, 3, E, N, D);
  t_ddown = dense(ddown, SMOE_F32, 3, E, D, N);
  memset(&grads, 0, sizeof(grads));
  grads.size = sizeof(grads);
  grads.gate = &t_dgate;
  grads.up = &t_dup;
  grads.down = &t_ddown;
  memset(&b, 0, sizeof(b));
  b.size = sizeof(b);
  b.x = &v.x;
  b.routing = &v.routing;
  b.weights = &v.weights;
  b.dout = &t_dout;
  b.h = f.h;
  b.h_bytes = f.h_bytes;
  b.saved = f.saved;
  b.saved_bytes = f.saved_bytes;
  b.scratch = aligned_block(b.scratch_bytes = backward.scratch_bytes, &block[3]);
  b.dx = &t_dx;
  b.dweights = &t_ds;
  b.grads = &grads;
  expect(smoe_moe_backward(&p, &b, NULL) == SMOE_OK, "smoe_moe_backward");
  expect_near(dx, want.dx, T * D, "dx");
  expect_near(ds, want.ds, T * K, "dweights");
  expect_near(dgate, want.dgate, E * N * D, "dgate");
  expect_near(dup, want.dup, E * N * D, "dup");
  expect_near(ddown, want.ddown, E * D * N, "ddown");
  b.size = (uint32_t)offsetof(smoe_backward_args, kept_x);
  expect(smoe_moe_backward(&p, &b, NULL) == SMOE_OK, "a struct of the version before kept_x");
  b.size = sizeof(b);
  b.kept_x = out;
  expect_sentence(smoe_moe_backward(&p, &b, NULL), SMOE_INVALID_ARGUMENT,
                  "kept_x is given, must be NULL: only an exchange keeps rows");
  for (slot = 0; slot < 4; ++slot) free(block[slot]);
}

static void test_refusals(void) {
  static layer l;
  static float out[T * D];
  smoe_problem p = make_problem();
  smoe_forward_args f;
  smoe_exec exec;
  smoe_device* device = NULL;
  smoe_device_options options;
  views v;
  int64_t capacity = -5;
  int i;

  make_layer(&l);
  for (i = 0; i < T * D; ++i) out[i] = 77.0f;
  make_views(&v, &l, out);
  memset(&f, 0, sizeof(f));
  f.size = sizeof(f);
  f.x = &v.x;
  f.routing = &v.routing;
  f.weights = &v.weights;
  f.out = &v.out;

  expect_sentence(smoe_moe_forward(NULL, &f, NULL), SMOE_INVALID_ARGUMENT,
                  "problem is null, must not be null");
  expect_sentence(smoe_moe_forward(&p, NULL, NULL), SMOE_INVALID_ARGUMENT,
                  "args is null, must not be null");
  f.x = NULL;
  expect_sentence(smoe_moe_forward(&p, &f, NULL), SMOE_INVALID_ARGUMENT,
                  "x is null, must not be null");
  f.x = &v.x;
  v.x.reserved = 3;
  expect_sentence(smoe_moe_forward(&p, &f, NULL), SMOE_INVALID_ARGUMENT,
                  "x.reserved is 3, must be 0");
  v.x.reserved = 0;
  v.x.dtype = SMOE_BF16;
  expect_sentence(smoe_moe_forward(&p, &f, NULL), SMOE_INVALID_ARGUMENT, "x is bf16, must be f32");
  v.x.dtype = SMOE_F32;
  f.kept_x_bytes = 8;
  expect_sentence(smoe_moe_forward(&p, &f, NULL), SMOE_INVALID_ARGUMENT,
                  "kept_x is given, must be NULL: only an exchange keeps rows");
  f.kept_x_bytes = 0;
  p.top_k = 0;
  expect_sentence(smoe_row_capacity(&p, &capacity), SMOE_INVALID_ARGUMENT,
                  "top_k is 0, must be at least 1");
  expect(capacity == -5, "a refused call writes nothing");
  p.top_k = INT64_C(1) << 40;
  expect(smoe_row_capacity(&p, &capacity) == SMOE_OUT_OF_RANGE, "C >= 2^31 is out of range");
  p.top_k = K;
  expect_sentence(smoe_row_capacity(&p, NULL), SMOE_INVALID_ARGUMENT,
                  "capacity is null, must not be null");

  memset(&exec, 0, sizeof(exec));
  exec.size = sizeof(exec);
  exec.num_threads = -1;
  expect_sentence(smoe_moe_forward(&p, &f, &exec), SMOE_INVALID_ARGUMENT,
                  "num_threads is -1, must be at least 0");
  expect_sentence(smoe_device_open(-1, &device), SMOE_INVALID_ARGUMENT,
                  "ordinal is -1, must be at least 0");
  expect(smoe_device_open(0, NULL) == SMOE_INVALID_ARGUMENT, "device_open(0, NULL)");
  expect(smoe_device_close(NULL) == SMOE_OK, "device_close(NULL)");
  expect_sentence(smoe_device_open_with(NULL, &device), SMOE_INVALID_ARGUMENT,
                  "options is null, must not be null");
  memset(&options, 0, sizeof(options));
  options.size = sizeof(options);
  expect(smoe_device_open_with(&options, NULL) == SMOE_INVALID_ARGUMENT, "open_with(, NULL)");
  options.ordinal = -1;
  expect_sentence(smoe_device_open_with(&options, &device), SMOE_INVALID_ARGUMENT,
                  "ordinal is -1, must be at least 0");
  options.ordinal = 0;
  options.engine = "abacus";
  expect(smoe_device_open_with(&options, &device) ==
             (smoe_engine_name(0) == NULL ? SMOE_UNSUPPORTED : SMOE_INVALID_ARGUMENT),
         "an unknown engine is refused");
  expect(smoe_engine_name(0) == NULL || strstr(smoe_last_error(), smoe_engine_name(0)) != NULL,
         "the refusal names the engines of the build");
  expect(smoe_engine_name(1000) == NULL && smoe_engine_name(-1) == NULL, "no such engine");
  expect(smoe_device_engine(NULL) == NULL, "no device has no engine");
  expect(smoe_device_engine_note(NULL) == NULL, "no device has no note");
  for (i = 0; i < T * D; ++i) expect(out[i] == 77.0f, "a refused forward leaves out alone");
}

static void test_struct_sizes(void) {
  struct {
    smoe_problem problem;
    unsigned char appended[24];
  } newer;
  const smoe_problem p = make_problem();
  smoe_sizes sizes = sizes_of(&p, SMOE_FORWARD);
  int64_t capacity = 0;
  char sentence[200];

  sizes.reserved = 3;
  expect_sentence(smoe_moe_sizes(&p, SMOE_FORWARD, NULL, &sizes), SMOE_INVALID_ARGUMENT,
                  "sizes.reserved is 3, must be 0");

  memset(&newer, 0, sizeof(newer));
  newer.problem = make_problem();
  newer.problem.size = sizeof(newer);
  expect(smoe_row_capacity(&newer.problem, &capacity) == SMOE_OK && capacity == T * K,
         "a larger struct with zero bytes");
  newer.appended[5] = 1;
  sprintf(sentence, "problem uses byte %d, must be zero from byte %d on in version %s",
          (int)sizeof(smoe_problem) + 5, (int)sizeof(smoe_problem), smoe_version());
  expect_sentence(smoe_row_capacity(&newer.problem, &capacity), SMOE_UNSUPPORTED, sentence);
  newer.problem.size = 0;
  sprintf(sentence, "problem.size is 0, must be sizeof the struct, %d", (int)sizeof(smoe_problem));
  expect_sentence(smoe_row_capacity(&newer.problem, &capacity), SMOE_INVALID_ARGUMENT, sentence);
}

static void test_routing(void) {
  const float logits[2 * 3] = {0.0f, 2.0f, 1.0f, 3.0f, 0.0f, -1.0f};
  int64_t ids[2 * 2] = {-9, -9, -9, -9};
  float weights[2 * 2] = {-9.0f, -9.0f, -9.0f, -9.0f};
  const smoe_tensor t_logits = dense(logits, SMOE_F32, 2, 2, 3, 0);
  const smoe_tensor t_ids = dense(ids, SMOE_I64, 2, 2, 2, 0);
  const smoe_tensor t_weights = dense(weights, SMOE_F32, 2, 2, 2, 0);
  const double first = 1.0 / (1.0 + exp(-1.0)), second = 1.0 / (1.0 + exp(-3.0));
  const double want[4] = {first, 1.0 - first, second, 1.0 - second};
  smoe_route_options options;
  smoe_round_options rounding;
  int64_t rows = 0;

  memset(&options, 0, sizeof(options));
  options.size = sizeof(options);
  options.top_k = 2;
  expect(smoe_route(&options, &t_logits, &t_ids, &t_weights, NULL) == SMOE_OK, "smoe_route");
  expect(ids[0] == 1 && ids[1] == 2 && ids[2] == 0 && ids[3] == 1, "ids of smoe_route");
  expect_near(weights, want, 4, "weights of smoe_route");

  memset(&rounding, 0, sizeof(rounding));
  rounding.size = sizeof(rounding);
  rounding.route = &options;
  expect(smoe_round_capacity(&rounding, 100, 3, &rows) == SMOE_OK && rows == 200 + 3 * 64,
         "the default tile is 128");
  options.top_k = 9;
  expect_sentence(smoe_route(&options, &t_logits, &t_ids, &t_weights, NULL), SMOE_INVALID_ARGUMENT,
                  "top_k is 9, must be at most E = 3");
}

/* Scratch came later than these calls: the old forms stay, the new ones ask for nothing here. */
static void test_scratch(void) {
  const float logits[3 * 2] = {0.0f, 2.0f, 1.0f, 3.0f, 0.0f, -1.0f};
  const float a[2 * 2] = {1.0f, 2.0f, 3.0f, 4.0f}, b[2] = {1.0f, 10.0f};
  const int64_t offsets[2] = {0, 2};
  int32_t token[2] = {-9, -9}, expert[2] = {-9, -9};
  float weight[2] = {-9.0f, -9.0f}, d[2] = {0.0f, 0.0f}, values[2] = {-9.0f, -9.0f};
  int64_t ends[3] = {-9, -9, -9}, counts[2] = {-9, -9}, ids[3] = {0, 1, 1}, bytes = -1;
  const smoe_tensor t_logits = dense(logits, SMOE_F32, 2, 3, 2, 0);
  const smoe_tensor t_token = dense(token, SMOE_I32, 1, 2, 0, 0);
  const smoe_tensor t_expert = dense(expert, SMOE_I32, 1, 2, 0, 0);
  const smoe_tensor t_weight = dense(weight, SMOE_F32, 1, 2, 0, 0);
  const smoe_tensor t_ends = dense(ends, SMOE_I64, 1, 3, 0, 0);
  const smoe_tensor t_ids = dense(ids, SMOE_I64, 2, 3, 1, 0);
  const smoe_tensor t_values = dense(values, SMOE_F32, 1, 2, 0, 0);
  const smoe_tensor t_counts = dense(counts, SMOE_I64, 1, 2, 0, 0);
  const smoe_tensor t_a = dense(a, SMOE_F32, 2, 2, 2, 0);
  const smoe_tensor t_b = dense(b, SMOE_F32, 3, 1, 1, 2);
  const smoe_tensor t_d = dense(d, SMOE_F32, 2, 2, 1, 0);
  const smoe_tensor t_offsets = dense(offsets, SMOE_I64, 1, 2, 0, 0);
  smoe_pairs pairs;
  smoe_route_options options;
  smoe_grouped_gemm_args gemm;

  memset(&pairs, 0, sizeof(pairs));
  pairs.size = sizeof(pairs);
  pairs.token = &t_token;
  pairs.expert = &t_expert;
  pairs.weight = &t_weight;
  pairs.offsets = &t_ends;
  expect(smoe_expert_choice_scratch_bytes(3, 2, NULL, &bytes) == SMOE_OK && bytes == 0,
         "expert choice needs no scratch here");
  expect(smoe_expert_choice_in_scratch(&t_logits, 1, &pairs, NULL, 0, NULL) == SMOE_OK &&
             token[0] == 2 && token[1] == 0,
         "smoe_expert_choice_in_scratch");

  memset(&options, 0, sizeof(options));
  options.size = sizeof(options);
  options.top_k = 1;
  bytes = -1;
  expect(smoe_router_losses_scratch_bytes(3, 2, NULL, &bytes) == SMOE_OK && bytes == 0,
         "the losses need no scratch here");
  expect(smoe_router_losses_in_scratch(&options, &t_logits, &t_ids, &t_values, &t_counts, NULL, 0,
                                       NULL) == SMOE_OK &&
             counts[0] == 1 && counts[1] == 2,
         "smoe_router_losses_in_scratch");

  memset(&gemm, 0, sizeof(gemm));
  gemm.size = offsetof(smoe_grouped_gemm_args, scratch); /* as the first version had it */
  gemm.a = &t_a;
  gemm.b = &t_b;
  gemm.d = &t_d;
  gemm.offsets = &t_offsets;
  gemm.scratch_bytes = -77; /* not read */
  expect(smoe_grouped_gemm(&gemm, NULL) == SMOE_OK && d[0] == 21.0f && d[1] == 43.0f,
         "a struct of the first version");
  bytes = -1;
  expect(smoe_grouped_gemm_scratch_bytes(2, 1, NULL, &bytes) == SMOE_OK && bytes == 0,
         "the grouped GEMM needs no scratch here");
  expect_sentence(smoe_grouped_gemm_scratch_bytes(2, 0, NULL, &bytes), SMOE_INVALID_ARGUMENT,
                  "experts is 0, must be at least 1");
  gemm.reserved = 3;
  expect_sentence(smoe_grouped_gemm(&gemm, NULL), SMOE_INVALID_ARGUMENT,
                  "args.reserved is 3, must be 0");
  gemm.reserved = 0;
  gemm.size = (uint32_t)offsetof(smoe_grouped_gemm_args, scratch) - 1;
  expect(smoe_grouped_gemm(&gemm, NULL) == SMOE_INVALID_ARGUMENT, "a struct of no version");
}

/* Without a GPU: the functions exist and refuse. */
static void test_exchange(void) {
  smoe_exchange_options options;
  int64_t bytes = -1;
  smoe_exchange* exchange = NULL;

  memset(&options, 0, sizeof(options));
  options.size = sizeof(options);
  options.dtype = SMOE_BF16;
  options.max_tokens = options.max_slots = options.hidden = 8;
  expect_sentence(smoe_exchange_bytes(&options, NULL, &bytes), SMOE_INVALID_ARGUMENT,
                  "shape.ranks is 0, must be at least 1");
  options.ranks = 2;
  expect_sentence(smoe_exchange_open(&options, NULL, &exchange), SMOE_UNSUPPORTED,
                  "exchange_bytes is not served by the backend cpu, must run on another");
  expect_sentence(smoe_exchange_check(NULL, NULL), SMOE_INVALID_ARGUMENT,
                  "exchange is null, must not be null");
  expect_sentence(smoe_exchange_kept_bytes(NULL, NULL, NULL, NULL), SMOE_INVALID_ARGUMENT,
                  "bytes is null, must not be null");
  expect_sentence(smoe_exchange_kept_bytes(NULL, NULL, NULL, &bytes), SMOE_INVALID_ARGUMENT,
                  "exchange is null, must not be null");
}

int main(void) {
  expect(strcmp(smoe_last_error(), "") == 0, "no error before the first call");
  expect(strcmp(smoe_version(), "0.1.0") == 0, "smoe_version");
  expect(smoe_activation_is_gated(SMOE_REGLU) == 1, "reglu is gated");
  expect(smoe_activation_is_gated(SMOE_SILU) == 0, "silu is not gated");
  expect(smoe_activation_is_gated(SMOE_RELU2) == 0, "relu2 is not gated");
  expect(smoe_activation_is_gated(SMOE_SWIGLU_CLAMPED) == 1, "swiglu_clamped is gated");
  expect(smoe_activation_is_gated(SMOE_SITU) == 1, "situ is gated");
  expect(smoe_activation_is_gated(SMOE_SWIGLU_STEP) == 1, "swiglu_step is gated");
  expect(smoe_activation_is_gated(SMOE_SWIGLU_STEP + 1) == -1, "an unknown activation");
  test_forward_and_backward();
  test_refusals();
  test_struct_sizes();
  test_routing();
  test_scratch();
  test_exchange();
  if (failures == 0) puts("every check holds");
  return failures != 0;
}
