/* C = A W^T with W packed into panels of 2 * LANES columns: [panel][depth][2 * LANES].
 *
 * Each element of C is one chain of fused multiply-adds along the depth, in every tiling. Panels are streamed once for up
 * to MAX_ROWS rows, which suits a decode step, because memory bounds it. A panel stays in the L2 cache for the tiles of a
 * longer batch.
 */
#include "step.h"

#define PANEL (2 * LANES)
#define MAX_ROWS (LANES == 16 ? 12 : 6)
#define MAX_PANELS 4
#define AHEAD 32 /* rows of a panel: the prefetching of the processor starts again at every 4 KiB */

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }

INLINE void put(float *to, vec value, int64_t room) {
    if (room >= LANES) {
        store(to, value);
    } else if (room > 0) {
        float lanes[LANES];
        store(lanes, value);
        memcpy(to, lanes, (size_t)room * sizeof(float));
    }
}

INLINE vec get(const float *from, int64_t room) {
    if (room >= LANES) return load(from);
    float lanes[LANES] = {0};
    if (room > 0) memcpy(lanes, from, (size_t)room * sizeof(float));
    return load(lanes);
}

INLINE void finish(vec low, vec high, const float *bias, float *c, int64_t room, int mode) {
    if (bias) {
        low += load(bias);
        high += load(bias + LANES);
    }
    if (mode == GATED) {
        put(c, silu(low) * high, room);
        return;
    }
    if (mode == ADD) {
        low += get(c, room);
        high += get(c + LANES, room - LANES);
    }
    put(c, low, room);
    put(c + LANES, high, room - LANES);
}

typedef struct {
    int64_t rows, depth, columns, panels, tiles, a_stride, c_stride;
    const float *a, *packed, *bias;
    float *c;
    int mode;
} product;

INLINE int64_t first_row(const product *p, int64_t index) { return p->rows * index / p->tiles; }

/* ROWS rows of A, those of the tile `index`, times PANELS panels of W, from `panel` on.
 *
 * A single tile reads W from memory all the time, so it prefetches a little ahead. Of several tiles, the first would wait
 * for memory and the others would leave it idle. Therefore each tile prefetches its part of the next panel. */
INLINE void tile(const product *p, int64_t index, int64_t panel, const int rows, const int panels) {
    const int64_t row = first_row(p, index), panel_size = p->depth * PANEL, step = PANEL * sizeof(float) / p->tiles;
    const int64_t ahead = p->tiles == 1 ? AHEAD * PANEL * sizeof(float) : panel_size * sizeof(float) + index * p->depth * step;
    const float *a = p->a + row * p->a_stride, *w = p->packed + panel * panel_size;
    vec sums[MAX_ROWS][2 * MAX_PANELS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < 2 * panels; j++) sums[i][j] = (vec){0};
    for (int64_t k = 0; k < p->depth; k++) {
        vec columns[2 * MAX_PANELS];
        UNROLL for (int j = 0; j < panels; j++) {
            columns[2 * j] = load(w + j * panel_size + k * PANEL);
            columns[2 * j + 1] = load(w + j * panel_size + k * PANEL + LANES);
            const char *soon = (const char *)(w + j * panel_size) + ahead + k * step;
            __builtin_prefetch(soon);
            __builtin_prefetch(soon + 64);
        }
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int j = 0; j < 2 * panels; j++) sums[i][j] += a[i * p->a_stride + k] * columns[j];
    }
    const int width = p->mode == GATED ? LANES : PANEL;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < panels; j++) {
            const int64_t column = (panel + j) * width;
            finish(sums[i][2 * j], sums[i][2 * j + 1], p->bias ? p->bias + (panel + j) * PANEL : 0,
                   p->c + (row + i) * p->c_stride + column, p->columns - column, p->mode);
        }
}

#define CASE(rows, panels) \
    case rows:             \
        tile(p, index, panel, rows, panels); break

static void tile_of(const product *p, int64_t index, int64_t panel, int rows) {
    switch (rows) {
        CASE(1, 1); CASE(2, 1); CASE(3, 1); CASE(4, 1); CASE(5, 1); CASE(6, 1);
#if LANES == 16
        CASE(7, 1); CASE(8, 1); CASE(9, 1); CASE(10, 1); CASE(11, 1); CASE(12, 1);
#endif
    }
}

/* With few rows, the multipliers wait for each other's sums. Several panels at a time keep them busy. */
static int64_t panels_at_once(const product *p, int64_t panel, int64_t available, int rows) {
    const int64_t index = 0;
#if LANES == 16
    if (rows <= 2 && available >= 4) {
        switch (rows) { CASE(1, 4); CASE(2, 4); }
        return 4;
    }
#endif
    if (rows <= 4 && available >= 2) {
        switch (rows) { CASE(1, 2); CASE(2, 2); CASE(3, 2); 
#if LANES == 16
        CASE(4, 2);
#endif
        default: tile_of(p, index, panel, rows); return 1; }
        return 2;
    }
    tile_of(p, index, panel, rows);
    return 1;
}

static void multiply_share(const void *context, share part) {
    const product *p = context;
    SHARE(p->panels * p->tiles, part, from, to);
    for (int64_t unit = from; unit < to;) {
        const int64_t panel = unit / p->tiles, index = unit % p->tiles;
        const int rows = (int)(first_row(p, index + 1) - first_row(p, index));
        unit += p->tiles == 1 ? panels_at_once(p, panel, to - unit, rows) : (tile_of(p, index, panel, rows), 1);
    }
}

void multiply(pool *helpers, int64_t rows, int64_t depth, int64_t columns, const float *a, int64_t a_stride,
              const float *packed, const float *bias, float *c, int64_t c_stride, int mode) {
    const int64_t width = mode == GATED ? LANES : PANEL;
    const int64_t panels = (columns + width - 1) / width, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const product p = {rows, depth, columns, panels, tiles, a_stride, c_stride, a, packed, bias, c, mode};
    each(helpers, panels * tiles, multiply_share, &p);
}

int64_t ballast_lanes(void) { return LANES; }

/* One product alone, for tests and benchmarks. */
void ballast_multiply(int64_t rows, int64_t depth, int64_t columns, const float *a, const float *packed, float *c,
                      pool *helpers) {
    multiply(helpers, rows, depth, columns, a, depth, packed, 0, c, columns, STORE);
}
