/* The C interface (C99): all of sonicmoe without C++ types.
 *
 * Rules that hold for every struct and call:
 * - A struct begins with `size`. Set it to sizeof the struct, and the fields that you do not use to
 *   zero, which means the default. New versions only append fields; a larger struct is accepted if
 *   its unknown bytes are zero.
 * - Pass NULL for an optional tensor that you leave out, or for a buffer of 0 bytes. If `exec` is
 *   NULL, the call runs on the CPU with all cores. Any other NULL is refused, unless a comment at
 *   the argument allows it.
 * - If a call fails, smoe_last_error() returns the reason as one sentence. After SMOE_CUDA and
 *   SMOE_INTERNAL outputs may be undefined. Any other error means that the call was refused before
 *   any work and wrote nothing. No call throws or ends the process.
 * - Shapes, units, meanings and letters (T, d, n, E, K, C) are those of the C++ headers.
 * - Calls are thread-safe as long as they write to different memory.
 */
#ifndef SONICMOE_C_API_H_
#define SONICMOE_C_API_H_

#include <stdint.h>

#if defined(__GNUC__)
#define SMOE_API __attribute__((visibility("default")))
#else
#define SMOE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t smoe_status;
enum {
  SMOE_OK = 0,
  SMOE_INVALID_ARGUMENT = 1,
  SMOE_UNSUPPORTED = 2,
  SMOE_OUT_OF_RANGE = 3,
  SMOE_WORKSPACE_TOO_SMALL = 4,
  SMOE_CUDA = 5,
  SMOE_INTERNAL = 6
};

enum { SMOE_F32 = 0, SMOE_BF16 = 1, SMOE_F16 = 2, SMOE_F64 = 3, SMOE_I32 = 4, SMOE_I64 = 5 };

enum {
  SMOE_SWIGLU = 0,
  SMOE_SWIGLU_OAI = 1,
  SMOE_GEGLU = 2,
  SMOE_GEGLU_TANH = 3,
  SMOE_REGLU = 4,
  SMOE_SILU = 5,
  SMOE_GELU = 6,
  SMOE_GELU_TANH = 7,
  SMOE_RELU = 8,
  SMOE_RELU2 = 9,
  SMOE_SWIGLU_CLAMPED = 10
};

enum { SMOE_CPU_BACKEND = 0, SMOE_CUDA_BACKEND = 1 };
enum { SMOE_FORM_IDS = 0, SMOE_FORM_PAIRS = 1, SMOE_FORM_GROUPED = 2 };
enum { SMOE_INFERENCE = 0, SMOE_FORWARD = 1, SMOE_BACKWARD = 2 };
enum { SMOE_GRAD_WRITE = 0, SMOE_GRAD_ACCUMULATE = 1 };
enum { SMOE_PRECISION_TENSORS = 0, SMOE_PRECISION_FP8 = 1 };
enum { SMOE_KEPT_H_PRECISION = 0, SMOE_KEPT_H_TENSORS = 1 };
enum {
  SMOE_SCORE_SOFTMAX_AFTER_TOPK = 0,
  SMOE_SCORE_SOFTMAX_BEFORE_TOPK = 1,
  SMOE_SCORE_SIGMOID = 2
};
enum {
  SMOE_ROUND_NEAREST = 0,
  SMOE_ROUND_UP = 1,
  SMOE_ROUND_DOWN = 2,
  SMOE_ROUND_SCORE = 3,
  SMOE_ROUND_STOCHASTIC = 4,
  SMOE_ROUND_BALANCED = 5
};

/* 1: the activation acts on gate and up; 0: on one input; -1: the value is unknown. */
SMOE_API int32_t smoe_activation_is_gated(int32_t activation);

/* The version of the linked library: "0.1.0". */
SMOE_API const char* smoe_version(void);
/* The sentence of this thread's last refused call; "" before the first. Never NULL. */
SMOE_API const char* smoe_last_error(void);

/* A strided view of the caller's memory; strides count elements. */
typedef struct smoe_tensor {
  uint32_t size;
  int32_t dtype;
  int32_t rank;
  int32_t reserved; /* 0 */
  void* data;
  int64_t shape[3];
  int64_t stride[3];
} smoe_tensor;

/* A CUDA device, opened once and shared by threads. */
typedef struct smoe_device smoe_device;

typedef struct smoe_exec {
  uint32_t size;
  int32_t backend;
  int32_t num_threads; /* CPU: 0 = one per core that this process may use; at most 4 per core */
  int32_t reserved;    /* 0 */
  const smoe_device* device;
  void* stream; /* CUDA: a cudaStream_t */
} smoe_exec;

