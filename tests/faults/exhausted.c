/* Calls from a process whose address space is exhausted must return, not end it.
 *
 *   exhausted_test libsonicmoe.so
 *
 * The library and the C++ runtime are loaded late, as Python does it: then their thread-local
 * storage is allocated on a thread's first use, and glibc ends the process where it cannot be. Each
 * limit is tried in a child: it lets through a little more than the last, so that one allocation or
 * thread start after the other is the first to fail. In half of the children the thread that makes
 * the call has used the library before, in the other half it is new. */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sonicmoe/c_api.h"

enum { T = 64, D = 128, N = 256, E = 4, K = 2, THREADS = 2 };
enum { CHILD_OK = 0, CHILD_REFUSED = 1, CHILD_WRONG = 2 };

static smoe_status (*moe_sizes)(const smoe_problem*, int32_t, const smoe_exec*, smoe_sizes*);
static smoe_status (*moe_forward)(const smoe_problem*, const smoe_forward_args*, const smoe_exec*);
static const char* (*last_error)(void);

static smoe_problem problem;
static smoe_exec executor;
static smoe_forward_args args;
static smoe_routing routing;
static smoe_weights weights;
static smoe_tensor x, out, ids, scores, gate, up, down;
static float expected[T * D];

static void* buffer(size_t bytes) {
  void* memory = NULL;
  if (posix_memalign(&memory, 256, bytes + 256) != 0) exit(3);
  memset(memory, 0, bytes);
  return memory;
}

static void dense(smoe_tensor* t, int32_t dtype, int64_t n0, int64_t n1, int64_t n2) {
  int64_t i;
  const int64_t count = n0 * n1 * (n2 > 0 ? n2 : 1);
  memset(t, 0, sizeof *t);
  t->size = sizeof *t;
  t->dtype = dtype;
  t->rank = n2 > 0 ? 3 : 2;
  t->shape[0] = n0;
  t->shape[1] = n1;
  t->shape[2] = n2;
  t->stride[t->rank - 1] = 1;
  t->stride[t->rank - 2] = t->shape[t->rank - 1];
  if (n2 > 0) t->stride[0] = n1 * n2;
  t->data = buffer((size_t)count * (dtype == SMOE_I64 ? 8 : 4));
  for (i = 0; i < count; ++i) {
    if (dtype == SMOE_I64) {
      ((int64_t*)t->data)[i] = i % E;
    } else {
      ((float*)t->data)[i] = (float)(i % 7 - 3) / 8;
    }
  }
}

static void prepare(void) {
  smoe_sizes sizes = {sizeof(smoe_sizes), 0, 0, 0, 0};
  problem.size = sizeof problem;
  problem.tokens = T;
  problem.hidden = D;
  problem.width = N;
  problem.experts = E;
  problem.top_k = K;
  executor.size = sizeof executor;
  executor.num_threads = THREADS;
  dense(&x, SMOE_F32, T, D, 0);
  dense(&out, SMOE_F32, T, D, 0);
  dense(&ids, SMOE_I64, T, K, 0);
  dense(&scores, SMOE_F32, T, K, 0);
  dense(&gate, SMOE_F32, E, N, D);
  dense(&up, SMOE_F32, E, N, D);
  dense(&down, SMOE_F32, E, D, N);
  routing.size = sizeof routing;
  routing.ids = &ids;
  routing.weights = &scores;
  weights.size = sizeof weights;
  weights.gate = &gate;
  weights.up = &up;
  weights.down = &down;
  if (moe_sizes(&problem, SMOE_INFERENCE, &executor, &sizes) != SMOE_OK) exit(3);
  args.size = sizeof args;
  args.x = &x;
  args.routing = &routing;
  args.weights = &weights;
  args.out = &out;
  args.scratch = buffer((size_t)sizes.scratch_bytes);
  args.scratch_bytes = sizes.scratch_bytes;
}

static long address_space(void) {
  long pages = 0;
  FILE* f = fopen("/proc/self/statm", "r");
  if (f == NULL || fscanf(f, "%ld", &pages) != 1) _exit(3);
  fclose(f);
  return pages * sysconf(_SC_PAGESIZE);
}

/* Takes all memory that malloc can give. */
static void take_all_memory(void) {
  size_t bytes;
  for (bytes = 1 << 20; bytes >= 16; bytes /= 2) {
    while (malloc(bytes) != NULL) continue;
  }
}

