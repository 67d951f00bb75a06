/* Threads that help with a stage of work while they have a core, and are not waited for while they have none.
 *
 * A stage is cut into parts; whoever runs takes the next one. The caller takes parts too and waits only for parts that
 * somebody has begun, so a helper without a core costs nothing. (With OpenMP every stage waits for every thread: beside
 * other work on the same cores a step of 0.3 ms took 150 ms.) Which thread computes a part changes no result.
 */
#pragma once
#include <stdint.h>

typedef struct pool pool;

typedef struct {
    int64_t rank, size;
} share;

/* The part [from, to) of `count` units that is one share of a stage. */
#define SHARE(count, part, from, to)                              \
    const int64_t from = (count) * (part).rank / (part).size;     \
    const int64_t to = (count) * ((part).rank + 1) / (part).size

typedef void stage(const void *context, share part);

/* Run a stage of so many units, in at most as many parts, and return when all of it is done. */
void each(pool *helpers, int64_t units, stage *what, const void *context);