typedef struct smoe_problem {
  uint32_t size;
  int32_t form;
  int32_t dtype;
  int32_t activation;
  int64_t tokens;
  int64_t hidden;
  int64_t width;
  int64_t experts;
  int64_t top_k;    /* ids form only */
  int64_t capacity; /* pairs form only */
  double alpha;     /* swiglu_oai only; 0 = 1.702 */
  double limit;     /* swiglu_oai, 0 = 7, and swiglu_clamped, 0 = 10 */
  int32_t precision;
  int32_t kept_h;
} smoe_problem;

typedef struct smoe_sizes {
  uint32_t size;
  uint32_t reserved; /* 0 */
  int64_t h_bytes;
  int64_t saved_bytes;
  int64_t scratch_bytes;
} smoe_sizes;

typedef struct smoe_routing {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_tensor* ids;
  const smoe_tensor* weights;
  const smoe_tensor* token;
  const smoe_tensor* expert;
  const smoe_tensor* row_begin;
  const smoe_tensor* row_count;
} smoe_routing;

typedef struct smoe_weights {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_tensor* gate;
  const smoe_tensor* up;
  const smoe_tensor* down;
  const smoe_tensor* b_gate;
  const smoe_tensor* b_up;
  const smoe_tensor* b_down;
} smoe_weights;

typedef struct smoe_forward_args {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_tensor* x;
  const smoe_routing* routing;
  const smoe_weights* weights;
  const smoe_tensor* out;
  void* h; /* NULL together with saved: inference */
  int64_t h_bytes;
  void* saved;
  int64_t saved_bytes;
  void* scratch;
  int64_t scratch_bytes;
  const void* fp8_weights; /* SMOE_PRECISION_FP8: written by smoe_quantize_weights; else NULL */
  int64_t fp8_weights_bytes;
} smoe_forward_args;

typedef struct smoe_backward_args {
  uint32_t size;
  int32_t grad_mode;
  const smoe_tensor* x;
  const smoe_routing* routing;
  const smoe_weights* weights;
  const smoe_tensor* dout;
  const void* h;
  int64_t h_bytes;
  const void* saved;
  int64_t saved_bytes;
  void* scratch;
  int64_t scratch_bytes;
  const smoe_tensor* dx;       /* optional */
  const smoe_tensor* dweights; /* optional */
  const smoe_weights* grads;   /* optional, any subset */
  const void* fp8_weights;     /* as in forward */
  int64_t fp8_weights_bytes;
} smoe_backward_args;

SMOE_API smoe_status smoe_row_capacity(const smoe_problem* problem, int64_t* capacity);
SMOE_API smoe_status smoe_moe_sizes(const smoe_problem* problem, int32_t pass,
                                    const smoe_exec* exec, smoe_sizes* sizes);
/* Views (C, n) of gate and up in the h that smoe_moe_forward wrote; see h_views() of moe.h. gate
 * has rank 0 for activations without a gate. If h is NULL, the views have no data. */
SMOE_API smoe_status smoe_h_views(const smoe_problem* problem, const smoe_weights* weights, void* h,
                                  int64_t h_bytes, const smoe_exec* exec, smoe_tensor* gate,
                                  smoe_tensor* up);
/* The quantised weights that SMOE_PRECISION_FP8 reads, and their size in bytes. Quantise again
 * after the weights have changed. */
SMOE_API smoe_status smoe_fp8_weights_bytes(const smoe_problem* problem, const smoe_exec* exec,
                                            int64_t* bytes);
SMOE_API smoe_status smoe_quantize_weights(const smoe_problem* problem, const smoe_weights* weights,
                                           void* fp8_weights, int64_t fp8_weights_bytes,
                                           const smoe_exec* exec);
/* The precision that is expected to be faster for this problem. */
SMOE_API smoe_status smoe_auto_precision(const smoe_problem* problem, const smoe_exec* exec,
                                         int32_t* precision);
/* Forward and backward of the layer, as in moe.h. */
SMOE_API smoe_status smoe_moe_forward(const smoe_problem* problem, const smoe_forward_args* args,
                                      const smoe_exec* exec);
SMOE_API smoe_status smoe_moe_backward(const smoe_problem* problem, const smoe_backward_args* args,
                                       const smoe_exec* exec);

