/* One MoE layer from C: route, forward, backward. Exits 0 when <dW2, W2> = <dO, O>, as it must be
 * for an output that is linear in W2. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "sonicmoe/c_api.h"

enum { T = 256, D = 64, N = 32, E = 16, K = 4 };

/* Every call returns a status. The library keeps the sentence of the last error for each thread. */
static void check(smoe_status status) {
  if (status == SMOE_OK) return;
  fprintf(stderr, "sonicmoe: %s\n", smoe_last_error());
  exit(1);
}

static smoe_tensor view(void* data, int32_t dtype, int64_t n0, int64_t n1, int64_t n2) {
  smoe_tensor t = {.size = sizeof t, .dtype = dtype, .rank = n2 > 0 ? 3 : 2, .data = data};
  t.shape[0] = n0, t.shape[1] = n1, t.shape[2] = n2;
  t.stride[0] = n2 > 0 ? n1 * n2 : n1;
  t.stride[1] = n2 > 0 ? n2 : 1;
  t.stride[2] = n2 > 0;
  return t;
}

/* The memory that main() frees at its end. */
static void* owned[16];
static int owned_count = 0;

static void* allocate(size_t bytes) {
  void* memory = malloc(bytes);
  if (memory == NULL) exit(2);
  owned[owned_count++] = memory;
  return memory;
}

static float* random_values(int64_t count) {
  float* values = allocate((size_t)count * sizeof *values);
  int64_t i;
  for (i = 0; i < count; ++i) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return values;
}

/* Memory that the library uses for one step, aligned as the library requires. */
static void* lend(int64_t bytes) {
  char* memory = allocate((size_t)bytes + 256);
  return memory + (256 - (uintptr_t)memory % 256) % 256;
}

static double inner_product(const float* a, const float* b, int64_t count) {
  double sum = 0;
  int64_t i;
  for (i = 0; i < count; ++i) sum += (double)a[i] * b[i];
  return sum;
}

int main(void) {
  static int64_t ids[T * K];
  static float scores[T * K], dscores[T * K], out[T * D], dx[T * D];
  static float dw1[E * 2 * N * D], dw2[E * D * N];
  float *x = random_values(T * D), *dout = random_values(T * D), *logits = random_values(T * E);
  float *w1 = random_values(E * 2 * N * D), *w2 = random_values(E * D * N);

  smoe_tensor tx = view(x, SMOE_F32, T, D, 0), tdout = view(dout, SMOE_F32, T, D, 0);
  smoe_tensor tout = view(out, SMOE_F32, T, D, 0), tdx = view(dx, SMOE_F32, T, D, 0);
  smoe_tensor tlogits = view(logits, SMOE_F32, T, E, 0), tids = view(ids, SMOE_I64, T, K, 0);
  smoe_tensor ts = view(scores, SMOE_F32, T, K, 0), tds = view(dscores, SMOE_F32, T, K, 0);
  /* W1 (E, 2n, d) holds [gate; up]: two views of one tensor, by stride. */
  smoe_tensor gate = view(w1, SMOE_F32, E, N, D), up = view(w1 + N * D, SMOE_F32, E, N, D);
  smoe_tensor dgate = view(dw1, SMOE_F32, E, N, D), dup = view(dw1 + N * D, SMOE_F32, E, N, D);
  smoe_tensor down = view(w2, SMOE_F32, E, D, N), ddown = view(dw2, SMOE_F32, E, D, N);
  gate.stride[0] = up.stride[0] = dgate.stride[0] = dup.stride[0] = 2 * N * D;

  /* Structs start with their size. Fields that are not named are zero, which means the default. */
  smoe_problem problem = {.size = sizeof problem, .tokens = T, .hidden = D, .width = N};
  problem.experts = E, problem.top_k = K;
  smoe_route_options options = {.size = sizeof options, .top_k = K};
  smoe_routing routing = {.size = sizeof routing, .ids = &tids, .weights = &ts};
  smoe_weights weights = {.size = sizeof weights, .gate = &gate, .up = &up, .down = &down};
  smoe_weights grads = {.size = sizeof grads, .gate = &dgate, .up = &dup, .down = &ddown};
  smoe_sizes forward = {.size = sizeof forward}, backward = {.size = sizeof backward};
  check(smoe_moe_sizes(&problem, SMOE_FORWARD, NULL, &forward));
  check(smoe_moe_sizes(&problem, SMOE_BACKWARD, NULL, &backward));

  smoe_forward_args f = {.size = sizeof f, .x = &tx, .routing = &routing, .weights = &weights};
  f.out = &tout;
  f.h = lend(f.h_bytes = forward.h_bytes);
  f.saved = lend(f.saved_bytes = forward.saved_bytes);
  f.scratch = lend(f.scratch_bytes = forward.scratch_bytes);
  smoe_backward_args b = {.size = sizeof b, .x = &tx, .routing = &routing, .weights = &weights};
  b.dout = &tdout, b.dx = &tdx, b.dweights = &tds, b.grads = &grads;
  b.h = f.h, b.h_bytes = f.h_bytes;
  b.saved = f.saved, b.saved_bytes = f.saved_bytes;
  b.scratch = lend(b.scratch_bytes = backward.scratch_bytes);

  check(smoe_route(&options, &tlogits, &tids, &ts, NULL));
  check(smoe_moe_forward(&problem, &f, NULL));
  check(smoe_moe_backward(&problem, &b, NULL));

  const double left = inner_product(dw2, w2, E * D * N), right = inner_product(dout, out, T * D);
  printf("kept for backward: %lld bytes; <dW2, W2> = %f, <dO, O> = %f\n",
         (long long)(f.h_bytes + f.saved_bytes), left, right);
  while (owned_count > 0) free(owned[--owned_count]);
  return fabs(left - right) <= 1e-4 * (1 + fabs(right)) ? 0 : 3;
}
