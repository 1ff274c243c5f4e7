/* The C interface (C99): all of sonicmoe without C++ types.
 *
 * A function smoe_NAME does what the C++ function NAME does, with the same shapes, units, letters
 * (T, d, n, E, K, C) and errors. The C++ headers describe it: moe.h, packed.h, routing.h,
 * grouped_gemm.h, exchange.h. The comments here add only what differs.
 *
 * Rules for every struct and call:
 * - A struct begins with `size`. Set it to sizeof the struct, and the fields that you do not use to
 *   zero, which means the default. New versions only append fields; a larger struct is accepted if
 *   its unknown bytes are zero.
 * - Pass NULL for an optional tensor that you leave out, or for a buffer of 0 bytes. If `exec` is
 *   NULL, the call runs on the CPU with all cores. Any other NULL is refused, unless a comment
 *   allows it.
 * - If a call fails, smoe_last_error() returns the reason as one sentence. After SMOE_CUDA and
 *   SMOE_INTERNAL outputs may be undefined. Any other error means that the call was refused before
 *   any work and wrote nothing. No call throws or ends the process.
 * - Calls are thread-safe as long as they write to different memory. Only one thread at a time may
 *   use an exchange.
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

/* The result of a call, with the values of Status in status.h. SMOE_INTERNAL also means that host
 * memory is exhausted. */
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

/* Values of dtype fields. */
enum { SMOE_F32 = 0, SMOE_BF16 = 1, SMOE_F16 = 2, SMOE_F64 = 3, SMOE_I32 = 4, SMOE_I64 = 5 };

/* Values of smoe_problem.activation; types.h has the formulas. */
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
  SMOE_SWIGLU_CLAMPED = 10,
  SMOE_SITU = 11,
  SMOE_SWIGLU_STEP = 12
};

/* Values of smoe_packed_weights.format. */
enum { SMOE_NF4 = 0, SMOE_MXFP4 = 1, SMOE_FP8_BLOCKS = 2 };

/* Values of the fields and arguments backend, form, pass, grad_mode, precision, kept_h, score and
 * mode. */
enum { SMOE_CPU_BACKEND = 0, SMOE_CUDA_BACKEND = 1 };
enum { SMOE_FORM_IDS = 0, SMOE_FORM_PAIRS = 1, SMOE_FORM_GROUPED = 2 };
enum { SMOE_INFERENCE = 0, SMOE_FORWARD = 1, SMOE_BACKWARD = 2 };
enum { SMOE_GRAD_WRITE = 0, SMOE_GRAD_ACCUMULATE = 1 };
enum { SMOE_PRECISION_TENSORS = 0, SMOE_PRECISION_FP8 = 1 };
enum { SMOE_KEPT_H_PRECISION = 0, SMOE_KEPT_H_TENSORS = 1 };
enum {
  SMOE_SCORE_SOFTMAX_AFTER_TOPK = 0,
  SMOE_SCORE_SOFTMAX_BEFORE_TOPK = 1,
  SMOE_SCORE_SIGMOID = 2,
  SMOE_SCORE_SQRT_SOFTPLUS = 3
};
enum {
  SMOE_ROUND_NEAREST = 0,
  SMOE_ROUND_UP = 1,
  SMOE_ROUND_DOWN = 2,
  SMOE_ROUND_SCORE = 3,
  SMOE_ROUND_STOCHASTIC = 4,
  SMOE_ROUND_BALANCED = 5
};

/* Returns 1 if the activation acts on gate and up, 0 if it acts on one input, -1 if the value is
 * unknown. */
SMOE_API int32_t smoe_activation_is_gated(int32_t activation);

/* The version of the linked library: "0.1.0". */
SMOE_API const char* smoe_version(void);
/* The sentence of this thread's last failed call; "" before the first. Never NULL. The thread's
 * next failed call overwrites it. */
SMOE_API const char* smoe_last_error(void);

/* A strided view of the caller's memory, as Tensor in types.h. Strides count elements. */
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

/* Where a call runs, as Exec in types.h. */
typedef struct smoe_exec {
  uint32_t size;
  int32_t backend;
  int32_t num_threads; /* CPU: 0 = one per core that this process may use; at most 4 per core */
  int32_t reserved;    /* 0 */
  const smoe_device* device; /* CUDA: of smoe_device_open */
  void* stream;              /* CUDA: a cudaStream_t; NULL: the default stream */
} smoe_exec;

