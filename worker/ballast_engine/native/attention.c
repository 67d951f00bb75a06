/* Attention over paged KV, for decodes and prefill chunks, with a running softmax over groups of keys.
 *
 * A group is GROUP vectors of keys, aligned to the start of the request. The order of the sums of a row therefore
 * depends only on its position: a token has the same bits as a decode, in a chunk, or if it is computed again.
 */
#include "step.h"

#define GROUP (LANES == 16 ? 4 : 2)
#define KEYS (GROUP * LANES)
#define MAX_ROWS 6

INLINE vec load_kv(const void *pages, int64_t index, const int is_bfloat16) {
    if (!is_bfloat16) return load((const float *)pages + index);
    const half_anywhere raw = *(const half_anywhere *)((const uint16_t *)pages + index);
    return (vec)(__builtin_convertvector(raw, ivec) << 16);
}

INLINE float load_one(const void *pages, int64_t index, const int is_bfloat16) {
    if (!is_bfloat16) return ((const float *)pages)[index];
    const uint32_t bits = (uint32_t)((const uint16_t *)pages)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void store_one(void *pages, int64_t index, float value, int is_bfloat16) {
    if (!is_bfloat16) {
        ((float *)pages)[index] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const int is_nan = value != value;
    ((uint16_t *)pages)[index] = (uint16_t)(is_nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void write_row(const attention *a, int64_t slot, const float *k, const float *v) {
    const int64_t dim = a->head_dim, tokens = a->block_tokens, block = slot / tokens, offset = slot % tokens;
    for (int64_t head = 0; head < a->num_kv_heads; head++) {
        const int64_t page = (block * a->num_kv_heads + head) * dim * tokens;
        for (int64_t d = 0; d < dim; d++) {
            store_one(a->keys, page + d * tokens + offset, k[head * dim + d], (int)a->is_bfloat16);
            store_one(a->values, page + offset * dim + d, v[head * dim + d], (int)a->is_bfloat16);
        }
    }
}

/* GROUP vectors of keys: their addresses, and the lanes that a row of the tile sees. */
typedef struct {
    int64_t keys[GROUP];   /* index of the first key's first dimension; the next dimension is block_tokens further */
    int64_t values[GROUP]; /* index of the first value */
    int64_t first[GROUP];  /* position of the first key */
    int64_t room[GROUP];   /* keys from there to the end of the block */
    int from[GROUP], to[GROUP];
} span;

/* One tile: rows of a request, all heads of one kv head. Row i is token i / group, head i % group. */
typedef struct {
    const attention *a;
    const int64_t *blocks;
    int64_t kv_head, num_rows, group, first_position, last_position;
    float q[MAX_TILE][MAX_HEAD_DIM];
    float out[MAX_TILE][MAX_HEAD_DIM];
    float weights[MAX_TILE][KEYS];
    float top[MAX_TILE];
    float rescale[MAX_TILE];
    vec total[MAX_TILE];
} work;

INLINE void fetch(const void *pages, int64_t index, const int is_bfloat16) {
    __builtin_prefetch((const char *)pages + index * (is_bfloat16 ? 2 : 4));
}

/* The pages of a context are anywhere in memory, so the processor does not prefetch the next page. Therefore the values
 * of this span are prefetched while its scores are computed, and the keys of the next span while the values are summed. */
INLINE void scores(work *w, const span *s, int64_t row, const int rows, const int is_bfloat16, const int is_first) {
    const attention *a = w->a;
    vec sums[MAX_ROWS][GROUP];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int g = 0; g < GROUP; g++) sums[i][g] = (vec){0};
    for (int64_t d = 0; d < a->head_dim; d++) {
        vec keys[GROUP];
        UNROLL for (int g = 0; g < GROUP; g++) {
            keys[g] = load_kv(a->keys, s->keys[g] + d * a->block_tokens, is_bfloat16);
            if (is_first) fetch(a->values, s->values[g] + d * LANES, is_bfloat16);
        }
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int g = 0; g < GROUP; g++) sums[i][g] += w->q[row + i][d] * keys[g];
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int g = 0; g < GROUP; g++) store(w->weights[row + i] + g * LANES, sums[i][g]);
}

INLINE void blend(work *w, const span *s, const span *next, int64_t row, int64_t d, const int rows, const int width,
                  const int is_bfloat16) {
    const attention *a = w->a;
    vec sums[MAX_ROWS][GROUP];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < width; j++) sums[i][j] = load(w->out[row + i] + d + j * LANES) * w->rescale[row + i];
    for (int g = 0; g < GROUP; g++)
        for (int lane = s->from[g]; lane < s->to[g]; lane++) {
            const int64_t value = s->values[g] + lane * a->head_dim + d;
            const int key = g * LANES + lane;
            if (next && key < width * LANES)
                UNROLL for (int h = 0; h < GROUP; h++)
                    fetch(a->keys, next->keys[h] + (d + key) * a->block_tokens, is_bfloat16);
            vec values[GROUP];
            UNROLL for (int j = 0; j < width; j++) values[j] = load_kv(a->values, value + j * LANES, is_bfloat16);
            UNROLL for (int i = 0; i < rows; i++)
                UNROLL for (int j = 0; j < width; j++) sums[i][j] += w->weights[row + i][key] * values[j];
        }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < width; j++) store(w->out[row + i] + d + j * LANES, sums[i][j]);
}

