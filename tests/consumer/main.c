/* Uses the installed C header through pkg-config. */
#include <stdio.h>
#include <string.h>

#include "sonicmoe/c_api.h"

int main(void) {
  smoe_problem problem;
  int64_t capacity = 0;
  memset(&problem, 0, sizeof(problem));
  problem.size = sizeof(problem);
  problem.tokens = 5;
  problem.hidden = problem.width = 8;
  problem.experts = 4;
  problem.top_k = 3;
  if (smoe_row_capacity(&problem, &capacity) != SMOE_OK || capacity != 15) return 1;
  if (smoe_row_capacity(NULL, &capacity) != SMOE_INVALID_ARGUMENT) return 2;
  puts("consumer works");
  return 0;
}