typedef struct smoe_route_options {
  uint32_t size;
  int32_t score;
  int64_t top_k;
  double scale; /* 0 = 1 */
  const smoe_tensor* bias;
  int64_t n_group;
  int64_t topk_group;
  int32_t renormalize;
  int32_t reserved; /* 0 */
} smoe_route_options;

SMOE_API smoe_status smoe_route(const smoe_route_options* options, const smoe_tensor* logits,
                                const smoe_tensor* ids, const smoe_tensor* weights,
                                const smoe_exec* exec);
SMOE_API smoe_status smoe_route_backward(const smoe_route_options* options,
                                         const smoe_tensor* logits, const smoe_tensor* ids,
                                         const smoe_tensor* dweights, const smoe_tensor* dlogits,
                                         const smoe_exec* exec);

typedef struct smoe_pairs {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_tensor* token;
  const smoe_tensor* expert;
  const smoe_tensor* weight;
  const smoe_tensor* offsets;
} smoe_pairs;

typedef struct smoe_round_options {
  uint32_t size;
  int32_t mode;
  const smoe_route_options* route;
  int64_t tile; /* 0 = 128 */
  uint64_t seed;
} smoe_round_options;

SMOE_API smoe_status smoe_round_capacity(const smoe_round_options* options, int64_t tokens,
                                         int64_t experts, int64_t* capacity);
SMOE_API smoe_status smoe_round_scratch_bytes(const smoe_round_options* options, int64_t tokens,
                                              int64_t experts, const smoe_exec* exec,
                                              int64_t* bytes);
SMOE_API smoe_status smoe_token_round(const smoe_round_options* options, const smoe_tensor* logits,
                                      const smoe_pairs* pairs, void* scratch, int64_t scratch_bytes,
                                      const smoe_exec* exec);
SMOE_API smoe_status smoe_token_round_backward(const smoe_round_options* options,
                                               const smoe_tensor* logits, const smoe_pairs* pairs,
                                               const smoe_tensor* dweight,
                                               const smoe_tensor* dlogits, void* scratch,
                                               int64_t scratch_bytes, const smoe_exec* exec);

SMOE_API smoe_status smoe_expert_choice(const smoe_tensor* logits, int64_t capacity,
                                        const smoe_pairs* pairs, const smoe_exec* exec);
SMOE_API smoe_status smoe_expert_choice_backward(const smoe_tensor* logits, const smoe_pairs* pairs,
                                                 const smoe_tensor* dweight,
                                                 const smoe_tensor* dlogits, const smoe_exec* exec);

/* Expert choice with scratch, which CUDA needs. */
SMOE_API smoe_status smoe_expert_choice_scratch_bytes(int64_t tokens, int64_t experts,
                                                      const smoe_exec* exec, int64_t* bytes);
SMOE_API smoe_status smoe_expert_choice_in_scratch(const smoe_tensor* logits, int64_t capacity,
                                                   const smoe_pairs* pairs, void* scratch,
                                                   int64_t scratch_bytes, const smoe_exec* exec);
SMOE_API smoe_status smoe_expert_choice_backward_in_scratch(
    const smoe_tensor* logits, const smoe_pairs* pairs, const smoe_tensor* dweight,
    const smoe_tensor* dlogits, void* scratch, int64_t scratch_bytes, const smoe_exec* exec);

SMOE_API smoe_status smoe_router_losses(const smoe_route_options* options,
                                        const smoe_tensor* logits, const smoe_tensor* ids,
                                        const smoe_tensor* values,
                                        const smoe_tensor* tokens_per_expert,
                                        const smoe_exec* exec);
SMOE_API smoe_status smoe_router_losses_backward(const smoe_route_options* options,
                                                 const smoe_tensor* logits,
                                                 const smoe_tensor* tokens_per_expert,
                                                 const smoe_tensor* dvalues,
                                                 const smoe_tensor* dlogits, const smoe_exec* exec);

/* router_losses with scratch, which CUDA needs; its backward needs none. */
SMOE_API smoe_status smoe_router_losses_scratch_bytes(int64_t tokens, int64_t experts,
                                                      const smoe_exec* exec, int64_t* bytes);
SMOE_API smoe_status smoe_router_losses_in_scratch(
    const smoe_route_options* options, const smoe_tensor* logits, const smoe_tensor* ids,
    const smoe_tensor* values, const smoe_tensor* tokens_per_expert, void* scratch,
    int64_t scratch_bytes, const smoe_exec* exec);