/* The call under test with `extra` bytes of address space and no other memory; ends the child. */
static void* limited_call(void* extra) {
  const size_t spare = *(const size_t*)extra;
  void* reserved = NULL;
  struct rlimit limit;
  smoe_status status;
  if (spare > 0) {
    reserved = mmap(NULL, spare, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) _exit(3);
  }
  limit.rlim_cur = limit.rlim_max = (rlim_t)address_space();
  if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(3);
  take_all_memory();
  if (spare > 0) munmap(reserved, spare);
  status = moe_forward(&problem, &args, &executor);
  if (status == SMOE_OK) {
    _exit(memcmp(out.data, expected, sizeof expected) == 0 ? CHILD_OK : CHILD_WRONG);
  }
  _exit(status == SMOE_INTERNAL &&
                strcmp(last_error(), "memory is exhausted, nothing was computed") == 0
            ? CHILD_REFUSED
            : CHILD_WRONG);
}

/* Who makes the call: a thread on which the library has refused a call before, or a new thread. */
enum { KNOWN_THREAD, NEW_THREAD };

/* Forks. Returns -1 in the child, and in the parent the status with which the child has ended. */
static int fork_and_wait(void) {
  int status = 0;
  const pid_t child = fork();
  if (child == 0) return -1;
  if (child < 0 || waitpid(child, &status, 0) != child) exit(3);
  return status;
}

static int child_status(size_t extra, int who) {
  pthread_t thread;
  const int status = fork_and_wait();
  if (status >= 0) return status;
  memset(out.data, 0, sizeof expected);
  if (who == KNOWN_THREAD) {
    moe_forward(NULL, NULL, NULL);
    limited_call(&extra);
  }
  if (pthread_create(&thread, NULL, limited_call, &extra) != 0) _exit(3);
  pthread_join(thread, NULL);
  return 0;
}

/* A process without a free pthreads key must still get the sentence of an error. */
static int sentence_without_keys(void) {
  pthread_key_t key;
  const int status = fork_and_wait();
  if (status >= 0) return WIFEXITED(status) && WEXITSTATUS(status) == CHILD_REFUSED;
  while (pthread_key_create(&key, NULL) == 0) continue;
  moe_forward(NULL, NULL, NULL);
  _exit(strstr(last_error(), " is null, must not be null") != NULL ? CHILD_REFUSED : CHILD_WRONG);
}

int main(int argc, char** argv) {
  void* library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
  int count[2][2] = {{0, 0}, {0, 0}};
  int failed = 0;
  int who;
  size_t extra;
  if (library == NULL) return 3;
  mallopt(M_ARENA_MAX, 1); /* so that one thread can take the memory of all */
  mallopt(M_TOP_PAD, 0);   /* so that the heap grows by single pages */
  *(void**)&moe_sizes = dlsym(library, "smoe_moe_sizes");
  *(void**)&moe_forward = dlsym(library, "smoe_moe_forward");
  *(void**)&last_error = dlsym(library, "smoe_last_error");
  if (!sentence_without_keys()) {
    printf("FAILED: an error without its sentence\n");
    ++failed;
  }
  prepare();
  if (moe_forward(&problem, &args, &executor) != SMOE_OK) return 3;
  memcpy(expected, out.data, sizeof expected);
  for (who = KNOWN_THREAD; who <= NEW_THREAD; ++who) {
    for (extra = 0; extra < 24u << 20; extra += extra < 2u << 20 ? 4 << 10 : 256 << 10) {
      const int status = child_status(extra, who);
      if (WIFEXITED(status) && WEXITSTATUS(status) < CHILD_WRONG) {
        ++count[who][WEXITSTATUS(status)];
        continue;
      }
      printf("FAILED: %s thread, %d KiB: %s %d\n", who == NEW_THREAD ? "new" : "known",
             (int)(extra >> 10), WIFEXITED(status) ? "exit code" : "signal",
             WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
      ++failed;
    }
    printf("%s thread: %d calls succeeded, %d were refused\n", who == NEW_THREAD ? "new" : "known",
           count[who][CHILD_OK], count[who][CHILD_REFUSED]);
    if (count[who][CHILD_OK] == 0 || count[who][CHILD_REFUSED] == 0) {
      puts("FAILED: the limits were all too low, or none was low enough");
      ++failed;
    }
  }
  return failed != 0;
}