INLINE void blend_all(work *w, const span *s, const span *next, int64_t row, const int rows, const int is_bfloat16) {
    const int64_t dim = w->a->head_dim;
    int64_t d = 0;
    for (; d + GROUP * LANES <= dim; d += GROUP * LANES) blend(w, s, next, row, d, rows, GROUP, is_bfloat16);
    for (; d + LANES <= dim; d += LANES) blend(w, s, next, row, d, rows, 1, is_bfloat16);
    for (; d < dim; d++)
        for (int i = 0; i < rows; i++) {
            float total = w->out[row + i][d] * w->rescale[row + i];
            for (int g = 0; g < GROUP; g++)
                for (int lane = s->from[g]; lane < s->to[g]; lane++)
                    total += w->weights[row + i][g * LANES + lane] *
                             load_one(w->a->values, s->values[g] + lane * dim + d, is_bfloat16);
            w->out[row + i][d] = total;
        }
}

#define EACH(rows, call)      \
    switch (rows) {           \
        case 1: { enum { N = 1 }; call; } break; \
        case 2: { enum { N = 2 }; call; } break; \
        case 3: { enum { N = 3 }; call; } break; \
        case 4: { enum { N = 4 }; call; } break; \
        case 5: { enum { N = 5 }; call; } break; \
        case 6: { enum { N = 6 }; call; } break; \
    }

static void scores_of(work *w, const span *s, int64_t row, int rows) {
    if (w->a->is_bfloat16) EACH(rows, scores(w, s, row, N, 1, row == 0))
    else EACH(rows, scores(w, s, row, N, 0, row == 0))
}

static void blend_of(work *w, const span *s, const span *next, int64_t row, int rows) {
    if (w->a->is_bfloat16) EACH(rows, blend_all(w, s, next, row, N, 1))
    else EACH(rows, blend_all(w, s, next, row, N, 0))
}

/* Turn the scores of a row into weights relative to the largest score so far, and rescale the earlier sum to it. */
INLINE void weigh(work *w, const span *s, int64_t row) {
    vec score[GROUP], best = splat(-INFINITY);
    const int64_t position = w->first_position + row / w->group;
    const int64_t oldest = w->a->window ? position - w->a->window + 1 : 0;
    for (int g = 0; g < GROUP; g++) {
        score[g] = load(w->weights[row] + g * LANES);
        if (s->first[g] + LANES - 1 > position || s->first[g] < oldest || s->room[g] < LANES) {
            float lanes[LANES];
            store(lanes, score[g]);
            for (int lane = 0; lane < LANES; lane++) {
                const int64_t key = s->first[g] + lane;
                if (key > position || key < oldest || lane >= s->room[g]) lanes[lane] = -INFINITY;
            }
            score[g] = load(lanes);
        }
        best = larger(score[g], best);
    }
    const float here = largest(best);
    if (here == -INFINITY) { /* the row sees none of these keys */
        memset(w->weights[row], 0, sizeof w->weights[row]);
        w->rescale[row] = 1.0f;
        return;
    }
    const float before = w->top[row], top = here > before ? here : before;
    w->top[row] = top;
    w->rescale[row] = exponential(splat(before - top))[0];
    vec total = w->total[row] * w->rescale[row];
    for (int g = 0; g < GROUP; g++) {
        const vec weight = exponential(score[g] - top);
        store(w->weights[row] + g * LANES, weight);
        total += weight;
    }
    w->total[row] = total;
}