/* The sizes and options of a layer, as Problem in moe.h. */
typedef struct smoe_problem {
  uint32_t size;
  int32_t form;
  int32_t dtype;
  int32_t activation;
  int64_t tokens;   /* T */
  int64_t hidden;   /* d */
  int64_t width;    /* n */
  int64_t experts;  /* E */
  int64_t top_k;    /* K; ids form only */
  int64_t capacity; /* C; pairs form only */
  double alpha;     /* 0: the default. swiglu_oai: 1.702; situ (cap of gate): 4 */
  double limit;     /* 0: the default. swiglu_oai, swiglu_step: 7; swiglu_clamped: 10;
                       situ (cap of up): 25 */
  int32_t precision;
  int32_t kept_h;
  int64_t up_rank;     /* rank of low-rank factors; 0: none */
  int64_t down_rank;   /* likewise */
  int32_t f32_factors; /* 1: the factors are fp32; 0: in dtype */
  int32_t reserved;    /* 0 */
} smoe_problem;

/* Bytes of the buffers of a pass, as Sizes in moe.h. */
typedef struct smoe_sizes {
  uint32_t size;
  uint32_t reserved; /* 0 */
  int64_t h_bytes;
  int64_t saved_bytes;
  int64_t scratch_bytes;
} smoe_sizes;

/* Tensors of the routing and of the weights, with the shapes of Routing and Weights in moe.h. */
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

/* Low-rank factors of one projection and of both, as LowRank and Lora in low_rank.h; also their
 * gradients, which have no scale. */
typedef struct smoe_low_rank {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_tensor* a;
  const smoe_tensor* b;
  const smoe_tensor* gate_b;
  double scale; /* 0 = 1 */
} smoe_low_rank;

typedef struct smoe_lora {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_low_rank* up;
  const smoe_low_rank* down;
} smoe_lora;

/* Arguments of smoe_moe_forward and smoe_exchange_forward, as ForwardArgs in moe.h. */
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
  const smoe_lora* lora; /* optional */
  /* Optional, smoe_exchange_forward only: smoe_exchange_kept_bytes for the rows of x that have
   * come, which backward then reads instead of sending x again. SMOE_PART_COMPUTE reads it. */
  void* kept_x;
  int64_t kept_x_bytes;
} smoe_forward_args;

/* Arguments of smoe_moe_backward and smoe_exchange_backward, as BackwardArgs in moe.h. */
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
  const smoe_lora* lora;       /* as in forward */
  const smoe_lora* lora_grads; /* optional, any subset */
  const void* kept_x;          /* optional, smoe_exchange_backward only: as forward wrote it */
  int64_t kept_x_bytes;
} smoe_backward_args;

/* C of a problem, and the sizes in bytes of the buffers of a pass. */
SMOE_API smoe_status smoe_row_capacity(const smoe_problem* problem, int64_t* capacity);
SMOE_API smoe_status smoe_moe_sizes(const smoe_problem* problem, int32_t pass,
                                    const smoe_exec* exec, smoe_sizes* sizes);
/* Sets `gate` and `up` to views (C, n) of the h that smoe_moe_forward wrote. Set their size field
 * before the call. gate gets rank 0 for activations without a gate. If h is NULL, the views have no
 * data. */
SMOE_API smoe_status smoe_h_views(const smoe_problem* problem, const smoe_weights* weights, void* h,
                                  int64_t h_bytes, const smoe_exec* exec, smoe_tensor* gate,
                                  smoe_tensor* up);
/* The size in bytes of the quantised weights that SMOE_PRECISION_FP8 reads, and the function that
 * writes them. Quantise again after the weights have changed. */
SMOE_API smoe_status smoe_fp8_weights_bytes(const smoe_problem* problem, const smoe_exec* exec,
                                            int64_t* bytes);
SMOE_API smoe_status smoe_quantize_weights(const smoe_problem* problem, const smoe_weights* weights,
                                           void* fp8_weights, int64_t fp8_weights_bytes,
                                           const smoe_exec* exec);
/* Writes to `precision` the SMOE_PRECISION value that is expected to be faster for this problem. */
SMOE_API smoe_status smoe_auto_precision(const smoe_problem* problem, const smoe_exec* exec,
                                         int32_t* precision);
/* Forward and backward of the layer. */
SMOE_API smoe_status smoe_moe_forward(const smoe_problem* problem, const smoe_forward_args* args,
                                      const smoe_exec* exec);
SMOE_API smoe_status smoe_moe_backward(const smoe_problem* problem, const smoe_backward_args* args,
                                       const smoe_exec* exec);

