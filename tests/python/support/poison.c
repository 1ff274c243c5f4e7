// Fills what torch allocates on the CPU with 0xff, which is NaN in every floating type: an element
// that nobody wrote, or a row that a test must not compare, then shows in every run instead of now
// and then. tools/run_tests.sh preloads it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

int posix_memalign(void** block, size_t alignment, size_t bytes) {
  static int (*allocate)(void**, size_t, size_t);
  if (allocate == NULL) *(void**)&allocate = dlsym(RTLD_NEXT, "posix_memalign");
  const int error = allocate(block, alignment, bytes);
  if (error == 0) memset(*block, 0xff, bytes);
  return error;
}