INLINE int64_t between(int64_t low, int64_t value, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

static span find(const work *w, int64_t index) {
    const attention *a = w->a;
    const int64_t tokens = a->block_tokens, per_page = (tokens + LANES - 1) / LANES;
    const int64_t end = w->last_position + 1, oldest = a->window ? w->first_position - a->window + 1 : 0;
    span s;
    for (int g = 0; g < GROUP; g++) {
        const int64_t number = index * GROUP + g, page = number / per_page, inner = number % per_page * LANES;
        const int is_needed = page * tokens + inner < end;
        const int64_t start = (w->blocks[is_needed ? page : 0] * a->num_kv_heads + w->kv_head) * tokens * a->head_dim;
        s.keys[g] = start + (is_needed ? inner : 0);
        s.values[g] = start + (is_needed ? inner * a->head_dim : 0);
        s.first[g] = is_needed ? page * tokens + inner : end;
        s.room[g] = is_needed ? tokens - inner : 0;
        s.to[g] = (int)between(0, end - s.first[g], s.room[g] < LANES ? s.room[g] : LANES);
        s.from[g] = (int)between(0, oldest - s.first[g], s.to[g]);
    }
    return s;
}

static void take_in(work *w, const span *s, const span *next) {
    const int64_t parts = (w->num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t row = w->num_rows * part / parts, end = w->num_rows * (part + 1) / parts;
        scores_of(w, s, row, (int)(end - row));
        for (int64_t i = row; i < end; i++) weigh(w, s, i);
        blend_of(w, s, part == 0 ? next : 0, row, (int)(end - row));
    }
}

static void run_tile(work *w, const attention *a, const step *s, int64_t request, int64_t tile, int64_t kv_head,
                     const float *q, int64_t q_stride, float *out, int64_t out_stride) {
    const int64_t first = s->query_start[request] + tile * a->tile_rows, end = s->query_start[request + 1];
    const int64_t tokens = end - first < a->tile_rows ? end - first : a->tile_rows, dim = a->head_dim;
    const int64_t group = a->num_heads / a->num_kv_heads;
    const float scale = 1.0f / sqrtf((float)dim);
    w->a = a;
    w->blocks = s->table + request * s->table_width;
    w->kv_head = kv_head;
    w->group = group;
    w->num_rows = tokens * group;
    w->first_position = s->positions[first];
    w->last_position = s->positions[first + tokens - 1];
    for (int64_t row = 0; row < w->num_rows; row++) {
        const float *from = q + (first + row / group) * q_stride + (kv_head * group + row % group) * dim;
        for (int64_t d = 0; d < dim; d++) {
            w->q[row][d] = from[d] * scale;
            w->out[row][d] = 0.0f;
        }
        w->top[row] = -INFINITY;
        w->total[row] = (vec){0};
    }
    const int64_t per_page = (a->block_tokens + LANES - 1) / LANES;
    const int64_t oldest = a->window && w->first_position >= a->window ? w->first_position - a->window + 1 : 0;
    const int64_t first_group = oldest / a->block_tokens * per_page / GROUP;
    const int64_t last_group = (w->last_position / a->block_tokens * per_page +
                                w->last_position % a->block_tokens / LANES) / GROUP;
    span now = find(w, first_group), next = now;
    for (int64_t index = first_group; index <= last_group; index++, now = next) {
        if (index < last_group) next = find(w, index + 1);
        take_in(w, &now, index < last_group ? &next : 0);
    }
    for (int64_t row = 0; row < w->num_rows; row++) {
        float *to = out + (first + row / group) * out_stride + (kv_head * group + row % group) * dim;
        const float total = 1.0f / sum(w->total[row]);
        for (int64_t d = 0; d < dim; d++) to[d] = w->out[row][d] * total;
    }
}

typedef struct {
    const attention *a;
    const step *s;
    const float *q, *k, *v;
    int64_t q_stride;
    float *out;
    int64_t out_stride;
} call;

static void attend_share(const void *context, share part) {
    const call *c = context;
    const int64_t kv_heads = c->a->num_kv_heads, *tile_start = c->s->tile_start;
    work w;
    int64_t request = 0;
    SHARE(tile_start[c->s->num_requests] * kv_heads, part, from, to);
    for (int64_t task = from; task < to; task++) {
        const int64_t tile = task / kv_heads;
        while (tile_start[request + 1] <= tile) request++;
        run_tile(&w, c->a, c->s, request, tile - tile_start[request], task % kv_heads, c->q, c->q_stride, c->out,
                 c->out_stride);
    }
}

void attend(pool *helpers, const attention *a, const step *s, const float *q, int64_t q_stride, float *out,
            int64_t out_stride) {
    const call c = {a, s, q, 0, 0, q_stride, out, out_stride};
    each(helpers, s->tile_start[s->num_requests] * a->num_kv_heads, attend_share, &c);
}

static void write_share(const void *context, share part) {
    const call *c = context;
    const int64_t width = c->a->num_kv_heads * c->a->head_dim;
    SHARE(c->s->num_rows, part, from, to);
    for (int64_t row = from; row < to; row++)
        write_row(c->a, c->s->slots[row], c->k + row * width, c->v + row * width);
}

/* The attention of one layer alone, with contiguous q, k and v. */
void ballast_attention(const attention *a, const step *s, const float *q, const float *k, const float *v, float *out,
                       pool *helpers) {
    const call c = {a, s, q, k, v, 0, 0, 0};
    each(helpers, s->num_rows, write_share, &c);
    attend(helpers, a, s, q, a->num_heads * a->head_dim, out, a->num_heads * a->head_dim);
}