/* Packed weights, as PackedWeights in packed.h. */
typedef struct smoe_packed_weights {
  uint32_t size;
  int32_t format;
  int64_t experts;
  int64_t rows;
  int64_t columns;
  int64_t block; /* SMOE_NF4: elements that share an absmax; else 0 */
  const void* codes;
  int64_t codes_bytes;
  const void* scales;
  int64_t scales_bytes;
  const void* nested_map; /* SMOE_NF4, optional; without it the other nested_* are NULL too */
  int64_t nested_map_bytes;
  const void* nested_scales;
  int64_t nested_scales_bytes;
  const void* nested_offset;
  int64_t nested_offset_bytes;
} smoe_packed_weights;

/* Writes the unpacked weights to `out` (E, rows, columns), which smoe_moe_forward and
 * smoe_moe_backward take as weights. */
SMOE_API smoe_status smoe_unpack_weights(const smoe_packed_weights* packed, const smoe_tensor* out,
                                         const smoe_exec* exec);

/* Options of top-k, as RouteOptions in routing.h. */
typedef struct smoe_route_options {
  uint32_t size;
  int32_t score;
  int64_t top_k;
  double scale;            /* 0 = 1 */
  const smoe_tensor* bias; /* optional */
  int64_t n_group;
  int64_t topk_group;
  int32_t renormalize;
  int32_t reserved; /* 0 */
} smoe_route_options;

/* Top-k and its backward. */
SMOE_API smoe_status smoe_route(const smoe_route_options* options, const smoe_tensor* logits,
                                const smoe_tensor* ids, const smoe_tensor* weights,
                                const smoe_exec* exec);
SMOE_API smoe_status smoe_route_backward(const smoe_route_options* options,
                                         const smoe_tensor* logits, const smoe_tensor* ids,
                                         const smoe_tensor* dweights, const smoe_tensor* dlogits,
                                         const smoe_exec* exec);

/* A list of pairs, as Pairs in routing.h. */
typedef struct smoe_pairs {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_tensor* token;
  const smoe_tensor* expert;
  const smoe_tensor* weight;
  const smoe_tensor* offsets;
} smoe_pairs;

/* Options of token rounding, as RoundOptions in routing.h. */
typedef struct smoe_round_options {
  uint32_t size;
  int32_t mode;
  const smoe_route_options* route;
  int64_t tile; /* 0 = 128 */
  uint64_t seed;
} smoe_round_options;

/* Token rounding: the length C of its list, its scratch in bytes, the call and its backward. */
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

/* Expert choice without scratch, for the CPU. */
SMOE_API smoe_status smoe_expert_choice(const smoe_tensor* logits, int64_t capacity,
                                        const smoe_pairs* pairs, const smoe_exec* exec);
SMOE_API smoe_status smoe_expert_choice_backward(const smoe_tensor* logits, const smoe_pairs* pairs,
                                                 const smoe_tensor* dweight,
                                                 const smoe_tensor* dlogits, const smoe_exec* exec);

/* Expert choice with scratch, which CUDA needs: the scratch in bytes, the call and its backward. */
SMOE_API smoe_status smoe_expert_choice_scratch_bytes(int64_t tokens, int64_t experts,
                                                      const smoe_exec* exec, int64_t* bytes);
SMOE_API smoe_status smoe_expert_choice_in_scratch(const smoe_tensor* logits, int64_t capacity,
                                                   const smoe_pairs* pairs, void* scratch,
                                                   int64_t scratch_bytes, const smoe_exec* exec);
SMOE_API smoe_status smoe_expert_choice_backward_in_scratch(
    const smoe_tensor* logits, const smoe_pairs* pairs, const smoe_tensor* dweight,
    const smoe_tensor* dlogits, void* scratch, int64_t scratch_bytes, const smoe_exec* exec);

/* The auxiliary losses, without scratch, for the CPU, and their backward, for every backend: of all
 * tokens, or of S sequences if values is (S, 2) and tokens_per_expert (S, E). */
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

/* The auxiliary losses with scratch, which CUDA needs, and that scratch in bytes. */
SMOE_API smoe_status smoe_router_losses_scratch_bytes(int64_t tokens, int64_t experts,
                                                      const smoe_exec* exec, int64_t* bytes);
SMOE_API smoe_status smoe_router_losses_in_scratch(
    const smoe_route_options* options, const smoe_tensor* logits, const smoe_tensor* ids,
    const smoe_tensor* values, const smoe_tensor* tokens_per_expert, void* scratch,
    int64_t scratch_bytes, const smoe_exec* exec);

