#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define PARTS_PER_THREAD 4
#define SPINS 2000   /* rounds, about 50 microseconds, before a helper without work sleeps */
#define PATIENCE 200 /* rounds before the caller offers its core to the helper it waits for */

/* A stage as one number, so that a part is claimed and its stage known in one step: stage | parts | next part. */
#define FIELD 20
#define MASK ((UINT64_C(1) << FIELD) - 1)
#define NEXT(word) ((word) & MASK)
#define PARTS(word) ((word) >> FIELD & MASK)

struct pool {
    _Atomic uint64_t word;
    char apart[64]; /* helpers write the following fields: keep these off the cache line that all helpers poll */
    _Atomic int64_t unfinished;
    _Atomic int sleepers;
    int is_closing, helpers;
    stage *what;
    const void *context;
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_t threads[];
};

static inline void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Take and run one part; return 0 if there is none. The stage cannot end or change while a part of it is claimed. */
static int take(pool *p) {
    uint64_t word = atomic_load(&p->word);
    do {
        if (NEXT(word) >= PARTS(word)) return 0;
    } while (!atomic_compare_exchange_weak(&p->word, &word, word + 1));
    p->what(p->context, (share){(int64_t)NEXT(word), (int64_t)PARTS(word)});
    atomic_fetch_sub(&p->unfinished, 1);
    return 1;
}

static int has_work(pool *p) {
    const uint64_t word = atomic_load(&p->word);
    return NEXT(word) < PARTS(word);
}

static void *help(void *argument) {
    pool *p = argument;
    for (;;) {
        for (int spins = 0; spins < SPINS; spins++) {
            if (take(p)) spins = 0;
            breathe();
        }
        pthread_mutex_lock(&p->lock);
        atomic_fetch_add(&p->sleepers, 1);
        while (!has_work(p) && !p->is_closing) pthread_cond_wait(&p->work, &p->lock);
        atomic_fetch_sub(&p->sleepers, 1);
        const int is_closing = p->is_closing;
        pthread_mutex_unlock(&p->lock);
        if (is_closing) return NULL;
    }
}

static void wake(pool *p) {
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
}

void each(pool *helpers, int64_t units, stage *what, const void *context) {
    const int64_t most = helpers ? (helpers->helpers + 1) * PARTS_PER_THREAD : 1, parts = units < most ? units : most;
    if (units <= 0) return;
    if (parts == 1) {
        what(context, (share){0, 1});
        return;
    }
    helpers->what = what;
    helpers->context = context;
    atomic_store(&helpers->unfinished, parts);
    const uint64_t before = atomic_load(&helpers->word) >> (2 * FIELD);
    atomic_store(&helpers->word, (before + 1) << (2 * FIELD) | (uint64_t)parts << FIELD);
    if (atomic_load(&helpers->sleepers) > 0) wake(helpers);
    while (take(helpers)) {}
    for (int spins = 0; atomic_load(&helpers->unfinished) > 0; spins++) {
        breathe();
        if (spins > PATIENCE) sched_yield();
    }
}

/* Start a team of `threads`, including the caller. Return NULL for one thread, or if no thread can be started. */
pool *ballast_pool_open(int64_t threads) {
    if (threads < 2) return NULL;
    pool *p = calloc(1, sizeof *p + (size_t)(threads - 1) * sizeof(pthread_t));
    if (!p) return NULL;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    while (p->helpers < threads - 1 && !pthread_create(&p->threads[p->helpers], NULL, help, p)) p->helpers++;
    return p;
}

void ballast_pool_close(pool *p) {
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->is_closing = 1;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->helpers; i++) pthread_join(p->threads[i], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->work);
    free(p);
}