typedef struct smoe_grouped_gemm_args {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_tensor* a;
  const smoe_tensor* b;
  const smoe_tensor* d;
  const smoe_tensor* offsets;
  const smoe_tensor* gather; /* optional */
  void* scratch;             /* smoe_grouped_gemm_scratch_bytes; NULL where that is 0 */
  int64_t scratch_bytes;
} smoe_grouped_gemm_args;

SMOE_API smoe_status smoe_grouped_gemm_scratch_bytes(int64_t rows, int64_t experts,
                                                     const smoe_exec* exec, int64_t* bytes);
SMOE_API smoe_status smoe_grouped_gemm(const smoe_grouped_gemm_args* args, const smoe_exec* exec);
SMOE_API smoe_status smoe_grouped_gemm_k(const smoe_grouped_gemm_args* args, const smoe_exec* exec);

/* Opens CUDA device `ordinal`. SMOE_UNSUPPORTED in a build without CUDA. The handle is immutable;
 * close it after the last call that uses it. Closing NULL is allowed. */
SMOE_API smoe_status smoe_device_open(int32_t ordinal, smoe_device** device);
SMOE_API smoe_status smoe_device_close(smoe_device* device);

/* How a device is opened. */
typedef struct smoe_device_options {
  uint32_t size;
  int32_t ordinal;
  /* The engine of the products, a name of smoe_engine_name. NULL: the engine named by the
   * environment variable SONICMOE_ENGINE, else the first that serves the device. */
  const char* engine;
} smoe_device_options;

/* smoe_device_open with options. An unknown engine gives SMOE_INVALID_ARGUMENT, an engine that does
 * not serve the device SMOE_UNSUPPORTED. */
SMOE_API smoe_status smoe_device_open_with(const smoe_device_options* options,
                                           smoe_device** device);
/* The name of engine `index` of this build, such as "hopper"; NULL past the last one. */
SMOE_API const char* smoe_engine_name(int32_t index);
/* The name of the engine that a device handle uses; NULL for NULL. */
SMOE_API const char* smoe_device_engine(const smoe_device* device);

/* Expert parallelism. exchange.h describes each function under its name without smoe_. CUDA only.
 * Only one thread at a time may use an exchange. */
typedef struct smoe_exchange smoe_exchange;

enum { SMOE_TRANSPORT_AUTO = 0, SMOE_TRANSPORT_PUSH = 1, SMOE_TRANSPORT_COPY = 2 };
enum { SMOE_PART_ALL = 0, SMOE_PART_BEGIN = 1, SMOE_PART_COMPUTE = 2, SMOE_PART_FINISH = 3 };

typedef struct smoe_exchange_options {
  uint32_t size;
  int32_t dtype;
  int32_t ranks;
  int32_t rank;
  int64_t max_tokens;
  int64_t max_slots;
  int64_t hidden;
  void* const* buffers; /* `ranks` addresses; not read by smoe_exchange_bytes */
  int64_t buffer_bytes; /* not read by smoe_exchange_bytes */
  int64_t time_limit_ms;
  int32_t multiprocessors;
  int32_t transport;
} smoe_exchange_options;

SMOE_API smoe_status smoe_exchange_bytes(const smoe_exchange_options* options,
                                         const smoe_exec* exec, int64_t* bytes);
SMOE_API smoe_status smoe_exchange_open(const smoe_exchange_options* options, const smoe_exec* exec,
                                        smoe_exchange** exchange);
SMOE_API smoe_status smoe_exchange_close(smoe_exchange* exchange, const smoe_exec* exec);
SMOE_API smoe_status smoe_exchange_check(smoe_exchange* exchange, const smoe_exec* exec);
SMOE_API smoe_status smoe_exchange_reset(smoe_exchange* exchange, const smoe_exec* exec);
SMOE_API smoe_status smoe_exchange_rows(smoe_exchange* exchange, const smoe_problem* problem,
                                        const smoe_exec* exec, int64_t* rows);
SMOE_API smoe_status smoe_exchange_sizes(const smoe_exchange* exchange, const smoe_problem* problem,
                                         int64_t rows, int32_t pass, const smoe_exec* exec,
                                         smoe_sizes* sizes);
SMOE_API smoe_status smoe_exchange_forward(smoe_exchange* exchange, const smoe_problem* problem,
                                           int64_t rows, const smoe_forward_args* args,
                                           int32_t part, const smoe_exec* exec);
SMOE_API smoe_status smoe_exchange_backward(smoe_exchange* exchange, const smoe_problem* problem,
                                            int64_t rows, const smoe_backward_args* args,
                                            int32_t part, const smoe_exec* exec);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SONICMOE_C_API_H_ */