/* Arguments of both grouped GEMMs, as GroupedGemm and GroupedGemmK in grouped_gemm.h. */
typedef struct smoe_grouped_gemm_args {
  uint32_t size;
  uint32_t reserved; /* 0 */
  const smoe_tensor* a;
  const smoe_tensor* b;
  const smoe_tensor* d;
  const smoe_tensor* offsets;
  const smoe_tensor* gather; /* optional */
  void* scratch;             /* of smoe_grouped_gemm_scratch_bytes; NULL if that is 0 */
  int64_t scratch_bytes;
} smoe_grouped_gemm_args;

/* The scratch in bytes of either grouped GEMM for R = rows and E = experts, and the two calls. */
SMOE_API smoe_status smoe_grouped_gemm_scratch_bytes(int64_t rows, int64_t experts,
                                                     const smoe_exec* exec, int64_t* bytes);
SMOE_API smoe_status smoe_grouped_gemm(const smoe_grouped_gemm_args* args, const smoe_exec* exec);
SMOE_API smoe_status smoe_grouped_gemm_k(const smoe_grouped_gemm_args* args, const smoe_exec* exec);

/* Opens CUDA device `ordinal` with the default engine (smoe_device_options.engine is NULL). Returns
 * SMOE_UNSUPPORTED if the build has no CUDA or does not serve the device, and SMOE_INVALID_ARGUMENT
 * if there is no such device. The handle is immutable. Close it after the last call that uses it.
 * Closing NULL is allowed. */
SMOE_API smoe_status smoe_device_open(int32_t ordinal, smoe_device** device);
SMOE_API smoe_status smoe_device_close(smoe_device* device);

/* Options of smoe_device_open_with. */
typedef struct smoe_device_options {
  uint32_t size;
  int32_t ordinal;
  /* The engine of the products, a name that smoe_engine_name returns. NULL: the engine named by the
   * environment variable SONICMOE_ENGINE, else the first engine that serves the device. */
  const char* engine;
} smoe_device_options;

/* smoe_device_open with options. Returns SMOE_INVALID_ARGUMENT if this build has no such engine,
 * and SMOE_UNSUPPORTED if the engine does not serve the device. An engine that fails a test of the
 * device is replaced (smoe_device_engine_note). */
SMOE_API smoe_status smoe_device_open_with(const smoe_device_options* options,
                                           smoe_device** device);
/* The name of engine `index` (from 0) of this build, such as "hopper"; NULL past the last one. */
SMOE_API const char* smoe_engine_name(int32_t index);
/* The name of the engine that a device handle uses; NULL for NULL. */
SMOE_API const char* smoe_device_engine(const smoe_device* device);
/* One sentence: why the handle does not use the engine that was asked for, because that engine
 * failed a test of the device (engine "blackwell" only). "" if it does; NULL for NULL. */
SMOE_API const char* smoe_device_engine_note(const smoe_device* device);

/* Expert parallelism, CUDA only. exchange.h describes the functions. */
typedef struct smoe_exchange smoe_exchange;

/* Values of smoe_exchange_options.transport and of the argument part. */
enum { SMOE_TRANSPORT_AUTO = 0, SMOE_TRANSPORT_PUSH = 1, SMOE_TRANSPORT_COPY = 2 };
enum { SMOE_PART_ALL = 0, SMOE_PART_BEGIN = 1, SMOE_PART_COMPUTE = 2, SMOE_PART_FINISH = 3 };

/* ExchangeShape and ExchangeOptions of exchange.h in one struct. */
typedef struct smoe_exchange_options {
  uint32_t size;
  int32_t dtype;
  int32_t ranks;
  int32_t rank;
  int64_t max_tokens;
  int64_t max_slots;
  int64_t hidden;
  void* const* buffers;    /* `ranks` addresses; not read by smoe_exchange_bytes */
  int64_t buffer_bytes;    /* not read by smoe_exchange_bytes */
  int64_t time_limit_ms;   /* 0 = 60,000 */
  int32_t multiprocessors; /* 0 = 8 */
  int32_t transport;
} smoe_exchange_options;

/* Functions of an exchange. Closing NULL is allowed. */
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
SMOE_API smoe_status smoe_exchange_kept_bytes(const smoe_exchange* exchange,
                                              const smoe_problem* problem, const smoe_exec* exec,
                                              int64_t* bytes);
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
