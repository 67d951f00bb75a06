/* One step: the flat mixed batch that ballast_engine.batch.Batch describes. Mirrored in library.py. */
#pragma once
#include "team.h"
#include "vectors.h"

typedef struct {
    int64_t num_rows, num_requests, table_width;
    const int64_t *token_ids;   /* [rows] */
    const int64_t *positions;   /* [rows] */
    const int64_t *slots;       /* [rows] slots to which K and V of a row are written */
    const int64_t *query_start; /* [requests + 1] */
    const int64_t *table;       /* [requests, table_width] block ids */
    const int64_t *tile_start;  /* [requests + 1] tiles of rows before each request; a tile has tile_rows rows */
    const float *cosines;       /* [positions, head_dim / 2] */
    const float *sines;
} step;

/* The attention of one layer and its pages.
 *
 * Keys are stored as [block, kv head, head_dim, block_tokens], values as [block, kv head, block_tokens, head_dim]: scores are
 * then computed for a whole vector of keys at a time, and no sum runs across the lanes of a vector.
 */
typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_tokens;
    int64_t window;    /* last tokens that a token sees, including itself; 0: all */
    int64_t tile_rows; /* rows of one request that are computed together */
    int64_t is_bfloat16;
    void *keys, *values;
} attention;

#define MAX_HEAD_DIM 256
#define MAX_TILE 48 /* rows x heads that share a kv head */

void write_row(const attention *a, int64_t slot, const float *k, const float *v);
void attend(pool *helpers, const attention *a, const step *s, const float *q, int64_t q_stride, float *out,
            int64_t out_stride);

enum { STORE, ADD, GATED };
void multiply(pool *helpers, int64_t rows, int64_t depth, int64_t columns, const float *a, int64_t a_stride,
              const float *packed, const float *bias, float *c, int64_t c_stride, int mode);
